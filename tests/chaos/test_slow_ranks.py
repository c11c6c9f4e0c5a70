"""Ranks that are slow are named, and drained between two steps. A slow loader is called that, and drains nothing."""

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.protocol.incidents import JobStatus, RankStatus

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .divided import BATCH
from .jobs import PATIENCE_S, ROOMY, Job
from .test_scaling import DIVIDED, SCALED, in_order, samples_by_step

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(400)]

SLOWED = Path(__file__).with_name("slowed.py")
RANKS, STEPS, WORK_S = 2, 160, 0.06
BEFORE = 30  # all ranks are held in front of this step, which is the first that is slow
WITHIN_STEPS = 20
GATE = 120  # a busy machine may take longer to prepare the drain than the job would last
HEARD_OFTEN = {"interval_s": 0.15, "missed": 60}
QUOTAS = Path("/sys/fs/cgroup/cpu")


def slowed(start: StartJob, how: dict[str, Any], **options: Any) -> Job:
    """Start two ranks; how slow they are is heard a few times a second."""
    policy = {**ROOMY, "heartbeat": HEARD_OFTEN, "slow": {"then": "drain", "for_s": 0}}
    return start(policy=policy, script=SLOWED, more_arguments=[json.dumps(how)], steps=STEPS, step_s=WORK_S, **options)


def under_way(job: Job) -> JobStatus:
    """Wait until the ranks are compared."""
    return job.until(
        lambda status: all(rank.slowness for rank in status.ranks) and len(status.ranks) == RANKS, "scores"
    )


def named(kind: str = "slow", node: str = "") -> Callable[[JobStatus], bool]:
    """Say whether a node is called slow."""
    return lambda status: any(fault.report.kind == kind and node in {"", fault.report.node} for fault in status.faults)


def left_or_at_gate(now: JobStatus, rank: RankStatus) -> bool:
    """Return whether a drain is on its way, or all ranks are held where none can begin: no boundary comes there."""
    left = rank.pid not in {each.pid for each in now.ranks}
    return left or now.phase == "pausing" or all(each.step >= GATE for each in now.ranks)


@contextlib.contextmanager
def pulses(pid: int, stopped_s: float = 0.1, running_s: float = 0.05) -> Iterator[None]:
    """Stop a process two thirds of the time, until it is gone or the block is left.

    Half of the time is so little that other work on the machine hides it in some of the rounds.
    """
    over = threading.Event()

    def pulse() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stopped_s)
                os.kill(pid, signal.SIGCONT)
                over.wait(running_s)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def quota(pid: int, share: float = 0.03) -> Iterator[None]:
    """Let a process have so much of a core, by a control group."""
    group = QUOTAS / f"midstep-{pid}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text(str(round(100_000 * share)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (group / "cpu.cfs_quota_us").write_text("-1")  # a process that ends needs some of it
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            for line in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (QUOTAS / "cgroup.procs").write_text(line)
            try:
                group.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(0.05)


@pytest.fixture(scope="module")
def with_slow_loader(start_shared_job: StartJob) -> tuple[Job, JobStatus]:
    """A job of which one rank has a slow loader, and how it stood when that was known; it has ended."""
    job = slowed(start_shared_job, {"loader_s": 0.004}, nodes=1, ranks_per_node=RANKS)
    seen = job.until(named("slow_input"), "slow input")
    assert finish(job)["incidents"] == [], job.said()
    return job, seen


def test_a_slow_loader_is_called_slow_input_and_nobody_is_replaced(with_slow_loader: tuple[Job, JobStatus]) -> None:
    """Its own time is that of the others."""
    _, seen = with_slow_loader
    (fault,) = seen.faults
    assert "slow input of rank 1" in fault.report.detail
    assert fault.report.level == "NotHandleFault"
    assert seen.ranks[1].input_s > 0.02 > seen.ranks[0].input_s
    assert seen.ranks[1].slowness < 1.3


@contextlib.contextmanager
def on_purpose(_: int, job: Job) -> Iterator[None]:
    """Have rank 1 be slow, as docs/stragglers.md does: by so much that other work on the machine does not hide it."""
    slow_down(job, 1)
    yield


def slow_down(job: Job, rank: int) -> None:
    """Have a rank take 0.2 s more in each step."""
    done = CliRunner().invoke(main, ["inject", str(job.directory), "--rank", str(rank), "--slow", "0.2"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("slowing", [pulses, quota, on_purpose], ids=["pulses", "quota", "on purpose"])
def test_a_slow_rank_is_named_within_20_steps_and_drained(
    start_job: StartJob, slowing: Callable[..., Any], with_slow_loader: tuple[Job, JobStatus]
) -> None:
    """Between two steps; no other rank is touched, no step is lost or repeated, and no bit differs."""
    job = slowed(start_job, {"spins": 500}, nodes=RANKS, ranks_per_node=1, spares=1, gates=[BEFORE, GATE])
    under_way(job)
    before = job.held_at(BEFORE)
    assert before.faults == ()
    rank = before.ranks[1]
    with slowing(rank.pid, job) if slowing is on_purpose else slowing(rank.pid):
        job.open_gate(BEFORE)
        seen = job.until(named(node=rank.node), "a slow rank")
        job.until(lambda now: left_or_at_gate(now, rank), "a boundary")
        job.open_gate(GATE)
        job.until(lambda now: now.ranks[1].pid != rank.pid, "the drain")
    report = finish(job)
    (incident,), (told, *_) = report["incidents"], report["slow"]
    assert_nobody_harmed(incident, {1}, ranks=RANKS)
    assert (told["node"], told["answer"], told["incident"]) == (rank.node, "drained", incident["number"])
    assert told["scores"]["1"] > 1.3
    assert incident["committed_before"] == incident["resumed_step"]
    assert f"{rank.node} is not well (rank 1 is slow" in incident["decisions"][0]["reason"]
    assert max(each.step for each in seen.ranks) <= BEFORE + WITHIN_STEPS, seen.faults
    for each in range(RANKS):
        lines = (job.records / f"steps.{each}").read_text().splitlines()
        assert Counter(int(line.split()[0]) for line in lines) == Counter(range(STEPS))
    assert_same_numbers(job.record(), with_slow_loader[0].record(), ranks=RANKS)


def test_without_a_spare_the_world_continues_without_a_slow_node(start_job: StartJob) -> None:
    """Between two steps: none is lost or repeated, and each sample is learned from once, in the global order."""
    policy = {**SCALED, "heartbeat": HEARD_OFTEN, "slow": {"then": "shrink", "for_s": 0}}
    job = start_job(script=DIVIDED, policy=policy, steps=STEPS, step_s=WORK_S, gates=[GATE])
    before = job.until(lambda status: len(status.ranks) == 4 and all(rank.slowness for rank in status.ranks), "scores")
    (slow,) = {rank.node for rank in before.ranks if rank.rank == 2}
    slow_down(job, 2)
    job.until(named(node=slow), "a slow node")
    job.until(lambda now: left_or_at_gate(now, before.ranks[2]), "a boundary")
    job.open_gate(GATE)
    report = finish(job)
    (incident,), (told, *_) = report["incidents"], report["slow"]
    assert (told["node"], told["answer"], told["incident"]) == (slow, "shrunk", incident["number"])
    assert (incident["outcome"], incident["steps_lost"]) == ("resumed", 0)
    (decision,) = incident["decisions"]
    assert decision["rung"] == "reschedule_pod"
    assert f"{slow} is not well (rank 2 is slow" in decision["reason"]
    assert "restarted from it, with 1 node" in decision["reason"]
    learned, turn = samples_by_step(job), incident["resumed_step"]
    assert [len(learned[step]) // BATCH for step in range(STEPS)] == [4] * turn + [2] * (STEPS - turn)
    seen = [sample for step in range(STEPS) for sample in learned[step]]
    assert Counter(seen) == Counter(in_order(len(seen)))
