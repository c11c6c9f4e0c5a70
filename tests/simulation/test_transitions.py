"""The transitions between phases are exactly those that happen."""

import gc

import pytest

from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.table import TABLE
from midstep.controller.recovery.transitions import LEADS_TO, diagram
from midstep.simulation.campaign import Reached

from ..unit.test_machine import job
from . import boundary
from .boundary import Written
from .transitions import claimed, reached, recorded


def begun_by_one_and_left_by_the_other() -> set[Reached]:
    """A process ends well in front of its train function, and another one waits there. No simulated script does so."""
    starting = Written(job(nodes=1, spares=0))
    starting.feed(starting.node("node0"))
    starting.feed(starting.exited(0, 0), starting.joined(1, fresh=True, own=0))
    return starting.seen


@pytest.mark.timeout(600)
def test_each_transition_that_is_claimed_happens() -> None:
    """In one of the jobs of the recording, each of which is played, or in one that is played by hand."""
    happens = begun_by_one_and_left_by_the_other() | boundary.transitions()
    gc.freeze()  # as each job collects what it has left, and what other tests of this process have imported is large
    try:
        for each in recorded():
            happens |= reached(each)
    finally:
        gc.unfreeze()
    assert claimed() - happens == set(), "see tests/simulation/transitions.py"
    assert {each for each in happens if each[0] is not each[2]} - claimed() == set()


def test_an_event_that_leads_anywhere_has_a_row() -> None:
    """What nobody takes changes nothing."""
    assert LEADS_TO.keys() <= TABLE.keys()


def test_the_diagram_names_every_phase() -> None:
    """It is drawn from the transitions."""
    drawn = diagram()
    assert all(phase.value in drawn for phase in Phase)
