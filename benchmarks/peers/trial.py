"""Runs one trial: starts what the peer's plan says, waits for its notes, and leaves no process behind."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from . import notes, outcome
from .kinds import FAULT_STEP, Fault, Trial
from .outcome import NoRecovery, Outcome
from .plan import HOST, Plan, Program, Start

LIMIT_S = 150.0
SERVER_S = 30.0
LINGER_S = 8.0  # for launchers to end, once the ranks that are left have finished
GONE_S = 10.0
LOOK_S = 0.2
MARK = "MIDSTEP_PEERS_TRIAL"  # in the environment of every process of a trial
TAIL_LINES = 12
EACH = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run(trial: Trial, plan: Callable[[Start], Plan], programs: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Run a trial. Raises NoRecovery, with the last lines that its programs printed."""
    with tempfile.TemporaryDirectory(prefix="midstep-peers-", ignore_cleanup_errors=True) as folder:
        directory, log, mark = Path(folder) / "notes", Path(folder) / "log", uuid.uuid4().hex
        directory.mkdir()
        try:
            with log.open("wb") as output:
                started = Started(mark, output)
                _play(plan(Start(trial, directory, programs)), trial, directory, started, limit_s)
            return _read(trial, directory)
        except NoRecovery as error:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise NoRecovery(f"{error}\n{last}") from error
        finally:
            _end_all(mark)


class Started(NamedTuple):
    """How the programs of a trial are started: with its mark, and with one log for all."""

    mark: str
    output: IO[bytes]

    def start(self, program: Program) -> "subprocess.Popen[bytes]":
        """Start one."""
        return subprocess.Popen(
            program.command,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **EACH, **program.environment, MARK: self.mark},
            start_new_session=True,
        )


def _play(plan: Plan, trial: Trial, directory: Path, started: Started, limit_s: float) -> None:
    """Start everything, and return when all launchers have ended, or the ranks that are left have finished."""
    for server in plan.servers:
        started.start(server)
        _wait_for_port(server.port)
    launchers = [started.start(launcher) for launcher in plan.launchers]
    give_up_s = time.monotonic() + limit_s
    while any(launcher.poll() is None for launcher in launchers) and time.monotonic() < give_up_s:
        done = outcome.finished(notes.read_processes(directory))
        if done >= (trial.ranks if trial.fault is Fault.NONE else trial.fewest):
            give_up_s = min(give_up_s, time.monotonic() + LINGER_S)
        time.sleep(LOOK_S)


def _read(trial: Trial, directory: Path) -> Outcome:
    processes, fault_s = notes.read_processes(directory), notes.read_fault(directory)
    if trial.fault is Fault.NONE:
        return outcome.undisturbed(processes, trial.ranks)
    if fault_s is None:
        raise NoRecovery("it did not come as far as the fault")
    return outcome.recovered(processes, trial.ranks, fault_s, FAULT_STEP, trial.fewest)


def _wait_for_port(port: int) -> None:
    give_up_s = time.monotonic() + SERVER_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        if time.monotonic() > give_up_s:
            raise NoRecovery(f"its server does not listen after {SERVER_S:g} s")
        time.sleep(LOOK_S)


def _end_all(mark: str) -> None:
    """End every process that has the trial's mark, whatever has become of its parents."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        marked = [process for process in psutil.process_iter() if _has(process, mark)]
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(marked, GONE_S if number == signal.SIGKILL else 1.0)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark)
    except (psutil.Error, OSError):
        return False
