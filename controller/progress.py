"""What heartbeats tell: how far each rank is, and which nodes have gone silent.

Heartbeats are many and of no worth a second later, so they are not journaled; the conclusion "this node is gone" is.
"""

import msgspec

from ..protocol.incidents import JobStatus, RankStatus
from ..protocol.messages import NodeHeartbeat, NodeJoined, NodeLost
from ..protocol.types import RankProgress
from .events import Event


class ProgressBoard:
    """The latest step clock of every rank, and when each node was last heard. Times are the controller's."""

    def __init__(self, *, world_size: int, interval_s: float, missed: int) -> None:
        """A node is silent after `missed` intervals without a word."""
        self._world_size = world_size
        self._interval_s = interval_s
        self._silent_s = interval_s * missed
        self._heard: dict[str, float] = {}  # nodes that are watched
        self._lost: dict[str, float] = {}  # nodes that were given up, and when their return was last told
        self._ranks: dict[int, dict[int, RankProgress]] = {}  # by rank, then incarnation: a successor may be ready
        self._checked_s: float | None = None

    def learn(self, event: Event, now: float) -> None:
        """Watch nodes that join, stop watching nodes that are gone."""
        if isinstance(event, NodeJoined):
            self._heard[event.node] = now
            self._lost.pop(event.node, None)
        elif isinstance(event, NodeLost):
            self.unwatch(event.node)
            self._lost[event.node] = now

    def unwatch(self, node: str) -> None:
        """Nobody expects to hear `node` any more."""
        self._heard.pop(node, None)
        self._lost.pop(node, None)

    def hear(self, node: str, now: float) -> bool:
        """Any word of a node shows that it lives. True: it was given up for lost, and should be asked who it is.

        Said again after the time in which a node goes silent, until it has joined.
        """
        if node in self._heard:
            self._heard[node] = now
        told_s = self._lost.get(node)
        if told_s is None or now - told_s < self._silent_s:
            return False
        self._lost[node] = now
        return True

    def take(self, heartbeat: NodeHeartbeat) -> None:
        """Take in the step clocks of a node. A rank's earlier life never hides its later one, nor the other way."""
        for progress in heartbeat.ranks:
            if not 0 <= progress.rank < self._world_size:
                continue
            lives = self._ranks.setdefault(progress.rank, {})
            lives[progress.incarnation] = progress
            for incarnation in [each for each in lives if each < max(lives) - 1]:
                del lives[incarnation]

    def start(self, now: float, found_s: float = 0.0) -> None:
        """A controller begins to listen: what happened before it did is no silence.

        Neither are the first `found_s`, in which nodes look for it. A node that has found it is watched as always.
        """
        self._heard = dict.fromkeys(self._heard, now + found_s)
        self._checked_s = now

    def silent(self, now: float) -> tuple[NodeLost, ...]:
        """Return the nodes that have gone silent, once each; they are not watched any longer.

        Call it after everything that has arrived was taken in. When this process itself stood still (stopped, swapped
        out, waiting for its disk), that time counts for nobody.
        """
        away_s = 0.0 if self._checked_s is None else now - self._checked_s - self._interval_s
        self._checked_s = now
        if away_s > self._interval_s:
            self._heard = {node: max(heard_s, min(now, heard_s + away_s)) for node, heard_s in self._heard.items()}
        lost = tuple(
            NodeLost(node, f"no word for {now - heard_s:.1f} s", now)
            for node, heard_s in self._heard.items()
            if now - heard_s > self._silent_s
        )
        for event in lost:
            self.unwatch(event.node)
        return lost

    def next_check(self, now: float) -> float | None:
        """Return when `silent` has to be asked again: twice in an interval; None while nobody is watched."""
        return now + self._interval_s / 2 if self._heard else None

    def overlay(self, status: JobStatus) -> JobStatus:
        """Return the machine's status with the steps and activities of the latest heartbeats.

        The machine only knows what was journaled; between incidents the ranks move on without telling it.
        """
        ranks = tuple(self._overlay_rank(rank) for rank in status.ranks)
        committed = max((rank.step for rank in ranks), default=0)
        latest = [lives[max(lives)] for lives in self._ranks.values()]
        medians = sorted(progress.median_step_s for progress in latest if progress.median_step_s > 0)
        return msgspec.structs.replace(
            status,
            ranks=ranks,
            committed=max(status.committed, committed),
            median_step_s=medians[len(medians) // 2] if medians else status.median_step_s,
        )

    def _overlay_rank(self, rank: RankStatus) -> RankStatus:
        progress = self._ranks.get(rank.rank, {}).get(rank.incarnation)
        if progress is None:
            return rank
        return msgspec.structs.replace(
            rank,
            step=max(progress.step, rank.step),
            activity="suspended" if progress.suspended else progress.activity.value,
        )
