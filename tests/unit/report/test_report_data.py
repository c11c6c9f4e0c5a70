"""Incidents as data: the shape that demo and benchmarks rely on, and sums that are true."""

import json

import msgspec
import pytest

from midstep.cli.status import as_data
from midstep.cli.views.incident_data import incident_json, report_json
from midstep.protocol.incidents import Incident, JobStatus

PROMISED = {"rung", "cause", "steps_lost", "healthy_pids_kept", "recovery_s", "excess_s", "phases", "reasons"}


def test_every_incident_has_the_promised_keys_and_is_json(status: JobStatus, running: JobStatus) -> None:
    for incident in (*status.incidents, *running.incidents):
        data = incident_json(incident)
        assert set(data) >= PROMISED
        assert json.loads(json.dumps(data)) == data


def test_phases_of_a_resumed_incident_add_up_to_its_recovery(status: JobStatus) -> None:
    for incident in status.incidents[:5]:
        data = incident_json(incident)
        assert sum(data["phases"].values()) == pytest.approx(data["recovery_s"], abs=1e-4)


def test_a_kill_is_told_with_rung_reasons_and_what_it_cost(status: JobStatus) -> None:
    data = incident_json(status.incidents[1])
    assert data["rung"] == "recover_in_place"
    assert data["steps_lost"] == 0
    assert data["healthy_pids_kept"] is True
    assert data["excess_s"] == pytest.approx(0.147)
    assert list(data["phases"]) == ["detecting", "suspecting", "quiescing", "rejoining", "resuming"]
    assert data["reasons"][:2] == [
        "not retry_step: the process of rank 1 is gone",
        "recover_in_place: the process of rank 1 ended, and node-0 is healthy",
    ]
    assert list(data["slowest_rank_phases"]) == ["stop", "clean", "join", "rebuild", "repair", "rollback"]


def test_phases_of_all_attempts_are_added(status: JobStatus) -> None:
    assert incident_json(status.incidents[4])["phases"]["quiescing"] == pytest.approx(62.946)


def test_what_a_stopped_incident_lost_is_not_claimed_to_be_nothing(status: JobStatus) -> None:
    data = incident_json(status.incidents[5])
    assert (data["outcome"], data["rung"]) == ("stopped", "stop")
    assert data["steps_lost"] is data["healthy_pids_kept"] is data["recovery_s"] is data["excess_s"] is None


def test_a_phase_under_way_is_counted_up_to_now(running: JobStatus) -> None:
    phases = incident_json(running.incidents[0], running.at_s)["phases"]
    assert phases["rejoining"] == pytest.approx(0.21)


def test_an_incident_with_nothing_in_it_yet_is_data_too() -> None:
    data = incident_json(Incident(1, 5.0))
    assert data["phases"] == {}
    assert data["rung"] is None


def test_a_healthy_process_that_was_lost_is_told(status: JobStatus) -> None:
    incident = status.incidents[1]
    changed = msgspec.structs.replace(incident, pids_after={**incident.pids_after, 2: 9999})
    assert incident_json(changed)["healthy_pids_kept"] is False


def test_midstep_status_prints_the_whole_status_as_one_line_of_json(status: JobStatus) -> None:
    line = as_data(status, "no controller answers")
    data = json.loads(line)
    assert "\n" not in line
    assert (data["live"], data["note"]) == (False, "no controller answers")
    assert msgspec.json.decode(line, type=JobStatus) == status


def test_midstep_report_prints_the_chosen_incidents_and_the_budgets(status: JobStatus) -> None:
    chosen = report_json(status, status.incidents[:1])
    assert [incident["number"] for incident in chosen["incidents"]] == [1]
    assert chosen["budgets"][0] == {"name": "recover_in_place per job", "used": 4, "limit": 4}
