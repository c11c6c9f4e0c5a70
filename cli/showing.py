"""Runs launchers with what the user sees of them: the job, what its ranks print, what happens to it, and its end."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..controller.endpoints.discovery_files import JobResult
from ..launch.directories import checked_name
from ..launch.job import PreparedJob, Start, new_name
from ..launch.joining import JoiningMachine
from ..launch.meeting import hear_if_all_are_signalled
from ..launch.roles import OpenedGroup
from ..protocol.errors import ConfigurationError
from .display.display import ALL_RANKS, Display, ShownRanks

if TYPE_CHECKING:
    from ..launch.ray import RayJob


def run_job(
    job: PreparedJob,
    *,
    quiet: bool,
    role: str = "",
    shown: ShownRanks = ALL_RANKS,
    stop_signals: frozenset[signal.Signals] = frozenset(),
    steps: int = 0,
) -> int:
    """Run a job to its end on this machine, and return its exit code.

    `role`: its role in a job of several roles. `stop_signals`: those that end it, beside the usual ones. `steps`: how
    many it trains, where that is known.
    """
    from ..launch.launcher import Launcher

    hear_if_all_are_signalled(os.environ)
    try:
        with Display(job.job_directory, job.run_directory, quiet=quiet, role=role, shown=shown, steps=steps) as display:
            display.say(f"job {job.name} in {job.job_directory}", "dim")
            result = asyncio.run(Launcher(job, stop_signals=stop_signals).run())
            return _shown(display, result, job.job_directory)
    finally:
        job.held.remove()  # if it was interrupted before the launcher ran


def join_job(
    machine: JoiningMachine,
    *,
    quiet: bool,
    shown: ShownRanks = ALL_RANKS,
    stop_signals: frozenset[signal.Signals] = frozenset(),
) -> int:
    """Run this machine's part of a job to its end, and return its exit code. `stop_signals`: as of `run_job`."""
    from ..launch.launcher import Launcher

    hear_if_all_are_signalled(os.environ)
    try:
        with Display(machine.directory, machine.held.path, quiet=quiet, shown=shown) as display:
            part = "runs its controller" if machine.job is not None else "joins it"
            display.say(f"job {machine.name} at {machine.endpoint}: this machine {part}", "dim")
            display.say(f"logs in {machine.directory / 'logs'}", "dim")
            return _shown(display, asyncio.run(Launcher(machine, stop_signals=stop_signals).run()))
    finally:
        machine.held.remove()


def run_roles(opened: OpenedGroup, *, quiet: bool) -> int:
    """Run a job of several roles to its end, and return its exit code. Each role shows its own ranks."""
    from ..launch.roles_launcher import RolesLauncher

    hear_if_all_are_signalled(os.environ)
    try:
        with Display(opened.directory, opened.held.path, quiet=True) as display:
            names = ", ".join(opened.founding.plan.names)
            display.say(f"job {opened.founding.job} of roles {names} in {opened.directory}", "dim")
            return _shown(display, asyncio.run(RolesLauncher(opened, quiet=quiet).run()), opened.directory)
    finally:
        opened.held.remove()  # if it was interrupted before the launcher ran


def run_on_ray(start: Start, *, quiet: bool, resources: dict[str, float] | None = None, role: str = "") -> int:
    """Run a new job on Ray to its end, and return its exit code. Raises ConfigurationError.

    `resources`: what Ray reserves for each node. `role`: its role in a job of several roles.
    """
    from ..launch.ray import Reserved, connect, found

    if start.fault_sources or start.fixed_nodes:
        raise ConfigurationError("--fault-source and --fixed-nodes are for nodes on this machine.")
    if start.job_directory is None:
        raise ConfigurationError("--platform ray needs --job-dir: a directory that all machines of the cluster see.")
    name = checked_name(start.job) if start.job is not None else new_name()
    connect()
    named = msgspec.structs.replace(start, job=name, job_directory=start.job_directory.absolute())
    return _on_ray(found(named, Reserved(resources or {})), quiet=quiet, role=role)


def continue_on_ray(directory: Path, *, quiet: bool, role: str = "", stop: bool = False) -> int:
    """Run a job that was founded before to its end, and return its exit code. Raises MidstepError.

    It may still run on this cluster: it is followed then. Where its cluster is gone, this one starts it from its
    journal and its newest checkpoint. `stop`: it is only to be ended.
    """
    from ..launch.ray import connect, found_again

    job = found_again(directory.absolute())
    connect()
    return _on_ray(job, quiet=quiet, role=role, again=True, stop=stop)


def _on_ray(job: "RayJob", *, quiet: bool, role: str, again: bool = False, stop: bool = False) -> int:
    from ..launch.ray import RunningJob

    with contextlib.ExitStack() as stack:
        running = stack.enter_context(RunningJob(job, again=again))
        display = stack.enter_context(Display(running.directory, running.directory, quiet=quiet, role=role))
        display.say(f"job {job.job} in {running.directory}", "dim")
        if stop:
            running.stop()
        return _shown(display, running.result(), running.directory)


def _shown(display: Display, result: JobResult, directory: Path | None = None) -> int:
    """Show the end of a job, and return its exit code. `directory`: of what can be reported on from here."""
    display.drain()
    if result.exit_code != 0 and directory is not None:
        display.say(f"see `midstep report {directory}`", "dim")
    # The last line: whoever comes back to the terminal reads it first.
    display.say(f"{result.reason} (exit code {result.exit_code})", "green" if result.exit_code == 0 else "red")
    return result.exit_code
