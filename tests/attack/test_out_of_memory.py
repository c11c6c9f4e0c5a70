"""Memory: a rank that the kernel kills because there is too little of it"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstep.policies.schema import Budget, Policy, RungPolicy
from midstep.protocol.messages import FaultReported, ProcessExited
from midstep.protocol.types import Rung, RunningProcess
from midstep.testing.fake_cluster import FakeCluster

from ..chaos.agent.conftest import Site
from .attack import attack

Play = Callable[..., None]

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 1 << 30
HUNGRY = """
import pathlib, sys, time
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")  # the others of the node are not to be chosen
print("running", flush=True)
while not pathlib.Path(sys.argv[0]).with_name("eat").exists():
    time.sleep(0.02)
eaten = []
while True:
    eaten.append(b"x" * (16 << 20))
"""


@contextlib.contextmanager
def limited_memory(name: str) -> Iterator[None]:
    """Move this process into a new cgroup with little memory: what it starts stays there. Skip where there is none."""
    v1 = CGROUPS / "memory"
    parent = v1 if v1.is_dir() else CGROUPS
    group = parent / name
    home = _group_of_this_process(parent)
    try:
        group.mkdir()
        limit = "memory.limit_in_bytes" if parent is v1 else "memory.max"
        (group / limit).write_text(str(LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))


def _group_of_this_process(parent: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers == "") == (parent is CGROUPS) and controllers in {"", "memory"}:
            return parent / path.lstrip("/")
    return parent


@attack(
    "a rank takes more memory than its cgroup has, and the kernel kills it",
    holds="the rank's end is a fault of its own kind, with the level of any other; a plain `kill -9` is still one",
    reads="`out_of_memory: rank 0 on node0: the process was killed by the kernel for lack of memory`",
)
@pytest.mark.chaos
def test_a_rank_that_the_kernel_kills_for_lack_of_memory_is_told_from_one_that_is_killed(play: Play) -> None:
    """The agent compares the kernel's count of such kills with what it was."""
    name = f"midstep-attack-{os.getpid()}"

    async def scenario(site: Site) -> None:
        with limited_memory(name):
            await site.agent()
        site.welcome(HUNGRY)
        for rank in (0, 1):
            site.start(rank)
            await site.says(rank, "running")
        os.kill((await site.started(1)).process.pid, signal.SIGKILL)
        plain = await site.exited(1)
        assert (plain.status, plain.out_of_memory) == (-9, False)
        (site.root / "eat").touch()

        exited = await site.exited(0)
        assert (exited.status, exited.out_of_memory) == (-9, True)
        assert not site.controller.all(FaultReported)
        site.let_go()
        assert await site.gone() == 0

    play(scenario)
    group = (CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS) / name
    group.rmdir()


@attack(
    "a rank takes too much memory again and again, each time that it is replaced",
    holds="each time counts for its budgets, and the job ends when they are spent",
    reads="`rank 1 ran out of memory`, in the reason of each decision",
)
def test_a_rank_that_is_out_of_memory_again_and_again_ends_the_job_by_its_budgets() -> None:
    """Memory that a script needs in each life is no reason to go on for ever."""
    ladder = (RungPolicy(Rung.RECOVER_IN_PLACE, budget=Budget(per_rank=2, per_job=10)), RungPolicy(Rung.STOP))
    cluster = FakeCluster(policy=Policy(ladder=ladder))
    cluster.start()
    for step in range(1, 4):
        holder = cluster.holder(1)
        process = RunningProcess(1, holder.pid, holder.incarnation, cluster.machine.generation)
        cluster.feed(ProcessExited(holder.node, process, -9, cluster.now, expected=False, out_of_memory=True))
        decision = cluster.machine.incidents[-1].decisions[0]
        assert "rank 1 ran out of memory" in decision.reason
        if step < 3:
            assert decision.rung is Rung.RECOVER_IN_PLACE
            cluster.recover(step)
    assert decision.rung is Rung.STOP
