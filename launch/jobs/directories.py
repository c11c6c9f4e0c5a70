"""Where jobs keep what outlives them, and how a command finds the one that is meant.

A job directory holds the journal; everything that reads a job after the fact starts from here.
"""

import os
import re
from pathlib import Path

from ...controller.volume.place import ENTRIES, FOLDER, folder_in, holds_journal
from ...protocol.errors import ConfigurationError
from ..roles.group_files import GROUP_NAME, is_group, present_role_directory, read_founding
from .job_file import JOB_FILE_NAME

HOME_VARIABLE = "MIDSTEP_HOME"
DEFAULT_BASE = Path("~/.midstep/jobs")
JOURNAL_FILE = "journal.sqlite"
LISTED_JOBS = 10
MAX_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")


def base_directory() -> Path:
    """Return the directory that job directories are in: `$MIDSTEP_HOME`, else `~/.midstep/jobs`."""
    named = os.environ.get(HOME_VARIABLE)
    return (Path(named) if named else DEFAULT_BASE).expanduser()


def checked_name(name: str) -> str:
    """Return the name of a new job, if it can be one: it becomes the name of directories, and part of socket paths.

    Raises ConfigurationError for one that is too long for that, or would lead elsewhere.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"--job {name[:80]!r} is not a valid job name; allowed: up to {MAX_NAME} letters, digits, dots, "
            "underscores and dashes, with a letter or digit first. --job-dir says where the job's files go."
        )
    return name


def is_job(directory: Path) -> bool:
    """Tell whether a directory holds a job's journal, or says where it is."""
    known = (directory / JOURNAL_FILE).is_file() or (directory / JOB_FILE_NAME).is_file()
    return known or holds_journal(folder_in(directory))


def jobs(base: Path | None = None) -> list[Path]:
    """Return the job directories below `base`, the one that was written to last first.

    Raises ConfigurationError if `base` cannot be read.
    """
    base = base_directory() if base is None else base
    try:
        found = [entry for entry in base.iterdir() if is_job(entry) or is_group(entry)] if base.is_dir() else []
    except OSError as error:
        raise ConfigurationError(f"cannot list the jobs in {base}: {error.strerror}") from error
    return sorted(found, key=lambda directory: (-_written_s(directory), directory.name))


def latest_job(base: Path | None = None) -> Path:
    """Return the directory of the job that was written to last. Raises ConfigurationError if there is none."""
    base = base_directory() if base is None else base
    found = jobs(base)
    if not found:
        raise ConfigurationError(
            f"there are no jobs in {base}; start one with `midstep run`, name a job directory, "
            f"or set {HOME_VARIABLE} to where your jobs are"
        )
    return found[0]


def find_job(name_or_path: str | None, base: Path | None = None) -> Path:
    """Return the job directory that is meant: a path, a job's name, or its beginning if only one job has it.

    `JOB/ROLE` is a role of a job of several roles, as it stands. None means the latest job. Raises ConfigurationError
    that lists the jobs that are there, or the roles of one that has several.
    """
    found = find_job_or_group(name_or_path, base)
    if is_group(found):
        named = name_or_path or found.name
        roles = ", ".join(f"{named}/{role}" for role in read_founding(found).plan.names)
        raise ConfigurationError(f"{found.name} is a job of several roles: name one of them: {roles}")
    return found


def find_job_or_group(name_or_path: str | None, base: Path | None = None) -> Path:
    """As `find_job`, and return the directory of a job of several roles if that is meant."""
    base = base_directory() if base is None else base
    if name_or_path is None:
        return latest_job(base)
    path = Path(name_or_path).expanduser()
    if path.name == JOURNAL_FILE and path.is_file():
        return path.parent
    for place in (path, base / path):
        if place.parent != base and not place.exists() and is_group(place.parent):
            return present_role_directory(place.parent, place.name)
    if is_job(path) or is_group(path):
        return path
    is_name = path.name == name_or_path  # no separators: "../x" names no job
    if is_name and (is_job(base / name_or_path) or is_group(base / name_or_path)):
        return base / name_or_path
    beginning = [job for job in jobs(base) if is_name and name_or_path and job.name.startswith(name_or_path)]
    if len(beginning) == 1:
        return beginning[0]
    raise ConfigurationError(f"{_what_is_wrong(path, name_or_path, beginning)}; {_listing(base)}")


def _what_is_wrong(path: Path, name: str, beginning: list[Path]) -> str:
    if beginning:
        return f"{len(beginning)} jobs begin with {name!r}"
    if path.is_dir():
        return f"{path} is not a job directory: it has no {JOURNAL_FILE}"
    return f"there is no job {name!r} (of one that was started with --job-dir, name that directory)"


def _listing(base: Path) -> str:
    found = jobs(base)
    if not found:
        return f"there are no jobs in {base} (set {HOME_VARIABLE} to look elsewhere)"
    names = ", ".join(job.name for job in found[:LISTED_JOBS])
    more = f" and {len(found) - LISTED_JOBS} more" if len(found) > LISTED_JOBS else ""
    return f"jobs in {base}, latest first: {names}{more}"


def _written_s(directory: Path) -> float:
    """Return when the journal was last written: while a job runs, only the write-ahead log beside it shows that."""
    times = []
    written = (JOURNAL_FILE, f"{JOURNAL_FILE}-wal", JOB_FILE_NAME, f"{FOLDER}/{ENTRIES}", GROUP_NAME)
    for name in written:
        try:
            times.append((directory / name).stat().st_mtime)
        except OSError:  # no log beside it, or gone between listing and looking
            continue
    return max(times, default=0.0)
