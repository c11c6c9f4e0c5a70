"""Reads the journal of a job from where it is: in the job directory, in etcd, or on a volume of several machines."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ...controller.election.roster import controllers
from ...controller.election.succession import FileSuccession
from ...controller.etcd.place import EtcdPlace, access_of, parse_place
from ...controller.journal import reading
from ...controller.story import StoryEntry
from ...controller.volume import presence
from ...controller.volume import reading as on_volume
from ...controller.volume.place import folder_in, holds_journal, is_volume, parse_volume_place
from ...protocol.incidents import ControllerStatus, JobStatus
from .job_file import read_job_file, run_directory_of


def read_status(job_directory: Path) -> JobStatus:
    """Return a job's status as of its last event, from its journal alone. Raises JournalError."""
    folder, place = _volume_of(job_directory), _etcd_of(job_directory)
    if folder is not None:
        return on_volume.read_status(folder)
    if place is None:
        return reading.read_status(job_directory)
    from ...controller.etcd import reading as in_etcd

    return in_etcd.read_status(place)


def read_story(job_directory: Path) -> Iterator[StoryEntry]:
    """Yield each event that the journal of a job still has, with what followed from it. Raises JournalError."""
    folder, place = _volume_of(job_directory), _etcd_of(job_directory)
    if folder is not None:
        return on_volume.read_story(folder)
    if place is None:
        return reading.read_story(job_directory)
    from ...controller.etcd import reading as in_etcd

    return in_etcd.read_story(place)


def paused_until_s(job_directory: Path) -> float:
    """Return until when no standby of a job takes over, in wall-clock seconds, or 0. Raises JournalError."""
    folder, place = _volume_of(job_directory), _etcd_of(job_directory)
    if folder is not None:
        return FileSuccession(folder, presence.succession_clock(folder)).paused_until_s()
    if place is None:
        run_directory = run_directory_of(job_directory)
        return 0.0 if run_directory is None else FileSuccession(run_directory).paused_until_s()
    from ...controller.etcd.succession import EtcdSuccession

    with contextlib.closing(EtcdSuccession(place)) as succession:
        return succession.paused_until_s()


def living_controllers(job_directory: Path) -> tuple[ControllerStatus, ...]:
    """Return the controllers of a job that live, also those that stand by. Raises JournalError."""
    folder, place = _volume_of(job_directory), _etcd_of(job_directory)
    if folder is not None:
        return presence.controllers_in(folder)
    if place is None:
        run_directory = run_directory_of(job_directory)
        return () if run_directory is None else controllers(run_directory)
    from ...controller.etcd import reading as in_etcd

    return in_etcd.read_controllers(place)


def _volume_of(job_directory: Path) -> Path | None:
    """Return the folder with the journal: the one that the job's store names, or the one in its own directory."""
    own = folder_in(job_directory)
    if holds_journal(own):
        return own
    known = read_job_file(job_directory)
    return parse_volume_place(known.store).folder if known is not None and is_volume(known.store) else None


def _etcd_of(job_directory: Path) -> EtcdPlace | None:
    known = read_job_file(job_directory)
    if known is None or not known.store or is_volume(known.store):
        return None
    return parse_place(known.store, known.job, access_of(os.environ))
