"""The ends of agents and launchers: exit codes, the reason in a file, and signals that only a launcher acts on.

The launcher of an engine goes by the exit code of an agent, or of `midstep run` on a machine that has joined. Any other
code is the job's own. Slurm sends SIGTERM to all processes of a step at once: only launchers act on it then. The others
ignore it, and so does what they start, since a program begins by ignoring what its parent ignores.
"""

import contextlib
import signal
from collections.abc import MutableMapping
from pathlib import Path

import msgspec

from .private_files import replace_file

RESTART_HERE = 75  # no controller for too long: the job may be elsewhere, or over
ANOTHER_NODE = 76  # this node is not to be used any more by the job
NOT_ADMITTED = 77  # wrong or expired token, a name in use, another release: the same again will not help
# 79, of a job that a rule of its policy has stopped, is in `rules.py`: a scheduler must not start that job again.

# Of `midstep controller`, whose job is not over then.
CONTROLLER_FAILED = 70  # it failed, or another one leads by now: there is no result.json
JOURNAL_DAMAGED = 65  # no other one can continue either: the journal is not what was written
_NAME = "agent.end"
_VARIABLE = "MIDSTEP_LAUNCHER_HEARS_SIGTERM"  # of what a launcher starts
_YES = "1"


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


def hear_for_all(environment: MutableMapping[str, str]) -> None:
    """Have what is started in this environment leave SIGTERM to this process."""
    environment[_VARIABLE] = _YES


def leave_to_launcher(environment: MutableMapping[str, str]) -> None:
    """Ignore SIGTERM from now on, if the launcher of this process has said so."""
    if environment.pop(_VARIABLE, "") == _YES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def is_left_to_launcher() -> bool:
    """Say whether this process leaves SIGTERM to its launcher."""
    return signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def heard(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return those of some signals that this process does not leave to its launcher."""
    return [number for number in numbers if number is not signal.SIGTERM or not is_left_to_launcher()]
