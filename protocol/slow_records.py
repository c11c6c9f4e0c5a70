"""Records of nodes that were named slow: since when, by how much, and what was done about it."""

import msgspec

from .compat import StrEnum
from .faults import FaultKind


class SlowAnswer(StrEnum):
    """The answer to a node that is slow."""

    REPORTED = "reported"  # it was shown, and kept its ranks
    DRAINED = "drained"  # its ranks moved to a spare node
    SHRUNK = "shrunk"  # the world continued without it
    RESTARTED = "restarted"  # all processes began again without it, from a checkpoint, in a world of the same size


class SlowRecord(msgspec.Struct, frozen=True):
    """One time that a node was named slow. Times are wall-clock seconds of the controller.

    `said` is what was measured when it was named. `scores`: of each slow rank how many times as long as others it
    computed, or data was on its way from or to its machine; empty where no number says it. `until_s`: when it was well
    again, or its ranks had left; None: neither has come. `incident`: the number of that in which its ranks left.
    """

    fault_id: str
    kind: FaultKind
    node: str
    said: str
    since_s: float
    scores: dict[int, float] = {}
    until_s: float | None = None
    answer: SlowAnswer = SlowAnswer.REPORTED
    incident: int | None = None


class SlowTold(msgspec.Struct, frozen=True):
    """The records of a job, the earliest first; `left_out`: how many earlier ones are not kept any more."""

    records: tuple[SlowRecord, ...] = ()
    left_out: int = 0
