"""`midstep run --platform ray`: a job on a Ray cluster, shown as one on this machine is."""

import msgspec

from ...protocol.errors import ConfigurationError
from ..display.display import Display
from ..jobs.directories import checked_name
from ..jobs.start import Start, new_name
from .job import Reserved, RunningJob


def launch(start: Start, *, quiet: bool) -> int:
    """Run a job on Ray to its end, and return its exit code. Raises ConfigurationError."""
    if start.fault_sources or start.fixed_nodes:
        raise ConfigurationError("--fault-source and --fixed-nodes are for nodes on this machine.")
    if start.job_directory is None:
        raise ConfigurationError("--platform ray needs --job-dir: a directory that all machines of the cluster see.")
    name = checked_name(start.job) if start.job is not None else new_name()
    start = msgspec.structs.replace(start, job=name, job_directory=start.job_directory.absolute())
    with RunningJob(start, Reserved()) as running, Display(running.directory, running.directory, quiet=quiet) as shown:
        shown.say(f"job {name} in {running.directory}", "dim")
        result = running.result()
        shown.drain()
        shown.say(f"{result.reason} (exit code {result.exit_code})", "green" if result.exit_code == 0 else "red")
        if result.exit_code != 0:
            shown.say(f"see `midstep report {running.directory}`", "dim")
    return result.exit_code
