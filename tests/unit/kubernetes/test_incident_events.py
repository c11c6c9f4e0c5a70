"""An incident as Events: of the job, and of the pods with its faults."""

from midstep.platforms.base import EndedIncident
from midstep.platforms.kubernetes.deployment import LONGEST_MESSAGE, events_of
from midstep.platforms.kubernetes.fleet import PodPhase, PodReading
from midstep.platforms.kubernetes.names import owner_reference

OWNER = owner_reference("Deployment", "apps/v1", "midstep-demo", "0123456789abcdef")
PODS = {"node0": PodReading("node0", "midstep-demo-node0", PodPhase.RUNNING, uid="of-node0")}


def test_an_incident_is_an_event_of_the_job_and_of_each_pod_that_is_still_there() -> None:
    incident = EndedIncident(7, "recover_in_place", "Incident 7: RESUMED", ("node0", "node9"))
    job, pod = events_of(incident, OWNER, PODS, "training", 0.0)

    assert job["metadata"] == {"name": "midstep-demo.01234567.incident-7", "namespace": "training"}
    assert job["involvedObject"]["uid"] == "0123456789abcdef"
    assert pod["metadata"]["name"] == "midstep-demo-node0.01234567.incident-7"
    assert pod["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "midstep-demo-node0",
        "uid": "of-node0",
        "namespace": "training",
    }
    for event in (job, pod):
        assert (event["type"], event["reason"], event["message"]) == ("Normal", "RecoverInPlace", incident.text)
        assert event["firstTimestamp"] == event["lastTimestamp"] == "1970-01-01T00:00:00Z"


def test_a_job_that_stops_is_a_warning_and_a_long_text_is_cut() -> None:
    (event,) = events_of(EndedIncident(1, "stop", "x" * 5000, (), stopped=True), OWNER, {}, "default", 0.0)

    assert (event["type"], event["reason"], len(event["message"])) == ("Warning", "Stop", LONGEST_MESSAGE)
