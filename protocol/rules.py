"""Rules of the job's owner: what is said of reported values and of lines in logs, and what follows when one is broken.

A rule is a part of the policy. Each rank holds its own values against the rules at the end of each step
(`processor/rules.py`), each agent the lines of its ranks (`agent/log_rules.py`), and the controller does what a broken
one asks for (`controller/recovery/rules.py`).
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .bounds import Count, Name, Seconds, Text
from .compat import StrEnum
from .line_patterns import mistakes_in

MOST_RULES = 64
MOST_LINE_RULES = 16
DO_NOT_REQUEUE = 79  # the exit code of a job that a rule or a refusal has stopped: the same again would end so again
RuleName = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,63}$")]


class RuleAction(StrEnum):
    """The consequence of a broken rule. Of rules that are broken in one step, the last of these is done."""

    REPORT = "report"  # it is written down, and training goes on
    REPEAT_STEP = "repeat_step"
    SKIP_BATCH = "skip_batch"  # the step is repeated with the batches that follow, on all ranks
    ROLL_BACK = "roll_back"  # to a checkpoint or host copy of at least so many steps before; the data is left out
    STOP = "stop"  # the job ends, and must not be started again as it is


OF_LINES = (RuleAction.REPORT, RuleAction.REPEAT_STEP, RuleAction.STOP)  # what may follow a line


class Jump(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """More than `deviations` standard deviations above the mean of the last `over_steps` values, or no finite number.

    Nothing is judged before 10 values, or `over_steps` if these are fewer, are known. A `not_finite` rule goes first.
    """

    deviations: Annotated[float, Meta(gt=0, le=1e6)]
    over_steps: Annotated[int, Meta(ge=4, le=10_000)] = 50


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Less than `per_second` of the value, for `for_s` seconds on end."""

    per_second: Annotated[float, Meta(gt=0, le=1e18)]
    for_s: Annotated[float, Meta(gt=0, le=31_536_000)]


class JobRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule on one value that the script reports with `step.report(NAME=...)`, or on lines that a rank prints.

    With `value` one of the conditions is set. `line`: a regular expression that may not fit. `steps`: of `roll_back`.
    `at_most`: how often in a row `then` is done; where it does not help, the job stops.
    """

    name: RuleName
    then: RuleAction
    value: RuleName | None = None
    line: str | None = None
    not_finite: bool = False
    above: float | None = None
    below: float | None = None
    jump: Jump | None = None
    slow: Slow | None = None
    steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    at_most: Annotated[int, Meta(ge=1, le=1000)] = 3

    def mistakes(self) -> list[str]:
        """Return what is wrong between its keys, empty when nothing is."""
        if (self.value is None) == (self.line is None):
            return ["one of value and line is needed, and only one"]
        return self._mistakes_of_value() if self.line is None else self._mistakes_of_line(self.line)

    @property
    def subject(self) -> str:
        """Say what the rule is about."""
        return "lines of the log" if self.value is None else self.value

    def _mistakes_of_line(self, line: str) -> list[str]:
        found = [f"line: {mistake}" for mistake in mistakes_in(line)]
        if self.not_finite or self.above is not None or self.below is not None or self.jump or self.slow:
            found.append("not_finite, above, below, jump and slow are conditions on a value; a line has none")
        if self.steps or self.then not in OF_LINES:
            allowed = ", ".join(OF_LINES)
            found.append(f"then: a line does not say which batch it is about; allowed: {allowed}, without steps")
        return found

    def _mistakes_of_value(self) -> list[str]:
        given = [self.not_finite, self.above is not None, self.below is not None, bool(self.jump), bool(self.slow)]
        found = [] if sum(given) == 1 else ["one of not_finite, above, below, jump and slow is needed, and only one"]
        if (self.then is RuleAction.ROLL_BACK) != (self.steps > 0):
            found.append("steps: at least 1 with then: roll_back, and only there")
        if self.slow and self.then not in {RuleAction.REPORT, RuleAction.STOP}:
            found.append(f"then: {self.then} does not make anything faster; allowed with slow: report, stop")
        return found


class OutOfMemoryAction(StrEnum):
    """The consequence of a lack of memory in the train function."""

    REPLACE = "replace"  # the process is replaced, as after any exception
    SKIP_BATCH = "skip_batch"  # its memory is freed, and all ranks go on with the next batch


OUT_OF_MEMORY = JobRule("out_of_memory", RuleAction.SKIP_BATCH, value="memory", not_finite=True)


def acting(rules: tuple[JobRule, ...]) -> tuple[JobRule, ...]:
    """Return the rules that do more than report, the mildest first: the number of one is 1 + its place here."""
    order = list(RuleAction)
    return tuple(sorted((each for each in rules if each.then is not order[0]), key=lambda each: order.index(each.then)))


class LeaveOut(msgspec.Struct, frozen=True):
    """The batches that a repair leaves out: all ranks take their data from where they stood at `data_step` updates.

    0: the step has not ended, and each rank continues behind as many batches as it took for the one before.

    `times`: how often that was done at this step; a rank-local state that says so has been through it.
    """

    times: Count
    data_step: Count


class StandingRule(msgspec.Struct, frozen=True):
    """The wish of broken rules for the next repair. `step`: the updates that were committed when one was broken.

    How often in a row at this step a batch was left out, the step was repeated, and all went back to an earlier one.
    """

    step: Count
    generation: Count
    skips: Count = 0
    repeats: Count = 0
    back: Count = 0
    unfinished: bool = False  # the step did not come to its end on all ranks

    @property
    def times(self) -> int:
        """How often data was left out in a row; 0: none is."""
        return self.back or self.skips


class RuleTally(msgspec.Struct, frozen=True):
    """How often a rule was broken, and the last time: at which step, when, and the value or line.

    `row`: so many steps in a row, or one step so often.
    """

    times: Count
    step: Count
    at_s: Seconds
    detail: Text
    then: RuleAction
    row: Count = 1


class RuleBook(msgspec.Struct, frozen=True):
    """All that the rules have led to so far.

    `steps_left_out`: of so many steps each rank has left its batches out. `rolled_back`: the step from which was gone
    back last, and how often in a row.
    """

    tallies: dict[Name, RuleTally] = {}
    steps_left_out: Count = 0
    standing: StandingRule | None = None
    rolled_back: tuple[Count, Count] = (0, 0)

    def committed(self, target: int) -> "RuleBook":
        """Count what the repair to `target` has left out: its step is committed everywhere."""
        stands = self.standing
        if stands is None:
            return self
        steps = stands.skips + (stands.step + 1 - target if stands.back else 0)
        return msgspec.structs.replace(self, steps_left_out=self.steps_left_out + steps, standing=None)
