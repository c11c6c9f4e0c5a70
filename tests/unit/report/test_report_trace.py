"""The trace holds to the Trace Event Format, so that a viewer opens it and shows what happened."""

import json
from collections import defaultdict
from typing import Any

import pytest

from midstep.cli.views.incident_data import trace_json
from midstep.protocol.incidents import JobStatus

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "ts", "s", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}


def events(status: JobStatus) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(trace_json(status, status.incidents)))
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


def test_every_event_has_the_fields_of_its_type(status: JobStatus, running: JobStatus) -> None:
    for event in (*events(status), *events(running)):
        assert set(event) == REQUIRED[event["ph"]]
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
            assert event.get("dur", 0) >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")


def test_every_thread_is_named_and_no_event_is_on_another(status: JobStatus) -> None:
    named = {event["tid"]: event["args"]["name"] for event in events(status) if event["name"] == "thread_name"}
    assert named == {0: "controller", 1: "rank 0", 2: "rank 1", 3: "rank 2", 4: "rank 3"}
    assert {event["tid"] for event in events(status)} == set(named)
    assert {event["pid"] for event in events(status)} == {1}


def test_complete_events_of_a_thread_nest(status: JobStatus) -> None:
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events(status):
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_until: list[int] = []
        for began, ended in spans:
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or ended <= open_until[-1], "two events overlap in part"
            open_until.append(ended)


def test_times_are_microseconds_since_the_first_incident(status: JobStatus) -> None:
    found = events(status)
    killed = next(event for event in found if event["name"] == "incident 2")
    assert killed["ts"] == pytest.approx(60e6, abs=1)
    assert killed["dur"] == pytest.approx(267e3, abs=1)


def test_faults_and_decisions_are_instants_with_their_reasons(status: JobStatus) -> None:
    instants = [event for event in events(status) if event["ph"] == "i"]
    faults = [event for event in instants if event["cat"] == "fault"]
    assert len(faults) == sum(len(incident.reports) for incident in status.incidents)
    decided = [event["name"] for event in instants if event["cat"] == "decision"]
    assert decided.count("decision: recover_in_place") == 4
    pod = next(event for event in instants if event["name"] == "decision: reschedule_pod")
    assert "recover: no spare node is left" in pod["args"]["skipped"]


def test_a_job_without_incidents_has_a_trace_too(status: JobStatus) -> None:
    trace = trace_json(status, ())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M"}
