"""Each signal of ClusterD, and each change of the job's status, has its answer."""

import os
import re
from pathlib import Path

import msgspec
import pytest

from midstep.detectors import clusterd_signals as d
from midstep.detectors.clusterd import Dialogue
from midstep.detectors.clusterd_service import CALLS, FIELDS, SUBSCRIPTIONS
from midstep.protocol.incidents import BudgetUse, Incident, JobStatus, NodeStatus, Outcome, RankStatus
from midstep.protocol.types import Assertion, Decision, FaultKind, FaultLevel, FaultReport, Rung

RANKS = (d.FaultyRank(1, "1"),)
TRAINING = JobStatus(
    job="job",
    at_s=100.0,
    phase="running",
    generation=1,
    term=1,
    committed=7,
    median_step_s=0.1,
    ranks=tuple(RankStatus(rank, f"node{rank // 2}", 100 + rank, 1, "running", 7, "") for rank in range(4)),
    nodes=(NodeStatus("node0", "a", "active", (0, 1)), NodeStatus("node1", "b", "active", (2, 3))),
    budgets=(BudgetUse("retry_step per job", 1, 1), BudgetUse("recover_in_place per job", 1, 3)),
    incidents=(),
)


@pytest.fixture
def dialogue() -> Dialogue:
    made = Dialogue("detector/clusterd", 2)
    assert made.looked(TRAINING, 0.0) == []
    return made


def signal(kind: str, **fields: object) -> d.Signal:
    return msgspec.structs.replace(d.Signal("u1", kind, RANKS), **fields)


def at(
    phase: str,
    outcome: Outcome | None = None,
    *,
    rung: Rung = Rung.RECOVER_IN_PLACE,
    number: int = 1,
    kind: FaultKind = FaultKind.DEVICE,
    seen_by: str = "detector/clusterd",
    **fields: object,
) -> JobStatus:
    """The job in a phase, with one incident if it has an outcome."""
    report = FaultReport(kind, 100.0, seen_by, "", rank=1)
    decision = Decision(rung, "a rank has to be replaced")
    incidents = (
        () if outcome is None else (Incident(number, 100.0, (report,), (decision,), replaced=(1,), outcome=outcome),)
    )
    return msgspec.structs.replace(TRAINING, phase=phase, incidents=incidents, **fields)


ENDED = at("ended", exit_code=130, reason="ClusterD has decided to dump")


def reports(actions: list[d.Action]) -> list[FaultReport]:
    return [action.report for action in actions if isinstance(action, d.TellFault)]


@pytest.mark.parametrize(
    ("kind", "seen", "level"),
    [
        ("0", FaultKind.MEMORY, FaultLevel.RESTART_REQUEST),
        ("1", FaultKind.DEVICE, FaultLevel.RESTART_REQUEST),
        ("2", FaultKind.NETWORK, FaultLevel.NOT_HANDLE),
        ("of a later release", FaultKind.DEVICE, FaultLevel.RESTART_REQUEST),
    ],
)
def test_a_rank_that_clusterd_finds_at_fault_is_a_fault_of_the_job_at_once(
    dialogue: Dialogue, kind: str, seen: FaultKind, level: FaultLevel
) -> None:
    (report,) = reports(dialogue.heard(signal("stopTrain", ranks=(d.FaultyRank(1, kind),)), TRAINING, 1.0))
    assert (report.kind, report.level, report.rank, report.assertion) == (seen, level, 1, Assertion.OCCUR)


def test_that_the_ranks_have_stopped_is_said_when_they_have(dialogue: Dialogue) -> None:
    dialogue.heard(signal("stopTrain"), TRAINING, 1.0)
    assert dialogue.is_waiting
    assert dialogue.looked(at("suspecting", Outcome.OPEN), 1.1) == []
    (said,) = dialogue.looked(at("quiescing", Outcome.OPEN), 1.2)
    assert said == d.ReportStopComplete(d.OK, "the job is quiescing", RANKS)
    assert not dialogue.is_waiting


def test_a_job_that_has_recovered_meanwhile_has_stopped_too(dialogue: Dialogue) -> None:
    dialogue.heard(signal("stopTrain"), TRAINING, 1.0)
    (said,) = dialogue.looked(at("running", Outcome.RESUMED), 1.2)
    assert isinstance(said, d.ReportStopComplete)
    assert said.code == d.OK


def test_a_fault_for_which_no_rank_stops_is_said_to_need_none_after_some_seconds(dialogue: Dialogue) -> None:
    dialogue.heard(signal("stopTrain"), TRAINING, 1.0)
    assert dialogue.looked(TRAINING, 5.9) == []
    (said,) = dialogue.looked(TRAINING, 6.1)
    assert said == d.ReportStopComplete(d.OK, "no rank has to stop for it", RANKS)


def test_a_job_that_has_ended_is_not_ready(dialogue: Dialogue) -> None:
    dialogue.heard(signal("stopTrain"), TRAINING, 1.0)
    (said,) = dialogue.looked(ENDED, 1.2)
    assert isinstance(said, d.ReportStopComplete)
    assert said.code == d.NOT_READY


def test_a_rank_that_is_being_replaced_already_is_not_reported_again(dialogue: Dialogue) -> None:
    status = at("quiescing", Outcome.OPEN, rung=Rung.RECOVER, seen_by="rank/1")
    assert dialogue.heard(signal("stopTrain"), status, 1.0) == []


@pytest.mark.parametrize("kind", ["stopTrain", "globalFault"])
def test_a_signal_that_comes_twice_is_one(dialogue: Dialogue, kind: str) -> None:
    assert dialogue.heard(signal(kind), TRAINING, 1.0)
    assert dialogue.heard(signal("keep-alive"), TRAINING, 1.0) == []
    assert dialogue.heard(signal(kind), TRAINING, 1.0) == []


def test_the_strategies_are_those_that_the_budgets_leave(dialogue: Dialogue) -> None:
    (said,) = dialogue.heard(signal("globalFault"), TRAINING, 1.0)
    assert said == d.ReportRecoverStrategy(
        RANKS, (d.RecoverStrategy.RECOVER, d.RecoverStrategy.DUMP, d.RecoverStrategy.EXIT)
    )


@pytest.mark.parametrize("kind", ["globalFault", "faultNodesExit"])
def test_the_nodes_of_pods_that_are_to_exit_are_left(dialogue: Dialogue, kind: str) -> None:
    (report,) = reports(dialogue.heard(signal(kind, nodes=(1,)), TRAINING, 1.0))
    assert (report.node, report.rank, report.level) == ("node1", None, FaultLevel.SEPARATE_NPU)


@pytest.mark.parametrize("outcome", [Outcome.OPEN, Outcome.RESUMED])
def test_the_node_to_which_the_ranks_of_such_a_pod_have_moved_already_is_not_left(
    dialogue: Dialogue, outcome: Outcome
) -> None:
    """ClusterD says so ten seconds after the job has told it, and means the pod in which they were then."""
    dialogue.looked(at("quiescing", Outcome.OPEN, rung=Rung.RECOVER, seen_by="node/node0"), 1.0)
    moved = at("running", outcome, rung=Rung.RECOVER, seen_by="node/node0")
    dialogue.heard(signal("stopTrain"), moved, 2.0)
    assert reports(dialogue.heard(signal("globalFault", uuid="u2", nodes=(0,)), moved, 12.0)) == []


def test_the_node_of_a_pod_that_is_to_exit_is_left_whatever_has_moved_before(dialogue: Dialogue) -> None:
    before = at("running", Outcome.RESUMED, rung=Rung.RECOVER)
    dialogue.heard(signal("preExitProcess", nodes=(0,)), before, 50.0)
    dialogue.heard(signal("stopTrain", uuid="u2"), before, 51.0)
    (report,) = reports(dialogue.heard(signal("globalFault", uuid="u3", nodes=(0,)), before, 61.0))
    assert report.node == "node0"


def test_processes_that_are_to_end_before_anything_is_decided_end_where_they_are(dialogue: Dialogue) -> None:
    """ClusterD begins when it hears that they have ended, and may have them recovered in place."""
    report, told = dialogue.heard(signal("preExitProcess", nodes=(0,)), TRAINING, 1.0)
    assert isinstance(report, d.TellFault)
    assert (report.report.node, report.report.rank, report.report.level) == (None, 1, FaultLevel.RESTART_REQUEST)
    assert told == d.ReportProcessFault(RANKS)
    assert dialogue.heard(signal("stopTrain", uuid="u2"), TRAINING, 1.1) == []


def test_a_process_that_is_being_replaced_when_it_is_to_end_is_told_and_not_ended_again(dialogue: Dialogue) -> None:
    status = at("quiescing", Outcome.OPEN, seen_by="node/node0")
    assert dialogue.heard(signal("preExitProcess", nodes=(0,)), status, 1.0) == [d.ReportProcessFault(RANKS)]


def test_a_process_of_a_pod_that_has_changed_is_not_ended(dialogue: Dialogue) -> None:
    """ClusterD names the ranks of all faults, and the pods that are still those in which they were seen."""
    assert dialogue.heard(signal("preExitProcess", nodes=(1,)), TRAINING, 1.0) == []


def test_a_rank_that_clusterd_was_told_of_is_stopped_again_for_a_fault_after_its_strategy(dialogue: Dialogue) -> None:
    """A fault in the midst of a recovery has no stopTrain of its own."""
    dialogue.heard(signal("preExitProcess", nodes=(0,)), TRAINING, 1.0)
    dialogue.heard(signal("changeStrategy", uuid="u2", strategy="recover"), at("quiescing", Outcome.OPEN), 2.0)
    dialogue.looked(at("running", Outcome.RESUMED), 3.0)
    (report,) = reports(dialogue.heard(signal("stopTrain", uuid="u3"), at("running", Outcome.RESUMED), 9.0))
    assert report.rank == 1


def test_processes_that_have_ended_are_told_again_when_clusterd_has_forgotten_them(dialogue: Dialogue) -> None:
    """It forgets with the end of the fault before, or when it is started again; a sign of life says that it listens."""
    dialogue.heard(signal("preExitProcess", nodes=(0,)), TRAINING, 1.0)
    dialogue.began()
    status = at("quiescing", Outcome.OPEN)
    assert dialogue.looked(status, 1.1) == []
    assert dialogue.heard(signal("keep-alive"), status, 6.0) == [d.ReportProcessFault(RANKS)]
    assert dialogue.heard(signal("keep-alive"), status, 11.0) == []


def test_what_clusterd_has_forgotten_and_midstep_has_recovered_is_taken_back(dialogue: Dialogue) -> None:
    """Else the next process of that rank would wait for a device that is well."""
    dialogue.heard(signal("preExitProcess", nodes=(0,)), TRAINING, 1.0)
    dialogue.began()
    back = reports(dialogue.heard(signal("keep-alive"), at("running", Outcome.RESUMED), 6.0))
    assert [(each.rank, each.fault_id, each.assertion) for each in back] == [(1, "rank1", Assertion.RECOVER)]


@pytest.mark.parametrize("strategy", ["retry", "recover"])
def test_a_strategy_is_answered_with_what_became_of_the_incident(dialogue: Dialogue, strategy: str) -> None:
    rung = Rung.RETRY_STEP if strategy == "retry" else Rung.RECOVER
    dialogue.heard(signal("changeStrategy", strategy=strategy), at("rejoining", Outcome.OPEN, rung=rung), 1.0)
    assert dialogue.looked(at("rejoining", Outcome.OPEN, rung=rung), 2.0) == []
    (said,) = dialogue.looked(at("running", Outcome.RESUMED, rung=rung), 3.0)
    assert said == d.ReportRecoverStatus(strategy, d.OK, "incident 1: resumed")


def test_a_strategy_takes_back_what_clusterd_had_found(dialogue: Dialogue) -> None:
    """Its devices are well, or the ranks are to be elsewhere: the next process need not wait for it any more."""
    dialogue.heard(signal("stopTrain"), TRAINING, 1.0)
    dialogue.looked(at("quiescing", Outcome.OPEN), 1.2)
    again = reports(dialogue.heard(signal("changeStrategy", strategy="recover"), at("quiescing", Outcome.OPEN), 2.0))
    assert [(each.rank, each.fault_id, each.assertion) for each in again] == [(1, "rank1", Assertion.RECOVER)]


def test_a_retry_that_needs_another_process_has_failed_and_may_be_recovered(dialogue: Dialogue) -> None:
    dialogue.heard(signal("changeStrategy", strategy="retry"), at("rejoining", Outcome.OPEN), 1.0)
    (said,) = dialogue.looked(at("rejoining", Outcome.OPEN), 1.1)
    assert isinstance(said, d.ReportRecoverStatus)
    assert said.code == d.RETRY_FAILED


def test_an_incident_that_stays_open_is_given_up_before_clusterd_does(dialogue: Dialogue) -> None:
    dialogue.heard(signal("changeStrategy", strategy="recover"), at("waiting", Outcome.OPEN), 1.0)
    assert dialogue.looked(at("waiting", Outcome.OPEN), 800.0) == []
    (said,) = dialogue.looked(at("waiting", Outcome.OPEN), 842.0)
    assert isinstance(said, d.ReportRecoverStatus)
    assert said.code == d.UNRECOVERABLE


@pytest.mark.parametrize("kind", ["changeStrategy", "saveAndExit"])
@pytest.mark.parametrize(
    ("reason", "code"), [("by ClusterD", d.OK), ("no emergency checkpoint: nobody is left", d.DUMP_FAILED)]
)
def test_a_dump_ends_the_job_and_says_whether_there_is_a_checkpoint(
    dialogue: Dialogue, kind: str, reason: str, code: int
) -> None:
    (stop,) = dialogue.heard(signal(kind, strategy="dump"), TRAINING, 1.0)
    assert stop == d.StopJob("ClusterD has decided to dump")
    assert dialogue.looked(at("saving"), 2.0) == []
    (said,) = dialogue.looked(msgspec.structs.replace(ENDED, reason=reason), 3.0)
    assert said == d.ReportRecoverStatus("dump", code, reason)


def test_an_exit_ends_the_job_and_nothing_is_said_about_it(dialogue: Dialogue) -> None:
    (stop,) = dialogue.heard(signal("changeStrategy", strategy="exit"), TRAINING, 1.0)
    assert stop == d.StopJob("ClusterD has decided to exit")
    assert not dialogue.is_waiting


def test_a_job_that_clusterd_has_given_up_does_not_wait_for_its_checkpoint(dialogue: Dialogue) -> None:
    (stop,) = dialogue.heard(signal("killMaster"), TRAINING, 1.0)
    assert isinstance(stop, d.StopJob)
    assert stop.insist


def test_a_sign_of_life_asks_for_nothing(dialogue: Dialogue) -> None:
    assert dialogue.heard(signal("keep-alive"), TRAINING, 1.0) == []


def test_what_is_not_obeyed_is_said_in_the_log(dialogue: Dialogue) -> None:
    (said,) = dialogue.heard(signal("hot-switch", actions=("hot switch",)), TRAINING, 1.0)
    assert isinstance(said, d.Remark)
    assert "hot-switch" in said.text


@pytest.mark.parametrize(("kind", "written"), [(FaultKind.EXIT, "1"), (FaultKind.MEMORY, "0"), (FaultKind.LINK, "2")])
def test_a_fault_that_needs_a_node_is_told_to_clusterd_once(dialogue: Dialogue, kind: FaultKind, written: str) -> None:
    status = at("quiescing", Outcome.OPEN, rung=Rung.RECOVER, kind=kind, seen_by="node/node0")
    assert dialogue.looked(status, 1.0) == [d.ReportProcessFault((d.FaultyRank(1, written),))]
    assert dialogue.looked(status, 1.1) == []


def test_what_clusterd_was_told_is_not_held_against_the_next_process(dialogue: Dialogue) -> None:
    """ClusterD names the same rank in its answer, when the incident may be over: a healthy rank is not stopped."""
    dialogue.looked(at("quiescing", Outcome.OPEN, rung=Rung.RECOVER, seen_by="node/node0"), 1.0)
    over = at("running", Outcome.RESUMED, rung=Rung.RECOVER, seen_by="node/node0")
    assert dialogue.heard(signal("stopTrain"), over, 2.0) == []
    assert len(dialogue.heard(signal("stopTrain", uuid="u2"), over, 9.0)) == 1


def test_a_fault_that_is_mended_in_place_is_not_told(dialogue: Dialogue) -> None:
    assert dialogue.looked(at("quiescing", Outcome.OPEN, seen_by="node/node0"), 1.0) == []


def test_what_clusterd_has_found_itself_is_not_told_to_it(dialogue: Dialogue) -> None:
    assert dialogue.looked(at("quiescing", Outcome.OPEN, rung=Rung.RECOVER), 1.0) == []


def test_a_new_subscription_begins_anew(dialogue: Dialogue) -> None:
    """ClusterD has forgotten what it waited for, and what it was told."""
    status = at("quiescing", Outcome.OPEN, rung=Rung.RECOVER, seen_by="node/node0")
    assert dialogue.looked(status, 1.0)
    dialogue.heard(signal("stopTrain"), status, 2.0)
    dialogue.began()
    assert not dialogue.is_waiting
    assert dialogue.looked(status, 3.0) == [], "it forgets once more when it takes the subscription in"
    dialogue.heard(signal("keep-alive"), status, 8.0)
    assert len(dialogue.looked(status, 8.0)) == 1


@pytest.mark.skipif("MIDSTEP_MINDCLUSTER" not in os.environ, reason="MIDSTEP_MINDCLUSTER names no checkout")
def test_the_messages_are_those_of_mindclusters_own_file() -> None:
    """Each field with its number and type, and each call with what it takes and returns."""
    checkout = Path(os.environ["MIDSTEP_MINDCLUSTER"])
    commented = (checkout / "component/clusterd/pkg/interface/grpc/recover/recover.proto").read_text()
    text = re.sub("//.*", "", commented)
    for name, fields in FIELDS.items():
        body = re.search(rf"message {name}\s*\{{(.*?)\}}", text, re.S)
        assert body is not None, name
        written = re.findall(r"(repeated\s+)?(\w+|map<.*?>)\s+(\w+)\s*=\s*(\d+);", body[1])
        own = [("repeated" if several else "", kind, field) for field, kind, several in fields]
        assert [(several.strip(), kind, field) for several, kind, field, _ in written] == own, name
        assert [int(number) for *_, number in written] == [*range(1, len(fields) + 1)], name
    for call, takes in CALLS.items():
        assert re.search(rf"rpc {call}\({takes}\) returns\s*\(Status\)", text), call
    for call, brings in SUBSCRIPTIONS.items():
        assert re.search(rf"rpc {call}\(ClientInfo\) returns\s*\(stream {brings}\)", text), call
