"""The kernel says of real processes whether all of their threads wait for nothing that is under way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from midstep.agent.linux import cpu_s, state_of
from midstep.agent.thread_waits import waits_for_nothing

pytestmark = pytest.mark.timeout(120)

PATIENCE_S = 20.0
LOOKS = 5
OLD_STEP_S = 1000.0  # older than all processes here

START = """
import os, select, socket, subprocess, sys, threading, time
def beside(function, *arguments):
    threading.Thread(target=function, args=arguments, daemon=True).start()
def compute():
    while True: pass
def deadlock():
    lock = threading.Lock(); lock.acquire(); lock.acquire()
ours, theirs = socket.socketpair()
reads, writes = os.pipe()
"""
AT_REST = {
    "sleeps": "time.sleep(60)",
    "sleeps over and over": "while True: time.sleep(0.05)",
    "waits for a lock": "deadlock()",
    "waits for a lock, with a limit": "threading.Event().wait(60)",
    "waits in select for nothing": "select.select([], [], [], 60)",
    "another thread waits for a job": "beside(deadlock); time.sleep(60)",
    "another thread waits for whatever comes": "beside(select.epoll().poll); deadlock()",
    "another thread polls several files": "beside(lambda: select.select([ours, theirs], [], [], 60)); deadlock()",
    "another thread accepts": "one = socket.create_server(('127.0.0.1', 0)); beside(one.accept); deadlock()",
}
NOT_AT_REST = {
    "computes": "compute()",
    "waits for a socket": "ours.recv(1)",
    "waits for a socket, with a limit": "ours.settimeout(60); ours.recv(1)",
    "reads a pipe": "os.read(reads, 1)",
    "writes into a pipe that is full": "os.write(writes, bytes(1 << 20))",
    "waits for a process": "subprocess.run(['sleep', '60'])",
    "looks again and again for a process": "subprocess.run(['sleep', '60'], timeout=60)",
    "another thread computes for it": "beside(compute); deadlock()",
    "another thread waits for an answer": "beside(ours.recv, 1); deadlock()",
    "another thread waits for an answer, with a limit": "ours.settimeout(60); beside(ours.recv, 1); deadlock()",
    "another thread writes": "beside(os.write, writes, bytes(1 << 20)); time.sleep(60)",
    "a process may work for it": "child = subprocess.Popen(['sleep', '60']); deadlock()",
}


@contextmanager
def process(program: str) -> Iterator[int]:
    """A process that does what a program says; its pid. Ends with its children, in a group of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{START}print('ready', flush=True)\n{program}"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"ready\n"
            yield started.pid
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def settles(pid: int) -> None:
    """Wait until a process has come to where it stays: it uses no processor, or nothing else."""
    deadline, used_s = time.monotonic() + PATIENCE_S, -1.0
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now_s = cpu_s(pid)
        assert now_s is not None
        if now_s - used_s < 0.002 or used_s > 1.0:
            return
        used_s = now_s
    raise AssertionError("it does not come to rest")


@pytest.mark.parametrize("program", AT_REST.values(), ids=AT_REST)
def test_a_process_that_waits_for_nothing_is_at_rest(program: str) -> None:
    with process(program) as pid:
        deadline = time.monotonic() + PATIENCE_S
        while not waits_for_nothing(pid, OLD_STEP_S):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("program", NOT_AT_REST.values(), ids=NOT_AT_REST)
def test_a_process_for_which_something_is_under_way_is_not(program: str) -> None:
    with process(program) as pid:
        settles(pid)
        for _ in range(LOOKS):
            assert not waits_for_nothing(pid, OLD_STEP_S)
            time.sleep(0.02)


def test_a_child_that_is_older_than_the_step_is_no_reason_to_sleep() -> None:
    """A worker of a data loader is there all the time, and its rank may hang."""
    with process("child = subprocess.Popen(['sleep', '60']); time.sleep(60)") as pid:
        settles(pid)
        assert not waits_for_nothing(pid, OLD_STEP_S)
        assert waits_for_nothing(pid, 0.0)


def test_a_process_that_has_ended_is_not_at_rest() -> None:
    with process("time.sleep(60)") as pid:
        settles(pid)
    assert not waits_for_nothing(pid, OLD_STEP_S)
    assert cpu_s(pid) is None
    assert state_of(pid) == ""


def test_the_kernel_counts_what_all_threads_of_another_process_have_used() -> None:
    with process("beside(compute); deadlock()") as pid:
        before_s = cpu_s(pid)
        assert before_s is not None
        deadline = time.monotonic() + PATIENCE_S
        while (now_s := cpu_s(pid)) is not None and now_s < before_s + 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert now_s is not None
