"""How an agent ended, for the `midstep run` that has started it on the same machine."""

import contextlib
from pathlib import Path

import msgspec

from .private_files import replace_file

_NAME = "agent.end"


class AgentEnd(msgspec.Struct, frozen=True):
    """The exit code of an agent, and the reason in words."""

    exit_code: int
    reason: str


def write_agent_end(run_directory: Path, end: AgentEnd) -> None:
    """Say how this agent ended. Where that cannot be written its exit status has to do."""
    with contextlib.suppress(OSError):
        replace_file(run_directory / _NAME, msgspec.json.encode(end))


def read_agent_end(run_directory: Path) -> AgentEnd | None:
    """Return how the agent ended, if it could say so."""
    try:
        return msgspec.json.decode((run_directory / _NAME).read_bytes(), type=AgentEnd)
    except (OSError, msgspec.MsgspecError):
        return None
