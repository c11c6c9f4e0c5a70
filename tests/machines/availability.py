"""Whether this computer lets machines be made, and what becomes of tests that need them where it does not."""

import os

import pytest

REQUIRED = "MIDSTEP_REQUIRE_MACHINES"  # set where the tests have to run: a skipped one is a failed one then
SKIPPED = "no machines of namespaces: "


def require_machines(why_not: str) -> None:
    """Skip the test with the reason, if there is one; fail it where the environment says that it has to run."""
    if not why_not:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(f"{SKIPPED}{why_not}", pytrace=False)
    pytest.skip(f"{SKIPPED}{why_not}")


def summary(reasons: list[str]) -> str:
    """Return what is said at the end of a run in which tests were skipped for these reasons, if for ours."""
    ours = [reason.split(SKIPPED, 1)[1] for reason in reasons if SKIPPED in reason]
    return f"{len(ours)} tests of several machines did not run here: {ours[0]}" if ours else ""
