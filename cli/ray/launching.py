"""`midstep run --platform ray`: a job on a Ray cluster, shown as one on this machine is."""

import contextlib
import signal

import msgspec

from ...protocol.errors import ConfigurationError
from ..display.display import Display
from ..jobs.directories import checked_name
from ..jobs.start import Start, new_name
from .job import Reserved, RunningJob


def launch(
    start: Start,
    *,
    quiet: bool,
    reserved: Reserved | None = None,
    role: str = "",
    again: bool = False,
    stop: bool = False,
) -> int:
    """Run a job on Ray to its end, and return its exit code. Raises ConfigurationError.

    `role`: what it is in a job of several roles. `again`: it was founded before, and may run. `stop`: it is only to be
    ended.
    """
    if start.fault_sources or start.fixed_nodes:
        raise ConfigurationError("--fault-source and --fixed-nodes are for nodes on this machine.")
    if start.job_directory is None:
        raise ConfigurationError("--platform ray needs --job-dir: a directory that all machines of the cluster see.")
    name = checked_name(start.job) if start.job is not None else new_name()
    start = msgspec.structs.replace(start, job=name, job_directory=start.job_directory.absolute())
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(RunningJob(start, reserved or Reserved(), again=again))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has taken it for an error since it began here
        shown = stack.enter_context(Display(running.directory, running.directory, quiet=quiet, role=role))
        shown.say(f"job {name} in {running.directory}", "dim")
        if stop:
            running.stop()
        result = running.result()
        shown.drain()
        shown.say(f"{result.reason} (exit code {result.exit_code})", "green" if result.exit_code == 0 else "red")
        if result.exit_code != 0:
            shown.say(f"see `midstep report {running.directory}`", "dim")
    return result.exit_code
