"""The notices that a job owes to webhooks: a fold of the journal, and what the clock adds to it. Pure.

The end of the job, and a time without a controller, follow from events. All else holds or does not hold at a moment
(`changes`): when that changes, the change becomes an event of its own, so that each controller knows what has been told
and what has not. A notice is owed until a webhook has got it, and the next controller pays what the last one owed: it
can be told twice, and not be lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from ..policies.schema import NotifyPolicy
from ..protocol.incidents import NoticeKind
from ..protocol.types import FaultLevel, FaultReport
from ..protocol.wording import nodes_text, one_line
from .journaled import ConditionChanged, Journaled, Notice, NoticeSettled
from .metrics import Observation
from .recovery.events import ControllerStarted
from .recovery.state import JobState, Phase
from .recovery.world import NodeState

MOST_OWED = 200  # the oldest goes
MOST_CHARACTERS = 500  # of a text
MOST_SUBJECTS = 20  # of a kind that are told of at the same time
JOURNAL = "asked:journal"  # the one thing that cannot be in the journal
HOUR_S = 3600.0
_TRAINING = frozenset({Phase.RUNNING, Phase.PAUSING, Phase.FINISHING})
_OVER = frozenset({Phase.FINISHING, Phase.SAVING, Phase.ENDED})  # spares leave, and nothing is asked any more


class Owed(msgspec.Struct, frozen=True):
    """A notice, and the webhooks that have yet to get it."""

    notice: Notice
    webhooks: tuple[str, ...]


class NewestCheckpoint(msgspec.Struct, frozen=True):
    """The newest complete checkpoint in a job's directory, and its age when that was looked at; None: there is none."""

    step: int | None
    age_s: float = 0.0


@dataclass
class NoticeBook:
    """Remembers what has been told of a job, and what is to be. Without a webhook it stays empty.

    `standing`: for each thing whether it held when that was last noted; `told_s`: when it was last told of.
    """

    owed: dict[str, Owed] = field(default_factory=dict)  # by the notice's id
    standing: dict[str, bool] = field(default_factory=dict)
    told_s: dict[str, float] = field(default_factory=dict)
    idle_since_s: float | None = None  # since when nothing is trained
    ended: bool = False

    def follow(self, state: JobState, event: Journaled, now: float) -> None:
        """Learn from an event that the machine has just handled."""
        policy = state.policy.notify
        if not policy.webhooks:
            return
        if isinstance(event, NoticeSettled):
            self._settle(event)
        elif isinstance(event, ConditionChanged):
            self._change(policy, event, now)
        phase = state.phase
        if phase in _TRAINING or phase is Phase.ENDED or _may_train(state, phase):
            self.idle_since_s = None
        elif self.idle_since_s is None:
            self.idle_since_s = now
        if phase is not Phase.ENDED and isinstance(event, ControllerStarted) and event.guarded_until_s is not None:
            self._led_again(policy, event.term, now - event.guarded_until_s, now)
        if state.result is not None and not self.ended:
            self.ended = True
            end = f"the job has ended with exit code {state.result.exit_code}: {state.result.reason}"
            self._owe(policy, _notice(NoticeKind.ENDED, "", end, now))

    def waiting_for(self, webhook: str) -> int:
        """Return how many notices a webhook has yet to get."""
        return sum(webhook in each.webhooks for each in self.owed.values())

    def _settle(self, event: NoticeSettled) -> None:
        owed = self.owed.get(event.id)
        if owed is None:
            return
        left = tuple(each for each in owed.webhooks if each != event.webhook)
        if left:
            self.owed[event.id] = Owed(owed.notice, left)
        else:
            del self.owed[event.id]

    def _change(self, policy: NotifyPolicy, event: ConditionChanged, now: float) -> None:
        self.standing[event.key] = event.notice is not None
        if event.notice is not None:
            self._tell_now(policy, event.key, event.notice, now)

    def _led_again(self, policy: NotifyPolicy, term: int, without_s: float, now: float) -> None:
        key = _key(NoticeKind.UNGUARDED, "")
        if without_s < policy.unguarded_s or not _may_tell(self, policy, key, now):
            return
        text = f"the job was without a controller for {duration_text(without_s)}; it has one again, in term {term}"
        self._tell_now(policy, key, _notice(NoticeKind.UNGUARDED, "", text, now), now)

    def _tell_now(self, policy: NotifyPolicy, key: str, notice: Notice, now: float) -> None:
        self.told_s = {each: at_s for each, at_s in self.told_s.items() if now - at_s < policy.again_s}
        self.told_s[key] = now
        self._owe(policy, notice)

    def _owe(self, policy: NotifyPolicy, notice: Notice) -> None:
        webhooks = tuple(each.name for each in policy.webhooks if notice.kind in each.events)
        if webhooks:
            self.owed[notice.id] = Owed(notice, webhooks)
        while len(self.owed) > MOST_OWED:
            del self.owed[next(iter(self.owed))]


def changes(
    seen: Observation, book: NoticeBook, newest: NewestCheckpoint | None = None
) -> tuple[ConditionChanged, ...]:
    """Return what has begun to hold or holds no more, beside what the book has.

    `newest`: the newest checkpoint; None: it was not looked for. What was told of within `again_s` waits.
    """
    if seen.state.phase in _OVER:
        return ()
    policy, found = seen.state.policy.notify, dict[str, Notice]()
    for notice in _holding(seen, book, policy, newest):
        found.setdefault(_key(notice.kind, notice.subject), notice)
    changed = [
        ConditionChanged(key, notice)
        for key, notice in found.items()
        if not book.standing.get(key) and _may_tell(book, policy, key, seen.at_s)
    ]
    changed += [ConditionChanged(key) for key, stands in book.standing.items() if stands and key not in found]
    spare = _key(NoticeKind.NO_SPARE, "")
    if spare not in book.standing and _spares(seen.state):
        changed.append(ConditionChanged(spare))  # now the job has one to lose
    return tuple(changed)


def journal_notice(at_s: float) -> Notice:
    """Return the notice that the journal cannot be written, which is therefore told without being remembered."""
    text = (
        "the journal cannot be written, and nothing is decided: training continues, and no fault is answered. Mind the "
        "disk of the job directory; `midstep status` has the error"
    )
    return _notice(NoticeKind.ASKED, "journal", text, at_s)


def _holding(
    seen: Observation, book: NoticeBook, policy: NotifyPolicy, newest: NewestCheckpoint | None
) -> Iterator[Notice]:
    """Yield a notice for each thing that holds now."""
    state, now = seen.state, seen.at_s
    if book.idle_since_s is not None and now - book.idle_since_s >= policy.asked_after_s:
        text = f"nothing has been trained for {duration_text(now - book.idle_since_s)}: {_why_idle(state)}"
        yield _notice(NoticeKind.ASKED, "training", f"{text}. `midstep status` says more", now)
    for fault in _for_people(state):
        place = f"{fault.node}" if fault.device is None else f"{fault.node}, device {fault.device}"
        text = f"{place} has failed too often and is left until a person has looked: {fault.detail}"
        yield _notice(NoticeKind.ASKED, place, text, now)
    spent = [use for use in state.ladder.budgets(state.spent, now) if use.used >= policy.budget_share * use.limit]
    for use in spent[:MOST_SUBJECTS]:
        text = f"budget {use.name}: {use.used} of {use.limit} are spent. Then a coarser rung is taken"
        yield _notice(NoticeKind.BUDGET, use.name, f"{text}; `midstep report` says what spent it", now)
    if _key(NoticeKind.NO_SPARE, "") in book.standing and not _spares(state):
        text = "no spare node is left: the next node that is lost ends the job, makes it smaller, or is waited for"
        yield _notice(NoticeKind.NO_SPARE, "", text, now)
    age_s = 0.0 if newest is None else _age_s(seen, newest)
    if policy.checkpoint_age_s is not None and newest is not None and age_s >= policy.checkpoint_age_s:
        age = duration_text(age_s)
        text = f"the newest checkpoint, of step {newest.step}, is {age} old"
        text = f"there is no complete checkpoint, {age} after the job began" if newest.step is None else text
        yield _notice(NoticeKind.CHECKPOINT_OLD, "", f"{text} ({state.job.settings.checkpoint_directory})", now)
    hour = next((each for each in seen.time_lately if round(each.wall_s) == HOUR_S), None)
    goodput = None if hour is None else hour.goodput
    if policy.goodput_under is not None and goodput is not None and goodput < policy.goodput_under:
        text = f"only {100 * goodput:.1f} % of the last hour were training"
        yield _notice(NoticeKind.GOODPUT_LOW, "", f"{text}. `midstep report` ends with where the time went", now)


def _age_s(seen: Observation, newest: NewestCheckpoint) -> float:
    """Return the age of a checkpoint; where there is none, of the job, which is older than its present controller."""
    if newest.step is not None:
        return newest.age_s
    return 0.0 if seen.time is None else seen.at_s - seen.time.began_s


def _may_train(state: JobState, phase: Phase) -> bool:
    """Return whether all ranks of a script live that has not called midstep, and may never do."""
    return phase is Phase.STARTING and not state.ever_resilient and len(state.world.pids()) == state.world.size


def _for_people(state: JobState) -> list[FaultReport]:
    faults = [each.report for each in state.book.standing()]
    return [each for each in faults if each.level is FaultLevel.MANUALLY_SEPARATE_NPU and each.node][:MOST_SUBJECTS]


def _spares(state: JobState) -> int:
    return sum(node.state is NodeState.SPARE for node in state.world.nodes.values())


def _why_idle(state: JobState) -> str:
    if state.phase is not Phase.WAITING:
        return f"the job is {state.phase}"
    there = [node.name for node in state.world.nodes.values() if node.state in {NodeState.ACTIVE, NodeState.SPARE}]
    named = f" ({nodes_text(there)})" if there else ""
    return f"it waits for nodes, and has {len(there)} of the {state.nodes_needed} that it needs{named}"


def _may_tell(book: NoticeBook, policy: NotifyPolicy, key: str, now: float) -> bool:
    told_s = book.told_s.get(key)
    return told_s is None or now - told_s >= policy.again_s


def _notice(kind: NoticeKind, subject: str, text: str, at_s: float) -> Notice:
    return Notice(f"{_key(kind, subject)}@{at_s:.3f}", kind, subject, one_line(text, MOST_CHARACTERS), at_s)


def _key(kind: NoticeKind, subject: str) -> str:
    return f"{kind}:{subject}"


def duration_text(duration_s: float) -> str:
    """Return seconds as `45 s`, `12 min` or `3 h 5 min`."""
    if duration_s < 120.0:
        return f"{duration_s:.0f} s"
    minutes = round(duration_s / 60.0)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
