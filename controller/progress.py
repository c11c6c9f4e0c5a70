"""How far each rank is, by the latest heartbeats.

Heartbeats are many and of no worth a second later, so they are not journaled; status shows what they say.
"""

import msgspec

from ..protocol.incidents import JobStatus, RankStatus
from ..protocol.messages import NodeHeartbeat
from ..protocol.types import RankProgress


class ProgressBoard:
    """The latest step clock of every rank."""

    def __init__(self, *, world_size: int) -> None:
        """`world_size`: of the job; what speaks of other ranks is dropped."""
        self._world_size = world_size
        self._ranks: dict[int, dict[int, RankProgress]] = {}  # by rank, then incarnation: a successor may be ready

    def take(self, heartbeat: NodeHeartbeat) -> None:
        """Take in the step clocks of a node. An earlier incarnation never hides a later one, nor the other way."""
        for progress in heartbeat.ranks:
            if not 0 <= progress.rank < self._world_size:
                continue
            by_incarnation = self._ranks.setdefault(progress.rank, {})
            by_incarnation[progress.incarnation] = progress
            for incarnation in [each for each in by_incarnation if each < max(by_incarnation) - 1]:
                del by_incarnation[incarnation]

    def overlay(self, status: JobStatus) -> JobStatus:
        """Return the machine's status with the steps and activities of the latest heartbeats.

        The machine only knows what was journaled; between incidents the ranks move on without telling it.
        """
        ranks = tuple(self._overlay_rank(rank) for rank in status.ranks)
        committed = max((rank.step for rank in ranks), default=0)
        latest = [by_incarnation[max(by_incarnation)] for by_incarnation in self._ranks.values()]
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
