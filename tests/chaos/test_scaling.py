"""A world that loses a node for which there is no other goes on with fewer ranks, and grows when a node comes."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.utils.data import DistributedSampler

from midstep.protocol import environment as env
from midstep.protocol.discovery import read_endpoint
from midstep.protocol.keys import JobKeys
from midstep.protocol.types import ArmedFault, node_address

from .comparing import finish
from .conftest import StartJob
from .divided import BATCH, dataset
from .jobs import MARK, ROOMY, Job

pytestmark = pytest.mark.chaos

DIVIDED = Path(__file__).with_name("divided.py")
SCALED: dict[str, Any] = {**ROOMY, "scale": {"min_nodes": 1, "min_interval_s": 0}, "checkpoint": {"every_steps": 0}}
STEPS, STEP_S = 60, 0.05
LOSS, GROWTH = 6, 14  # steps at which the world is held, to lose a node and to get one


def bring_node(job: Job, name: str, faults: Sequence[ArmedFault] = ()) -> "subprocess.Popen[bytes]":
    """Start the agent of a node that nobody has asked for. `faults`: of the processes on it."""
    keys = job.run_directory / "keys"
    JobKeys.add(str(keys), node_address(name))
    endpoint = read_endpoint(job.run_directory)
    assert endpoint is not None
    options = {"--job": job.name, "--controller": endpoint, "--node": name, "--keys": keys}
    options |= {"--run-dir": job.run_directory}
    arguments = [str(part) for option in options.items() for part in option]
    environment = {**os.environ, MARK: job.name, "TMPDIR": str(job.temporary)}
    environment[env.FAULTS] = msgspec.json.encode(faults).decode()
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(job.temporary.parent / "inductor")
    return subprocess.Popen([sys.executable, "-m", "midstep.cli.agent", *arguments], env=environment)


def samples_by_step(job: Job) -> dict[int, list[int]]:
    """Return what all ranks together have learned from, by step."""
    learned: dict[int, list[int]] = {}
    for path in job.records.glob("samples.*"):
        for line in path.read_text().splitlines():
            step, _, samples = line.partition(": ")
            learned.setdefault(int(step), []).extend(map(int, samples.split()))
    return learned


def in_order(number: int) -> list[int]:
    """Return the first samples of the global order."""
    order: list[int] = list(DistributedSampler(dataset(), num_replicas=1, rank=0, shuffle=True, seed=5))
    return order[:number]


def test_a_world_shrinks_after_the_loss_of_a_node_and_grows_when_one_comes(start_job: StartJob) -> None:
    """All steps are done, no committed one is lost, and each sample is learned from once, in the global order."""
    job = start_job(script=DIVIDED, policy=SCALED, steps=STEPS, step_s=STEP_S, gates=[LOSS, GROWTH])
    job.held_at(LOSS)
    job.kill_node("node1")
    job.open_gate(LOSS)
    small = job.held_at(GROWTH)
    assert len(small.ranks) == 2
    agent = bring_node(job, "node9")
    try:
        job.until(lambda status: status.phase == "pausing", "a boundary at which the world can grow")
        job.open_gate(GROWTH)
        loss, growth = finish(job)["incidents"]
    finally:
        agent.kill()
        agent.wait(10)
    for incident in (loss, growth):
        assert incident["outcome"] == "resumed"
        assert incident["decisions"][-1]["rung"] == "reschedule_pod"
        assert incident["steps_lost"] == 0
    assert "with 1 of 2 nodes" in loss["decisions"][-1]["reason"]
    assert "grows from 1 to 2 nodes of the 2" in growth["decisions"][-1]["reason"]
    assert {path.read_text() for path in job.records.glob("size.*")} == {"4"}
    learned = samples_by_step(job)
    assert sorted(learned) == list(range(STEPS))
    sizes = [len(learned[step]) // BATCH for step in range(STEPS)]
    turn = growth["resumed_step"]
    assert sizes == [4] * LOSS + [2] * (turn - LOSS) + [4] * (STEPS - turn)
    seen = [sample for step in range(STEPS) for sample in learned[step]]
    assert Counter(seen) == Counter(in_order(len(seen)))
