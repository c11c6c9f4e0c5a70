"""Judge by heartbeats which nodes have gone silent, whether the fault is theirs, and how far each rank is.

A controller that is cut off sees what it would see if all nodes had died, and must not act on it: the ranks train on.
So while more than a share of the nodes owe their heartbeats at the same time, their silence is held for a while.
Heartbeats are many and of no worth a second later, so none is journaled; the conclusions are: a node is lost, a hold
has ended. Status shows what they say of ranks (`ProgressBoard`). Pure: time is an argument, and is the controller's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..policies.schema import HeartbeatPolicy
from ..protocol.bounds import MOST_REPORTED
from ..protocol.incidents import JobStatus, RankStatus, ReportedSeries
from ..protocol.messages import Command, DeleteNode, EndJob, NodeHeartbeat, NodeJoined, NodeLost, NodeWords
from ..protocol.rank_logs import in_lines
from ..protocol.reports import ReportedValues
from ..protocol.types import FaultReport, RankProgress, node_address
from .journaled import Journaled
from .recovery.events import Event, HoldEnded
from .recovery.state import JobState
from .slow_ranks import SlowRanks

QUIET_SHARE = 1 / 3  # of the time in which a node goes silent: one that is cut off with others is late by then, too
QUIET_INTERVALS = 2
MOST_NODES_WORDS = 4096  # of the nodes that spoke last
MOST_POINTS = 120  # of a value that the script reports
QUIET_RANK_S = 10.0  # a rank that has reported nothing for so long gives its place to a higher one
MOST_TOLD = 16  # shards of one copy: of a world on one dimension each rank has one
# Between turns of a controller that have nothing but heartbeats: those of hundreds of nodes are taken together.
BEATS_SPACING_S = 0.005
BEATS_SPACING_A_NODE_S = 16e-6
BEATS_SPACING_MOST_S = 0.02
RESENT_S = 5.0  # after a silence of all: what was said in it has arrived by then


def beats_spacing(nodes: int) -> float:
    """Return how many seconds lie between two turns that have nothing but heartbeats, in a job of so many nodes."""
    return min(BEATS_SPACING_MOST_S, max(BEATS_SPACING_S, nodes * BEATS_SPACING_A_NODE_S))


class Hold(msgspec.Struct, frozen=True):
    """Nodes whose silence is held, of how many that are watched, and the times between which it is."""

    nodes: tuple[str, ...]
    watched: int
    quiet_since_s: float  # when the first of them was heard last
    began_s: float
    until_s: float

    def text(self, now: float) -> str:
        """Say what is held, and for how long still."""
        silent_s, left_s = max(0.0, now - self.quiet_since_s), max(0.0, self.until_s - now)
        return (
            f"holding: {len(self.nodes)} of {self.watched} nodes silent for {silent_s:.0f} s; the controller itself "
            f"may be cut off, so nothing is decided about them for another {left_s:.0f} s"
        )


class Watch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes that are watched, and those that were given up, with the time at which that was last said."""

    nodes: tuple[str, ...]
    lost: dict[str, float]


class Liveness:
    """When each node was last heard, and what follows from its silence."""

    def __init__(self, policy: HeartbeatPolicy) -> None:
        """Take a node for silent after `missed` intervals without a message."""
        self._policy = policy
        self._silent_s = policy.interval_s * policy.missed
        quiet_s = max(QUIET_SHARE * self._silent_s, QUIET_INTERVALS * policy.interval_s)
        self._quiet_s = min(self._silent_s, quiet_s)
        self._heard: dict[str, float] = {}  # nodes that are watched
        self._lost: dict[str, float] = {}  # nodes that were given up, and when their return was last reported
        self._checked_s: float | None = None
        self._deaf_since_s: float | None = None  # most nodes are quiet
        self._hears_from_s = 0.0  # most nodes were quiet before, and what they said may still be on its way
        self._held: set[str] = set()  # in the present hold, heard again or not
        self.hold: Hold | None = None
        self.heard_again = False  # most nodes, as the last judgement has found

    @property
    def interval_s(self) -> float:
        """How often a node says that it lives."""
        return self._policy.interval_s

    def learn(self, event: Journaled, now: float) -> None:
        """Watch nodes that join, stop watching nodes that are gone."""
        if isinstance(event, NodeJoined):
            self._heard[event.node] = now
            self._lost.pop(event.node, None)
        elif isinstance(event, NodeLost):
            self._unwatch(event.node)
            self._lost[event.node] = now

    def ordered(self, receiver: str, order: Command) -> None:
        """Expect no more word of a node that gets the order to end."""
        if isinstance(order, DeleteNode):
            self._unwatch(order.node)
        elif isinstance(order, EndJob):
            self._unwatch(receiver.removeprefix(node_address("")))

    def hear(self, node: str, now: float) -> bool:
        """Any word of a node shows that it lives. True: it was given up for lost, and should be asked what runs there.

        Said again after the time in which a node goes silent, until it has joined.
        """
        if node in self._heard:
            self._heard[node] = now
        told_s = self._lost.get(node)
        if told_s is None or now - told_s < self._silent_s:
            return False
        self._lost[node] = now
        return True

    def watches(self, node: str) -> bool:
        """Say whether a node has joined and is not given up."""
        return node in self._heard

    def learned(self) -> "Watch":
        """Return what follows from events and commands alone."""
        return Watch(tuple(self._heard), dict(self._lost))

    def restore(self, learned: "Watch", now: float) -> None:
        """Know what an earlier controller had learned by `now`."""
        self._heard, self._lost = dict.fromkeys(learned.nodes, now), dict(learned.lost)

    def start(self, now: float, found_s: float = 0.0) -> None:
        """Begin to listen: the time before is no node's silence.

        Neither are the first `found_s`, in which nodes look for it. A node that has found it is watched as always.
        """
        self._heard = dict.fromkeys(self._heard, now + found_s)
        self._checked_s = now

    def judge(
        self, now: float, tolerated: Callable[[str], bool] = lambda node: False
    ) -> tuple[HoldEnded | NodeLost, ...]:
        """Return what follows from the silence of nodes: those that are lost, once each, and a hold that has ended.

        `tolerated`: a node is not lost yet for its silence, which may be that of the proxy before it.

        Lost nodes are not watched any longer. Call it after everything that has arrived was taken in. When this process
        itself stood still (stopped, swapped out, waiting for its disk), that time counts for no node.
        """
        self._discount_own_pause(now)
        self._listen(now)
        silent = {node: age_s for node, age_s in self._silent_for(self._silent_s, now).items() if not tolerated(node)}
        if silent and self._deaf_since_s is not None and not self._hold_is_over(now):
            began_s = self.hold.began_s if self.hold is not None else now
            since_s, until_s = now - max(silent.values()), began_s + self._policy.hold_s
            self.hold = Hold(tuple(silent), len(self._heard), since_s, began_s, until_s)
            self._held |= silent.keys()
            return ()
        lost = tuple(NodeLost(node, f"no word for {age_s:.1f} s", now) for node, age_s in silent.items())
        held, self.hold = self.hold, None
        for event in lost:
            self._unwatch(event.node)
        if held is None:
            return lost
        nodes = tuple(sorted(self._held))
        self._held.clear()
        return (HoldEnded(nodes, held.watched, now - held.began_s, tuple(silent)), *lost)

    def puts_off(self, due_s: float, now: float) -> bool:
        """Say whether a deadline that was due at `due_s` is not to be acted on yet, as the answers could not arrive.

        So it is while most nodes are quiet, and for as long afterwards, up to what a resend takes; never for longer
        than a hold can last.
        """
        deaf = self._deaf_since_s is not None
        return now - due_s < self._policy.hold_s and (deaf or now < self._hears_from_s)

    def next_check(self, now: float) -> float | None:
        """Return when `judge` has to be asked again: twice in an interval; None while no node is watched."""
        return now + self._policy.interval_s / 2 if self._heard else None

    def holding(self, now: float) -> str:
        """Return what status says of the present hold; the empty string when there is none."""
        return "" if self.hold is None else self.hold.text(now)

    def _unwatch(self, node: str) -> None:
        self._heard.pop(node, None)
        self._lost.pop(node, None)

    def _discount_own_pause(self, now: float) -> None:
        interval_s = self._policy.interval_s
        away_s = 0.0 if self._checked_s is None else now - self._checked_s - interval_s
        self._checked_s = now
        if away_s > interval_s:
            self._heard = {node: max(heard_s, min(now, heard_s + away_s)) for node, heard_s in self._heard.items()}

    def _listen(self, now: float) -> None:
        """Note whether most nodes are quiet, and when they are heard again.

        The rest gets the whole time once more then: they do not find their way back all at once.
        """
        quiet = self._silent_for(self._quiet_s, now)
        self.heard_again = self._deaf_since_s is not None and not self._is_most(quiet)
        if self._is_most(quiet):
            if self._deaf_since_s is None:
                self._deaf_since_s = now - self._quiet_s
        elif self.heard_again and self._deaf_since_s is not None:
            self._hears_from_s = now + min(RESENT_S, now - self._deaf_since_s)
            self._deaf_since_s = None
            self._heard.update(dict.fromkeys(quiet, now))

    def _silent_for(self, limit_s: float, now: float) -> dict[str, float]:
        """Return the nodes that were not heard for more than `limit_s`, and for how long."""
        if now - min(self._heard.values(), default=now) <= limit_s:
            return {}  # as nearly always, and most quickly found
        return {node: now - heard_s for node, heard_s in self._heard.items() if now - heard_s > limit_s}

    def _is_most(self, nodes: Iterable[str]) -> bool:
        return len(tuple(nodes)) > self._policy.hold_share * len(self._heard)

    def _hold_is_over(self, now: float) -> bool:
        return self.hold is not None and now >= self.hold.until_s


class ProgressBoard:
    """The latest step clock of every rank."""

    def __init__(self, *, world_size: int) -> None:
        """`world_size`: of the job; what speaks of other ranks is dropped."""
        self._world_size = world_size
        self.reported = ReportedBoard()
        self.slow = SlowRanks()
        self._unread: dict[str, NodeHeartbeat] = {}  # of each node the latest, until they are asked for
        self._ranks: dict[int, dict[int, RankProgress]] = {}  # by rank, then incarnation: a successor may be ready

    def take(self, heartbeat: NodeHeartbeat, now: float = 0.0) -> None:
        """Take in the step clocks of a node. An earlier incarnation never hides a later one, nor the other way."""
        self.reported.take(heartbeat.reported, now)
        self._unread[heartbeat.node] = heartbeat

    def _read(self) -> Mapping[int, Mapping[int, RankProgress]]:
        """Return what is known of each rank. Of thousands of nodes most clocks are replaced before they are read."""
        unread, self._unread = self._unread, {}
        for heartbeat in unread.values():
            self.slow.take(heartbeat)
            for progress in heartbeat.ranks:
                if 0 <= progress.rank < self._world_size:
                    self._note(progress)
        return self._ranks

    def _note(self, progress: RankProgress) -> None:
        by_incarnation = self._ranks.setdefault(progress.rank, {})
        by_incarnation[progress.incarnation] = progress
        if len(by_incarnation) > 1:
            for incarnation in [each for each in by_incarnation if each < max(by_incarnation) - 1]:
                del by_incarnation[incarnation]

    def look(self, now: float, state: JobState) -> tuple[FaultReport, ...]:
        """Return what is to be reported of slow ranks now."""
        if not self.slow.is_due(now, state):
            return ()
        self._read()
        return self.slow.look(now, state)

    @property
    def is_heard(self) -> bool:
        """Tell whether any rank has said how far it is."""
        return bool(self._read())

    def reached(self) -> int:
        """Return the most steps that the present process of any rank has committed."""
        return max((by_incarnation[max(by_incarnation)].step for by_incarnation in self._read().values()), default=0)

    def overlay(self, status: JobStatus) -> JobStatus:
        """Return the machine's status with the steps and activities of the latest heartbeats.

        The machine only knows what was journaled; between incidents the ranks move on without telling it.
        """
        known = self._read()
        ranks = tuple(self._overlay_rank(rank) for rank in status.ranks)
        committed = max((rank.step for rank in ranks), default=0)
        latest = [by_incarnation[max(by_incarnation)] for by_incarnation in known.values()]
        medians = sorted(progress.median_step_s for progress in latest if progress.median_step_s > 0)
        status = self.slow.overlay(msgspec.structs.replace(status, ranks=ranks))
        return msgspec.structs.replace(
            status,
            committed=max(status.committed, committed),
            median_step_s=medians[len(medians) // 2] if medians else status.median_step_s,
            reported=self.reported.told(),
        )

    def _overlay_rank(self, rank: RankStatus) -> RankStatus:
        progress = self._ranks.get(rank.rank, {}).get(rank.incarnation)
        if progress is None:
            return rank
        return msgspec.structs.replace(
            rank,
            step=max(progress.step, rank.step),
            activity="suspended" if progress.suspended else progress.activity.value,
            copied_steps=progress.copied_steps,
            copied_bytes=progress.copied_bytes,
            guest_copies=progress.guest_copies,
            agreed_step=progress.agreed_step,
            unchecked=progress.unchecked,
        )


def with_single_copies(status: JobStatus, state: JobState) -> JobStatus:
    """Return a status that names the shards that no vote checks. `status`: with the latest heartbeats.

    That a rank has such shards it says with them, once it has voted. Which they are follows from what all ranks had to
    hold when they last began to train, which the machine knows.
    """
    ranks = [rank.rank for rank in status.ranks if rank.unchecked]
    if not ranks:
        return status
    needs = {holder.rank: holder.needs for holder in state.world.holders}
    found = single_copies(ranks, needs)
    told = found[:MOST_TOLD]
    return msgspec.structs.replace(status, single_copies=told, single_copies_left_out=len(found) - len(told))


def single_copies(ranks: list[int], needs: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    """Return what these ranks hold and no other does, by rank. `needs`: the shards of every rank of the world."""
    holders = Counter(shard for shards in needs.values() for shard in shards)
    return tuple(shard for rank in ranks for shard in needs.get(rank, ()) if holders[shard] == 1)


class ReportedBoard:
    """The values that the script reports of its steps, to be shown: of the lowest rank that reports each, a few points.

    Heartbeats bring them, so they are lost where those are, nothing is decided by them, and the next controller begins
    again.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Points] = {}

    def take(self, told: ReportedValues | None, now: float) -> None:
        """Take in what a node has told with its heartbeat."""
        if told is None:
            return
        for name, value in told.values.items():
            known = self._series.get(name)
            if known is None:
                if len(self._series) >= MOST_REPORTED:
                    continue
                known = self._series[name] = _Points(told.rank, now)
            if told.rank <= known.rank or now - known.heard_s > QUIET_RANK_S:
                known.take(told.rank, told.step, value, now)

    def told(self) -> tuple[ReportedSeries, ...]:
        """Return all values, for the status."""
        return tuple(
            ReportedSeries(name, each.rank, tuple(each.values), tuple(each.values.values()))
            for name, each in self._series.items()
            if each.values
        )


class _Points:
    """The points of one value, by step."""

    def __init__(self, rank: int, heard_s: float) -> None:
        self.rank = rank
        self.heard_s = heard_s
        self.values: dict[int, float] = {}
        self._apart = 1  # steps that two points are apart at least, but for the last one

    def take(self, rank: int, step: int, value: float, now: float) -> None:
        """Take in a point. What comes from behind it belongs to steps that are repeated."""
        if rank == self.rank and step == next(reversed(self.values), None):
            return  # the same again: it does not show that the rank reports still
        self.rank, self.heard_s = rank, now
        for later in [each for each in self.values if each >= step]:
            del self.values[later]
        steps = list(self.values)
        if len(steps) > 1 and steps[-1] - steps[-2] < self._apart:
            del self.values[steps[-1]]
        self.values[step] = value
        if len(self.values) > MOST_POINTS:
            steps = list(self.values)
            self._apart = max(1, 2 * (steps[-1] - steps[0]) // len(steps))
            self.values = {each: self.values[each] for each in (*steps[:-1:2], steps[-1])}


class KeptWords:
    """Keep each node's last report of what its ranks printed, until the node is lost. No journal has it before that.

    The machine decides nothing by it. With the loss it becomes a part of the event, so that each controller has the
    same report.
    """

    def __init__(self) -> None:
        self._words: dict[str, NodeWords] = {}

    def take(self, words: NodeWords) -> None:
        """Keep what a node says, in place of what it said before."""
        self._words.pop(words.node, None)
        self._words[words.node] = words
        if len(self._words) > MOST_NODES_WORDS:
            del self._words[next(iter(self._words))]

    def completed(self, event: Event) -> Event:
        """Return the loss of a node with what was last heard of it, and forget that; other events as they are."""
        words = self._words.pop(event.node, None) if isinstance(event, NodeLost) else None
        return event if words is None else msgspec.structs.replace(event, output=in_lines(words))
