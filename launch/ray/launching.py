"""A job on a Ray cluster from the command line: begun or continued, and shown as one on this machine is."""

import contextlib
from pathlib import Path

import msgspec

from ...cli.display.display import Display
from ...protocol.errors import ConfigurationError
from ..jobs.directories import checked_name
from ..jobs.start import Start, new_name
from .controller_actor import RayJob
from .founding import Reserved, found, found_again
from .job import RunningJob, connect


def launch(start: Start, *, quiet: bool, reserved: Reserved | None = None, role: str = "") -> int:
    """Run a new job on Ray to its end, and return its exit code. Raises ConfigurationError.

    `role`: what it is in a job of several roles.
    """
    if start.fault_sources or start.fixed_nodes:
        raise ConfigurationError("--fault-source and --fixed-nodes are for nodes on this machine.")
    if start.job_directory is None:
        raise ConfigurationError("--platform ray needs --job-dir: a directory that all machines of the cluster see.")
    name = checked_name(start.job) if start.job is not None else new_name()
    connect()
    named = msgspec.structs.replace(start, job=name, job_directory=start.job_directory.absolute())
    return _run(found(named, reserved or Reserved()), quiet=quiet, role=role)


def launch_again(directory: Path, *, quiet: bool, role: str = "", stop: bool = False) -> int:
    """Run a job that was founded before to its end, and return its exit code. Raises MidstepError.

    It may still run on this cluster: it is followed then. Where its cluster is gone, this one starts it from its
    journal and its newest checkpoint. `stop`: it is only to be ended.
    """
    job = found_again(directory.absolute())
    connect()
    return _run(job, quiet=quiet, role=role, again=True, stop=stop)


def _run(job: RayJob, *, quiet: bool, role: str, again: bool = False, stop: bool = False) -> int:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(RunningJob(job, again=again))
        shown = stack.enter_context(Display(running.directory, running.directory, quiet=quiet, role=role))
        shown.say(f"job {job.job} in {running.directory}", "dim")
        if stop:
            running.stop()
        result = running.result()
        shown.drain()
        shown.say(f"{result.reason} (exit code {result.exit_code})", "green" if result.exit_code == 0 else "red")
        if result.exit_code != 0:
            shown.say(f"see `midstep report {running.directory}`", "dim")
    return result.exit_code
