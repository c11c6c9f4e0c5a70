"""Where the wall time of a job went: the categories, and the sum of each over the whole job or over a window."""

import msgspec

from .compat import StrEnum


class TimeCategory(StrEnum):
    """One use of a second of a job. Each second has one; together they are the wall time."""

    TRAINING = "training"  # productive: steps that no earlier process of the job had committed
    REPEATED = "repeated_steps"  # trained as well, up to the step that was reached before an incident
    START = "start"  # processes are on their way to the job's first step
    WAITING = "waiting_for_nodes"
    DETECT = "detect"  # from a fault to the decision about it
    RESTART = "restart"  # all processes start again
    QUIESCE = "quiesce"  # survivors stop, newcomers come
    REJOIN = "rejoin"  # communicators are built, state is repaired
    FIRST_STEP = "first_step"  # from there until every rank has committed a step
    CHECKPOINT = "checkpoint"  # an emergency checkpoint, before processes end
    PLANNED = "planned_change"  # a node is drained, or the world grows
    UNGUARDED = "unguarded"  # no controller led the job
    FINISH = "finish"  # training is done, processes wind up


RECOVERY = frozenset(
    {TimeCategory.DETECT, TimeCategory.RESTART, TimeCategory.QUIESCE, TimeCategory.REJOIN, TimeCategory.FIRST_STEP}
)


class TimeSpent(msgspec.Struct, frozen=True):
    """The seconds of each category between two moments of the controller's clock; categories without any are left out.

    `goodput`: the part that was productive; None if no rank is known to have trained, as in a script without midstep.
    """

    began_s: float
    ended_s: float
    goodput: float | None
    seconds: dict[TimeCategory, float]

    @property
    def wall_s(self) -> float:
        """The whole time."""
        return self.ended_s - self.began_s

    @property
    def recovery_s(self) -> float:
        """The time of all parts of recoveries."""
        return sum(self.seconds.get(each, 0.0) for each in RECOVERY)
