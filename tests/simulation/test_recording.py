"""What the tables of the machine claim is what happens: no less, and no more."""

import gc

import pytest

from midstep.controller.handlers.table import TABLE
from midstep.controller.handlers.transitions import LEADS_TO, diagram
from midstep.controller.state.job_state import Phase
from midstep.policies.schema import Policy, RungPolicy
from midstep.protocol.types import FaultKind, Rung

from ..fakes.cluster import job
from . import boundary
from .boundary import Written
from .recording import Happened, claimed, happens, recorded


def left_by_one_and_awaited_by_the_other() -> set[Happened]:
    """A process ends well in front of its train function, and another one waits there. No simulated script does so."""
    starting = Written(job(nodes=1, spares=0))
    starting.feed(starting.node("node0"))
    starting.feed(starting.exited(0, 0), starting.joined(1, fresh=True, own=0))
    return starting.seen


def all_restarted_after_a_suspicion() -> set[Happened]:
    """A policy that only knows new nodes, and saves nothing first; few simulated jobs have one."""
    policy = Policy(ladder=(RungPolicy(Rung.RESCHEDULE_JOB), RungPolicy(Rung.STOP)), save_before_reschedule=False)
    seen: set[Happened] = set()
    for exits in (False, True):
        suspecting = Written(job(spares=0), policy, creates=True)
        suspecting.start()
        suspecting.feed(suspecting.fault(0, FaultKind.COMMUNICATION))
        if exits:
            suspecting.feed(suspecting.exited(1))
        else:
            suspecting.overdue()
        suspecting.expect(Phase.WAITING)
        seen |= suspecting.seen
    return seen


@pytest.mark.timeout(600)
def test_what_the_tables_claim_is_what_happens() -> None:
    """In the jobs of the recording, each of which is played, and in some that are played by hand."""
    happened = left_by_one_and_awaited_by_the_other() | all_restarted_after_a_suspicion() | boundary.transitions()
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
