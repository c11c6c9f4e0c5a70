"""Runs the job of one role, in a process of its own: `python -m midstep.cli.roles.role_launcher DIRECTORY ROLE NUMBER`.

Started by the launcher of the whole job, with which it dies, for the attempt of that NUMBER. A job that has begun
continues from its journal.
"""

import logging
import sys
from pathlib import Path

import msgspec

from ...policies.scripted_roles import PlannedRole
from ...protocol.errors import MidstepError
from ..display.plain import echo, log_to_stderr
from ..display.tolerant_output import hold_standard_descriptors
from ..jobs.continuation import continued
from ..jobs.directories import is_job
from ..jobs.start import Start, create_job
from ..run import PlatformName, launch
from .group_files import read_founding
from .opening import start_of

EXIT_NOT_RUN = 2  # nothing of the job has been changed


def main(arguments: list[str]) -> int:
    """Run a role to the end of its job, and return its exit code."""
    directory, name, attempt = Path(arguments[0]), arguments[1], int(arguments[2])
    hold_standard_descriptors()
    log_to_stderr(logging.WARNING, f"midstep[{name}]: %(message)s")
    try:
        founding = read_founding(directory)
        role = founding.plan.role(name)
        assert role is not None, "the launcher starts roles of the file"
        start = start_of(founding, directory, role, attempt)
        return _run(start, role, PlatformName(founding.platform), quiet="--quiet" in arguments[3:])
    except MidstepError as error:
        echo(f"midstep[{name}]: {error}", err=True)
        return EXIT_NOT_RUN


def _run(start: Start, role: PlannedRole, platform: PlatformName, *, quiet: bool) -> int:
    directory = start.job_directory
    assert directory is not None
    if platform is PlatformName.RAY:
        from ..ray.job import Reserved
        from ..ray.launching import launch as launch_on_ray

        start = msgspec.structs.replace(start, fixed_nodes=False)
        reserved = Reserved(role.given.resources or None)
        return launch_on_ray(start, quiet=quiet, reserved=reserved, role=role.name, again=is_job(directory))
    job = continued(directory) if is_job(directory) else create_job(start)
    return launch(job, quiet=quiet, role=role.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
