"""Leftovers: processes that ranks start and that hide from their node"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from midstep.launch.job import Start, create_job
from midstep.platforms.processes import NodeMark
from midstep.protocol import environment as names
from midstep.protocol.messages import NodeLost

from ..chaos.agent.conftest import Site
from ..chaos.agent.test_local_platform import joined, nodes_of
from .attack import attack

Play = Callable[..., None]

# A daemon as the books have it: two forks, a session of its own, no variable, no descriptor, another program.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.write(1, f"daemon {os.getpid()} ".encode())
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, 100)
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
"""
RANK = DAEMON + "time.sleep(600)\n"
# Each forks the next one and ends: by the time that one is looked at it is another process.
FUGITIVE = """
import os, time
while True:
    time.sleep(0.02)
    if os.fork():
        os._exit(0)
"""


@contextlib.contextmanager
def started(script: str, **options: object) -> Iterator["subprocess.Popen[str]"]:
    """Run a script, which is killed in the end."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def daemon_of(log: str) -> int:
    """Return the pid that DAEMON has printed."""
    return int(log.split("daemon ")[1].split(maxsplit=1)[0])


@attack(
    "a rank daemonises a helper (two forks, `setsid`, an empty environment), then the agents of two nodes are killed",
    holds="nothing of either node stays; a process of the user that is not of the job does",
)
@pytest.mark.chaos
def test_a_daemon_with_an_empty_environment_ends_with_the_killed_agent_of_its_node(play: Play) -> None:
    """No parent, session or variable leads to it; the limit that it has inherited does."""

    async def scenario(site: Site) -> None:
        with nodes_of(site) as platform, started("import time; time.sleep(600)", start_new_session=True) as others:
            platform.start(2)
            daemons = []
            for rank, node in enumerate(("node0", "node1")):
                await joined(site, node)
                site.welcome(RANK, node)
                site.start(rank, node=node)
                await site.says(rank, "daemon ")
                daemons.append(daemon_of(site.log(rank)))
            assert all(map(is_alive, daemons))
            for pid in list(platform.agents.values()):
                os.kill(pid, signal.SIGKILL)

            await site.eventually(lambda: len(site.controller.all(NodeLost)) == 2, "the loss of both nodes")
            await site.eventually(lambda: not any(map(is_alive, daemons)), "the end of the daemons")
            assert others.poll() is None
            await platform.close()

    play(scenario, nodes=2)


@attack(
    "a leftover process forks and ends, again and again, while it is being killed",
    holds="its next fork is found, and the pid of a process that has ended is never killed for it",
)
def test_a_process_that_flees_by_forking_is_caught(tmp_path: Path) -> None:
    """The mark is inherited, and it is looked for until none is found."""
    mark = NodeMark(tmp_path, "node0")
    with mark.inherited(), started(FUGITIVE, env={}, start_new_session=True) as first:
        first.wait(10)
        mark.kill_all()

    assert not [pid for pid in psutil.pids() if mark.marks(pid) and is_alive(pid)]


def test_a_node_is_known_by_either_of_its_marks_and_no_other_is_harmed(tmp_path: Path) -> None:
    """The variable or the limit: of this node, and not of another one."""
    mine, other = NodeMark(tmp_path, "node0"), NodeMark(tmp_path, "node1")
    sleep = "import time; print('up', flush=True); time.sleep(600)"
    variable = {names.AGENT_SOCKET: mine.socket}
    with contextlib.ExitStack() as stack:
        with mine.inherited():
            limited = stack.enter_context(started(sleep, env={}))
        with other.inherited() as theirs:
            neighbour = stack.enter_context(started(sleep, env=theirs))
        named = stack.enter_context(started(sleep, env=variable))
        unmarked = stack.enter_context(started(sleep))
        for process in (limited, neighbour, named, unmarked):
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"

        mine.kill_all()

        assert limited.wait(10) == named.wait(10) == -signal.SIGKILL
        assert neighbour.poll() is unmarked.poll() is None
        mine.kill_all()  # a second time there is none


def test_a_zombie_that_nobody_waits_for_holds_up_nothing(tmp_path: Path) -> None:
    """It carries the limit until its parent has waited for it."""
    mark = NodeMark(tmp_path, "node0")
    with mark.inherited(), started("pass", env={}) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert mark.marks(process.pid)
        mark.kill_all()

        assert process.wait(10) == 0


def test_what_this_process_starts_later_is_not_marked(tmp_path: Path) -> None:
    """The limit is handed down for as long as it is asked for."""
    mark = NodeMark(tmp_path, "node0")
    with mark.inherited():
        assert mark.marks(os.getpid())
        mark.kill_all()  # spares the calling process

    assert not mark.marks(os.getpid())


@attack(
    "`midstep run` and the agents are killed together, so that no process is left to clear away what a rank daemonised",
    holds="the next `midstep run` of the same user ends it, and removes the run directory",
)
def test_the_next_job_ends_what_a_job_left_whose_launcher_was_killed_with_its_agents(tmp_path: Path) -> None:
    """The run directories of launchers that are gone name the nodes whose marks are looked for."""
    number = os.getpid()
    script = tmp_path / "train.py"
    script.touch()
    first = create_job(Start((str(script),), job_directory=tmp_path / "job", job=f"first-{number}"))
    jobs = [first]
    (first.run_directory / "node0").mkdir()
    with NodeMark(first.run_directory, "node0").inherited(), started("import time; time.sleep(600)", env={}) as left:
        try:
            first.held.close()  # what the kernel does when the launcher ends
            jobs.append(create_job(Start((str(script),), job_directory=tmp_path / "job2", job=f"second-{number}")))

            assert left.wait(10) == -signal.SIGKILL
            assert not first.run_directory.exists()
        finally:
            for job in jobs:
                job.held.remove()
