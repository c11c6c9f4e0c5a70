"""Says when a rank's step has taken too long, judged by the rank's own history and nothing else.

A collective's own timeout is a fixed half hour, because nobody dares to set it lower. The step clock in the
black box knows better: a rank whose steps take 0.3 s and that has now been in one for 2 s stands still. Pure:
the agent hands in what it read, and tells when it was itself held up, since then nobody else can be blamed.
"""

import msgspec

from ..protocol.types import Activity, RankProgress

WATCHED = frozenset({Activity.COMPUTING, Activity.COLLECTIVE, Activity.COMMITTING, Activity.UPDATING})


class Stall(msgspec.Struct, frozen=True):
    """A rank stands still. `age_s`: of its step, less what cannot be held against it."""

    progress: RankProgress
    age_s: float
    limit_s: float

    @property
    def detail(self) -> str:
        """Say in words what is seen, for the fault report."""
        held = ", and the kernel says that the process is stopped" if self.progress.suspended else ""
        return (
            f"step {self.progress.step} has taken {self.age_s:.2f} s, where {self.limit_s:.2f} s are allowed by a "
            f"median of {self.progress.median_step_s:.3f} s; {self.progress.activity} for "
            f"{self.progress.activity_age_s:.2f} s, {self.progress.collectives} collectives entered{held}"
        )


class _History:
    """What is remembered of one rank between two readings."""

    __slots__ = ("excused_s", "generation", "incarnation", "reports", "step", "steps_seen", "steps_total")

    def __init__(self, progress: RankProgress) -> None:
        self.incarnation = progress.incarnation
        self.steps_total = 0  # seen to advance in this incarnation
        self._begin_generation(progress)

    def _begin_generation(self, progress: RankProgress) -> None:
        self.generation = progress.generation
        self.step = progress.step
        self.steps_seen = 0  # seen to advance in this generation
        self._begin_step()

    def _begin_step(self) -> None:
        self.excused_s = 0.0
        self.reports = 0

    def follow(self, progress: RankProgress) -> None:
        """Take in where the rank is now."""
        if progress.generation != self.generation or progress.step < self.step:
            self._begin_generation(progress)
        elif progress.step > self.step:
            advanced = progress.step - self.step
            self.steps_seen += advanced
            self.steps_total += advanced
            self.step = progress.step
            self._begin_step()


class StallClock:
    """Watches the step clocks of all ranks of a node.

    A rank is reported when the step's age exceeds `factor` x its median step + `grace_s`, and again each time
    that the age has doubled: the controller may have had reason to wait. It is not judged before it has
    `after_steps` steps of history, nor in the first step after a recovery (somebody in the world may be new and
    slow once), nor while it starts, checkpoints, recovers, pauses or has finished; such time does not count
    against the step afterwards either.
    """

    def __init__(self, *, factor: float, grace_s: float, after_steps: int) -> None:
        self._factor = factor
        self._grace_s = grace_s
        self._after_steps = after_steps
        self._histories: dict[int, _History] = {}

    def held_up(self, lag_s: float) -> None:
        """The observer itself was not running for `lag_s`: the machine was, so nobody's step is to blame."""
        for history in self._histories.values():
            history.excused_s += lag_s

    def forget(self, rank: int) -> None:
        """The rank's process is gone."""
        self._histories.pop(rank, None)

    def observe(self, progress: RankProgress) -> Stall | None:
        """Take in a reading of a rank, and return its stall when it is to be reported."""
        history = self._histories.get(progress.rank)
        if history is None or history.incarnation != progress.incarnation:
            history = self._histories[progress.rank] = _History(progress)
        if progress.activity not in WATCHED:
            # A newcomer's step jumps to the world's in here; that is no step it has done.
            history.step = max(history.step, progress.step)
            history.follow(progress)
            history.excused_s = progress.step_age_s
            return None
        history.follow(progress)
        if history.steps_seen < 1 or progress.median_step_s <= 0:
            return None
        if history.steps_total < self._after_steps:
            return None
        age_s = progress.step_age_s - history.excused_s
        limit_s = self._factor * progress.median_step_s + self._grace_s
        if age_s <= limit_s * 2**history.reports:
            return None
        history.reports += 1
        return Stall(progress=progress, age_s=age_s, limit_s=limit_s)
