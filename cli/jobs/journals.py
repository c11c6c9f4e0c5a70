"""Reads the journal of a job from where it is: in the job directory, or in etcd."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ...controller.election.roster import controllers
from ...controller.election.succession import FileSuccession
from ...controller.etcd.place import EtcdPlace, access_of, parse_place
from ...controller.journal import reading
from ...controller.story import StoryEntry
from ...protocol.incidents import ControllerStatus, JobStatus
from .job_file import read_job_file, run_directory_of


def read_status(job_directory: Path) -> JobStatus:
    """Return a job's status as of its last event, from its journal alone. Raises JournalError."""
    place = _etcd_of(job_directory)
    if place is None:
        return reading.read_status(job_directory)
    from ...controller.etcd import reading as in_etcd

    return in_etcd.read_status(place)


def read_story(job_directory: Path) -> Iterator[StoryEntry]:
    """Yield each event that the journal of a job still has, with what followed from it. Raises JournalError."""
    place = _etcd_of(job_directory)
    if place is None:
        return reading.read_story(job_directory)
    from ...controller.etcd import reading as in_etcd

    return in_etcd.read_story(place)


def paused_until_s(job_directory: Path) -> float:
    """Return until when no standby of a job takes over, in wall-clock seconds, or 0. Raises JournalError."""
    place = _etcd_of(job_directory)
    if place is None:
        run_directory = run_directory_of(job_directory)
        return 0.0 if run_directory is None else FileSuccession(run_directory).paused_until_s()
    from ...controller.etcd.succession import EtcdSuccession

    with contextlib.closing(EtcdSuccession(place)) as succession:
        return succession.paused_until_s()


def living_controllers(job_directory: Path) -> tuple[ControllerStatus, ...]:
    """Return the controllers of a job that live, also those that stand by. Raises JournalError."""
    place = _etcd_of(job_directory)
    if place is None:
        run_directory = run_directory_of(job_directory)
        return () if run_directory is None else controllers(run_directory)
    from ...controller.etcd import reading as in_etcd

    return in_etcd.read_controllers(place)


def _etcd_of(job_directory: Path) -> EtcdPlace | None:
    known = read_job_file(job_directory)
    if known is None or not known.store:
        return None
    return parse_place(known.store, known.job, access_of(os.environ))
