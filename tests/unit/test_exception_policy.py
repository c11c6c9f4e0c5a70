"""Whether a memory error that is noticed late has spread: by the times at which updates began."""

import pytest

from midstep.processor.exceptions import HISTORY_UPDATES, spread_since

UPDATES = [(7, 700), (8, 800), (9, 900)]


@pytest.mark.parametrize(
    ("time_us", "first_spoilt", "why"),
    [
        (950, None, "younger than the last update: only this rank's memory is wrong"),
        (850, 9, "in the forward or backward pass of step 9: its gradients went into the update"),
        (900, 9, "at the moment in which the update began: it may have"),
        (720, 8, "two updates ago"),
        (None, 9, "nobody knows when: taken for older than the last update"),
        (100, 7, "older than all that this process did"),
    ],
    ids=str,
)
def test_the_first_spoilt_step_is_the_first_whose_update_began_after_the_error(
    time_us: int | None, first_spoilt: int | None, why: str
) -> None:
    assert spread_since(UPDATES, time_us) == first_spoilt, why


def test_before_the_first_update_nothing_can_have_spread() -> None:
    assert spread_since([], 5) is None
    assert spread_since([], None) is None


def test_an_error_older_than_what_is_remembered_spoils_everything() -> None:
    updates = [(1000 + index, 10 * index) for index in range(1, HISTORY_UPDATES + 1)]
    assert spread_since(updates, 1) == 0
