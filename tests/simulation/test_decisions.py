"""A recording of what the machine decided tells whether a change has changed it."""

from ..mutants.hunts import MUTANTS
from ..mutants.mutant import applied
from .decisions import digests

SEEDS = range(4)


def test_the_same_machine_decides_the_same() -> None:
    assert digests(SEEDS) == digests(SEEDS)


def test_a_machine_that_sends_something_else_is_seen() -> None:
    before = digests(SEEDS)
    mutant = next(each for each in MUTANTS if each.name == "resume one rank a step later")
    with applied(mutant):
        after = digests(SEEDS)
    assert [line.commands for line in after] != [line.commands for line in before]
