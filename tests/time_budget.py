"""A run that has only so much time: tests that have not begun when it is over are skipped, and named at the end.

CI is given a fixed time, on machines of which some are three times as slow as others. What a slow one has no time for
has to be said, and must not end the run (docs/decisions/0148-ci-has-a-time-budget.md).
"""

import math
import os
import time

import pytest

VARIABLE = "MIDSTEP_TESTS_UNTIL"  # seconds since 1970; not set: there is time for all
SKIPPED = "no time was left: "


def left_s() -> float:
    """Return how much time the run has left; endless where it has no limit, below zero when it is over."""
    until_s = os.environ.get(VARIABLE)
    return float(until_s) - time.time() if until_s else math.inf


def skip_if_over() -> None:
    """Skip the test that is about to begin, if the run's time is over."""
    if left_s() < 0:
        pytest.skip(f"{SKIPPED}this run had until {VARIABLE}={os.environ[VARIABLE]}")


def summary(skipped: list[tuple[str, str]]) -> str:
    """Return what is said at the end of a run with these skipped tests, each with its reason; empty: all had time."""
    ours = [name for name, reason in skipped if SKIPPED in reason]
    return f"NO TIME was left for {len(ours)} tests:\n" + "\n".join(ours) if ours else ""
