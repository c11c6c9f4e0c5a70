"""Where a controller that is started by hand works: directories of this machine, and the etcd that has its job."""

import contextlib
import os
from pathlib import Path

import click
import msgspec

from ...controller.etcd.place import EtcdPlace, certificates_of, parse_place
from ...controller.journal_reading import read_founding
from ...controller.service import KEYS_NAME
from ...protocol.errors import ConfigurationError
from ...protocol.private_files import make_private_directory
from ...protocol.token import Token, full, job_of
from ..joining.opening import let_nodes_join, require_loopback, required
from .directories import base_directory, checked_name
from .job_file import JobFile, write_job_file
from .run_directory import claim_free_run_directory


class ControllerPlace(msgspec.Struct, frozen=True):
    """Absolute paths, and `etcd` where the job is not kept in its directory."""

    job_directory: Path
    run_directory: Path
    etcd: EtcdPlace | None = None


def in_directories(
    job_directory: Path | None, run_directory: Path | None, token: Token | None, keys: Path | None, listen: str
) -> ControllerPlace:
    """Return where the job is that `midstep run` has made. Raises MidstepError, click.UsageError."""
    if job_directory is None or run_directory is None:
        raise click.UsageError("--job-dir and --run-dir name a job of this machine; --store URL one in etcd.")
    for directory in (job_directory, run_directory):
        if not directory.is_dir():
            raise click.UsageError(f"{directory} is not a directory.")
    if token is not None:
        job = job_of(token, read_founding(job_directory).job.job)
        let_nodes_join(keys or run_directory / KEYS_NAME, full(token), job)
    elif keys is None:
        require_loopback(listen)
    return ControllerPlace(job_directory.resolve(), run_directory.resolve())


def in_store(
    stack: contextlib.ExitStack,
    store: str,
    job: str | None,
    token: Token | None,
    *,
    directories: tuple[Path | None, Path | None],
) -> ControllerPlace:
    """Make the directories of a controller whose job is in etcd, but for those of job and run that are given.

    `stack` removes what is not to stay. All of the job's controllers have their keys from the same token.

    Raises MidstepError.
    """
    given = required(token)
    name = checked_name(job_of(given, job))
    job_directory, run_directory = directories
    place = parse_place(store, name, certificates_of(os.environ))
    directory = (job_directory or base_directory() / name).absolute()
    if run_directory is None:
        held = claim_free_run_directory(f"{name}.controller")
        stack.callback(held.remove)
        run_directory = held.path
    try:
        make_private_directory(directory)
        make_private_directory(run_directory)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be written: {error}. Choose another --job-dir.") from error
    let_nodes_join(run_directory / KEYS_NAME, full(given), name)
    write_job_file(directory, JobFile(str(run_directory), store, name))
    return ControllerPlace(directory, run_directory.resolve(), place)
