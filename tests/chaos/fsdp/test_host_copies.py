"""A sharded model without a second holder of anything: a lost rank comes back from copies in host memory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from midstep.processor.checkpoints import archive
from midstep.protocol.host_copies import read_header
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..comparing import assert_same_numbers, finish
from ..jobs import Job, inject
from .conftest import PATIENCE_S, POLICY, WORLD, StartSharded, undisturbed
from .training import Setting

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(500)]

COPYING: dict[str, Any] = {
    **POLICY,
    "restore": ["replica", "host_copy", "checkpoint"],
    "host_copy": {"every_steps": 1},
    "checkpoint": {"every_steps": 0},
}


def run(start_sharded: StartSharded, setting: Setting, faults: Sequence[ArmedFault], **options: Any) -> Job:
    """Run a setting with these faults to its end, which is that of an undisturbed run bit for bit."""
    calm = undisturbed(start_sharded, setting)
    job = start_sharded(setting, faults, **{"nodes": 1, "ranks_per_node": WORLD, "policy": COPYING, **options})
    assert job.wait(PATIENCE_S) == 0, job.said()
    assert_same_numbers(job.record(), calm, ranks=WORLD)
    return job


def assert_from_copies(incident: dict[str, Any], replaced: set[int], most_lost: int) -> None:
    """All went back to their copies; only these ranks got another process, and not more steps were lost."""
    assert (incident["outcome"], incident["restore"]) == ("resumed", "host_copy"), incident
    assert set(incident["replaced"]) == replaced, incident
    assert incident["healthy_pids_kept"], incident
    assert incident["steps_lost"] <= most_lost, incident


def test_the_only_holders_of_pieces_come_back_from_their_copies(start_sharded: StartSharded) -> None:
    """Two at once in a forward pass, one in its update, and one in the middle of its copy."""
    faults = [
        *(inject(rank, InjectionPoint.FORWARD, 3) for rank in (1, 2)),
        inject(3, InjectionPoint.UPDATE, 6),
        inject(0, InjectionPoint.HOST_COPY, 9),
    ]
    job = run(start_sharded, Setting(mesh=(4,)), faults)
    incidents = finish(job)["incidents"]
    assert len(incidents) == 3, job.said()
    for incident, replaced, lost in zip(incidents, ({1, 2}, {3}, {0}), (1, 1, 2), strict=True):
        assert_from_copies(incident, replaced, lost)


def flip_a_bit(process: psutil.Process, step: int) -> None:
    """Flip a bit in the copy of a step of a rank, in the memory that outlives its process."""
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        if "midstep-copy" not in os.readlink(link):
            continue
        with link.open("r+b", buffering=0) as file:
            header = read_header(file.fileno())
            if header is not None and header.step == step:
                file.seek(header.size_bytes - 1000)
                (byte,) = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
                return
    raise AssertionError(f"no copy of step {step}")


@pytest.mark.soak
def test_a_damaged_copy_is_refused_and_all_go_back_to_the_one_before_it(start_sharded: StartSharded) -> None:
    """The rank whose copy it is gets another process, and loads its older one."""
    setting = Setting(mesh=(4,), steps=10)
    calm = undisturbed(start_sharded, setting)
    faults = [inject(1, InjectionPoint.FORWARD, 6)]
    job = start_sharded(setting, faults, gates=(6,), nodes=1, ranks_per_node=WORLD, policy=COPYING)
    job.held_at(6)
    flip_a_bit(job.rank_process(2), 6)
    job.open_gate(6)
    assert job.wait(PATIENCE_S) == 0, job.said()
    assert_same_numbers(job.record(), calm, ranks=WORLD)
    (incident,) = finish(job)["incidents"]
    assert (incident["outcome"], incident["restore"], incident["resumed_step"]) == ("resumed", "host_copy", 5), incident
    assert set(incident["replaced"]) == {1, 2}, incident


@pytest.mark.soak
def test_a_job_without_memory_for_copies_trains_on_without_them(start_sharded: StartSharded) -> None:
    """A loss then takes the next source, with a reason for it."""
    policy = {**COPYING, "host_copy": {"every_steps": 1, "memory_bytes": 1 << 20}, "checkpoint": {"every_steps": 4}}
    job = run(start_sharded, Setting(mesh=(4,), steps=8), [inject(1, InjectionPoint.FORWARD, 6)], policy=policy)
    (incident,) = finish(job)["incidents"]
    assert (incident["outcome"], incident["restore"], incident["resumed_step"]) == ("resumed", "checkpoint", 4), (
        incident
    )
    assert "no copies in host memory any more" in job.said()


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [(2, 2), (4,)], ids=["both holders of a piece", "all ranks"])
def test_all_holders_of_a_piece_come_back_from_their_copies(start_sharded: StartSharded, mesh: tuple[int, ...]) -> None:
    """Also where no process is left; the world then starts again, and reads memory and not a disk."""
    victims = (1, 3) if len(mesh) > 1 else range(WORLD)
    faults = [inject(rank, InjectionPoint.BACKWARD, 6) for rank in victims]
    job = run(start_sharded, Setting(mesh=mesh, steps=9), faults)
    assert {incident["restore"] for incident in finish(job)["incidents"]} == {"host_copy"}, job.said()


@pytest.mark.soak
def test_a_checkpoint_of_pieces_is_written_from_copies_though_ranks_die(start_sharded: StartSharded) -> None:
    """Two of four are killed right after its copy; it is complete in the end, and plain torch reads it."""
    checkpoint = {"every_steps": 4, "format": "dcp", "keep": 9, "asynchronous": True}
    faults = [inject(rank, InjectionPoint.FORWARD, 5) for rank in (0, 1)]
    job = run(start_sharded, Setting(mesh=(4,), steps=8), faults, policy={**COPYING, "checkpoint": checkpoint})
    (incident,) = finish(job)["incidents"]
    assert_from_copies(incident, {0, 1}, 1)
    directory = job.directory / "checkpoints"
    assert archive.complete_steps(directory) == (4, 8), job.said()
    metadata = FileSystemReader(directory / "step-00000008").read_metadata()
    assert any(str(key).startswith("model.") for key in metadata.state_dict_metadata)


@pytest.mark.soak
def test_copies_that_are_taken_seldom_cost_the_steps_since(start_sharded: StartSharded) -> None:
    """No more than from one copy to the next, and the step in hand."""
    policy = {**COPYING, "host_copy": {"every_steps": 4}}
    job = run(start_sharded, Setting(mesh=(4,)), [inject(2, InjectionPoint.FORWARD, 8)], policy=policy)
    (incident,) = finish(job)["incidents"]
    assert_from_copies(incident, {2}, 4)
    assert incident["resumed_step"] == 5, incident


TWO_NODES: dict[str, Any] = {**COPYING, "host_copy": {"every_steps": 1, "copies": 2}}
KILL_NODE = FaultAction.KILL_NODE
ON_TWO_NODES: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "spares": 1, "policy": TWO_NODES}
SLOW = Setting(mesh=(4,), steps=9, step_s=0.3)  # slow enough for a copy to be on two nodes before the next step ends


def test_a_lost_node_comes_back_from_copies_on_another_one(start_sharded: StartSharded) -> None:
    """A spare node takes its ranks; survivors keep their processes, and no checkpoint is read."""
    faults = [inject(2, InjectionPoint.BACKWARD, 5, action=KILL_NODE)]
    job = run(start_sharded, SLOW, faults, **ON_TWO_NODES)
    (incident,) = finish(job)["incidents"]
    assert_from_copies(incident, {2, 3}, 1)
    assert "rank 2 gets its copy from rank 0" in str(incident), incident
    assert "on its own node only" not in job.said()


@pytest.mark.soak
def test_a_rank_that_keeps_copies_dies_in_the_middle_of_one_and_then_the_node_of_its_guest(
    start_sharded: StartSharded,
) -> None:
    """What it kept outlives its process: the next one sends it."""
    faults = [inject(0, InjectionPoint.GUEST_COPY, 3), inject(3, InjectionPoint.FORWARD, 7, action=KILL_NODE)]
    job = run(start_sharded, msgspec.structs.replace(SLOW, steps=11), faults, **ON_TWO_NODES)
    first, second = finish(job)["incidents"]
    assert_from_copies(first, {0}, 2)
    assert_from_copies(second, {2, 3}, 1)


@pytest.mark.soak
def test_two_nodes_are_lost_one_after_the_other(start_sharded: StartSharded) -> None:
    """After the first one copies are on two nodes again with the first step: the second one costs no more."""
    faults = [
        inject(0, InjectionPoint.BACKWARD, 4, action=KILL_NODE),
        inject(2, InjectionPoint.BACKWARD, 8, action=KILL_NODE),
    ]
    job = run(start_sharded, msgspec.structs.replace(SLOW, steps=12), faults, **{**ON_TWO_NODES, "spares": 2})
    first, second = finish(job)["incidents"]
    assert_from_copies(first, {0, 1}, 1)
    assert_from_copies(second, {2, 3}, 1)


@pytest.mark.soak
def test_where_both_holders_of_a_copy_are_lost_the_checkpoint_is_read(start_sharded: StartSharded) -> None:
    """Both nodes of a job, whose ranks keep copies of each other."""
    policy = {**TWO_NODES, "checkpoint": {"every_steps": 4}}
    job = start_sharded(SLOW, gates=(6,), **{**ON_TWO_NODES, "spares": 2, "policy": policy})
    calm = undisturbed(start_sharded, SLOW)
    nodes = {rank.node for rank in job.held_at(6).ranks}
    assert len(nodes) == 2
    for node in sorted(nodes):
        job.kill_node(node)
    job.open_gate(6)
    assert job.wait(PATIENCE_S) == 0, job.said()
    assert_same_numbers(job.record(), calm, ranks=WORLD)
    assert {incident["restore"] for incident in finish(job)["incidents"]} == {"checkpoint"}, job.said()


@pytest.mark.soak
def test_where_all_start_again_after_the_loss_of_a_node_memory_is_read_and_no_disk(start_sharded: StartSharded) -> None:
    """The policy keeps no process; the ranks of the lost node get their copies from the other one."""
    ladder = [{"rung": "reschedule_pod", "attempts": 3, "budget": {"per_job": 5}}, {"rung": "stop"}]
    faults = [inject(2, InjectionPoint.FORWARD, 5, action=KILL_NODE)]
    job = run(start_sharded, SLOW, faults, **{**ON_TWO_NODES, "policy": {**TWO_NODES, "ladder": ladder}})
    (incident,) = finish(job)["incidents"]
    assert (incident["outcome"], incident["restore"]) == ("resumed", "host_copy"), incident
    assert incident["steps_lost"] <= 1, incident
