"""Runs the job of one role in a process of its own: `python -m midstep.cli.role_launcher DIRECTORY ROLE N`.

Started by the launcher of the whole job, with which it dies, for the attempt of that N. A job that has begun
continues from its journal.
"""

import logging
import os
import sys
from pathlib import Path

import msgspec

from ..launch.directories import GroupFounding, is_job, read_founding
from ..launch.job import continued, create_job
from ..launch.roles import STOP, LaunchedRole, start_of
from ..protocol.errors import ConfigurationError, MidstepError
from ..protocol.exits import leave_to_launcher
from .display.plain import echo, hold_standard_descriptors, log_to_stderr
from .run import PlatformName
from .showing import continue_on_ray, run_job, run_on_ray

EXIT_NOT_RUN = 2  # nothing of the job has been changed


def main(arguments: list[str]) -> int:
    """Run a role to the end of its job, and return its exit code."""
    directory, name, attempt = Path(arguments[0]), arguments[1], int(arguments[2])
    leave_to_launcher(os.environ)
    hold_standard_descriptors()
    log_to_stderr(logging.WARNING, f"midstep[{name}]: %(message)s")
    try:
        founding = read_founding(directory)
        role = founding.plan.role(name)
        assert role is not None, "the launcher starts roles of the file"
        start = start_of(founding, directory, role, attempt)
        how = LaunchedRole(start, role, attempt, quiet="--quiet" in arguments[3:], stop=STOP in arguments[3:])
        return _run(founding, how)
    except MidstepError as error:
        echo(f"midstep[{name}]: {error}", err=True)
        return EXIT_NOT_RUN


def _run(founding: GroupFounding, launched: LaunchedRole) -> int:
    start, role = launched.start, launched.role
    directory = start.job_directory
    assert directory is not None
    if founding.platform == PlatformName.KUBERNETES:
        from ..launch.kubernetes.role import run_role

        return run_role(launched, echo)
    if launched.stop and not is_job(directory):
        raise ConfigurationError(f"its job {start.job} has not begun, so there is nothing to stop.")
    if founding.platform == PlatformName.RAY:
        if is_job(directory):
            return continue_on_ray(directory, quiet=launched.quiet, role=role.name, stop=launched.stop)
        on_ray = msgspec.structs.replace(start, fixed_nodes=False)
        return run_on_ray(on_ray, quiet=launched.quiet, resources=role.given.resources, role=role.name)
    job = continued(directory) if is_job(directory) else create_job(start)
    return run_job(job, quiet=launched.quiet, role=role.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
