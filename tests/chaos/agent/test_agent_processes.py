"""Training processes: started warm or cold, watched, replaced and killed, as the controller says."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from midstep.agent.last_words import EVERY_S
from midstep.protocol.messages import (
    ArmFault,
    FaultReported,
    NodeHeartbeat,
    NodeWords,
    ProcessExited,
    ProcessStarted,
    StopProcess,
)
from midstep.protocol.rank_logs import debug_log
from midstep.protocol.types import ArmedFault, FaultAction, FaultKind, JobSettings

pytestmark = pytest.mark.chaos

Play = Callable[..., None]

SLEEP = "import time\nprint('running', flush=True)\ntime.sleep(600)\n"
SHOW = """
import os, sys, threading
print("args", sys.argv[1:], "name", __name__, "path", sys.path[0])
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS",
             "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "MIDSTEP_SEATED", "MIDSTEP_INCARNATION"):
    print(name, os.environ[name])
print("parent", os.getppid(), "session", os.getsid(0) == os.getpid(), "threads", threading.active_count())
from midstep.protocol.blackbox import BlackBox
print("box of", BlackBox.attach(int(os.environ["MIDSTEP_BLACK_BOX_FD"])).rank)
print("torch was there", "torch" in sys.modules)
from midstep.processor.exceptions import patterns_here
print("patterns were read", patterns_here.cache_info().currsize == 1)
sys.exit(7)
"""


def test_a_rank_is_forked_from_the_fork_server_as_if_python_had_run_its_script(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script(SHOW)
        site.start(1, life)

        started = await site.started(1, life)
        exited = await site.exited(1, life)

        assert started.warm
        assert exited.process == started.process
        assert (exited.status, exited.expected) == (7, False)
        said = site.log(1, life).splitlines()
        assert f"args ['one', 'two'] name __main__ path {site.root}" in said
        assert f"parent {site.agents['node0'].pid} session True threads 1" in said
        assert "box of 1" in said
        assert "torch was there True" in said
        assert "patterns were read True" in said
        expected = {"RANK 1", "LOCAL_RANK 1", "WORLD_SIZE 2", "LOCAL_WORLD_SIZE 2", "GROUP_RANK 0"}
        expected |= {"MASTER_ADDR 127.0.0.1", "OMP_NUM_THREADS 1", f"TORCHELASTIC_RESTART_COUNT {life}"}
        expected |= {"TORCHELASTIC_USE_AGENT_STORE True", "MIDSTEP_SEATED 1", f"MIDSTEP_INCARNATION {life}"}
        assert expected <= set(said)

    play_in_turn(scenario)


BACKEND = """
import sys, threading, time
def autoload():
    threading.Thread(target=time.sleep, args=(600,), name="AtraceMonitor", daemon=True).start()
autoload()
"""
WITH_BACKEND = """
import os, sys, threading
print("torch was there", "torch" in sys.modules, "backend", "device_of_a_kind" in sys.modules)
print("threads", sorted(thread.name for thread in threading.enumerate()))
print("variable", os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"))
"""


def test_a_device_backend_that_starts_threads_costs_no_warmth(play: Play) -> None:
    """As torch-npu does when torch is imported. A fork has the backend, and its threads: they are made in the fork."""

    async def scenario(site: Any) -> None:
        metadata = site.root / "backend" / "device_of_a_kind-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: device-of-a-kind\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[torch.backends]\nof_a_kind = device_of_a_kind:autoload\n")
        (metadata.parent / "device_of_a_kind.py").write_text(BACKEND)
        await site.agent()
        site.welcome(WITH_BACKEND, environment={"PYTHONPATH": str(metadata.parent)})
        site.start(1)

        assert (await site.started(1)).warm
        assert (await site.exited(1)).status == 0
        said = site.log(1).splitlines()
        assert "torch was there True backend True" in said
        assert any(line.startswith("threads") and "AtraceMonitor" in line for line in said), said
        assert "variable None" in said

    play(scenario)


WORDS = """
import os, signal, sys
print("a" * 100_000)
for number in range(100):
    print("line", number)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_ranks_print_is_told_while_they_run_and_again_to_the_next_controller(play: Play) -> None:
    """A machine that loses its power says nothing any more."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome("import time\nprint('at last\\n', '\\xff' * 9, flush=True)\ntime.sleep(600)\n")
        site.start(0)

        def told(words: NodeWords) -> bool:
            return [each.text.splitlines()[0] for each in words.ranks] == ["at last"]

        words = await site.controller.until(NodeWords, told)
        assert (words.node, words.ranks[0].rank, words.ranks[0].incarnation) == ("node0", 0, 0)
        site.controller.order(ArmFault(fault=ArmedFault(rank=1, action=FaultAction.KILL)))
        words = await site.controller.until(NodeWords, lambda words: bool(words.agent))
        assert words.agent == "WARNING cannot inject kill: rank 1 has no process on this node"
        site.controller.restart()
        await site.controller.until(NodeHeartbeat)  # so it is known how to reach the agent
        site.welcome(SLEEP)
        await site.controller.until(NodeWords, told)
        await asyncio.sleep(2 * EVERY_S)
        assert len([each for each in site.controller.all(NodeWords) if told(each)]) <= 2, "only what has changed"

    play(scenario)


def test_the_last_words_of_a_process_come_with_its_end_and_are_few(play_in_turn: Play) -> None:
    """Whoever reads the report has no way to the files of this machine."""

    async def scenario(site: Any, life: int) -> None:
        site.script(WORDS)
        site.start(0, life)
        exited = await site.exited(0, life)
        assert exited.output.splitlines() == [f"line {number}" for number in range(80, 100)]

        site.script(SLEEP)
        site.start(0, life + 1)
        running = (await site.started(0, life + 1)).process
        site.controller.order(StopProcess(0, running.incarnation, grace_s=0.0))
        assert (await site.exited(0, life + 1)).output == ""  # it was ordered to end

    play_in_turn(scenario)


ENDINGS = [
    ("raise ValueError('what happened')", 1, "ValueError: what happened"),
    ("import sys; sys.exit('in words')", 1, "in words"),
    ("import sys; sys.exit()", 0, ""),
    ("import atexit; atexit.register(print, 'leaving')", 0, "leaving"),
    ("import os; os._exit(3)", 3, ""),
    ("import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()", 0, "does not wait"),
    ("import", 1, "SyntaxError"),
]


def test_a_script_ends_as_under_python(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        for incarnation, (script, status, said) in enumerate(ENDINGS, start=life):
            site.script(script)
            site.start(0, incarnation)

            assert (await site.exited(0, incarnation)).status == status, script
            assert said in site.log(0, incarnation), script

    play_in_turn(scenario)


def test_the_dump_of_a_crash_is_in_the_debug_log(play_in_turn: Play) -> None:
    """The terminal shows what a rank prints, and of a crash the incident's line is enough there."""

    async def scenario(site: Any, life: int) -> None:
        site.script("import os; os.kill(os.getpid(), 11)")
        site.start(0, life)

        assert (await site.exited(0, life)).status == -11
        assert site.log(0, life) == ""
        dump = debug_log(str(site.root / "job"), 0, life).read_text()
        assert dump.startswith("Fatal Python error: Segmentation fault")
        assert "script.py" in dump

    play_in_turn(scenario)


def test_the_traceback_begins_in_the_users_script(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script("def fail():\n    1 / 0\n\nfail()\n")
        site.start(0, life)
        await site.exited(0, life)

        said = site.log(0, life)
        assert said.startswith("Traceback (most recent call last):")
        assert "runpy" not in said
        assert "midstep" not in said

    play_in_turn(scenario)


def test_a_module_runs_like_python_m(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        (site.root / "some_module.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
        site.welcome("", command=("some_module", "x"), is_module=True)
        site.start(0)

        assert (await site.exited(0)).status == 0
        assert "__main__ some_module ['x']" in site.log(0)

    play(scenario)


def test_a_program_that_is_no_python_finds_rank_and_black_box(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        command = ("sh", "-c", "echo rank $RANK; readlink /proc/self/fd/$MIDSTEP_BLACK_BOX_FD; exit 5")
        site.welcome("", command=command, no_python=True)
        site.start(1)

        assert (await site.exited(1)).status == 5
        assert "rank 1" in site.log(1)
        assert "memfd:midstep-rank-1" in site.log(1)

    play(scenario)


def test_a_program_that_does_not_exist_is_an_exit_with_a_reason(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome("", command=("no-such-program",), no_python=True)
        site.start(0)

        assert (await site.exited(0)).status == 1
        assert "no-such-program cannot be started" in site.log(0)

    play(scenario)


def test_an_environment_bigger_than_a_socket_takes_at_once_arrives(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        big = {f"BIG{number}": "x" * 100_000 for number in range(6)}
        site.welcome("import os; print(sum(map(len, os.environ.values())) > 600_000)", environment=big)
        site.start(0)

        assert (await site.exited(0)).status == 0
        assert "True" in site.log(0)

    play(scenario)


def test_preloaded_modules_are_there_and_a_missing_one_does_no_harm(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        (site.root / "mine.py").write_text("import os; loaded_by = os.getpid()")
        settings = JobSettings(preload=("mine", "no_such_module"))
        site.welcome("import mine, os; print('preloaded', mine.loaded_by != os.getpid())", settings=settings)
        site.start(0)

        assert (await site.exited(0)).status == 0
        assert "preloaded True" in site.log(0)

    play(scenario)


def test_a_preloaded_module_that_starts_a_thread_is_left_out(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        (site.root / "mine.py").write_text(
            "import os, threading, time\nloaded_by = os.getpid()\n"
            "threading.Thread(target=time.sleep, args=(600,), name='mine-1', daemon=True).start()\n"
        )
        site.welcome(
            "import mine, os; print('preloaded', mine.loaded_by != os.getpid())",
            settings=JobSettings(preload=("mine",)),
        )
        await site.mentions("has started a thread (mine-1)")
        site.start(0)

        assert (await site.exited(0)).status == 0
        assert "preloaded False" in site.log(0)

    play(scenario)


def test_without_a_warm_pool_processes_start_cold(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome("import sys; print('ran')", settings=JobSettings(warm_standby=False))
        site.start(0)

        assert not (await site.started(0)).warm
        assert (await site.exited(0)).status == 0
        assert "ran" in site.log(0)

    play(scenario)


def test_a_killed_rank_is_seen_and_its_neighbour_lives(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script(SLEEP)
        site.start(0, life)
        site.start(1, life)
        killed, neighbour = await site.started(0, life), await site.started(1, life)
        await site.says(0, "running", life)
        os.kill(killed.process.pid, signal.SIGKILL)

        exited = await site.exited(0, life)

        assert (exited.status, exited.expected) == (-9, False)
        assert psutil.pid_exists(neighbour.process.pid)
        assert not [body for body in site.controller.all(ProcessExited) if body.process == neighbour.process]

    play_in_turn(scenario)


def test_what_a_rank_has_started_ends_with_it(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script("import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)\n" + SLEEP)
        site.start(0, life)
        started = await site.started(0, life)
        await site.says(0, "running", life)
        below = int(site.log(0, life).splitlines()[0])
        os.kill(started.process.pid, signal.SIGKILL)
        await site.exited(0, life)

        await site.eventually(lambda: not psutil.pid_exists(below), "the end of the rank's own process")

    play_in_turn(scenario)


def test_a_start_that_comes_twice_starts_one_process(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script(SLEEP)
        site.start(0, life)
        site.start(0, life)
        first = await site.started(0, life)
        await site.says(0, "running", life)
        site.start(0, life)
        site.start(1, life)
        await site.says(1, "running", life)

        started = [body.process for body in site.controller.all(ProcessStarted)]
        assert [each.pid for each in started if (each.rank, each.incarnation) == (0, life)] == [first.process.pid]
        assert psutil.pid_exists(first.process.pid)

    play_in_turn(scenario)


def test_a_new_incarnation_takes_the_place_of_the_process_that_holds_the_rank(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script(SLEEP)
        site.start(0, life)
        first = await site.started(0, life)
        await site.says(0, "running", life)
        site.start(0, life + 1)
        second = await site.started(0, life + 1)
        site.start(0, life)

        exited = await site.exited(0, life)
        assert (exited.status, exited.expected) == (-9, True)
        assert not psutil.pid_exists(first.process.pid)
        await site.says(0, "running", life + 1)
        assert psutil.pid_exists(second.process.pid)
        assert second.warm

    play_in_turn(scenario)


def test_the_black_box_outlives_the_process(play_in_turn: Play) -> None:
    script = """
import os
from midstep.protocol.blackbox import BlackBox
box = BlackBox.attach(int(os.environ["MIDSTEP_BLACK_BOX_FD"]))
print("found", box.read_local(3))
box.write_local(3, b"kept")
"""

    async def scenario(site: Any, life: int) -> None:
        site.script(script)
        site.start(1, life)
        await site.exited(1, life)
        site.start(1, life + 1)
        await site.exited(1, life + 1)

        assert "found None" in site.log(1, life)
        assert "found b'kept'" in site.log(1, life + 1)

    play_in_turn(scenario)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_does_not_hear_sigterm_is_killed(play_in_turn: Play, stopped: bool) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP)
        site.start(0, life)
        started = await site.started(0, life)
        await site.says(0, "running", life)
        if stopped:
            os.kill(started.process.pid, signal.SIGSTOP)
        site.controller.order(StopProcess(rank=0, incarnation=life, grace_s=0.2))

        exited = await site.exited(0, life)
        assert (exited.status, exited.expected) == (-9, True)

    play_in_turn(scenario)


def test_a_stop_that_overtakes_its_start_wins(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script(SLEEP)
        site.start(0, life)
        await site.started(0, life)
        site.controller.order(StopProcess(rank=0, incarnation=life + 1, grace_s=0.0))
        await site.exited(0, life)
        site.start(0, life + 1)
        site.start(0, life + 2)
        await site.started(0, life + 2)

        started = [body.process for body in site.controller.all(ProcessStarted)]
        assert {each.incarnation for each in started if each.incarnation >= life} == {life, life + 2}

    play_in_turn(scenario)


def test_a_start_that_cannot_be_done_is_a_fault(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SLEEP, settings=JobSettings(black_box_bytes=1 << 60))
        site.start(0)

        report = (await site.controller.until(FaultReported)).report
        assert (report.kind, report.rank, report.incarnation) == (FaultKind.START_FAILED, 0, 0)
        assert "no shared memory for the black box of rank 0" in report.detail

    play(scenario)


def test_armed_faults_kill_and_stop_the_rank_they_name(play_in_turn: Play) -> None:
    async def scenario(site: Any, life: int) -> None:
        site.script(SLEEP)
        site.start(0, life)
        site.start(1, life)
        stopped = await site.started(0, life)
        await site.says(0, "running", life)
        await site.says(1, "running", life)
        site.controller.order(ArmFault(fault=ArmedFault(rank=0, action=FaultAction.STOP)))
        site.controller.order(ArmFault(fault=ArmedFault(rank=1, action=FaultAction.KILL, incarnation=life + 4)))
        site.controller.order(ArmFault(fault=ArmedFault(rank=1, action=FaultAction.KILL, incarnation=life)))

        assert (await site.exited(1, life)).status == -9
        process = psutil.Process(stopped.process.pid)
        await site.eventually(lambda: process.status() == psutil.STATUS_STOPPED, "the stop of rank 0")
        assert not [body for body in site.controller.all(ProcessExited) if body.process == stopped.process]

    play_in_turn(scenario)


def test_a_killed_fork_server_is_replaced_and_no_start_waits_for_it(play: Play) -> None:
    async def scenario(site: Any) -> None:
        gate = site.root / "gate"
        gate.touch()
        (site.root / "slow.py").write_text(
            f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
        )
        await site.agent()
        site.welcome("import torch; print('with torch')", settings=JobSettings(preload=("slow",)))
        site.start(0)
        assert (await site.started(0)).warm
        await site.exited(0)
        await site.eventually(lambda: site.below("idle"), "an idle process")
        [killed], [idle] = site.below("forksrv"), site.below("idle")
        gate.unlink()  # the next fork server is not ready before the test says so
        killed.kill()
        idle.kill()
        await site.mentions("the fork server ended with status -9")
        await site.eventually(lambda: not psutil.pid_exists(idle.pid), "the agent to see that the idle process ended")
        site.start(1)

        assert not (await site.started(1)).warm
        assert (await site.exited(1)).status == 0
        gate.touch()
        await site.eventually(lambda: site.below("idle"), "a new idle process")
        site.start(0, incarnation=1)
        assert (await site.started(0, incarnation=1)).warm
        assert (await site.exited(0, incarnation=1)).status == 0
        assert [server.pid for server in site.below("forksrv")] != [killed.pid]

    play(scenario)
