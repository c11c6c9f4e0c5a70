"""A TrainJob hears of the progress within the trainer's bounds: the newest only, and not from the script as well."""

import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstep.agent.channel import rank_environment
from midstep.controller.endpoints import trainjob
from midstep.controller.endpoints.posting import PostFailed
from midstep.controller.endpoints.trainjob import Pace, ReportThread, progress_reporter, report_of, status_server
from midstep.controller.metrics import Observation
from midstep.launch.job import Start, spec_of
from midstep.policies.schema import Policy, TrainJobPolicy
from midstep.protocol.incidents import ReportedSeries
from midstep.protocol.messages import StartProcess
from midstep.protocol.types import Rendezvous
from midstep.testing.fake_cluster import FakeCluster

from ..chaos.status_server import StatusServerOfTrainer, checked, has_openssl

PATIENCE_S = 10.0
VARIABLES = {
    "KUBEFLOW_TRAINER_SERVER_URL": "https://trainer.svc:10443/status",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/var/run/secrets/kubeflow/trainer/ca.crt",
    "KUBEFLOW_TRAINER_SERVER_TOKEN": "/var/run/secrets/kubeflow/trainer/token",
}


def told(cluster: FakeCluster, policy: TrainJobPolicy, step: int = 50, per_s: float = 0.0, **values: float) -> Any:
    """The status of a report, held against the trainer's bounds; and its metrics by name."""
    reported = tuple(ReportedSeries(name, 0, (1,), (value,)) for name, value in values.items())
    now = cluster.now
    seen = Observation(now, cluster.machine.state, step, cluster.times.until(now), (), {}, 1, reported=reported)
    status = checked(report_of(seen, policy, per_s))
    return {**status, "metrics": {each["name"]: each["value"] for each in status["metrics"]}}


def test_the_share_and_the_time_that_is_left_follow_from_the_number_of_steps(cluster: FakeCluster) -> None:
    """From the policy, else from the script; without one they are not told."""
    status = told(cluster, TrainJobPolicy(report=True, total_steps=200), per_s=0.5, loss=0.25, total_steps=7.0)
    assert status["progressPercentage"] == 25
    assert status["estimatedRemainingSeconds"] == 300
    assert status["metrics"]["loss"] == "0.25"
    assert status["metrics"]["total_steps"] == "200"
    assert status["metrics"]["steps_per_second"] == "0.5"
    status = told(cluster, TrainJobPolicy(report=True), per_s=0.5, total_steps=100.0)
    assert status["progressPercentage"] == 50
    status = told(cluster, TrainJobPolicy(report=True), per_s=0.5)
    assert "progressPercentage" not in status
    assert "estimatedRemainingSeconds" not in status
    assert status["metrics"]["step"] == "50"
    assert "estimatedRemainingSeconds" not in told(cluster, TrainJobPolicy(report=True, total_steps=200))


def test_a_report_keeps_the_bounds_of_the_trainer(cluster: FakeCluster) -> None:
    """What is no number, or has too long a name, is left out; more steps than there were to be are all of them."""
    status = told(
        cluster, TrainJobPolicy(report=True, total_steps=10), step=11, per_s=1e-12, loss=math.nan, grad=math.inf,
        **{"x" * 65: 1.0, "y" * 64: -1.2345678e-300},
    )  # fmt: skip
    assert status["progressPercentage"] == 100
    assert not {"loss", "grad", "x" * 65} & status["metrics"].keys()
    assert status["metrics"]["y" * 64] == "-1.23457e-300"
    assert told(cluster, TrainJobPolicy(report=True, total_steps=10**9), per_s=1e-9)["estimatedRemainingSeconds"] == (
        2**31 - 1
    )


def test_incidents_are_counted_and_the_end_leaves_no_time(cluster: FakeCluster) -> None:
    cluster.feed(cluster.exited(1))
    cluster.recover(5)
    assert told(cluster, TrainJobPolicy(report=True))["metrics"]["incidents"] == "1"


def test_the_pace_has_what_came_between_and_begins_again_after_lost_steps() -> None:
    pace = Pace()
    assert pace.per_second() == 0.0
    for at_s, step in ((0.0, 0), (10.0, 10), (40.0, 10), (50.0, 20)):
        pace.take(at_s, step)
    assert pace.per_second() == pytest.approx(0.4)
    pace.take(60.0, 12)
    assert pace.per_second() == 0.0
    for second in range(2000):
        pace.take(100.0 + second, 100 + 3 * second)
    assert pace.per_second() == pytest.approx(3.0)


class Hands:
    """What reports are handed to: it holds the first, and refuses as often as it is told."""

    def __init__(self, refuses: int = 0) -> None:
        self.got: list[bytes] = []
        self.refuses, self.go = refuses, threading.Event()

    def __call__(self, report: bytes) -> None:
        assert self.go.wait(PATIENCE_S)
        if self.refuses:
            self.refuses -= 1
            raise PostFailed("it answers 503")
        self.got.append(report)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries come soon after each other."""
    monkeypatch.setattr(trainjob, "FIRST_WAIT_S", 0.01)


def test_only_the_newest_report_waits() -> None:
    """However many come while one is under way, and none of them is waited for."""
    hands = Hands()
    thread = ReportThread(hands)
    thread.start()
    thread.take(b"first")
    time.sleep(0.1)
    began_s = time.monotonic()
    for number in range(10_000):
        thread.take(b"%d" % number)
    assert time.monotonic() - began_s < 1.0
    hands.go.set()
    thread.finish(PATIENCE_S)
    assert hands.got == [b"first", b"9999"]


def test_a_report_is_tried_a_few_times_and_then_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the failure once, and that it is over."""
    caplog.set_level(logging.INFO)
    hands = Hands(refuses=trainjob.TRIES + 1)
    hands.go.set()
    thread = ReportThread(hands)
    thread.start()
    thread.take(b"lost")
    thread._changed.acquire()
    thread._changed.wait_for(lambda: thread._newest is None, PATIENCE_S)
    thread._changed.release()
    assert hands.got == []
    thread.take(b"taken")
    thread.finish(PATIENCE_S)
    assert hands.got == [b"taken"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


def test_the_end_is_not_held_up_by_a_server_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """The log says that the last report is lost, though its try is not over."""
    hands = Hands()
    thread = ReportThread(hands)
    thread.start()
    thread.take(b"last")
    began_s = time.monotonic()
    thread.finish(0.3)
    assert time.monotonic() - began_s < 2.0
    assert "has not taken the progress at the end within 0.3 s" in caplog.text
    hands.go.set()


def test_all_three_variables_are_needed(caplog: pytest.LogCaptureFixture, cluster: FakeCluster) -> None:
    """One is missing: the log says so, and nothing is reported. Without the key the variables are not looked at."""
    assert status_server(VARIABLES) is not None
    lacking = {name: value for name, value in VARIABLES.items() if not name.endswith("TOKEN")}
    assert status_server(lacking) is None

    def look() -> Observation:
        raise AssertionError

    assert progress_reporter(TrainJobPolicy(report=True), lacking, look, 4) is None
    assert "no progress is reported" in caplog.text
    assert progress_reporter(TrainJobPolicy(), VARIABLES, look, 4) is None
    assert progress_reporter(TrainJobPolicy(report=True), VARIABLES, look, 4) is not None


@pytest.mark.skipif(not has_openssl, reason="there is no openssl to make a certificate with")
def test_what_is_wrong_with_server_or_files_is_said_without_the_token(tmp_path: Path) -> None:
    """Another CA, a token that is not good any more, no file, no https."""
    server, other = StatusServerOfTrainer(tmp_path / "one"), StatusServerOfTrainer(tmp_path / "other")
    good = status_server(server.environment)
    assert good is not None
    report = msgspec.json.encode({"trainerStatus": {"lastUpdatedTime": "2026-01-01T00:00:00Z"}})
    trainjob.post(good, report)
    assert len(server.taken) == 1
    for changed, said in (
        ({"ca_file": str(other.ca_file)}, "its certificate is not trusted here"),
        ({"ca_file": str(tmp_path / "none")}, "no certificate of a CA can be read"),
        ({"token_file": str(other.token_file)}, "it answers 403"),
        ({"token_file": str(tmp_path / "none")}, "nothing can be read from it"),
        ({"token_file": str(tmp_path)}, "nothing can be read from it"),
        ({"url": "http://trainer.example/status"}, "only https leaves this machine"),
        ({"url": server.url.replace("gpt", "other")}, "it answers 404"),
    ):
        with pytest.raises(PostFailed, match=said) as failed:
            trainjob.post(msgspec.structs.replace(good, **changed), report)
        assert server.token not in str(failed.value)
    server.close()
    other.close()


def test_ranks_do_not_see_the_variables_where_the_controller_reports(tmp_path: Path) -> None:
    """So that a callback of the script which goes by them stays silent."""
    order = StartProcess(0, 0, 0, 1, 1, 0, True, Rendezvous("127.0.0.1", 1, "secret"))
    start = Start(command=("train.py",))
    for policy, seen in ((Policy(), 3), (Policy(trainjob=TrainJobPolicy(report=True)), 0)):
        spec = spec_of(start, "gpt", policy, tmp_path)
        environment = rank_environment(VARIABLES, spec, order, node="node0", agent_socket="ipc://a", started_s=0.0)
        assert sum(name in environment for name in VARIABLES) == seen
