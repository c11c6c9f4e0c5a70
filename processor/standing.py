"""Where a rank stands: how many updates it has applied, what of its state is whole, what it says at barrier one. Pure.

The train thread of a process keeps one, and so does each process of the simulation.
"""

from collections.abc import Iterable, Sequence

from ..protocol.types import CheckpointTrace, LocalStateCopy, RepairPart, RestoreSource, ShardHold, StepReport


class Standing:
    """One rank's. Whoever changes what the rank holds says so here, before it is changed."""

    def __init__(self, *, clean: bool) -> None:
        """`clean`: a world that starts together holds its initial state; a single newcomer holds nothing of worth."""
        self.count = 0  # updates applied, so also the index of the next step
        self.ready = False  # the gradients of step `count` are final
        self.updating = False  # the update of step `count` has begun
        self.clean = clean  # what is held is of one step
        self.struck: frozenset[str] = frozenset()  # shards that are lost, while the rest is clean
        self._told = self.struck

    def report(
        self,
        shards: Sequence[ShardHold],
        local_states: tuple[LocalStateCopy, ...],
        checkpoints: tuple[int, ...],
        trace: CheckpointTrace,
    ) -> StepReport:
        """Say where this rank stands, for barrier one; the repair is planned by it."""
        self._told = self.struck
        return StepReport(
            committed=self.count,
            ready=self.ready and self.clean and not self.struck,  # gradients are memory, too
            clean=self.clean,
            holds=tuple(hold for hold in shards if hold.held and self.clean and hold.shard_id not in self.struck),
            needs=tuple(hold.shard_id for hold in shards),
            local_states=local_states,
            checkpoints=checkpoints,
            trace=trace,
        )

    @property
    def struck_since(self) -> bool:
        """Whether something was struck after the last report, so that no plan can know of it."""
        return not self.struck <= self._told

    def strike(self, shards: Iterable[str]) -> None:
        """The memory of these shards was hit: they are as good as lost."""
        self.struck |= frozenset(shards)

    def gradients_dropped(self) -> None:
        """In clean: the interrupted step can be repeated, and cannot be finished any more."""
        self.ready = False

    def update_torn(self) -> None:
        """An update has ended halfway: nothing that is held is of one step."""
        self.updating = self.ready = self.clean = False

    def repairing(self, part: RepairPart, rank: int) -> None:
        """A repair begins: what it overwrites is not whole until all of it has come."""
        arriving = {transfer.shard_id for transfer in part.transfers if transfer.destination == rank}
        if arriving and part.target_step == self.count and self.clean:
            self.struck |= arriving  # the rest is of the same step, and stays
        elif arriving or part.restore is RestoreSource.CHECKPOINT:
            self.clean = False

    def repaired(self) -> None:
        """All has come. Where only that was missing the rank holds one step again, whatever becomes of the rollback."""
        if self.clean:
            self.struck = frozenset()

    def rolled_back(self, step: int) -> None:
        """Everything is as of `step` updates: that is where the next step begins."""
        self.count, self.ready, self.updating = step, False, False

    def whole_again(self) -> None:
        """Repair and rollback are over."""
        self.clean, self.struck = True, frozenset()
