"""A training process and its rank's black box as values: what a process does next is another value."""

import enum

import msgspec

from midstep.protocol.types import LocalStateCopy, RepairPart, ShardHold, StepReport

SHARD = "replicated"
HOLDS = (ShardHold(SHARD, 1000),)


class Stage(enum.Enum):
    """What a process does."""

    JOINED = "joined"  # new, parked in front of its train function
    TRAINING = "training"
    PARKED = "parked"  # stopped and cleaned
    REJOINING = "rejoining"
    AT_BARRIER_TWO = "at barrier two"
    FINISHED = "finished"  # its train function has returned


class Process(msgspec.Struct, frozen=True):
    """The process of a rank. `whole`: it holds every shard, as of `committed` updates.

    `ready`: the collectives of its next step are done. `kept`: the rank-local states in the black box that it found.
    `complained`: it has reported a failed collective in this generation. `faulty`: it has raised, or been told wrong.
    """

    rank: int
    node: str
    incarnation: int
    generation: int
    stage: Stage = Stage.JOINED
    committed: int = 0
    ready: bool = False
    whole: bool = False
    resumed: bool = False  # and has not yet committed a step since
    complained: bool = False
    faulty: bool = False
    part: RepairPart | None = None
    kept: tuple[LocalStateCopy, ...] = ()

    @property
    def name(self) -> str:
        """Rank and incarnation."""
        return f"{self.rank}.{self.incarnation}"

    @property
    def pid(self) -> int:
        """A number that no other process has."""
        return 1000 * self.incarnation + self.rank + 1

    def local_states(self, size: int) -> tuple[LocalStateCopy, ...]:
        """Return the rank-local states in its black box: of its rank and of the rank that it keeps a copy for."""
        if not self.whole:
            return self.kept
        steps = (self.committed, self.committed + 1) if self.ready else (self.committed,)
        return tuple(
            LocalStateCopy(rank, step) for rank in sorted({self.rank, (self.rank + 1) % size}) for step in steps
        )

    def report(self, size: int) -> StepReport:
        """Return where it stands."""
        holds = HOLDS if self.whole else ()
        return StepReport(
            self.committed if self.whole else 0,
            ready=self.ready,
            clean=self.whole,
            holds=holds,
            needs=(SHARD,),
            local_states=self.local_states(size),
        )

    def change(self, **fields: object) -> "Process":
        """Return the process with other values."""
        return msgspec.structs.replace(self, **fields)
