"""The checkpoints that a script under --mindio writes itself, as Megatron does: where they lie, and the newest one.

midstep neither writes nor reads them. It has to know the step of the newest one before it can plan a way back to it:
Megatron keeps that number in a file of its own beside the checkpoints, and has changed it when a checkpoint is whole.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...protocol import environment as names

TRACKER = "latest_checkpointed_iteration.txt"
OPTION = "--load"
FOLDER = "iter_"  # and the step
MOST_STEPS = 32  # that a script can choose from
_MOST_DIGITS = 15  # a number of steps has fewer
_MOST_BYTES = 32  # with what may stand around it


def folder_of(command: Sequence[str], environment: Mapping[str, str], working_directory: Path) -> Path | None:
    """Return the folder from which a script loads: by the variable, else by `--load`, the last one of them.

    None if neither is there, as with a shell script that passes `--load` itself.
    """
    given = environment.get(names.SCRIPT_CHECKPOINTS, "") or _option(command)
    return working_directory / given if given else None


def _option(command: Sequence[str]) -> str:
    given = ""
    for place, argument in enumerate(command):
        if argument == OPTION and place + 1 < len(command):
            given = command[place + 1]
        elif argument.startswith(f"{OPTION}="):
            given = argument.removeprefix(f"{OPTION}=")
    return given


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, by the script's count; 0 if there is none that has a number."""
    try:
        with (folder / TRACKER).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError:
        return 0
    digits = text.strip()
    return int(digits) if len(text) <= _MOST_BYTES and len(digits) <= _MOST_DIGITS and digits.isdigit() else 0


def whole_steps(folder: Path) -> tuple[int, ...]:
    """Return the steps of the newest checkpoints, by the script's count, the newest one first.

    What has a higher number than the newest one is being written, or was when its job ended.
    """
    newest = newest_step(folder)
    names = (each.name.removeprefix(FOLDER) for each in folder.glob(f"{FOLDER}*"))
    older = {int(name) for name in names if name.isdigit() and len(name) <= _MOST_DIGITS and int(name) < newest}
    return (newest, *sorted(older, reverse=True)[: MOST_STEPS - 1]) if newest else ()


def variables_of(folder: Path | None) -> dict[str, str]:
    """Return the variables by which ranks find the checkpoints, and know the step with which the job begins."""
    if folder is None:
        return {}
    return {names.SCRIPT_CHECKPOINTS: str(folder), names.SCRIPT_STEP: str(newest_step(folder))}


def folder_here() -> Path | None:
    """Return the folder, in a rank; None if it is not known."""
    given = os.environ.get(names.SCRIPT_CHECKPOINTS, "")
    return Path(given) if given else None


def first_step_here() -> int:
    """Return the step with which the job has begun, by the script's count, in a rank."""
    given = os.environ.get(names.SCRIPT_STEP, "")
    return int(given) if given.isdigit() else 0
