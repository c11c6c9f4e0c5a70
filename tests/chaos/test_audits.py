"""A gradient that is wrong before its reduction: a rank that repeats the step computes another one."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.rules import DO_NOT_REQUEUE
from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import PATIENCE_S, ROOMY, Job, inject
from .test_integrity import assert_same_end

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("audited.py")
AUDITS: dict[str, Any] = {**ROOMY, "integrity": {"audit_steps": 4, "strikes": 100}}
STEPS = 20
FLIPS = int(os.environ.get("MIDSTEP_FLIPS", "30"))  # the table in docs/integrity.md has 250
KINDS = (
    (FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD),
    (FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD),
    (FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY),
)


def flip(rank: int, action: FaultAction, point: InjectionPoint, step: int | None, **options: Any) -> ArmedFault:
    """Return a flip of what a rank computes."""
    return ArmedFault(rank, action, point, step, **options)


def run(
    start_job: StartJob,
    ranks: int,
    faults: Sequence[ArmedFault],
    *,
    steps: int = STEPS,
    patience_s: float = PATIENCE_S,
    **options: Any,
) -> Job:
    """Run a job with these flips, and one without; both end with the same bits."""
    shape = {"nodes": 1, "ranks_per_node": ranks, "script": SCRIPT, "steps": steps, "step_s": 0.0}
    calm = start_job(**shape)
    assert calm.wait(patience_s) == 0, calm.said()
    job = start_job(faults=faults, **{**shape, "policy": AUDITS, **options})
    assert job.wait(patience_s) == 0, job.said()
    assert_same_end(job.record(), calm.record(), ranks)
    return job


def many_flips(ranks: int, number: int) -> list[ArmedFault]:
    """Return flips of all kinds and bits, one in every second step, of one rank after the other."""
    kinds = [(*kind, bits) for kind in KINDS for bits in FlippedBits]
    flips = []
    for each in range(number):
        action, point, bits = kinds[each % len(kinds)]
        flips.append(flip(each % ranks, action, point, 6 + 2 * each, bits=bits))
    return flips


def blamed(job: Job) -> set[tuple[int, int]]:
    """Return who was found to have been wrong once, and in which step."""
    logs = "".join(log.read_text() for log in job.directory.glob("logs/*") if log.is_file())
    found = re.findall(r"rank (\d+) computed a wrong gradient in step (\d+)", logs)
    return {(int(rank), int(step)) for rank, step in found}


def test_a_wrong_gradient_is_blamed_on_its_rank_and_the_step_repeated(start_job: StartJob) -> None:
    """In a layer, in the backward pass, and in the rank that repeats: each once."""
    flips = [
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 8),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 12, bits=FlippedBits.SIGN),
        flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 16, bits=FlippedBits.TENSOR),
    ]
    job = run(start_job, 3, flips)
    incidents = finish(job)["incidents"]
    assert [{each["kind"] for each in incident["reports"]} for incident in incidents] == [{"gradients_differ"}] * 3
    for incident in incidents:
        assert (incident["outcome"], incident["steps_lost"]) == ("resumed", 0), incident
        assert incident["pids_before"] == incident["pids_after"], incident
    assert blamed(job) == {(1, 8), (2, 12), (0, 16)}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_each_of_many_wrong_gradients_is_blamed_on_its_rank_in_one_job(start_job: StartJob) -> None:
    """All kinds, all bits, all ranks, one flip every second step; the end is that of an undisturbed run.

    Steps are so short that a flip may come before the controller has heard from all that the step before was repeated:
    it is of the same incident then, in a generation of its own. Where other programs keep a rank from linking up in
    time, that takes one more.
    """
    flips = many_flips(3, FLIPS)
    policy = {**AUDITS, "integrity": {"audit_steps": 1, "strikes": 1000}}
    job = run(start_job, 3, flips, policy=policy, steps=10 + 2 * FLIPS, patience_s=700.0)
    incidents = finish(job)["incidents"]
    assert blamed(job) == {(each.rank, each.step) for each in flips}
    kinds = Counter(report["kind"] for each in incidents for report in each["reports"])
    assert kinds["gradients_differ"] == FLIPS
    assert sum(len(each["generations"]) for each in incidents) == FLIPS + kinds["link_up"]
    assert all(each["pids_before"] == each["pids_after"] for each in incidents)
    assert all((each["outcome"], each["steps_lost"]) == ("resumed", 0) for each in incidents)


@pytest.mark.soak
def test_a_rank_that_is_wrong_each_time_moves_to_a_spare(start_job: StartJob) -> None:
    """It differs in its own gradient and in the one that it repeats. The end is exact all the same."""
    broken = flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 8, rate=1.0, incarnation=1)
    job = run(start_job, 3, [broken], nodes=3, ranks_per_node=1, spares=1)
    (incident,) = finish(job)["incidents"]
    assert [(each["kind"], each["rank"]) for each in incident["reports"]] == [("wrong_gradient", 1)], incident
    assert (incident["replaced"], incident["decisions"][-1]["rung"], incident["steps_lost"]) == ([1], "recover", 0)
    assert "the node is left" in incident["reports"][0]["detail"]


@pytest.mark.soak
def test_of_two_ranks_the_repetition_tells_who_was_wrong(start_job: StartJob) -> None:
    """Each of them repeats the other."""
    flips = [
        flip(1, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 8, bits=FlippedBits.ELEMENT),
        flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 12, bits=FlippedBits.TENSOR),
    ]
    job = run(start_job, 2, flips)
    assert blamed(job) == {(1, 8), (0, 12)}
    assert all(each["pids_before"] == each["pids_after"] for each in finish(job)["incidents"])


@pytest.mark.soak
def test_a_thread_that_saves_does_its_collectives_beside_the_repetitions(start_job: StartJob) -> None:
    """They belong to no step, and have peers in a repetition, too."""
    job = run(start_job, 3, [], policy={**AUDITS, "integrity": {"audit_steps": 1}}, more_arguments=("saving",))
    assert finish(job)["incidents"] == [], job.said()
    whole = {place.parent.name for place in job.records.glob("step-*/.metadata")}
    assert whole == {f"step-{step}" for step in range(STEPS)}


@pytest.mark.soak
def test_processes_that_are_lost_in_audited_steps_come_back_as_ever(start_job: StartJob) -> None:
    """In a replay, in the step itself, at its barrier; votes are held beside. Nobody is blamed."""
    kills = [
        inject(1, InjectionPoint.REPLAY, 4),
        inject(2, InjectionPoint.BACKWARD, 8),
        inject(0, InjectionPoint.BARRIER, 12),
        inject(1, InjectionPoint.UPDATE, 16, life=2),
    ]
    policy = {**AUDITS, "integrity": {"every_steps": 1, "audit_steps": 4}}
    job = run(start_job, 3, kills, policy=policy)
    incidents = finish(job)["incidents"]
    assert [incident["replaced"] for incident in incidents] == [[1], [2], [0], [1]], incidents
    assert blamed(job) == set()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "arguments", "why"),
    [
        ("audited.py", ("changing",), "something in the training is not deterministic"),
        ("training.py", (), "does not take its batch by `batch = step.inputs"),
    ],
)
def test_what_cannot_be_repeated_is_refused_in_the_first_steps(
    start_job: StartJob, script: str, arguments: tuple[str, ...], why: str
) -> None:
    """In a sentence that says what to do, before any rank is blamed; no process is restarted to hear it again."""
    job = start_job(
        nodes=1,
        ranks_per_node=2,
        script=SCRIPT.with_name(script),
        steps=STEPS,
        step_s=0.0,
        policy=AUDITS,
        more_arguments=arguments,
    )
    assert job.wait(PATIENCE_S) == DO_NOT_REQUEUE
    assert why in job.said()
    assert job.record().ends == {}
    assert [each["replaced"] for each in job.report()["incidents"]] == [[]]


@pytest.mark.soak
def test_what_is_only_to_be_reported_goes_on(start_job: StartJob) -> None:
    """No step is repeated."""
    policy = {**AUDITS, "integrity": {"audit_steps": 4, "then": "report"}}
    flips = [flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 8)]
    job = run(start_job, 3, flips, policy=policy)
    assert finish(job)["incidents"] == []
