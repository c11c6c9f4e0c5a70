"""A world that grows in place: the ranks that it has keep their processes, and new ones train with them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .divided import BATCH
from .jobs import Job, inject
from .test_scaling import DIVIDED, GROWTH, LOSS, SCALED, STEP_S, STEPS, bring_node, in_order, samples_by_step

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

IN_PLACE: dict[str, Any] = {**SCALED, "scale": {**SCALED["scale"], "in_place": True}}
LARGE, SMALL = 4, 2


@contextmanager
def grown(start_job: StartJob, fault: ArmedFault | None = None) -> Iterator[tuple[Job, dict[int, int]]]:
    """Have a job lose one of two nodes, and get another while it trains; give the pids of the small world, too.

    `fault`: what goes wrong while it grows.
    """
    is_new = fault is not None and fault.rank >= SMALL
    job = start_job(script=DIVIDED, policy=IN_PLACE, steps=STEPS, step_s=STEP_S, gates=[LOSS, GROWTH])
    job.held_at(LOSS)
    job.kill_node("node1")
    job.open_gate(LOSS)
    small = {rank.rank: rank.pid for rank in job.held_at(GROWTH).ranks}
    if fault is not None and fault.point is not None and not is_new:
        words = ["inject", str(job.directory), "--rank", str(fault.rank), "--at", fault.point.value]
        assert CliRunner().invoke(main, words, catch_exceptions=False).exit_code == 0
    agent = bring_node(job, "node9", [fault] if fault is not None and is_new else [])
    try:
        job.until(lambda status: status.phase == "pausing", "a boundary at which the world can grow")
        job.open_gate(GROWTH)
        yield job, small
    finally:
        agent.kill()
        agent.wait(10)


def read(job: Job, name: str) -> dict[str, str]:
    """Return what the ranks wrote down under a name."""
    return {path.suffix: path.read_text() for path in job.records.glob(f"{name}.*")}


def continued(start_job: StartJob, home: Path, nodes: int, until: int) -> Job:
    """Run a job of so many nodes from the newest checkpoint in a directory up to a step, and write one of that step."""
    checkpoint = {"directory": str(home), "every_steps": until}
    job = start_job(script=DIVIDED, nodes=nodes, policy={**SCALED, "checkpoint": checkpoint}, steps=until, step_s=0.0)
    assert not finish(job)["incidents"]
    return job


def test_a_world_grows_in_place_with_the_bits_of_one_that_had_the_size_from_that_step_on(
    start_job: StartJob, tmp_path: Path
) -> None:
    """No process restarts, no step is repeated, and each sample is learned from once, in the global order."""
    with grown(start_job) as (job, small):
        loss, growth = finish(job)["incidents"]
    assert (growth["outcome"], growth["rung"], growth["steps_lost"]) == ("resumed", "recover", 0)
    assert "all others keep theirs" in growth["decisions"][-1]["reason"]
    assert growth["replaced"] == [2, 3]
    assert {int(rank): pid for rank, pid in growth["pids_after"].items() if int(rank) < SMALL} == small
    assert set(read(job, "size").values()) == {str(LARGE)}

    learned = samples_by_step(job)
    turns = (loss["resumed_step"], growth["resumed_step"])
    sizes = [LARGE] * turns[0] + [SMALL] * (turns[1] - turns[0]) + [LARGE] * (STEPS - turns[1])
    assert [len(learned[step]) // BATCH for step in range(STEPS)] == sizes
    seen = [sample for step in range(STEPS) for sample in learned[step]]
    assert Counter(seen) == Counter(in_order(len(seen)))

    home = tmp_path / "reference"
    for nodes, until in zip((2, 1, 2), (*turns, STEPS), strict=True):
        reference = continued(start_job, home, nodes, until)
    assert len(set(read(job, "weights").values())) == 1
    assert read(job, "weights") == read(reference, "weights")


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (2, InjectionPoint.REBUILD),
        (3, InjectionPoint.REPAIR),
        (2, InjectionPoint.BARRIER),
        (0, InjectionPoint.REBUILD),
        (1, InjectionPoint.REPAIR),
        (0, InjectionPoint.ROLLBACK),
    ],
)
def test_a_process_that_dies_while_the_world_grows_is_replaced_and_no_sample_is_lost(
    start_job: StartJob, rank: int, point: InjectionPoint
) -> None:
    """Whichever it is: the world has its size by then, and the others keep their processes."""
    with grown(start_job, inject(rank, point, None, life=2)) as (job, small):
        growth = finish(job)["incidents"][1:]
    assert growth[-1]["outcome"] == "resumed"
    assert growth[0]["decisions"][0]["rung"] == "recover"
    assert any(f"rank {rank}" in decision["reason"] for each in growth for decision in each["decisions"][-1:]), growth
    last = {int(each): pid for each, pid in growth[-1]["pids_after"].items()}
    assert {each: last[each] for each in small if each != rank} == {each: small[each] for each in small if each != rank}
    learned = samples_by_step(job)
    seen = [sample for step in range(STEPS) for sample in {*learned[step]}]
    assert Counter(seen) == Counter(in_order(len(seen)))
    assert len({*read(job, "weights").values()}) == 1


def test_a_node_that_is_lost_while_the_world_grows_takes_no_committed_step_along(start_job: StartJob) -> None:
    """The world gets smaller again, from a checkpoint of the boundary: the new ranks had nothing that could be lost."""
    fault = inject(2, InjectionPoint.REBUILD, None, life=2, action=FaultAction.KILL_NODE)
    with grown(start_job, fault) as (job, _):
        shrunk = finish(job)["incidents"][-1]
    assert (shrunk["outcome"], shrunk["rung"], shrunk["steps_lost"]) == ("resumed", "reschedule_pod", 0), shrunk
    assert set(read(job, "size").values()) == {str(SMALL)}
    learned = samples_by_step(job)
    seen = [sample for step in range(STEPS) for sample in learned[step]]
    assert Counter(seen) == Counter(in_order(len(seen)))
