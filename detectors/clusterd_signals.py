"""The messages between ClusterD and a job, and what follows from them, as the dialogue takes and gives them.

Names, numbers and words are those of `recover.proto` and `pkg/domain/common/code.go` of MindCluster 26.1.
"""

from typing import NamedTuple

import msgspec

from ..protocol.compat import StrEnum
from ..protocol.controls import EndPause, PauseTraining, PerformAction
from ..protocol.types import FaultReport

OK, NOT_READY, RETRY_FAILED, UNRECOVERABLE, DUMP_FAILED, FAILED = 0, 404, 405, 406, 407, 499
"""Codes of reports. What ClusterD does with each differs."""
PAUSE_TRAIN = "pause_train"  # an action of stopTrain: no fault, and all ranks are to stand still
CONTINUE = "continue"  # a strategy: the end of such a pause
REPORTED_S = 840.0  # ClusterD waits for a report for 15 minutes
TRAINING = frozenset({"running", "suspecting", "finishing"})  # phases of a job in which ranks do not stand still


class SignalType(StrEnum):
    """A signal of ClusterD's."""

    STOP_TRAIN = "stopTrain"
    GLOBAL_FAULT = "globalFault"
    CHANGE_STRATEGY = "changeStrategy"
    SAVE_AND_EXIT = "saveAndExit"
    KILL_MASTER = "killMaster"
    FAULT_NODES_EXIT = "faultNodesExit"
    PRE_EXIT_PROCESS = "preExitProcess"
    KEEP_ALIVE = "keep-alive"
    PAUSE_START_AGENT = "pauseStartAgent"
    CONTINUE_START_AGENT = "continueStartAgent"


class RecoverStrategy(StrEnum):
    """A way to recover, as ClusterD calls it."""

    RETRY = "retry"
    RECOVER = "recover"
    DUMP = "dump"
    EXIT = "exit"


class RankFaultType(StrEnum):
    """The kind of a rank's fault, as ClusterD writes it."""

    MEMORY = "0"
    NORMAL = "1"
    LINK = "2"


class FaultyRank(NamedTuple):
    """A rank and its kind of fault."""

    rank: int
    type: str


class _Message(msgspec.Struct, frozen=True, tag=True, tag_field="message"):
    """Base of what goes over the line to TaskD: `type` is a field of the signals themselves."""


class Signal(_Message, frozen=True):
    """A signal of ClusterD. `nodes`: indices of pods, the ranks of which come one after the other."""

    uuid: str
    type: str
    ranks: tuple[FaultyRank, ...] = ()
    nodes: tuple[int, ...] = ()
    strategy: str = ""
    actions: tuple[str, ...] = ()
    timeout_s: int = 0
    extra: str = ""


class SwitchNics(_Message, frozen=True):
    """ClusterD has ranks use another network port while all stand still; `use_backup`: the second one, of each."""

    ranks: tuple[int, ...]
    use_backup: tuple[bool, ...]


class StressTest(_Message, frozen=True):
    """ClusterD has devices tested while all ranks stand still: the operations of each rank, by their numbers."""

    operations: dict[int, tuple[int, ...]]


Heard = Signal | SwitchNics | StressTest


# --- what is to be done -----------------------------------------------------------------------------------------------


class ReportProcessFault(_Message, frozen=True):
    """Tell ClusterD of ranks that midstep has found at fault."""

    ranks: tuple[FaultyRank, ...]


class ReportStopComplete(_Message, frozen=True):
    """Tell ClusterD that the ranks have stopped; or, with a code above 0, why they cannot."""

    code: int
    info: str
    ranks: tuple[FaultyRank, ...]


class ReportRecoverStrategy(_Message, frozen=True):
    """Tell ClusterD what the ladder has left."""

    ranks: tuple[FaultyRank, ...]
    strategies: tuple[RecoverStrategy, ...]


class ReportRecoverStatus(_Message, frozen=True):
    """Tell ClusterD what came of its strategy."""

    strategy: str
    code: int
    info: str


class TellFault(msgspec.Struct, frozen=True):
    """Tell midstep's controller of a fault."""

    report: FaultReport


class StopJob(msgspec.Struct, frozen=True):
    """End the job; `insist`: without waiting for its checkpoint."""

    why: str
    insist: bool = False


class Steer(msgspec.Struct, frozen=True):
    """Have the job do something, as an operator asks for it."""

    control: PauseTraining | EndPause | PerformAction


class ReplySwitchNicResult(_Message, frozen=True):
    """Tell ClusterD whether all ranks have switched."""

    succeeded: bool


class ReplyStressTestResult(_Message, frozen=True):
    """Tell ClusterD what each test of each rank has found: a code, and what it means."""

    results: dict[int, dict[int, tuple[str, str]]]


class Remark(msgspec.Struct, frozen=True):
    """Log a line."""

    text: str


Report = (
    ReportProcessFault
    | ReportStopComplete
    | ReportRecoverStrategy
    | ReportRecoverStatus
    | ReplySwitchNicResult
    | ReplyStressTestResult
)
Action = Report | TellFault | StopJob | Steer | Remark
