"""The tables of the machine claim no less and no more than what happens."""

import gc

import pytest

from midstep.controller.recovery.machine import TABLE
from midstep.controller.recovery.state import Phase
from midstep.testing.transitions import LEADS_TO, diagram

from . import boundary
from .rare import seen_by_hand
from .recording import claimed, happens, recorded


@pytest.mark.timeout(600)
def test_what_the_tables_claim_is_what_happens() -> None:
    """In the jobs of the recording, each of which is played, and in some that are played by hand."""
    happened = seen_by_hand() | boundary.transitions()
    gc.freeze()  # as each job collects what it has left, and what other tests of this process have imported is large
    try:
        for each in recorded():
            happened |= happens(each)
    finally:
        gc.unfreeze()
    assert claimed() - happened == set(), "see tests/simulation/recording.py"
    assert happened - claimed() == set()


def test_an_event_that_leads_anywhere_has_a_row() -> None:
    """What nobody takes changes nothing."""
    assert LEADS_TO.keys() <= TABLE.keys()


def test_the_diagram_names_every_phase() -> None:
    """It is drawn from the transitions."""
    drawn = diagram()
    assert all(phase.value in drawn for phase in Phase)
