"""Hold what the script reports of a step against the policy's rules: pure. The time is an argument.

Each rank judges its own values, before the commit barrier; the barrier tells all of them the number of the rule that is
worst broken on any rank, so that all do the same, and none has applied the update by then.

What a jump is measured against are the values of the steps that were committed. They are a process's own: a new one
begins to collect them again.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..protocol.errors import ConfigurationError
from ..protocol.rules import JobRule, Jump, RuleAction, Slow, acting
from .framework import LeavesOut, Reporting

if TYPE_CHECKING:
    from .framework import Framework

LEAST_VALUES = 10  # before that nothing is called a jump
LEAST_DEVIATION = 0.001  # of the mean: values that are all alike have none, and the next one is no jump for that


class Breach(msgspec.Struct, frozen=True):
    """A rule that is broken. `number`: for the commit barrier; 0: the rule only reports."""

    rule: JobRule
    number: int
    detail: str


class Judge:
    """The rules of a job, and the values of one rank's last steps."""

    def __init__(self, rules: Sequence[JobRule]) -> None:
        self._rules = tuple(rule for rule in rules if rule.value is not None)
        self.acting = acting(self._rules)
        self._numbers = {rule.name: number for number, rule in enumerate(self.acting, start=1)}
        self._numbers_asked = {rule.value for rule in self._rules if rule.not_finite}
        self._past = {rule.name: _Past(rule.jump) for rule in self._rules if rule.jump is not None}
        self._slow_since_s: dict[str, float] = {}
        self._standing: set[str] = set()  # rules that report, and were broken in the step before, too
        self._last: tuple[int, float] | None = None  # the step that was judged last, and when

    def judge(self, step: int, values: Mapping[str, float], now: float) -> tuple[Breach, ...]:
        """Return the rules that are broken by the values of a step which ends at `now`; the worst one is the last.

        A rule that only reports is returned once for as long as it stays broken. A value that was not reported breaks
        nothing.
        """
        step_s = None if self._last is None or self._last[0] + 1 != step else now - self._last[1]
        self._last = (step, now)
        found = [breach for rule in self._rules if (breach := self._judged(rule, step, values, step_s, now))]
        news = [each for each in found if each.number or each.rule.name not in self._standing]
        self._standing = {each.rule.name for each in found if not each.number}
        return tuple(sorted(news, key=lambda each: each.number))

    def _judged(
        self, rule: JobRule, step: int, values: Mapping[str, float], step_s: float | None, now: float
    ) -> Breach | None:
        value = None if rule.value is None else values.get(rule.value)
        if value is None:
            return None
        why = self._why(rule, step, value, step_s, now)
        return None if why is None else Breach(rule, self._numbers.get(rule.name, 0), f"{rule.value} {why}")

    def _why(self, rule: JobRule, step: int, value: float, step_s: float | None, now: float) -> str | None:
        if rule.jump is not None:
            if not math.isfinite(value) and rule.value in self._numbers_asked:
                return None  # that is for the rule on what is no number, which may ask for less
            return self._past[rule.name].jumps(step, value, rule.jump)
        if rule.slow is not None:
            return None if step_s is None else self._is_slow(rule.name, rule.slow, value / max(step_s, 1e-9), now)
        if rule.not_finite:
            return None if math.isfinite(value) else f"is {value}"
        if rule.above is not None:
            return f"is {value:g}, above {rule.above:g}" if not value <= rule.above else None
        return f"is {value:g}, below {rule.below:g}" if rule.below is not None and not value >= rule.below else None

    def _is_slow(self, name: str, slow: Slow, rate: float, now: float) -> str | None:
        if rate >= slow.per_second:
            self._slow_since_s.pop(name, None)
            return None
        since_s = self._slow_since_s.setdefault(name, now)
        if now - since_s < slow.for_s:
            return None
        return f"comes to {rate:g} a second, and to less than {slow.per_second:g} for {now - since_s:.0f} s"


class _Past:
    """The values of the last steps, those of a step that is repeated left out."""

    def __init__(self, jump: Jump) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=jump.over_steps)

    def jumps(self, step: int, value: float, jump: Jump) -> str | None:
        """Say how far a value is off, if it is; otherwise keep it."""
        while self._values and self._values[-1][0] >= step:
            self._values.pop()
        if not math.isfinite(value):
            return f"is {value}"
        past = [each for _, each in self._values]
        if len(past) >= min(LEAST_VALUES, jump.over_steps):
            mean = statistics.fmean(past)
            deviation = max(statistics.pstdev(past, mean), LEAST_DEVIATION * abs(mean), math.ulp(1.0))
            off = (value - mean) / deviation
            if off > jump.deviations:
                return f"is {value:g}, {off:.1f} deviations above the mean {mean:g} of {len(past)} steps"
        self._values.append((step, value))
        return None


def judge_of(rules: Sequence[JobRule], framework: "Framework") -> Judge | None:
    """Return what holds values against rules; None without such rules.

    Raises ConfigurationError for rules that would never be broken there, or whose action cannot be done.
    """
    on_values = [rule for rule in rules if rule.value is not None]
    if not on_values:
        return None
    kind = type(framework).__name__
    if not (isinstance(framework, Reporting) and framework.reports_values):
        raise ConfigurationError(
            f"rules in the policy: {_names(on_values)} would never be broken: they are on values of step.report(...), "
            f"and a script with a {kind} has no step. Choose rules on lines of the log, or train with "
            "midstep.TrainState, Megatron or torchtitan (docs/rules.md)"
        )
    leaving_out = [rule for rule in on_values if rule.then in {RuleAction.SKIP_BATCH, RuleAction.ROLL_BACK}]
    if leaving_out and not isinstance(framework, LeavesOut):
        raise ConfigurationError(
            f"rules in the policy: {_names(leaving_out)} would leave data out, which a {kind} cannot. Choose "
            f"{RuleAction.REPORT}, {RuleAction.REPEAT_STEP} or {RuleAction.STOP}, or train with midstep.TrainState"
        )
    return Judge(on_values)


def _names(rules: Sequence[JobRule]) -> str:
    return ", ".join(rule.name for rule in rules)


def worst(breaches: Iterable[Breach]) -> int:
    """Return the number that a rank takes into the commit barrier; 0: no rule asks for more than a report."""
    return max((each.number for each in breaches if each.rule.then is not RuleAction.REPORT), default=0)
