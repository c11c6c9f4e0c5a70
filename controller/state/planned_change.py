"""A change of the world that waits for a step boundary: data, no decisions.

While it is prepared, training continues and no incident is open. The incident begins when the first rank has stopped.
"""

import math
from dataclasses import dataclass, field

from ...policies.facts import Spent
from ...protocol.enums import StrEnum
from ...protocol.types import Decision, FaultReport


class Stage(StrEnum):
    """How far a planned change has got."""

    PREPARING = "preparing"  # newcomers are started, beside those whose ranks they will hold
    READING = "reading"  # the step clocks are read, to choose the boundary
    STOPPING = "stopping"  # the ranks have been told where to stop
    HANDING_OVER = "handing over"  # all have stopped, and write what only those that leave hold


# The way back from here is an incident of its own.
AT_THE_BOUNDARY = frozenset({Stage.STOPPING, Stage.HANDING_OVER})


@dataclass
class Newcomer:
    """A process that gets ready to take a rank over."""

    rank: int
    incarnation: int
    pid: int = 0


@dataclass
class Plan:
    """The ranks of `node` move to `spare`; or, without them, the world grows to `nodes` nodes.

    `awaiting`: newcomers that have not reached their train function.
    """

    report: FaultReport
    decision: Decision
    charges: tuple[Spent, ...]
    node: str = ""
    spare: str = ""
    nodes: int = 0
    newcomers: dict[int, Newcomer] = field(default_factory=dict)
    awaiting: set[int] = field(default_factory=set)
    stage: Stage = Stage.PREPARING
    readings: int = 0  # how often the step clocks were asked for
    looking: bool = False  # the boundary is overdue, and the clocks are read to see why
    after_step: int | None = None  # where all stop; None: not known, or given up for stopping at once


@dataclass
class Unwell:
    """A node that is not well: who said so, what stands in the way of its drain, and how often one has failed."""

    report: FaultReport
    note: str = ""
    failures: int = 0


@dataclass
class Plans:
    """What is planned, what is to be planned, and when to look again."""

    current: Plan | None = None
    unwell: dict[str, Unwell] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)  # nodes that the platform will take away
    due_s: float | None = None
    scaled_s: float = -math.inf  # when the world last got another size
    grow_due_s: float | None = None  # when it is time to look whether the world can grow
    remark: str = ""  # why a change was not made after all, for the record of the incident

    def what_is_wrong(self, node: str) -> str:
        """Say in words why a node is to be left."""
        return "going" if node in self.going else "not well"
