"""The record of incidents: one is open at most, and everything between report and end is in it."""

import pytest

from midstep.controller.recovery.incident import MAX_INCIDENTS, MAX_REPORTS_PER_INCIDENT, History
from midstep.protocol.incidents import Outcome
from midstep.protocol.types import Decision, FaultKind, FaultReport, RestoreSource, Rung


def fault(at_s: float = 10.0, rank: int = 1) -> FaultReport:
    """A rank that has ended."""
    return FaultReport(FaultKind.EXIT, at_s, "node/a", "ended", rank)


@pytest.fixture
def history() -> History:
    """A history with one open incident, seen at 10.5, that began at 10."""
    made = History()
    assert made.report(fault(), {0: 100, 1: 101}, 10.5, committed=6)
    return made


def test_the_first_report_opens_an_incident_and_the_next_belong_to_it(history: History) -> None:
    """Pids and step are those before the first."""
    assert not history.report(fault(rank=0), {}, 10.6, committed=9)
    (incident,) = history.incidents
    assert [report.rank for report in incident.reports] == [1, 0]
    assert (incident.number, incident.pids_before, incident.committed_before) == (1, {0: 100, 1: 101}, 6)


def test_an_incident_begins_with_its_earliest_fault(history: History) -> None:
    """Reports arrive in any order, and never from the future."""
    history.report(fault(at_s=9.0), {}, 11.0, committed=6)
    assert history.incidents[0].began_s == 9.0
    later = History()
    later.report(fault(at_s=99.0), {}, 11.0, committed=0)
    assert later.incidents[0].began_s == 11.0


def test_a_phase_ends_where_the_next_begins(history: History) -> None:
    """The last one ends with the incident."""
    history.entered("quiescing", 2, 10.5)
    history.entered("rejoining", 2, 11.0)
    history.resumed(12.0, {0: 100, 1: 201}, 0.5)
    phases = [(phase.name, phase.began_s, phase.ended_s) for phase in history.incidents[0].phases]
    assert phases == [("quiescing", 10.5, 11.0), ("rejoining", 11.0, 12.0)]


def test_a_resumed_incident_is_measured(history: History) -> None:
    """Recovery from the fault, excess beyond a step, steps lost, pids kept."""
    history.opened(2, [1])
    history.planned(RestoreSource.REPLICA, ("why",), target=5, committed=7, is_current=True)
    history.moved(1000, over_devices=1000)
    history.moved(0)
    history.moved(24)
    history.resumed(12.0, {0: 100, 1: 201}, 0.5)
    (incident,) = history.incidents
    assert incident.outcome is Outcome.RESUMED
    assert (incident.recovery_s, incident.excess_s, incident.steps_lost) == (2.0, 1.5, 2)
    assert incident.bytes_moved == 1024
    assert incident.bytes_over_devices == 1000
    assert incident.healthy_pids_kept
    assert history.open is None


def test_a_healthy_pid_that_changed_is_seen(history: History) -> None:
    """Rank 0 was not to be replaced."""
    history.opened(2, [1])
    history.resumed(12.0, {0: 200, 1: 201}, 0.5)
    assert not history.incidents[0].healthy_pids_kept


def test_generations_and_replaced_ranks_add_up(history: History) -> None:
    """A second attempt does not hide the first."""
    history.opened(2, [1])
    history.opened(3, [0, 1])
    assert (history.incidents[0].generations, history.incidents[0].replaced) == ((2, 3), (0, 1))


def test_the_last_decision_names_the_rung(history: History) -> None:
    """All are kept, with their reasons."""
    assert history.incidents[0].rung is None
    history.decided(Decision(Rung.RECOVER_IN_PLACE, "first"))
    history.decided(Decision(Rung.RECOVER, "then"))
    assert history.incidents[0].rung is Rung.RECOVER
    assert [decision.reason for decision in history.incidents[0].decisions] == ["first", "then"]


def test_the_timings_of_ranks_are_kept(history: History) -> None:
    """One row for each phase."""
    history.rank_phases(2, 1, {"rebuild": 0.1, "repair": 0.2})
    assert [(row.rank, row.name, row.duration_s) for row in history.incidents[0].rank_phases] == [
        (1, "rebuild", 0.1),
        (1, "repair", 0.2),
    ]


@pytest.mark.parametrize("end", ["resumed", "dismissed", "stopped"])
def test_a_closed_incident_does_not_change_any_more(history: History, end: str) -> None:
    """What comes later belongs to the next one."""
    if end == "resumed":
        history.resumed(12.0, {}, 0.0)
    elif end == "dismissed":
        history.dismissed(12.0, "nothing was wrong")
    else:
        history.stopped(12.0, {}, "no rung is left")
    closed = history.incidents[0]
    history.decided(Decision(Rung.STOP, "late"))
    history.entered("running", 2, 13.0)
    history.moved(5)
    assert history.incidents == [closed]
    assert closed.ended_reason
    assert history.report(fault(20.0), {}, 20.0, 8)
    assert [incident.number for incident in history.incidents] == [1, 2]


def test_without_an_incident_nothing_is_written() -> None:
    """A job that starts has phases and no record."""
    history = History()
    history.entered("starting", 1, 1.0)
    history.opened(1, [0])
    history.decided(Decision(Rung.STOP, "none"))
    assert history.incidents == []


def test_the_record_is_bounded() -> None:
    """Old incidents and a flood of reports are dropped; numbers go on."""
    history = History()
    for number in range(MAX_INCIDENTS + 3):
        history.report(fault(float(number)), {}, float(number), 0)
        history.dismissed(float(number), "nothing")
    assert len(history.incidents) == MAX_INCIDENTS
    assert history.incidents[-1].number == MAX_INCIDENTS + 3
    flood = History()
    for number in range(MAX_REPORTS_PER_INCIDENT + 3):
        flood.report(fault(), {}, 10.0 + number, 0)
    assert len(flood.incidents[0].reports) == MAX_REPORTS_PER_INCIDENT
