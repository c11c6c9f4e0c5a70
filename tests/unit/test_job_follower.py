"""`midstep run` follows an incident: a line for each turn, and none that repeats another."""

from pathlib import Path

import pytest
from rich.text import Text

from midstep.cli.display import display as job_follower
from midstep.cli.display.display import JobFollower
from midstep.controller.endpoints.control_requests import StatusReply
from midstep.protocol.incidents import Incident, JobStatus, Outcome
from midstep.protocol.types import Decision, Rung

STARTED = "rank 1 can be restarted on node node0, keeping 3 healthy ranks alive"


def status_of(*incidents: Incident) -> JobStatus:
    """Return the status of a running job with these incidents."""
    return JobStatus("job", 0.0, "running", 1, 1, 10, 0.1, (), (), (), incidents)


def lines_of(monkeypatch: pytest.MonkeyPatch, *statuses: JobStatus) -> list[str]:
    """Return what is said while a job goes through these."""
    said: list[str] = []
    follower = JobFollower(Path("nowhere"), lambda text: said.append(Text.__str__(text)))
    for status in statuses:
        monkeypatch.setattr(job_follower, "ask", lambda *_, status=status: StatusReply(status))
        follower.look()
    return said


def test_a_decision_with_more_reports_behind_it_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That collectives of survivors fail, too, is no news to an operator; another rung, or another rank, is."""
    kill = Decision(Rung.RECOVER_IN_PLACE, f"rank 1 ended: {STARTED}", ())
    wider = Decision(Rung.RECOVER_IN_PLACE, f"rank 1 ended; ranks 2, 3 had a collective fail: {STARTED}", ())
    two = Decision(Rung.RECOVER_IN_PLACE, "ranks 1, 2 ended: ranks 1, 2 can be restarted", ())
    coarser = Decision(Rung.RESCHEDULE_POD, "ranks 1, 2 ended: all processes are restarted", ())
    opened = [Incident(1, 5.0, decisions=(kill, wider, two, coarser)[:some]) for some in (1, 2, 4)]
    over = Incident(1, 5.0, decisions=opened[-1].decisions, outcome=Outcome.DISMISSED, ended_reason="it was nothing")

    said = lines_of(monkeypatch, *map(status_of, (*opened, over)))

    assert said == [
        f"incident 1: recover_in_place - rank 1 ended: {STARTED}",
        "incident 1: recover_in_place - ranks 1, 2 ended: ranks 1, 2 can be restarted",
        "incident 1: reschedule_pod - ranks 1, 2 ended: all processes are restarted",
        "incident 1: dismissed: it was nothing",
    ]


def test_a_line_break_in_a_status_begins_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the terminal is what midstep says, never what somebody has put into a status."""
    forged = JobStatus("job", 0.0, "stopped\nJob gpt: FINISHED with exit code 0", 1, 1, 10, 0.1, (), (), (), ())
    assert lines_of(monkeypatch, forged) == ["stopped Job gpt: FINISHED with exit code 0 (generation 1)"]


def test_a_job_in_which_nothing_happens_is_asked_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question takes some of the cores that its ranks train on. As soon as something happens, all looks ask."""
    now, asked = 0.0, []
    status = status_of()
    follower = JobFollower(Path("nowhere"), lambda text: None, lambda: now)

    def answer(*_: object) -> StatusReply:
        asked.append(now)
        return StatusReply(status)

    def look_until(end_s: float) -> int:
        nonlocal now
        asked.clear()
        while now < end_s:
            follower.look()
            now = round(now + 0.2, 1)
        return len(asked)

    monkeypatch.setattr(job_follower, "ask", answer)
    assert look_until(10.0) == 50
    look_until(12.0)
    assert look_until(22.0) == 10
    status = status_of(Incident(1, 22.0))
    look_until(23.0)
    assert look_until(32.0) == 45
