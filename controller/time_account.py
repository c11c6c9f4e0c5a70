"""The account of a job's time: looks on after each event, and books the time since the last one. Pure.

What a second was spent on follows from where the machine stood, so the account is a fold of the journal as the machine
is. It is a part of snapshots, and outlives the events. Three things are known only later:

- When a fault struck. It is known with the decision about it: the training since then is booked once more, as `detect`.
- How many steps an incident lost. That many median steps of the training after it are booked as `repeated_steps`, when
  they are trained: so what was booked for an hour that is over is not changed by what happens later.
- Since when no controller led. The next one says it, as far as it knows a sign of life (`ControllerStarted`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ..protocol.incidents import Incident, JobStatus, Outcome
from ..protocol.time_spent import TimeCategory, TimeSpent
from ..protocol.types import Decision
from .journaled import Journaled
from .recovery.events import ControllerStarted
from .recovery.state import JobState, Phase

BUCKET_S = 3600.0
WINDOWS_S = (3600.0, 24 * 3600.0, 30 * 24 * 3600.0)
MOST_BUCKETS = 30 * 24 + 1  # for the longest window, with the hour in which it begins

C = TimeCategory

_ON_THE_WAY = {
    Phase.STARTING: C.RESTART,
    Phase.QUIESCING: C.QUIESCE,
    Phase.REJOINING: C.REJOIN,
    Phase.RESUMING: C.FIRST_STEP,
}
_ALWAYS = {
    Phase.WAITING: C.WAITING,
    Phase.RUNNING: C.TRAINING,
    Phase.SUSPECTING: C.DETECT,
    Phase.SAVING: C.CHECKPOINT,
    Phase.FINISHING: C.FINISH,
}


@dataclass
class TimeAccount:
    """The time of one job so far. Times are of the controller's clock.

    `buckets` are the latest hours, counted from `began_s`; `dropped` of them are gone.
    """

    began_s: float | None = None
    upto_s: float = 0.0
    category: TimeCategory | None = None  # of the time from `upto_s` on; None: the job is over
    trained: bool = False
    seconds: dict[TimeCategory, float] = field(default_factory=dict)
    buckets: list[dict[TimeCategory, float]] = field(default_factory=list)
    dropped: int = 0
    stretch_s: float = 0.0  # of the latest uninterrupted training, and when that was last so
    trained_upto_s: float = 0.0
    since_resume_s: float = 0.0  # of training, since ranks last told how far they are
    to_repeat_s: float = 0.0  # of the training to come
    open_number: int = 0  # of the open incident
    decided_number: int = 0  # of the latest incident whose fault has been booked
    change: Decision | None = None  # that of the change which is planned

    def follow(self, state: JobState, event: Journaled, now: float) -> None:
        """Book the time up to an event that the machine has just handled at `now`."""
        if self.began_s is None:
            self.began_s = self.upto_s = now
        elif isinstance(event, ControllerStarted) and event.guarded_until_s is not None:
            self._book(self.category, min(event.guarded_until_s, now))
            self._book(None if self.category is None else C.UNGUARDED, now)
        else:
            self._book(self.category, self._resumed_s(state, now))
            self._book(None if self.category is None else C.TRAINING, now)
        incident = state.history.open
        if self.open_number and (incident is None or incident.number != self.open_number):
            self._closed(state, self.open_number)
        self.open_number = 0 if incident is None else incident.number
        if incident is not None and incident.decisions and incident.number > self.decided_number:
            self.decided_number = incident.number
            self._detected(incident.began_s)
        expected, change = self.change, state.planned.current
        if change is not None:
            self.change = change.decision
        elif incident is None:
            self.change = None
        # A fault on the way is decided, too: from then on it is an incident like any other.
        planned = incident is not None and incident.decisions in {(expected,), (self.change,)}
        self.category = category_of(state, state.phase, incident, planned=planned)
        self.trained |= self.category is C.TRAINING

    def until(self, now: float) -> TimeSpent | None:
        """Return the whole job's time up to `now`; None before its first event."""
        if self.began_s is None:
            return None
        account = self._at(now)
        return time_spent(self.began_s, account.upto_s, account.seconds, trained=self.trained)

    def windows(self, now: float) -> tuple[TimeSpent, ...]:
        """Return the time of the last hour, day and 30 days, of those that are shorter than the job."""
        if self.began_s is None:
            return ()
        account, began_s = self._at(now), self.began_s
        return tuple(account._window(each) for each in WINDOWS_S if each < account.upto_s - began_s)

    def since(self, moment_s: float, now: float) -> TimeSpent | None:
        """Return the time from a moment up to `now`; None: the job was over before it, or began later."""
        account = self._at(now) if self.began_s is not None else self
        if self.began_s is None or account.upto_s <= moment_s:
            return None
        return account.until(now) if moment_s <= self.began_s else account._window(account.upto_s - moment_s)

    def told(self, status: JobStatus) -> JobStatus:
        """Return a status with the account as of its moment."""
        return msgspec.structs.replace(status, time=self.until(status.at_s), time_lately=self.windows(status.at_s))

    def _resumed_s(self, state: JobState, now: float) -> float:
        """Return when all had repeated the step, if that is what is heard at `now`: what they said may come late."""
        incident = state.history.incidents[-1] if self.open_number else None
        if incident is None or incident.number != self.open_number or incident.outcome is not Outcome.RESUMED:
            return now
        return now if incident.resumed_s is None else min(incident.resumed_s, now)

    # --- booking ----------------------------------------------------------------------------------------------------

    def _book(self, category: TimeCategory | None, now: float) -> None:
        """Book what is left of the time up to `now`. What has ended takes no time."""
        duration_s, began_s = now - self.upto_s, self.upto_s
        if category is None or duration_s <= 0.0:
            return
        if category is C.TRAINING:
            again_s = min(duration_s, self.to_repeat_s)
            self.to_repeat_s -= again_s
            self._enter(C.REPEATED, began_s, began_s + again_s)
            began_s += again_s
            self.stretch_s += now - began_s
            self.trained_upto_s = now
        else:
            self.stretch_s = self.stretch_s if category is C.DETECT else 0.0
        if category in {C.TRAINING, C.UNGUARDED}:
            self.since_resume_s += duration_s
        self._enter(category, began_s, now)
        self.upto_s = now

    def _enter(self, category: TimeCategory, began_s: float, ended_s: float) -> None:
        """Add a time to its sum, and to each hour that it is a part of."""
        assert self.began_s is not None
        self._add(self.seconds, category, ended_s - began_s)
        while began_s < ended_s:
            number = int((began_s - self.began_s) // BUCKET_S) - self.dropped
            number += self._begin_of(number + 1) <= began_s  # it was rounded
            while len(self.buckets) <= number:
                self.buckets.append({})
            end_s = min(ended_s, self._begin_of(number + 1))
            self._add(self.buckets[number], category, end_s - began_s)
            began_s = end_s
            over = len(self.buckets) - MOST_BUCKETS
            if over > 0:
                del self.buckets[:over]
                self.dropped += over

    @staticmethod
    def _add(sums: dict[TimeCategory, float], category: TimeCategory, duration_s: float) -> None:
        if duration_s > 0.0:
            sums[category] = sums.get(category, 0.0) + duration_s

    def _detected(self, since_s: float) -> None:
        """Book the training since a fault as the time of its detection."""
        rest_s = max(0.0, min(self.stretch_s, self.trained_upto_s - since_s))
        self.stretch_s = 0.0
        self.since_resume_s -= rest_s
        self._rebook(self.seconds, rest_s)
        for sums in reversed(self.buckets):
            rest_s -= self._rebook(sums, rest_s)
            if rest_s <= 0.0:
                return

    def _rebook(self, sums: dict[TimeCategory, float], most_s: float) -> float:
        part_s = min(most_s, sums.get(C.TRAINING, 0.0))
        if part_s > 0.0:
            sums[C.TRAINING] -= part_s
            self._add(sums, C.DETECT, part_s)
        return part_s

    def _closed(self, state: JobState, number: int) -> None:
        """Note what an incident that has ended lost.

        Where all that knew how far training was are lost, it had come as far as its time allowed since it was known.
        """
        for incident in reversed(state.history.incidents):
            if incident.number == number and incident.outcome is Outcome.RESUMED:
                lost_s = (incident.committed_before - (incident.resumed_step or 0)) * incident.median_step_s
                lost_s += 0.0 if incident.committed_is_known else self.since_resume_s
                self.to_repeat_s += max(0.0, lost_s)
                self.since_resume_s = 0.0
            if incident.number <= number:
                return

    # --- reading ----------------------------------------------------------------------------------------------------

    def _at(self, now: float) -> "TimeAccount":
        """Return the account as it will be at `now`, if nothing happens until then."""
        buckets = [*self.buckets[:-1], *map(dict, self.buckets[-1:])]
        account = TimeAccount(self.began_s, self.upto_s, self.category, self.trained, dict(self.seconds), buckets)
        account.dropped, account.to_repeat_s = self.dropped, self.to_repeat_s
        account._book(self.category, now)
        return account

    def _window(self, length_s: float) -> TimeSpent:
        """Return the last seconds of the account. Of the hour in which they begin, an equal share of each category."""
        began_s, sums = self.upto_s - length_s, dict[TimeCategory, float]()
        for number, bucket in enumerate(self.buckets):
            held_s = min(self._begin_of(number + 1), self.upto_s) - self._begin_of(number)
            within_s = min(held_s, self._begin_of(number) + held_s - began_s)
            if within_s > 0.0 and held_s > 0.0:
                for category, duration_s in bucket.items():
                    self._add(sums, category, duration_s * within_s / held_s)
        return time_spent(began_s, self.upto_s, sums, trained=self.trained)

    def _begin_of(self, number: int) -> float:
        assert self.began_s is not None
        return self.began_s + (self.dropped + number) * BUCKET_S


def category_of(state: JobState, phase: Phase, incident: Incident | None, *, planned: bool) -> TimeCategory | None:
    """Return what time is spent on from now on; None: the job is over. `planned`: the incident is a planned change."""
    if phase is Phase.ENDED:
        return None
    if phase is Phase.PAUSING:  # training goes on until the first rank has stopped
        return C.TRAINING if incident is None else C.PLANNED
    if phase in _ALWAYS:
        return _ALWAYS[phase]
    if incident is None:
        return C.START
    if planned:
        return C.PLANNED
    return C.WAITING if phase is Phase.QUIESCING and state.due.unplaced else _ON_THE_WAY[phase]


def time_spent(began_s: float, ended_s: float, seconds: Mapping[TimeCategory, float], *, trained: bool) -> TimeSpent:
    """Return seconds as a sum with its goodput. `trained`: ranks are known to have trained, then or before."""
    wall_s = ended_s - began_s
    share = seconds.get(TimeCategory.TRAINING, 0.0) / wall_s if wall_s > 0 else 0.0
    kept = {each: seconds[each] for each in TimeCategory if seconds.get(each, 0.0) > 0.0}
    return TimeSpent(began_s, ended_s, share if trained else None, kept)
