"""The simulation sees what it is there to see: a machine with one thing broken is caught. All: `make mutants`."""

import pytest

from midstep.simulation.world import simulate

from .mutants import MUTANTS, Mutant, applied, hunt

QUICK = (
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


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.name in QUICK], ids=lambda mutant: mutant.name)
def test_a_broken_machine_is_caught(mutant: Mutant) -> None:
    assert hunt(mutant, SEEDS) is not None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_every_mutant_is_still_there(mutant: Mutant) -> None:
    """When this fails the machine has changed: write the mutant again, so that it breaks the same thing."""
    with applied(mutant):
        pass


def test_afterwards_the_machine_is_whole_again() -> None:
    with applied(MUTANTS[0]):
        pass
    simulate(11)
