"""Exploration and simulation see what they are there to see: each mutant is caught. All: `make test SUITE=mutants`."""

from pathlib import Path

import pytest

from midstep.testing.simulation.world import simulate

from ..exploration.bounds import SMALL
from . import table
from .hunts import MUTANTS, in_small_worlds, in_the_campaign
from .mutant import Mutant, applied
from .table import Row, rendered, told, written

BY_CAMPAIGN = (
    "believe any agent about any rank",
    "skip barrier two",
    "resume one rank a step later",
    "replace everybody",
    "wait without a deadline",
    "decide without a reason",
    "take messages twice",
    "go back one step more than needed",
    "forget a budget",
    "update without the commit barrier",
    "never be ready",
    "report a step too few",
)
SEEDS = 150
MOST_MOVES = 3_000  # those that take more are left to `make test SUITE=mutants`
TOLD = told()
BY_EXPLORATION = [
    mutant
    for mutant in MUTANTS
    if TOLD.get(mutant.name, ("", "", 0))[0] in {"both", "exploration"} and TOLD[mutant.name][2] <= MOST_MOVES
]


@pytest.mark.parametrize(
    "mutant", [each for each in MUTANTS if each.name in BY_CAMPAIGN], ids=lambda mutant: mutant.name
)
def test_the_campaign_catches_a_broken_machine(mutant: Mutant) -> None:
    assert in_the_campaign(mutant, SEEDS) is not None


@pytest.mark.parametrize("mutant", BY_EXPLORATION, ids=lambda mutant: mutant.name)
def test_the_exploration_catches_a_broken_machine(mutant: Mutant) -> None:
    """In the world that the docs name."""
    (bound,) = [each for each in SMALL if each.name == TOLD[mutant.name][1]]
    assert in_small_worlds(mutant, (bound,)) is not None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_every_mutant_is_still_there(mutant: Mutant) -> None:
    """When this fails the product has changed: write the mutant again, so that it breaks the same thing."""
    with applied(mutant):
        pass


def test_the_docs_say_of_each_mutant_what_catches_it() -> None:
    """After a change of the mutants or of the explored worlds `python -m tests.mutants --write` has been run."""
    assert list(TOLD) == [mutant.name for mutant in MUTANTS]
    assert {by for by, _, _ in TOLD.values()} <= {"both", "exploration", "campaign"}
    by = [by for by, _, _ in TOLD.values()]
    explored, played = len(by) - by.count("campaign"), len(by) - by.count("exploration")
    sums = (
        f"{explored} of {len(by)} are caught by the exploration, {played} by the campaign, {by.count('both')} by both."
    )
    assert written().strip().endswith(sums)


def test_a_mutant_that_lives_is_told_as_one() -> None:
    """The table would not pass over it."""
    rows = {mutant.name: Row(None, None) for mutant in MUTANTS}
    assert rendered(rows).count("| nothing |") == len(MUTANTS)


def test_the_row_of_a_mutant_that_was_not_hunted_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "simulator.md"
    page.write_text(table.PAGE.read_text())
    monkeypatch.setattr(table, "PAGE", page)
    before = written()
    table.write({MUTANTS[0].name: Row(None, None)})
    assert written().splitlines()[3:-1] == before.splitlines()[3:-1]
    assert "| nothing |" in written()


def test_afterwards_the_machine_is_whole_again() -> None:
    with applied(MUTANTS[0]):
        pass
    simulate(11)
