"""Hunts a mutant in two ways: by every order of events in small worlds, and by random jobs of the simulation."""

from typing import NamedTuple

from midstep.testing.invariants import InvariantBroken
from midstep.testing.simulation.world import simulate

from ..exploration.bounds import SMALL, Bound
from ..exploration.explore import Exploration, RuleBroken
from . import of_endings, of_incidents, of_messages, of_processes
from .mutant import Mutant, applied

MUTANTS = (*of_incidents.MUTANTS, *of_endings.MUTANTS, *of_messages.MUTANTS, *of_processes.MUTANTS)
MOST_SEEDS = 12_000


class Caught(NamedTuple):
    """What caught a mutant: a rule or an error, what was seen, and after how many seeds, or moves in which bound."""

    by: str
    what: str
    after: int
    bound: str = ""


def in_small_worlds(mutant: Mutant, bounds: tuple[Bound, ...] = SMALL) -> Caught | None:
    """Return what the exploration says of a mutant, going through the bounds in turn; None when it lives."""
    with applied(mutant):
        for bound in bounds:
            exploration = None
            try:
                exploration = Exploration(bound.name, bound.start())
                exploration.run()
            except RuleBroken as broken:
                rule = str(broken).splitlines()[0]
                return Caught(rule.partition(": ")[0], rule, _moves(exploration), bound.name)
            except NameError:
                raise  # the mutant itself is wrong
            except Exception as error:  # the explored world has come apart over it
                return Caught(type(error).__name__, str(error), _moves(exploration), bound.name)
    return None


def _moves(exploration: Exploration | None) -> int:
    return 0 if exploration is None else exploration.moves


def in_the_campaign(mutant: Mutant, most_seeds: int = MOST_SEEDS) -> Caught | None:
    """Return what random jobs say of a mutant; None when it lives."""
    with applied(mutant):
        for seed in range(most_seeds):
            try:
                simulate(seed, focus=mutant.focuses[seed % len(mutant.focuses)])
            except InvariantBroken as broken:
                return Caught(str(broken.invariant), broken.what, seed + 1)
            except NameError:
                raise  # the mutant itself is wrong
            except Exception as error:  # the simulated world has come apart over it
                return Caught(type(error).__name__, str(error), seed + 1)
    return None


__all__ = ["MUTANTS", "Caught", "in_small_worlds", "in_the_campaign"]
