"""SIGTERM where it reaches all processes of a job at once, as Slurm sends it to a step: only launchers act on it.

All others ignore it, and so does what they start: a program begins by ignoring what its parent ignores.
"""

import signal
from collections.abc import MutableMapping

_VARIABLE = "MIDSTEP_LAUNCHER_HEARS_SIGTERM"  # of what a launcher starts
_YES = "1"


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
