"""Many flips in one job: each is found, all processes are kept, and the end is that of an undisturbed run."""

import json
import os
import re
from typing import Any

import pytest

from midstep.controller.endpoints.control_requests import InjectRequest
from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import PATIENCE_S, Job, Record, inject
from .test_integrity import COPYING, PLACES, VOTING, assert_same_end, blamed, flip, run
from .test_rules import RULED

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(600)]

FLIPS = int(os.environ.get("MIDSTEP_FLIPS", "150"))  # in the job with a vote in each step
FLIPS_BETWEEN = int(os.environ.get("MIDSTEP_FLIPS", "30"))  # in each of the others
VOTES_EVERY = 4
APART = VOTES_EVERY + 1  # of two flips, so that they fall on each step of those between two votes
KINDS = [(action, bits) for action in PLACES for bits in FlippedBits]
LONG_STEPS = 10 + APART * FLIPS_BETWEEN
LONG_PATIENCE_S = PATIENCE_S + 3.0 * FLIPS_BETWEEN


@pytest.fixture(scope="module")
def calm(start_shared_job: StartJob) -> dict[int, Record]:
    """What two and three ranks write down in a long run to which nothing happens."""
    found = {}
    for ranks in (2, 3):
        job = start_shared_job(nodes=1, ranks_per_node=ranks, steps=LONG_STEPS, step_s=0.0)
        assert job.wait(LONG_PATIENCE_S) == 0, job.said()
        found[ranks] = job.record()
    return found


def flips_of(ranks: int, first: int, apart: int, number: int) -> list[ArmedFault]:
    """Return flips of all kinds of state, of all bits, on all ranks by turns."""
    flips = []
    for each in range(number):
        action, bits = KINDS[each % len(KINDS)]
        flips.append(flip(each % ranks, action, first + apart * each, bits))
    return flips


def long_run(start_job: StartJob, calm: Record, faults: list[ArmedFault], **options: Any) -> Job:
    """Run a job of as many ranks and steps as the calm one, with these faults; both end with the same bits."""
    return run(
        start_job,
        len(calm.ends),
        faults,
        calm=calm,
        steps=LONG_STEPS,
        step_s=0.0,
        patience_s=LONG_PATIENCE_S,
        **options,
    )


def test_each_of_many_flips_is_blamed_on_its_rank_in_one_job(start_job: StartJob) -> None:
    """All kinds, all bits, all ranks, one flip every third step; the end is that of an undisturbed run all the same."""
    flips = flips_of(3, 4, 3, FLIPS)
    job = run(start_job, 3, flips, steps=10 + 3 * FLIPS, step_s=0.0, patience_s=500.0)
    incidents = finish(job)["incidents"]
    assert [blamed(each) for each in incidents] == [{each.rank} for each in flips]
    assert all(each["pids_before"] == each["pids_after"] for each in incidents)
    assert all((each["outcome"], each["steps_lost"]) == ("resumed", 0) for each in incidents)


A_NUMBER = {"name": "a_number", "value": "loss", "not_finite": True, "then": "repeat_step"}
SELDOM: dict[str, Any] = {
    **COPYING,
    "checkpoint": {"every_steps": 5 * VOTES_EVERY},  # there is a vote in these steps, too
    "integrity": {"every_steps": VOTES_EVERY, "strikes": 1000},
    "rules": [A_NUMBER],  # with what is no number all ranks are equal again, before the next vote
}


def step_of(each: ArmedFault) -> int:
    """Return the step in which bits flip."""
    assert each.step is not None
    return each.step


def at_once(each: ArmedFault, votes_every: int) -> bool:
    """Say whether the step of a flip has a vote that finds it before anything is computed with it."""
    return each.action is FaultAction.FLIP_PARAMETER and step_of(each) % votes_every == 0


def in_the_last_update(each: ArmedFault, votes_every: int) -> bool:
    """Say whether a flip is in the last update before a vote: no gradient is computed with it."""
    return each.action is not FaultAction.FLIP_PARAMETER and (step_of(each) + 1) % votes_every == 0


def sources(flips: list[ArmedFault], votes_every: int) -> list[str]:
    """Return what each of these is mended from."""
    return ["replica" if at_once(each, votes_every) else "host_copy" for each in flips]


def assert_all_kept(incidents: list[dict[str, Any]]) -> None:
    """Each ended well, in the processes that there were."""
    for each in incidents:
        assert (each["outcome"], each["pids_before"]) == ("resumed", each["pids_after"]), each


def told_by_repetitions(job: Job) -> set[tuple[int, int]]:
    """Return the ranks that were found to have been wrong by the repetition of a step, with the step of the vote."""
    logs = "".join(log.read_text() for log in job.directory.glob("logs/*") if log.is_file())
    found = re.findall(r"rank (\d+) was wrong at step (\d+): the repetition", logs)
    return {(int(rank), int(step)) for rank, step in found}


def test_between_votes_each_of_many_flips_is_blamed_on_its_rank_of_three(
    start_job: StartJob, calm: dict[int, Record]
) -> None:
    """The gradients of all were wrong meanwhile: all go back to the copies that passed the last vote."""
    flips = flips_of(3, 5, APART, FLIPS_BETWEEN)
    job = long_run(start_job, calm[3], flips, policy=SELDOM)
    incidents = finish(job)["incidents"]
    assert [blamed(each) for each in incidents] == [{each.rank} for each in flips]
    assert [each["restore"] for each in incidents] == sources(flips, VOTES_EVERY)
    assert_all_kept(incidents)


@pytest.mark.parametrize("every", [VOTES_EVERY, 1])
def test_each_of_many_flips_is_found_with_two_ranks(start_job: StartJob, calm: dict[int, Record], every: int) -> None:
    """The repetition tells the rank of one in the last update before a vote; earlier ones are in the state of both."""
    flips = flips_of(2, 5, APART, FLIPS_BETWEEN)
    policy = {**SELDOM, "integrity": {"every_steps": every, "strikes": 1000}}
    job = long_run(start_job, calm[2], flips, policy=policy)
    incidents = finish(job)["incidents"]
    assert [each["restore"] for each in incidents] == sources(flips, every)
    assert [blamed(each) for each in incidents] == [{each.rank} if at_once(each, every) else set() for each in flips]
    assert_all_kept(incidents)
    told = told_by_repetitions(job)
    assert told >= {(each.rank, step_of(each) + 1) for each in flips if in_the_last_update(each, every)}
    flipped = {(each.rank, step_of(each) + later) for each in flips for later in range(1, every + 1)}
    assert told <= flipped, "a rank is blamed where nothing has flipped since the vote before"


REPAIRS = FLIPS_BETWEEN // 3
REPAIRS_APART = 3 * APART
BITS = list(FlippedBits)
RESTARTS = {"rung": "reschedule_pod", "attempts": 3, "budget": {"per_job": 1000}}


def test_each_of_many_copies_that_change_on_their_way_is_sent_again(
    start_job: StartJob, calm: dict[int, Record]
) -> None:
    """The first vote of each newcomer finds it, before anything is computed with it. No step is lost."""
    faults = []
    for each in range(REPAIRS):
        killed = each % 2
        sender = 1 - killed  # the lowest of those that are as near; it was killed the time before
        faults += [
            inject(killed, InjectionPoint.FORWARD, 6 + REPAIRS_APART * each, life=1 + each // 2),
            ArmedFault(
                sender,
                FaultAction.FLIP_REPAIR,
                InjectionPoint.REPAIR,
                incarnation=1 + (each + killed) // 2,
                bits=BITS[each % len(BITS)],
            ),
        ]
    policy = {**VOTING, "integrity": {"every_steps": 1000, "strikes": 1000}}
    job = long_run(start_job, calm[3], faults, policy=policy)
    incidents = finish(job)["incidents"]
    found = [(each["replaced"], blamed(each), each["restore"], each["steps_lost"]) for each in incidents]
    assert found == [([each % 2], {each % 2}, "replica", 0) for each in range(REPAIRS)]


def test_each_of_many_checkpoints_that_have_changed_is_not_loaded(start_job: StartJob, calm: dict[int, Record]) -> None:
    """Two ranks differ and go back. They find out as they load it, so both get another process for the one before."""
    kinds = [kind for kind in KINDS if kind[0] is not FaultAction.FLIP_PARAMETER]
    faults = []
    for each in range(REPAIRS):
        rank, step, life = each % 2, 12 + REPAIRS_APART * each, 1 + each
        action, bits = kinds[each % len(kinds)]
        changed = BITS[each % len(BITS)]
        faults += [
            ArmedFault(rank, FaultAction.FLIP_CHECKPOINT, InjectionPoint.FORWARD, step, life, bits=changed),
            ArmedFault(rank, action, PLACES[action], step + 1, life, bits=bits),
        ]
    policy = {
        **VOTING,
        "ladder": [{"rung": "retry_step", "attempts": 8, "budget": {"per_job": 1000}}, RESTARTS, {"rung": "stop"}],
        "checkpoint": {"every_steps": 5},
        "integrity": {"every_steps": 1, "strikes": 1000},
    }
    job = long_run(start_job, calm[2], faults, policy=policy)
    incidents = finish(job)["incidents"]
    found = [({each["kind"] for each in one["reports"]}, one["restore"], one["resumed_step"]) for one in incidents]
    assert [(blamed(each), each["restore"], each["resumed_step"]) for each in incidents] == [
        (set(), "checkpoint", REPAIRS_APART * each + 5) for each in range(REPAIRS)
    ], found
    assert all("is damaged" in str(each) for each in incidents)


def test_one_of_two_that_is_wrong_in_each_update_moves_to_a_spare(
    start_job: StartJob, undisturbed_pair: Record
) -> None:
    """It differs from itself in the repetition, and the other one does not. Its copy is on the other node as well."""
    broken = ArmedFault(1, FaultAction.FLIP_GRADIENT, InjectionPoint.UPDATE, None, 1, rate=1.0)
    policy = {**COPYING, "host_copy": {"every_steps": 1, "copies": 2}}
    job = start_job(nodes=2, ranks_per_node=1, spares=1, policy=policy, gates=[5])
    job.held_at(5)
    job.ask(InjectRequest(broken))
    job.open_gate(5)
    first, second = finish(job)["incidents"]
    assert ({each["kind"] for each in first["reports"]}, first["replaced"]) == ({"copies_differ"}, [])
    assert (blamed(second), second["replaced"]) == ({1}, [1]), second
    assert "recover" in {each["rung"] for each in second["decisions"]}, second
    assert (second["restore"], second["steps_lost"]) == ("host_copy", 1), second
    assert_same_end(job.record(), undisturbed_pair, 2)


def test_votes_and_a_rule_on_a_value_find_what_each_of_them_is_for(start_job: StartJob) -> None:
    """Also in one step: its value is no number, and copies differ. It is repeated once for both."""
    flips = [
        flip(0, FaultAction.FLIP_PARAMETER, 6),
        flip(1, FaultAction.FLIP_GRADIENT, 8, FlippedBits.ELEMENT),
        flip(0, FaultAction.FLIP_MOMENT, 14, FlippedBits.TENSOR),
    ]
    shape = {"nodes": 1, "ranks_per_node": 2, "steps": 24, "script": RULED}
    calm = start_job(**shape, more_arguments=["{}"])
    finish(calm)
    bad = json.dumps({"rank": 1, "batches": [9, 20], "times": 1})
    policy = {**COPYING, "integrity": VOTING["integrity"], "rules": [A_NUMBER]}
    job = start_job(**shape, more_arguments=[bad], faults=flips, policy=policy)
    report = finish(job)
    assert_all_kept(report["incidents"])
    assert told_by_repetitions(job) == {(1, 9), (0, 15)}
    assert [blamed(each) for each in report["incidents"] if blamed(each)] == [{0}]
    assert report["rules"]["a_number"]["times"] == 1  # in step 9 the vote comes first, and the step is repeated for it
    assert_same_end(job.record(), calm.record(), 2)
