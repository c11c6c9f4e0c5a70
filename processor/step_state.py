"""The step state of a rank: how many updates it has applied, and which of its shards are whole. Pure.

The step report of barrier one is made of it. The train thread of a process keeps one, and so does each process of the
simulation.
"""

from collections.abc import Iterable, Sequence

from ..protocol.types import CheckpointTrace, LocalStateCopy, RepairPart, RestoreSource, ShardHold, StepReport


class StepState:
    """Updates applied and shards held by one rank. Call a method here before the shards themselves are changed."""

    def __init__(self, *, clean: bool) -> None:
        """`clean`: True in a world that starts together, which holds its initial state; False in a single newcomer."""
        self.count = 0  # updates applied, so also the index of the next step
        self.ready = False  # the gradients of step `count` are final
        self.updating = False  # the update of step `count` has begun
        self.clean = clean  # what is held is of one step
        self.corrupted: frozenset[str] = frozenset()  # shards that are lost, while the rest is clean
        self._reported = self.corrupted

    def report(
        self,
        shards: Sequence[ShardHold],
        local_states: tuple[LocalStateCopy, ...],
        checkpoints: tuple[int, ...],
        trace: CheckpointTrace,
    ) -> StepReport:
        """Return the report of this rank for barrier one, from which the repair is planned."""
        self._reported = self.corrupted
        return StepReport(
            committed=self.count,
            ready=self.ready and self.clean and not self.corrupted,  # gradients are memory, too
            clean=self.clean,
            holds=tuple(hold for hold in shards if hold.held and self.clean and hold.shard_id not in self.corrupted),
            needs=tuple(hold.shard_id for hold in shards),
            local_states=local_states,
            checkpoints=checkpoints,
            trace=trace,
        )

    @property
    def corrupted_since_report(self) -> bool:
        """Whether a shard was corrupted after the last report, so that no plan can take it into account."""
        return not self.corrupted <= self._reported

    def mark_corrupted(self, shards: Iterable[str]) -> None:
        """Count these shards as lost: their memory has an uncorrectable error."""
        self.corrupted |= frozenset(shards)

    def gradients_dropped(self) -> None:
        """Note that the gradients are gone: the interrupted step has to be repeated. In clean."""
        self.ready = False

    def update_torn(self) -> None:
        """Note that an update has ended halfway: the shards belong to no one step."""
        self.updating = self.ready = self.clean = False

    def repairing(self, part: RepairPart, rank: int) -> None:
        """Note that a repair begins: what it overwrites is not whole until all of it has arrived."""
        arriving = {transfer.shard_id for transfer in part.transfers if transfer.destination == rank}
        if arriving and part.target_step == self.count and self.clean:
            self.corrupted |= arriving  # the rest is of the same step, and stays
        elif arriving or part.restore is RestoreSource.CHECKPOINT:
            self.clean = False

    def repaired(self) -> None:
        """Note that all has arrived. A rank that lacked nothing else is whole again, even if the rollback fails."""
        if self.clean:
            self.corrupted = frozenset()

    def rolled_back(self, step: int) -> None:
        """Note that all state is as of `step` updates."""
        self.count, self.ready, self.updating = step, False, False

    def whole_again(self) -> None:
        """Note that repair and rollback have succeeded."""
        self.clean, self.corrupted = True, frozenset()
