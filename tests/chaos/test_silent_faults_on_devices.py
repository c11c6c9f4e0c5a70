"""Silent faults where tensors are a device's: votes, audits, rules and slow ranks, in jobs on the fake device.

Reductions wait in its queue, each recovery stops and restarts it, and its own faults strike in the same steps. What a
job ends with is compared with an undisturbed one on the same device, bit for bit.
"""

import json
from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from . import test_audits as audits
from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import RANKS, ROOMY, Job, Record, inject
from .test_audits import AUDITS
from .test_integrity import COPYING, PLACES, VOTING, blamed, flip, run
from .test_rules import LEFT_OUT, assert_as, last_drawn, ruled, without
from .test_slow_ranks import HEARD_OFTEN, SLOWED, named, on_purpose, under_way

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(300)]

FLIPS, APART, FIRST = 30, 3, 4  # one flip in every third step
VOTED_STEPS = FIRST + APART * FLIPS + 6
SLOWED_STEPS, GATE, WORK_S = 90, 70, 0.05
TRUSTING: dict[str, Any] = {"node": {"failures": 100}}  # more faults than a node is trusted with by default


@pytest.fixture(scope="module")
def device() -> str:
    """All jobs of this file compute on the fake device."""
    return "fake"


def harm(rank: int, action: FaultAction, point: InjectionPoint, step: int) -> ArmedFault:
    """Return a fault that the device itself reports."""
    return inject(rank, point, step, action=action)


@pytest.fixture(scope="module")
def three(start_shared_job: StartJob) -> Record:
    """The record of three ranks to which nothing happens."""
    job = start_shared_job(nodes=1, ranks_per_node=3, steps=VOTED_STEPS, step_s=0.0)
    assert not finish(job)["incidents"], job.said()
    return job.record()


def test_each_of_many_flips_in_a_devices_tensors_is_blamed_on_its_rank(start_job: StartJob, three: Record) -> None:
    """All kinds, all bits, all ranks by turns; every copy comes from device to device, and no step is lost.

    On a busy machine a flip may come before the controller has heard from all that the step before was repeated: it is
    of the same incident then, in a generation of its own.
    """
    kinds = [(action, bits) for action in PLACES for bits in FlippedBits]
    flips = []
    for number in range(FLIPS):
        action, bits = kinds[number % len(kinds)]
        flips.append(flip(number % 3, action, FIRST + APART * number, bits))
    job = run(start_job, 3, flips, calm=three, steps=VOTED_STEPS, step_s=0.0)
    incidents = finish(job)["incidents"]
    left = iter(flips)
    for incident in incidents:
        assert blamed(incident) == {next(left).rank for _ in incident["generations"]}, incident
        assert (incident["outcome"], incident["restore"], incident["steps_lost"]) == ("resumed", "replica", 0), incident
        assert incident["pids_before"] == incident["pids_after"], incident
        assert "from device to device" in " ".join(incident["reasons"]), incident
    assert next(left, None) is None, "some flip was not found"


def test_what_a_device_reports_in_a_step_with_a_vote_is_not_taken_for_silent(
    start_job: StartJob, three: Record
) -> None:
    """No rank is blamed for memory that the device says is lost; for the flips between such faults the right one is."""
    reported = [
        harm(1, FaultAction.MEMORY_PERSISTENT, InjectionPoint.FORWARD, 6),
        harm(2, FaultAction.MULTI_BIT, InjectionPoint.BACKWARD, 12),
        harm(0, FaultAction.HANG_COLLECTIVE, InjectionPoint.COLLECTIVE, 18),
        harm(1, FaultAction.MEMORY_PERSISTENT, InjectionPoint.UPDATE, 24),
    ]
    silent = [
        flip(1, FaultAction.FLIP_MOMENT, 9, FlippedBits.ELEMENT),
        flip(2, FaultAction.FLIP_PARAMETER, 15),
        flip(0, FaultAction.FLIP_GRADIENT, 21, FlippedBits.SIGN),
    ]
    policy = {**VOTING, **TRUSTING}
    job = run(start_job, 3, [*reported, *silent], calm=three, steps=VOTED_STEPS, step_s=0.0, policy=policy)
    incidents = finish(job)["incidents"]
    assert [blamed(each) for each in incidents] == [set(), {1}, set(), {2}, set(), {0}, set()], incidents
    assert all((each["replaced"], each["steps_lost"]) == ([], 0) for each in incidents), incidents


def test_of_two_ranks_that_differ_the_repetition_tells_who_was_wrong(start_job: StartJob) -> None:
    """Both go back to the copies of the device's tensors that they have in host memory."""
    flips = [
        flip(1, FaultAction.FLIP_GRADIENT, 6, FlippedBits.ELEMENT),
        flip(0, FaultAction.FLIP_PARAMETER, 12),
        flip(0, FaultAction.FLIP_MOMENT, 18, FlippedBits.EXPONENT),
    ]
    job = run(start_job, 2, flips, steps=24, step_s=0.0, policy=COPYING)
    first, changed, last = finish(job)["incidents"]
    for incident in (first, last):
        assert {each["kind"] for each in incident["reports"]} == {"copies_differ"}, incident
        assert (incident["restore"], incident["steps_lost"]) == ("host_copy", 1), incident
    assert (blamed(changed), changed["restore"]) == ({0}, "replica"), changed
    assert all(each["pids_before"] == each["pids_after"] for each in (first, changed, last))
    said = job.said()
    assert "rank 1 was wrong at step 7: the repetition" in said
    assert "rank 0 was wrong at step 19: the repetition" in said
    assert "rank 0 was wrong at step 7" not in said
    assert "rank 1 was wrong at step 19" not in said


def test_a_wrong_gradient_that_waits_in_the_queue_is_blamed_on_its_rank(start_job: StartJob) -> None:
    """Own ones and those of a peer's step; a device that is wrong each time is left for a spare.

    Memory that a device reports while it repeats a peer's step blames no rank.
    """
    once = [
        audits.flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 8),
        audits.flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 12, bits=FlippedBits.SIGN),
        audits.flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 16, bits=FlippedBits.TENSOR),
    ]
    reported = harm(1, FaultAction.MEMORY_PERSISTENT, InjectionPoint.REPLAY, 20)
    always = audits.flip(2, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 24, rate=1.0, incarnation=1)
    shape: dict[str, Any] = {"nodes": 3, "ranks_per_node": 1, "spares": 1}
    policy = {**AUDITS, **TRUSTING}
    job = audits.run(start_job, 3, [*once, reported, always], steps=30, policy=policy, **shape)
    *mended, lost, moved = finish(job)["incidents"]
    assert [{each["kind"] for each in incident["reports"]} for incident in mended] == [{"gradients_differ"}] * 3
    assert audits.blamed(job) == {(1, 8), (2, 12), (0, 16)}
    for incident in (*mended, lost):
        assert (incident["outcome"], incident["steps_lost"]) == ("resumed", 0), incident
        assert incident["pids_before"] == incident["pids_after"], incident
    assert (len(lost["generations"]), lost["restore"]) == (1, "replica"), lost
    assert "from device to device" in " ".join(lost["reasons"]), lost
    assert [(each["kind"], each["rank"]) for each in moved["reports"]] == [("wrong_gradient", 2)], moved
    assert (moved["replaced"], moved["decisions"][-1]["rung"], moved["steps_lost"]) == ([2], "recover", 0), moved


def test_a_batch_is_left_out_for_a_value_and_for_a_device_without_memory(start_job: StartJob) -> None:
    """By a rule, and where the device of another rank says that it has none left; all processes are kept."""
    *of_rule, last = LEFT_OUT
    without_memory = harm(1, FaultAction.OUT_OF_MEMORY, InjectionPoint.FORWARD, last - len(of_rule))
    policy = {"out_of_memory": "skip_batch"}
    bad = {"rank": 2, "batches": of_rule}
    job = ruled(start_job, bad, {"then": "skip_batch"}, faults=[without_memory], policy=policy)
    report = finish(job)
    assert {name: each["times"] for name, each in report["rules"].items()} == {"a_number": 3, "out_of_memory": 1}
    for incident in report["incidents"]:
        assert_nobody_harmed(incident, set())
    assert_as(job, without(start_job, *LEFT_OUT))


def test_all_go_back_on_their_devices_and_leave_out_the_data_since_then(start_job: StartJob) -> None:
    """A device reports damaged memory on the way."""
    damaged = harm(2, FaultAction.MEMORY_PERSISTENT, InjectionPoint.FORWARD, 11)
    bad, rule = {"rank": 0, "batches": [13]}, {"then": "roll_back", "steps": 2}
    job = ruled(start_job, bad, rule, faults=[damaged])
    report = finish(job)
    _, back = report["incidents"]
    assert (back["resumed_step"], back["restore"], back["replaced"]) == (10, "checkpoint", []), back
    assert report["steps_left_out"] == 4
    other = without(start_job, 10, 11, 12, 13)
    assert last_drawn(job) == last_drawn(other)
    for rank in range(RANKS):
        mine, theirs = job.record().ends[rank], other.record().ends[rank]
        assert {**mine, "pid": 0} == {**theirs, "pid": 0}


def slowed(start: StartJob, how: dict[str, Any], **options: Any) -> Job:
    """Start two ranks; how slow they are is heard a few times a second."""
    policy = {**ROOMY, "heartbeat": HEARD_OFTEN, "slow": {"then": "drain", "for_s": 0}}
    arguments = [json.dumps(how)]
    return start(policy=policy, script=SLOWED, more_arguments=arguments, steps=SLOWED_STEPS, step_s=WORK_S, **options)


def test_a_slow_rank_is_named_and_drained_and_one_that_waits_for_data_is_not(start_job: StartJob) -> None:
    """A rank that waits for either of them, in the queue of its device, is not slow."""
    loading = slowed(start_job, {"loader_s": 0.004}, nodes=1, ranks_per_node=2)
    seen = loading.until(named("slow_input"), "slow input")
    assert "slow input of rank 1" in seen.faults[0].report.detail
    assert finish(loading)["incidents"] == [], loading.said()
    job = slowed(start_job, {"spins": 500}, nodes=2, ranks_per_node=1, spares=1, gates=[GATE])
    slow = under_way(job).ranks[1]
    with on_purpose(slow.pid, job):
        job.until(named(node=slow.node), "a slow rank")
        job.until(lambda now: now.phase != "running" or all(each.step >= GATE for each in now.ranks), "a boundary")
        job.open_gate(GATE)
        job.until(lambda now: now.ranks[1].pid != slow.pid, "the drain")
    (incident,) = finish(job)["incidents"]
    assert_nobody_harmed(incident, {1}, ranks=2)
    assert incident["committed_before"] == incident["resumed_step"] < SLOWED_STEPS
    assert_same_numbers(job.record(), loading.record(), ranks=2)
