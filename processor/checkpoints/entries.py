"""The entries of a checkpoint directory: complete checkpoints, the remains of others, and files of other programs.

Each entry is looked at by itself. One that cannot be read is passed over, said in the log once, and hides no other. It
remains a trace: a checkpoint has once been complete here, so training must not begin at its first step in silence.

For barrier one a rank surveys the directory. One that cannot be listed is not an empty one: the rank tries again for a
while, as file servers come back, then says why, and the controller decides what can be done without.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ...protocol.errors import CheckpointError
from ...protocol.types import CheckpointTrace
from . import files
from .dcp_metadata import Index, check_files, read_index

LATEST = "latest.json"
MOST_LATEST_BYTES = 4096
_COMPLETE = re.compile(r"step-(\d{8,16})")
_UNFINISHED = re.compile(r"step-(\d{8,16})\.(?:tmp|old)-.+")
JOINING_PATIENCE_S = 10.0  # a new process, which `deadlines.start_s` waits for
PARKED_PATIENCE_S = 1.0  # a survivor, which `deadlines.quiesce_s` waits for, and which may need no checkpoint
MOST_REPORTED = 1000  # the newest; a report is one message
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_NAMED = 3  # traces that are reported one by one
_MOST_CHARACTERS = 300  # of each
_log = logging.getLogger("midstep")


class Latest(msgspec.Struct, frozen=True):
    """The checkpoint that was completed last: a trace that outlives the checkpoints themselves."""

    step: int


@dataclasses.dataclass(frozen=True)
class Entries:
    """The findings: steps whose checkpoints are complete, ascending, and other traces of checkpoints, in words."""

    complete: tuple[int, ...] = ()
    unusable: tuple[str, ...] = ()


def complete_steps(directory: str | Path) -> tuple[int, ...]:
    """Return the steps whose checkpoints are complete, ascending; checks that the files are there in full size.

    Raises CheckpointError when the directory exists and cannot be listed.
    """
    return look_into(directory).complete


def look_into(directory: str | Path, most: int | None = None, *, foreign: bool = False) -> Entries:
    """Look at each entry, the newest first, up to `most` complete checkpoints.

    `foreign`: directories that torch.distributed.checkpoint alone has written are checkpoints, too.
    Raises CheckpointError when the directory exists and cannot be listed.
    """
    complete: list[int] = []
    unusable: list[str] = []
    for step in reversed(_steps(_names(directory))):
        place = files.step_directory(directory, step)
        problem = _problem(place, foreign=foreign)
        if problem == "":
            complete.append(step)
        elif problem is not None:
            files.warn_once(f"{place} is passed over: {problem}")
            unusable.append(f"{place.name}: {problem}")
        if len(complete) == most:
            break
    if not complete and not unusable:
        unusable += _completed_before(Path(directory) / LATEST)
    return Entries(tuple(reversed(complete)), tuple(unusable))


def note_latest(directory: str | Path, step: int) -> None:
    """Write down that the checkpoint of `step` is complete. A failure is logged: the checkpoint itself is a trace."""
    path = Path(directory) / LATEST
    try:
        files.write_whole(
            path, msgspec.json.encode(Latest(step)), partial=path.with_suffix(f".{secrets.token_hex(4)}.new")
        )
    except OSError as error:
        files.warn_once(f"cannot write {path}: {error}")


def prune(directory: str | Path, keep: int, *, written: int | None = None) -> tuple[int, ...]:
    """Remove all but the newest `keep` complete checkpoints, and what older attempts left; returns the steps removed.

    `written`: the step that was just completed. What is newer is another job's and stays. What cannot be removed is
    logged and left. Raises CheckpointError when the directory cannot be listed.
    """
    names = _names(directory)
    steps = [step for step in complete_steps(directory) if written is None or step <= written]
    if not steps:
        return ()
    old = [name for name in names if (match := _UNFINISHED.fullmatch(name)) and int(match[1]) < steps[-1]]
    _remove(Path(directory) / name for name in old)
    return tuple(step for step in steps[: -max(1, keep)] if _remove([files.step_directory(directory, step)]))


def forget_after(directory: str | Path, step: int, label: str) -> None:
    """Remove the checkpoints of later steps: the job has gone back, and takes another way from here.

    Those that cannot be read now might be read later, so they get other names; and so do those that torch has written.
    In repair, on the rank that publishes. What cannot be changed is logged and left.
    Raises CheckpointError when the directory cannot be listed.
    """
    for later in _steps(_names(directory)):
        place = files.step_directory(directory, later)
        problem = _problem(place, foreign=True) if later > step else None
        if problem is None:
            continue
        try:
            if problem == "" and files.holds_own_files(place):
                _remove([place])
            else:
                move_aside(place, label)
        except OSError as error:
            files.warn_once(f"cannot give {place} another name: {error}")


def set_aside(directory: str | Path, label: str) -> None:
    """Give the checkpoints of an earlier training other names, which midstep neither reads nor removes.

    In repair, on the rank that publishes, where training begins at its first step. Raises CheckpointError when one
    keeps its name: a later recovery would take it for one of this training.
    """
    with files.told(f"set the checkpoints of an earlier training in {directory} aside"):
        for step in _steps(_names(directory)):
            place = files.step_directory(directory, step)
            if _problem(place, foreign=True) is not None:
                move_aside(place, label)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (Path(directory) / LATEST).unlink()


def move_aside(place: Path, label: str) -> None:
    """Give an entry a name that midstep neither reads nor removes. Raises OSError."""
    aside = place.with_name(f"{place.name}.aside-{label}")
    if os.path.lexists(aside):
        aside = aside.with_name(f"{aside.name}-{secrets.token_hex(4)}")
    place.rename(aside)
    files.warn_once(f"{place} is not of this training, and is {aside.name} now")


def _names(directory: str | Path) -> list[str]:
    with files.told(f"look for checkpoints in {directory}"):
        try:
            return os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):  # there is no such directory
            return []


def _steps(names: Iterable[str]) -> list[int]:
    """Return the steps of entries that have the name of a complete checkpoint, ascending."""
    found = {name: int(match[1]) for name in names if (match := _COMPLETE.fullmatch(name))}
    known = {name: step for name, step in found.items() if 0 < step <= files.MOST_STEPS}
    return sorted(step for name, step in known.items() if files.step_directory("", step).name == name)


def _problem(place: Path, *, foreign: bool) -> str | None:
    """Say why an entry is no checkpoint that can be read; empty: it is one; None: it is not midstep's, or torch's."""
    try:
        mode = place.lstat().st_mode
        if stat.S_ISLNK(mode):
            return "it is a symbolic link, and links are not followed here"
        if not stat.S_ISDIR(mode):
            files.warn_once(f"{place} is no directory, so midstep has not written it")
            return None
        return _incomplete(place, foreign=foreign)
    except FileNotFoundError:  # removed since the directory was listed
        return None
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error}"


def _incomplete(place: Path, *, foreign: bool) -> str | None:
    try:
        manifest = files.read_manifest(place)
    except FileNotFoundError:
        if os.path.lexists(place / files.DAMAGED):
            return f"it was found to be damaged, and has {files.DAMAGED} since"
        if files.holds_own_files(place):
            return f"it has no {files.MANIFEST}"
        return _foreign_problem(place) if foreign else None
    for name, part in manifest.parts.items():
        try:
            found = (place / name).lstat()
        except FileNotFoundError:
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode) or found.st_size != part.size_bytes:
            return f"{name} is no file of {part.size_bytes} bytes"
    return ""


def _foreign_problem(place: Path) -> str | None:
    """Say why a directory that torch alone has written cannot be read; None: it is no such directory."""
    try:
        found = (place / files.METADATA).lstat()
    except FileNotFoundError:
        return None
    if os.path.lexists(place / files.FOREIGN_DAMAGE):
        return f"it was found to be damaged, see {files.FOREIGN_DAMAGE} in it"
    check_files(place, _index(place, found.st_ino, found.st_mtime_ns, found.st_size))
    return ""


@functools.lru_cache(maxsize=16)
def _index(place: Path, *_state: int) -> Index:
    return read_index(place)


def _completed_before(path: Path) -> list[str]:
    try:
        latest = files.read_record(path, Latest, MOST_LATEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, CheckpointError) as error:
        return [f"{path.name} cannot be read: {error}"]
    return [f"the checkpoint of step {latest.step} was complete by {path.name}, and is gone"]


def _remove(places: Iterable[Path]) -> bool:
    """Remove what midstep has written there; False where something of it is left."""
    whole = True
    for place in places:
        try:
            files.remove_checkpoint(place)
        except FileNotFoundError:
            continue
        except OSError as error:
            whole = False
            files.warn_once(f"cannot remove {place} whole: {error}")
    return whole


def survey(
    directory: str | None,
    patience_s: float,
    *,
    foreign: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[tuple[int, ...], CheckpointTrace]:
    """Return the steps whose checkpoints this rank can read, ascending, and what else it found. For barrier one."""
    if directory is None:
        return (), CheckpointTrace()
    end_s, wait_s = clock() + patience_s, _FIRST_WAIT_S
    while True:
        try:
            entries = look_into(directory, MOST_REPORTED, foreign=foreign)
            break
        except CheckpointError as error:
            if clock() + wait_s > end_s:
                _log.error("no checkpoint can be used: %s", error)
                return (), CheckpointTrace(directory, unlisted=str(error)[:_MOST_CHARACTERS])
        sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    trace = CheckpointTrace(
        directory, unusable=_in_words(entries.unusable), unmarked=not os.path.lexists(Path(directory) / files.MARK)
    )
    return entries.complete, trace


def _in_words(unusable: tuple[str, ...]) -> str:
    named = "; ".join(each[:_MOST_CHARACTERS] for each in unusable[:_NAMED])
    return f"{named}; and {len(unusable) - _NAMED} more" if len(unusable) > _NAMED else named
