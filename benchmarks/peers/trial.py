"""Runs one trial: starts what the peer's plan says, waits for its notes, and leaves no process behind."""

import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from . import course, marks, notes, outcome
from .course import Course
from .kinds import FAULT_STEP, Fault, Trial
from .notes import Process
from .outcome import NoRecovery, Outcome
from .plan import HOST, Plan, Program, Start

LIMIT_S = 150.0
SCHEDULE_LIMIT_S = 1800.0  # however slowly steps come
SERVER_S = 30.0
LINGER_S = 8.0  # for launchers to end, once the ranks that are left have finished
GONE_S = 10.0
LOOK_S = 0.2
TAIL_LINES = 12
EACH = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class Played(NamedTuple):
    """A trial that is over: the lines of its processes, when its programs were started, and when its faults were."""

    processes: list[Process]
    began_s: float
    faults: dict[int, float]
    ended: str  # why it is over


def run(trial: Trial, plan: Callable[[Start], Plan], programs: Path, limit_s: float = LIMIT_S) -> Outcome | Course:
    """Run a trial. Raises NoRecovery, with the last lines that its programs printed."""
    with tempfile.TemporaryDirectory(prefix="midstep-peers-", ignore_cleanup_errors=True) as folder:
        directory, log, mark = Path(folder) / "notes", Path(folder) / "log", uuid.uuid4().hex
        directory.mkdir()
        try:
            with log.open("wb") as output:
                started = Started(mark, output)
                played = _play(plan(Start(trial, directory, programs)), trial, directory, started, limit_s)
            return _read(trial, played)
        except NoRecovery as error:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise NoRecovery(f"{error}\n{last}", error.course) from error
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
            env={**os.environ, **EACH, **program.environment, marks.TRIAL: self.mark},
            start_new_session=True,
        )


def _play(plan: Plan, trial: Trial, directory: Path, started: Started, limit_s: float) -> Played:
    """Start everything, and return when all launchers have ended, or the ranks that are left have finished."""
    for server in plan.servers:
        started.start(server)
        _wait_for_port(server.port)
    began_s = time.monotonic()
    launchers = [started.start(launcher) for launcher in plan.launchers]
    lingers_s = math.inf
    while True:
        processes, now_s = notes.read_processes(directory), time.monotonic()
        if outcome.finished(processes) >= _enough(trial, processes):
            lingers_s = min(lingers_s, now_s + LINGER_S)
        if all(launcher.poll() is not None for launcher in launchers):
            ended = "its programs ended"
        elif now_s > lingers_s:
            ended = "it finished"
        elif not (ended := _overdue(trial, processes, began_s, limit_s)):
            time.sleep(LOOK_S)
            launchers = list(map(_again, launchers, plan.launchers, itertools.repeat(started)))
            continue
        return Played(notes.read_processes(directory), began_s, notes.read_faults(directory), ended)


def _again(launcher: "subprocess.Popen[bytes]", program: Program, started: Started) -> "subprocess.Popen[bytes]":
    """Do what a platform does when a node is lost: start its launcher on another one, at once."""
    return started.start(program) if program.of_node and launcher.poll() == -signal.SIGKILL else launcher


def _enough(trial: Trial, processes: Sequence[Process]) -> int:
    """Return how many processes have to finish."""
    if trial.drawn is not None:
        return course.enough(processes, trial.drawn.steps, trial.ranks)
    return trial.ranks if trial.fault is Fault.NONE else trial.fewest


def _overdue(trial: Trial, processes: Sequence[Process], began_s: float, limit_s: float) -> str:
    """Return why a trial has failed by now, or nothing: under a schedule it may take long, if new steps come."""
    now_s = time.monotonic()
    if trial.drawn is None:
        return f"not done in {limit_s:g} s" if now_s > began_s + limit_s else ""
    newest_s = course.newest_s(processes)
    if now_s > (began_s if newest_s is None else newest_s) + limit_s:
        return f"no new step in {limit_s:g} s"
    return f"not done in {SCHEDULE_LIMIT_S:g} s" if now_s > began_s + SCHEDULE_LIMIT_S else ""


def _read(trial: Trial, played: Played) -> Outcome | Course:
    if trial.drawn is not None:
        steps = trial.drawn.steps
        found = course.of(played.processes, steps, played.began_s, played.faults)
        if len(found.done_s) < steps:
            raise NoRecovery(played.ended, found)
        return found
    if trial.fault is Fault.NONE:
        return outcome.undisturbed(played.processes, trial.ranks)
    if not played.faults:
        raise NoRecovery("it did not come as far as the fault")
    return outcome.recovered(played.processes, trial.ranks, played.faults[0], FAULT_STEP, trial.fewest)


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
        marked = marks.marked(marks.TRIAL, mark)
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(marked, GONE_S if number == signal.SIGKILL else 1.0)
