"""What the ranks of one node run where each machine has been given its own command, as torchrun's users do.

Directory, arguments and environment may differ between machines; all else of the job comes from the controller.
"""

from pathlib import Path

import msgspec

from ..protocol.errors import ConfigurationError
from ..protocol.private_files import replace_file
from ..protocol.types import JobSpec


class OwnProgram(msgspec.Struct, frozen=True):
    """A command and where it runs. `environment`: beside that of the agent."""

    command: tuple[str, ...]
    is_module: bool
    no_python: bool
    working_directory: str
    environment: dict[str, str]

    def of(self, job: JobSpec) -> JobSpec:
        """Return the job as this machine runs it."""
        return msgspec.structs.replace(
            job,
            command=self.command,
            is_module=self.is_module,
            no_python=self.no_python,
            working_directory=self.working_directory,
            environment={**job.environment, **self.environment},
        )


def write_program(path: Path, program: OwnProgram) -> None:
    """Write it down for the agent; the environment may hold secrets. Raises ConfigurationError."""
    try:
        replace_file(path, msgspec.json.encode(program))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.") from error


def read_program(path: Path) -> OwnProgram:
    """Read what `write_program` wrote. Raises ConfigurationError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=OwnProgram)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. `midstep run` writes it.") from error
