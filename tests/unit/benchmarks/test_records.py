"""The figures that follow from the records of a measured job."""

import json
from pathlib import Path

import pytest

from midstep.benchmarks.records import VOTED, WARM_UP_STEPS, cost_of_votes

STEPS, EVERY = 45, 10
RANKS = 2


def write(directory: Path, voted: set[int], longer_from: int = STEPS) -> None:
    """Write the records of a job whose steps take a second, at last two, and a tenth more with a vote."""
    for rank in range(RANKS):
        lines, at_s = [{"mark": "group", "at_s": 0.0}], 0.0
        for step in range(STEPS):
            at_s += (2.0 if step >= longer_from else 1.0) + 0.1 * (step in voted)
            lines.append({"step": step, "at_s": at_s})
            lines += [{"name": VOTED, "value": step, "at_s": at_s}] * (step in voted)
        (directory / f"rank-{rank}.1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_votes_cost_what_steps_with_one_take_longer_than_the_others(tmp_path: Path) -> None:
    """In proportion to how many there are, behind the warm-up."""
    write(tmp_path, set(range(0, STEPS, EVERY)))
    counted = STEPS - 1 - WARM_UP_STEPS
    assert cost_of_votes(tmp_path, RANKS) == pytest.approx(1 + 0.1 * 4 / counted)


def test_that_all_steps_get_longer_in_the_course_of_a_run_is_no_cost_of_votes(tmp_path: Path) -> None:
    """Here more of the steps with a vote are among the longer ones."""
    voted, longer_from = {*range(0, STEPS, EVERY), STEPS - 8}, 25
    write(tmp_path, voted, longer_from)
    plain_s = sum(2.0 if step >= longer_from else 1.0 for step in range(1 + WARM_UP_STEPS, STEPS))
    assert cost_of_votes(tmp_path, RANKS) == pytest.approx(1 + 0.1 * 5 / plain_s)


@pytest.mark.parametrize("voted", [set[int](), set(range(STEPS))])
def test_without_both_kinds_of_steps_the_cost_of_votes_is_not_known(tmp_path: Path, voted: set[int]) -> None:
    write(tmp_path, voted)
    assert cost_of_votes(tmp_path, RANKS) is None
