"""Where a controller that is started by hand works: directories of this machine, and the store that has its job."""

import contextlib
import os
from pathlib import Path

import click
import msgspec

from ..controller.etcd.place import access_of, parse_place
from ..controller.journal.reading import read_founding
from ..controller.journal.volume_place import VolumePlace, is_volume, parse_volume_place
from ..controller.opening import ControllerPlace, SharedFolder
from ..controller.service import KEYS_NAME
from ..protocol.discovery import endpoint
from ..protocol.errors import ConfigurationError
from ..protocol.private_files import make_private_directory
from ..protocol.token import FullToken, Token, full, job_of
from . import directories
from .job import let_nodes_join, require_loopback, required
from .joining import TokenWatch
from .meeting import address_outside, host_name

_EVERYWHERE = {"0.0.0.0", "*", "[::]", "::"}


class Given(msgspec.Struct, frozen=True):
    """The settings of the command line."""

    job: str | None
    token: Token | None
    token_file: Path | None
    keys: Path | None
    job_directory: Path | None
    run_directory: Path | None
    listen: str


def in_directories(stack: contextlib.ExitStack, given: Given) -> ControllerPlace:
    """Return where the job is that `midstep run` or `midstep submit` has made; `stack` removes what is not to stay.

    Raises MidstepError, click.UsageError.
    """
    job_directory, run_directory, token, keys = given.job_directory, given.run_directory, given.token, given.keys
    if job_directory is None or (run_directory is None and token is None):
        raise click.UsageError(
            "--job-dir and --run-dir name a job of this machine, with the job's token --job-dir alone; --store URL "
            "one in etcd, or on a volume of several machines."
        )
    if run_directory is None:
        held = directories.claim_free_run_directory(f"{read_founding(job_directory).job.job}.controller")
        stack.callback(held.remove)
        run_directory = held.path
        directories.write_job_file(job_directory, directories.JobFile(str(run_directory)))
    for directory in (job_directory, run_directory):
        if not directory.is_dir():
            raise click.UsageError(f"{directory} is not a directory.")
    if token is not None:
        job = job_of(token, read_founding(job_directory).job.job)
        _open(stack, given, full(token), keys or run_directory / KEYS_NAME, job)
    elif keys is None:
        require_loopback(given.listen)
    run_directory = run_directory.resolve()
    return ControllerPlace(
        job_directory.resolve(),
        run_directory,
        keys or run_directory / KEYS_NAME,
        given.listen,
        isolated=directories.isolation_folder(),
        machine=host_name(),
    )


def in_store(stack: contextlib.ExitStack, store: str, given: Given) -> ControllerPlace:
    """Make the directories of a controller whose job is in a store, but for those that are given.

    `stack` removes what is not to stay. All of the job's controllers have their keys from the same token.

    Raises MidstepError.
    """
    token = full(required(given.token)) if given.keys is None else None
    name = directories.checked_name(given.job or "" if token is None else job_of(token, given.job))
    job_directory, run_directory = given.job_directory, given.run_directory
    etcd = None if is_volume(store) else parse_place(store, name, access_of(os.environ))
    shared = _shared(parse_volume_place(store)) if is_volume(store) else None
    directory = (job_directory or directories.base_directory() / name).absolute()
    if run_directory is None:
        held = directories.claim_free_run_directory(f"{name}.controller")
        stack.callback(held.remove)
        run_directory = held.path
    try:
        make_private_directory(directory)
        make_private_directory(run_directory)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be written: {error}. Choose another --job-dir.") from error
    if token is not None:
        _open(stack, given, token, run_directory / KEYS_NAME, name)
    directories.write_job_file(directory, directories.JobFile(str(run_directory), store, name))
    run_directory = run_directory.resolve()
    keys = given.keys or run_directory / KEYS_NAME
    return ControllerPlace(
        directory,
        run_directory,
        keys,
        given.listen,
        etcd,
        shared,
        name,
        reached_at(given.listen),
        directories.isolation_folder(),
        host_name(),
    )


def reached_at(listen: str) -> str:
    """Return where others reach a controller that listens there; empty where that is not known before it leads."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal() or int(port) == 0:
        return ""
    if host in _EVERYWHERE:
        host = address_outside() or ""
    return endpoint(host.removeprefix("[").removesuffix("]"), int(port)) if host else ""


def _shared(place: VolumePlace) -> SharedFolder:
    """Return the folder of a job, and what connects to its Lease. Raises ConfigurationError."""
    from ..platforms.kubernetes.leases import KubernetesLease

    return SharedFolder(place.folder, lambda: KubernetesLease(place.namespace, place.lease))


def _open(stack: contextlib.ExitStack, given: Given, token: FullToken, keys: Path, job: str) -> None:
    """Let nodes join with the token, and with those that replace it in its file while `stack` is open."""
    let_nodes_join(keys, token, job)
    stack.enter_context(TokenWatch(given.token_file, token, keys, job))
