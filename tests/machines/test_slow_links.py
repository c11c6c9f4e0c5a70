"""A machine whose cable is slow is named, and drained between two steps, though no rank computes more slowly."""

import pytest

from midstep.protocol.incidents import JobStatus

from ..chaos.comparing import assert_same_numbers
from .conftest import StartJob, run_undisturbed
from .network import Quality

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

NODES, STEPS = 3, 200
BEFORE, AFTER, END = 30, 120, STEPS - 1
WITHIN_STEPS = 20
POLICY = {
    "heartbeat": {"interval_s": 0.2, "missed": 50},
    "slow": {"then": "drain", "for_s": 0},
    "stall": {"grace_s": 10},  # the first step over the slow cable takes ten to twenty times as long as those before
}
SLOW = {"late": Quality(delay_s=0.02), "thin": Quality(rate_bits=4e6)}


def named(status: JobStatus) -> list[str]:
    """Return the nodes that are said to have slow links."""
    return [fault.report.node or "" for fault in status.faults if fault.report.kind == "slow_link"]


@pytest.mark.parametrize("quality", SLOW.values(), ids=SLOW)
def test_a_machine_with_a_slow_cable_is_named_and_left_between_two_steps(
    start_job: StartJob, tmp_path_factory: pytest.TempPathFactory, quality: Quality
) -> None:
    undisturbed = run_undisturbed(tmp_path_factory.mktemp("undisturbed") / "it", ranks=NODES, steps=STEPS)
    job = start_job(NODES + 2, nodes=NODES, steps=STEPS, step_s=0.05, policy=POLICY, gates=(BEFORE, AFTER, END))
    status = job.held_at(BEFORE)
    assert named(status) == []
    slow = status.ranks[1].node
    job.machines.network.worsen(job.machine_of(1).number, quality)
    job.open_gate(BEFORE)
    seen = job.until(lambda status: bool(named(status)), "a slow link")
    assert named(seen) == [slow]
    assert max(rank.step for rank in seen.ranks) <= BEFORE + WITHIN_STEPS, seen.faults
    job.until(lambda status: status.phase == "pausing", "a boundary behind the gate")
    job.open_gate(AFTER)
    job.until(lambda status: all(rank.node != slow for rank in status.ranks), "the ranks to leave it")
    job.open_gate(END)
    report = job.finish()
    (incident,) = report["incidents"]
    assert incident["steps_lost"] == 0
    assert "slow links of rank 1" in str(incident)
    assert_same_numbers(job.record(), undisturbed, ranks=NODES)
