"""The result of a forecast: incidents by rung, where the time went, and which invariants did not hold."""

from collections import Counter

import msgspec

from ..controller.time_account import time_spent
from ..protocol.compat import StrEnum
from ..protocol.time_spent import TimeSpent
from ..protocol.types import Rung
from .fault_trace import Kind


class Loss(StrEnum):
    """Where time goes that trains nothing."""

    DETECTION = "detection"  # from a fault to its report
    RECOVERY = "recovery"  # from the report to the resumed step
    REPEATED = "repeated steps"  # committed, and lost again
    CHECKPOINT = "checkpoints"  # training stands still for them
    VOTES = "votes"  # what ranks hold is hashed
    WRONG = "wrong state"  # trained on from what was silently corrupted, and given up
    FEWER = "fewer ranks"  # the share of the work that the missing ranks of a smaller world would have done
    STOPPED = "stopped"  # until the job is started again


class Took(msgspec.Struct, frozen=True):
    """One incident: when it began, the rung that ended it, what it cost, how many rungs were tried, and why."""

    at_h: float
    rung: Rung
    cost_s: float
    attempts: int
    reason: str


class JobStop(msgspec.Struct, frozen=True):
    """The job stopped, and why."""

    at_h: float
    reason: str


class Outlook(msgspec.Struct, kw_only=True):
    """The whole forecast. `goodput`: the part of the time that went into steps that were not lost again.

    `smaller_hours`: how long it trained with fewer ranks than asked for. `spent` counts how often a rung was passed
    over because a budget was spent; `faults_missed` are those of ranks without a process. `time` is what the account of
    a real job would say (`midstep status`), without the time in which the job was stopped.
    """

    seed: int
    hours: float
    ranks: int
    goodput: float = 0.0
    incidents: int = 0
    dismissed: int = 0
    spent: int = 0
    steps_done: int = 0
    steps_lost: int = 0
    faults_missed: int = 0
    smaller_hours: float = 0.0
    faults: Counter[Kind] = msgspec.field(default_factory=Counter)
    time: TimeSpent = time_spent(0.0, 0.0, {}, trained=True)
    lost_s: dict[Loss, float] = msgspec.field(default_factory=lambda: dict.fromkeys(Loss, 0.0))
    timeline: list[Took] = msgspec.field(default_factory=list)
    stops: list[JobStop] = msgspec.field(default_factory=list)
    violations: list[str] = msgspec.field(default_factory=list)

    def taken(self, took: Took) -> None:
        """Add an incident."""
        self.timeline.append(took)

    def counted(self, spent: TimeSpent | None) -> None:
        """Add where the time of one job went, up to its end."""
        if spent is not None:
            sums = Counter(self.time.seconds)
            sums.update(spent.seconds)
            self.time = time_spent(0.0, self.time.wall_s + spent.wall_s, sums, trained=True)

    def by_rung(self) -> dict[Rung, list[Took]]:
        """Return the incidents of each rung, cheapest first."""
        return {rung: rows for rung in Rung if (rows := [took for took in self.timeline if took.rung is rung])}

    def as_json(self) -> dict[str, object]:
        """Return it as plain values: the form of `--json`."""
        rungs = {
            rung.value: {
                "incidents": len(rows),
                "lost_s": sum(row.cost_s for row in rows),
                "worst_s": max(row.cost_s for row in rows),
            }
            for rung, rows in self.by_rung().items()
        }
        return {
            "seed": self.seed, "hours": self.hours, "ranks": self.ranks, "goodput": self.goodput,
            "incidents": self.incidents, "dismissed": self.dismissed, "violations": self.violations, "rungs": rungs,
            "faults": {kind.value: count for kind, count in self.faults.items()},
            "faults_missed": self.faults_missed, "budgets_spent": self.spent,
            "steps_done": self.steps_done, "steps_lost": self.steps_lost, "smaller_hours": self.smaller_hours,
            "lost_s": {loss.value: self.lost_s[loss] for loss in Loss},
            "time": msgspec.to_builtins(self.time),
            "stops": msgspec.to_builtins(self.stops), "timeline": msgspec.to_builtins(self.timeline),
        }  # fmt: skip
