"""A job beside MindCluster's own ClusterD, over a real API server: what it finds, asks for and decides."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from midstep.controller.endpoints.control_requests import Accepted, ControlRequest
from midstep.protocol.controls import ForbidRung
from midstep.protocol.types import Rung
from midstep.testing.played_clusterd import PlayedClusterd

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers, finish
from ..chaos.conftest import StartJob
from ..chaos.jobs import ROOMY, Record
from ..chaos.test_clusterd import LONG_STEP_S, PAUSES, WAIT_S, WITH_ACTIONS, pass_pause
from .ascend_job import LASTING, PASSING, AscendJob
from .conftest import StartBridge
from .operators import Operator
from .real_clusterd import ADDRESS, PORT, RealClusterd

pytestmark = pytest.mark.timeout(400)

WHERE = f"{ADDRESS}:{PORT}"
IN_PLACE, MOVED = GATES = (4, 10)
# ClusterD decides some 25 s after the process has ended, and waits for the device itself.
PATIENT: dict[str, Any] = {**ROOMY, "deadlines": {"stop_grace_s": 2.0, "device_s": 80.0, "nodes_s": 80.0}}
LED = [
    "preExitProcess",
    "ReportProcessFault",
    "stopTrain",
    "ReportStopComplete",
    "globalFault",
    "ReportRecoverStrategy",
    "changeStrategy recover",
    "ReportRecoverStatus",
]


def paused(notice: str, reply: str) -> list[str]:
    """Return the steps of what is done in a pause."""
    return ["stopTrain", "ReportStopComplete", notice, reply, "changeStrategy continue", "ReportRecoverStatus"]


def test_a_device_that_gets_well_is_recovered_in_place_and_one_that_does_not_is_left(
    clusterd: RealClusterd, start_job: StartJob, undisturbed: Record, bridge: StartBridge
) -> None:
    acjob = AscendJob(clusterd.server.api, "device-faults", ["recover-in-place", "recover"])
    job = start_job(spares=1, gates=GATES, policy=PATIENT)
    job.held_at(IN_PLACE)
    between = bridge(job, WHERE, acjob.uid)
    clusterd.until_subscribed(acjob.uid)
    acjob.hurt(2, PASSING)
    job.until(lambda status: bool(status.incidents), "the fault")
    acjob.heal(2)
    job.open_gate(IN_PLACE)
    assert between.until("ReportRecoverStatus", job) == LED

    job.held_at(MOVED)
    clusterd.until_subscribed(acjob.uid, 2)
    acjob.hurt(3, LASTING)
    assert between.until("ReportProcessFault", job) == LED[:2]
    job.open_gate(MOVED)  # a rank that is held there does not stop
    assert between.until("ReportRecoverStrategy", job) == LED[2:6]
    acjob.replace_pod(1)
    assert between.until("ReportRecoverStatus", job) == LED[6:]
    first, second = finish(job)["incidents"]
    assert first["rung"] == "recover_in_place"
    assert_nobody_harmed(first, {2})
    assert second["rung"] == "recover"
    assert_nobody_harmed(second, {2, 3})
    assert_same_numbers(job.record(), undisturbed)
    assert acjob.annotation("ProcessRecoverStatus") == "recover-success"


def test_a_fault_that_clusterd_forgets_with_the_one_before_is_told_again_and_led(
    clusterd: RealClusterd, start_job: StartJob, undisturbed: Record, bridge: StartBridge
) -> None:
    """For 5 s after a recovery in place it waits for agents, and then forgets all that it has heard meanwhile."""
    acjob = AscendJob(clusterd.server.api, "forgotten", ["recover-in-place", "recover"])
    job = start_job(spares=1, gates=GATES, policy=PATIENT)
    job.held_at(IN_PLACE)
    between = bridge(job, WHERE, acjob.uid)
    clusterd.until_subscribed(acjob.uid)
    acjob.hurt(2, PASSING)
    job.until(lambda status: bool(status.incidents), "the fault")
    acjob.heal(2)
    job.open_gate(IN_PLACE)
    assert between.until("ReportRecoverStatus", job) == LED
    acjob.hurt(3, LASTING)
    assert between.until("ReportProcessFault", job) == LED[:2]
    clusterd.until_subscribed(acjob.uid, 2)
    job.open_gate(MOVED)
    assert between.until("ReportRecoverStatus", job) == LED[1:]
    first, second = finish(job)["incidents"]
    assert_nobody_harmed(first, {2})
    assert_nobody_harmed(second, {2, 3})
    assert_same_numbers(job.record(), undisturbed)


def test_a_fault_that_midstep_tells_is_led_to_its_end(
    clusterd: RealClusterd, start_job: StartJob, undisturbed: Record, bridge: StartBridge
) -> None:
    """A process that is killed is nothing to the device plugin. The job has recovered before ClusterD decides."""
    acjob = AscendJob(clusterd.server.api, "told", ["recover"])
    job = start_job(spares=1, gates=GATES, policy=PATIENT)
    held = job.held_at(IN_PLACE)
    forbidden = ControlRequest(ForbidRung(Rung.RECOVER_IN_PLACE, WAIT_S), "test", "to another node")
    assert isinstance(job.ask(forbidden), Accepted)
    between = bridge(job, WHERE, acjob.uid)
    clusterd.until_subscribed(acjob.uid)
    os.kill(next(rank.pid for rank in held.ranks if rank.rank == 3), signal.SIGKILL)
    assert between.until("ReportProcessFault", job) == LED[1:2]
    job.open_gate(IN_PLACE)
    assert between.until("ReportRecoverStatus", job) == LED[2:]
    job.open_gate(MOVED)
    (moved,) = finish(job)["incidents"]
    assert moved["rung"] == "recover"
    assert_nobody_harmed(moved, {2, 3})
    assert_same_numbers(job.record(), undisturbed)


def test_a_platform_confirms_the_strategy_and_the_ranks_by_annotations(
    clusterd: RealClusterd, start_job: StartJob, undisturbed: Record, bridge: StartBridge
) -> None:
    acjob = AscendJob(clusterd.server.api, "platform", ["recover"], annotations={"ProcessRecoverStrategy": ""})
    job = start_job(spares=1, gates=GATES[:1], policy=PATIENT)
    job.held_at(IN_PLACE)
    between = bridge(job, WHERE, acjob.uid)
    clusterd.until_subscribed(acjob.uid)
    acjob.hurt(3, LASTING)
    assert between.until("ReportProcessFault", job) == LED[:2]
    job.open_gate(IN_PLACE)
    acjob.annotate({"ProcessRecoverStrategy": "recover"})
    clusterd.server.until(lambda: bool(acjob.annotation("ProcessConfirmFault")), "the ranks that ClusterD asks about")
    assert acjob.annotation("ProcessConfirmFault") == "3:1"
    acjob.annotate({"ProcessResultFault": "2:1,3:1"})
    assert between.until("ReportRecoverStrategy", job) == LED[2:6]
    acjob.replace_pod(1)
    acjob.annotate({"RankTableReady": "true"})
    assert between.until("ReportRecoverStatus", job) == LED[6:]
    (moved,) = finish(job)["incidents"]
    assert_nobody_harmed(moved, {2, 3})
    assert_same_numbers(job.record(), undisturbed)


def test_a_platform_that_wants_a_dump_ends_the_job_with_its_checkpoint(
    clusterd: RealClusterd, start_job: StartJob, bridge: StartBridge
) -> None:
    acjob = AscendJob(clusterd.server.api, "dumped", ["dump"])
    job = start_job(gates=GATES[:1], policy=PATIENT)
    job.held_at(IN_PLACE)
    between = bridge(job, WHERE, acjob.uid)
    clusterd.until_subscribed(acjob.uid)
    acjob.hurt(3, PASSING)
    job.until(lambda status: bool(status.incidents), "the fault")
    job.open_gate(IN_PLACE)
    assert between.until("ReportRecoverStatus", job) == [*LED[:2], "saveAndExit", "ReportRecoverStatus"]
    job.wait(WAIT_S)
    assert "emergency checkpoint of step" in job.report()["reason"]


def test_ports_are_switched_and_devices_tested_at_an_operators_request(
    clusterd: RealClusterd,
    start_job: StartJob,
    undisturbed: Record,
    bridge: StartBridge,
    tmp_path: Path,
) -> None:
    acjob = AscendJob(clusterd.server.api, "maintained", ["recover"])
    script = tmp_path / "with_actions.py"
    script.write_text(WITH_ACTIONS)
    job = start_job(step_s=LONG_STEP_S, gates=PAUSES[:2], script=script, policy=PATIENT)
    operator = Operator(WHERE, acjob.uid)
    job.held_at(PAUSES[0])
    between = bridge(job, WHERE, acjob.uid)
    clusterd.until_subscribed(acjob.uid)
    with ThreadPoolExecutor() as asking:
        answer = asking.submit(operator.switch_ports, {acjob.node_of(0): {"0": True}})
        pass_pause(job, PAUSES[0])
        assert answer.result(WAIT_S) == "switch nic finish"
        assert between.until("ReportRecoverStatus", job) == paused("SwitchNics", "ReplySwitchNicResult")
        job.held_at(PAUSES[1])
        clusterd.until_subscribed(acjob.uid, 2)
        answer = asking.submit(operator.test, {acjob.node_of(0): [0]})
        pass_pause(job, PAUSES[1])
        assert "finish" in answer.result(WAIT_S)
    operator.close()
    assert not [each for each in finish(job)["incidents"] if each["replaced"]]
    assert_same_numbers(job.record(), undisturbed)


def test_a_clusterd_that_was_started_again_takes_the_job_in_again(
    clusterd: RealClusterd, start_job: StartJob, undisturbed: Record, bridge: StartBridge
) -> None:
    acjob = AscendJob(clusterd.server.api, "again", ["recover-in-place", "recover"])
    job = start_job(gates=GATES[:1], policy=PATIENT)
    job.held_at(IN_PLACE)
    between = bridge(job, WHERE, acjob.uid)
    clusterd.until_subscribed(acjob.uid)
    clusterd.kill()
    clusterd.start()
    clusterd.until_subscribed(acjob.uid, 2)
    acjob.hurt(2, PASSING)
    job.until(lambda status: bool(status.incidents), "the fault")
    acjob.heal(2)
    job.open_gate(IN_PLACE)
    assert between.until("ReportRecoverStatus", job) == LED
    (mended,) = finish(job)["incidents"]
    assert_nobody_harmed(mended, {2})
    assert_same_numbers(job.record(), undisturbed)


def test_without_the_config_map_of_its_resets_a_job_is_given_up_with_its_first_fault(
    clusterd: RealClusterd, start_job: StartJob, bridge: StartBridge
) -> None:
    """ClusterD writes the ranks at fault into it, also where nothing reads them, and gives up where there is none."""
    acjob = AscendJob(clusterd.server.api, "no-reset", ["recover-in-place"], has_reset_info=False)
    job = start_job(gates=GATES[:1], policy=PATIENT)
    job.held_at(IN_PLACE)
    between = bridge(job, WHERE, acjob.uid)
    clusterd.until_subscribed(acjob.uid)
    acjob.hurt(2, PASSING)
    assert between.until("killMaster", job) == [*LED[:2], "killMaster"]
    job.open_gate(IN_PLACE)
    job.wait(WAIT_S)
    assert "killMaster" in job.report()["reason"]


def test_the_played_clusterd_of_other_tests_says_the_same_in_the_same_order(
    start_job: StartJob, bridge: StartBridge, tmp_path: Path
) -> None:
    script = tmp_path / "with_actions.py"
    script.write_text(WITH_ACTIONS)
    played = PlayedClusterd("played", ["recover-in-place", "recover"], ranks_per_pod=2).start()
    job = start_job(step_s=LONG_STEP_S, gates=PAUSES[:2], script=script, policy=PATIENT)
    job.held_at(PAUSES[0])
    between = bridge(job, f"{ADDRESS}:{played.port}", "played")
    played.find([2])
    job.until(lambda status: bool(status.incidents), "the fault")
    job.open_gate(PAUSES[0])
    assert between.until("ReportRecoverStatus", job) == LED
    job.held_at(PAUSES[1])
    job.until(lambda _: played.subscriptions == 2, "the next subscription")
    played.switch_ports({0: True})
    pass_pause(job, PAUSES[1])
    assert between.until("ReportRecoverStatus", job) == paused("SwitchNics", "ReplySwitchNicResult")
    finish(job)
    played.close()


def test_a_job_without_the_label_is_refused_in_one_line(
    clusterd: RealClusterd, start_job: StartJob, bridge: StartBridge
) -> None:
    acjob = AscendJob(clusterd.server.api, "not-enabled", [])
    job = start_job(gates=GATES[:1], nodes=1, ranks_per_node=1, steps=MOVED)
    job.held_at(IN_PLACE)
    between = bridge(job, WHERE, acjob.uid)
    assert between.process.wait(WAIT_S) == 1
    assert "process-recover-enable" in between.said().splitlines()[-1]
    job.open_gate(IN_PLACE)
    assert job.wait(WAIT_S) == 0
