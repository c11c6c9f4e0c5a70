"""The trials of each peer: which fault, with which settings, in a world of which size."""

import enum

import msgspec

TOTAL_STEPS = 20
FAULT_STEP = 15
CHECKPOINT_EVERY_STEPS = 10
VICTIM = 1
WARM_UP_STEPS = 5  # the first steps allocate; no median counts them
NODES = 2  # under a schedule in which one is lost
COLUMNS = 2  # ranks of a row, where the model is sharded


class Fault(enum.Enum):
    """The fault of a rank, between forward and backward of a step."""

    NONE = "none"
    KILL = "kill"
    EXCEPTION = "exception"
    STOP = "stop"
    SLEEP = "sleep"
    NODE = "node"
    SCHEDULED = "scheduled"  # many of the others, one after another


class Setting(enum.Enum):
    """How a peer is set up: as it comes, or by somebody who knows it."""

    DEFAULT = "default"
    TUNED = "tuned"


class Draw(msgspec.Struct, frozen=True, omit_defaults=True):
    """The seed of a schedule, how many faults it has and of which sorts, and how many steps it is for."""

    seed: int
    faults: int
    steps: int
    sorts: tuple[Fault, ...] = (Fault.KILL, Fault.EXCEPTION, Fault.STOP, Fault.SLEEP)


class Trial(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run of the workload. `peer`: a module of this package, `hsdp.` before it where the model is sharded.

    `drawn`: it trains under a schedule, or undisturbed for as many steps as one; else it has one fault at most.
    """

    peer: str
    setting: Setting
    fault: Fault
    ranks: int
    drawn: Draw | None = None

    @property
    def tool(self) -> str:
        """Return the tool, however the model is spread over ranks."""
        return self.peer.rpartition(".")[2]

    @property
    def fewest(self) -> int:
        """Return how many ranks are left where a tool trains on without the failed one: its row is left out with it."""
        return self.ranks - (COLUMNS if "." in self.peer else 1)

    @property
    def nodes(self) -> int:
        """Return how many nodes the peers play; midstep always plays some."""
        return NODES if self.drawn is not None and Fault.NODE in self.drawn.sorts else 1

    def __str__(self) -> str:
        return f"{self.peer}, {self.setting.value}, {self.fault.value}, {self.ranks} ranks"
