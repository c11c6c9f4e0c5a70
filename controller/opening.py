"""How a controller gets its job: it enters the list of controllers, is elected, and opens the journal.

In files of one host, in an etcd, or on a volume that several machines share. What is above does not know which.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from ..protocol.errors import ConfigurationError
from .election.election import Election
from .election.file_election import LEASE_S, FileElection
from .election.lease_election import LeaseElection, LeaseStore
from .election.presence import (
    EtcdPresence,
    KeptPresence,
    RosterEntry,
    VolumePresence,
    controllers_of_host,
    server_clock,
)
from .election.succession import EtcdSuccession, FileSuccession, Succession
from .endpoints.standing_by import StandingBy
from .etcd.place import EtcdPlace
from .journal.etcd_store import open_in_etcd
from .journal.journal import Journal
from .journal.sqlite_file import HEAD_NAME, journal_path, lock_path
from .journal.sqlite_store import open_copy, open_sqlite
from .journal.volume_store import open_on_volume
from .keepalive import KeepAlive
from .switchover import ControllerEntry, Switchover

ELECTION_VARIABLE = "MIDSTEP_ELECTION"
ELECTIONS = "midstep.elections"  # the group of their entry points


_Beat = Callable[[ControllerEntry], None]


class Term(msgspec.Struct, frozen=True):
    """How a controller takes over.

    `wait_s`: how long to stand by for the present controller to end; None: without a limit. `lease_s`: depose it when
    it shows no sign of life for so long; None: wait for its end. `stop`: why the job is to be stopped at once, unless
    that has been asked for before. `in_memory`: with a copy of a journal that cannot be written. `name`: what this
    controller is called.
    """

    wait_s: float | None = 10.0
    lease_s: float | None = None
    stop: str | None = None
    in_memory: bool = False
    name: str | None = None


class SharedFolder(msgspec.Struct, frozen=True):
    """A folder of several machines with a job, and how the Lease is reached that its controllers are elected by."""

    path: Path
    connect: Callable[[], LeaseStore]


class ControllerPlace(msgspec.Struct, frozen=True):
    """Where a controller works: absolute paths, and the endpoint it listens at.

    The journal is in the job directory, unless `etcd` or a `shared` folder has it. `endpoint`: where others reach this
    controller of `job`, also while it stands by; empty: only its own machine does. `isolated`: the folder about devices
    that jobs have isolated for the next ones (None: there is none), in which this machine is called `machine`.
    """

    job_directory: Path
    run_directory: Path
    keys_directory: Path
    listen: str
    etcd: EtcdPlace | None = None
    shared: SharedFolder | None = None
    job: str = ""
    endpoint: str = ""
    isolated: Path | None = None
    machine: str = ""


class Opened(msgspec.Struct, frozen=True):
    """The parts that a controller has when it leads."""

    entry: ControllerEntry
    journal: Journal
    switchover: Switchover


def open_job(
    stack: contextlib.ExitStack,
    place: ControllerPlace,
    term: Term,
    alive: KeepAlive,
    standing_by: StandingBy | None = None,
) -> Opened:
    """Stand by until this controller leads, and begin its term. `stack` closes what is open.

    `standing_by` answers meanwhile. Raises JournalError, ConfigurationError.
    """
    if place.etcd is not None:
        return _open_in_etcd(stack, place, place.etcd, term, _beat(term, alive, standing_by))
    if place.shared is not None:
        return _open_in_folder(stack, place, place.shared, term, _beat(term, alive, standing_by))
    return _open_in_files(stack, place.job_directory, place.run_directory, term, alive)


def _open_in_files(
    stack: contextlib.ExitStack, job_directory: Path, run_directory: Path, term: Term, alive: KeepAlive
) -> Opened:
    entry = RosterEntry(run_directory, term.name)
    stack.callback(entry.close)
    path, head = journal_path(job_directory), run_directory / HEAD_NAME
    alive.beat()
    succession = None if term.in_memory else FileSuccession(run_directory)
    if succession is None:
        journal = stack.enter_context(open_copy(path, head=head))
    else:
        election = _election_of_one_host(path, term, entry, _admitted(succession, entry, term))
        journal = stack.enter_context(
            open_sqlite(path, wait_s=term.wait_s, head=head, beat=partial(_beat(term, alive), entry), election=election)
        )
    return Opened(entry, journal, Switchover(entry, lambda: controllers_of_host(run_directory), succession))


def _election_of_one_host(journal: Path, term: Term, entry: ControllerEntry, admitted: Callable[[], bool]) -> Election:
    """Return the election that the environment names, by its entry point, or else the one by a file."""
    name = os.environ.get(ELECTION_VARIABLE, "")
    if not name:
        return FileElection(lock_path(journal), lease_s=term.lease_s, admitted=admitted)
    known = {each.name: each for each in entry_points(group=ELECTIONS)}
    if name not in known:
        raise ConfigurationError(
            f"{ELECTION_VARIABLE}={name}: no installed package brings an election of this name in the group "
            f"{ELECTIONS}; there are: {', '.join(sorted(known)) or 'none'}."
        )
    try:
        election: Election = known[name].load()(
            journal=journal, name=entry.name, lease_s=term.lease_s or LEASE_S, admitted=admitted
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"the election {name} ({known[name].value}) cannot be used: {error}.") from error
    return election


def _open_in_etcd(
    stack: contextlib.ExitStack, where: ControllerPlace, place: EtcdPlace, term: Term, beat: _Beat
) -> Opened:
    lease_s = term.lease_s or LEASE_S
    entry = EtcdPresence(place, term.name or _default_name(), lease_s, where.endpoint)
    stack.callback(entry.close)
    succession = EtcdSuccession(place)
    stack.callback(succession.close)
    journal = open_in_etcd(
        place,
        entry,
        lease_s=lease_s,
        wait_s=term.wait_s,
        beat=partial(beat, entry),
        admitted=_admitted(succession, entry, term),
    )
    stack.callback(journal.close)
    return Opened(entry, journal, Switchover(entry, entry.controllers, succession))


def _open_in_folder(
    stack: contextlib.ExitStack, where: ControllerPlace, shared: SharedFolder, term: Term, beat: _Beat
) -> Opened:
    entry = VolumePresence(shared.path, term.name or _default_name(), where.endpoint)
    stack.callback(entry.close)
    succession = FileSuccession(shared.path, server_clock(shared.path))
    election = LeaseElection(
        shared.connect,
        entry.name,
        lease_s=term.lease_s or LEASE_S,
        admitted=_admitted(succession, entry, term),
    )
    journal = open_on_volume(
        shared.path,
        election,
        name=entry.name,
        heard=lambda: entry.heard,
        wait_s=term.wait_s,
        beat=partial(beat, entry),
    )
    stack.callback(journal.close)
    entry.lead(journal.clock)
    return Opened(entry, journal, Switchover(entry, entry.controllers, succession))


def _default_name() -> str:
    """Return what a controller is called that was given no name, among those of several machines."""
    return f"{socket.gethostname().partition('.')[0]}-{os.getpid()}"


def _admitted(succession: Succession, entry: ControllerEntry, term: Term) -> Callable[[], bool]:
    return lambda: succession.admits(entry.name, standby=term.wait_s is None)


def _beat(term: Term, alive: KeepAlive, standing_by: StandingBy | None = None) -> _Beat:
    """Return what shows that this controller gets on while it waits for the lead, and answers those who come."""
    alive.beat()
    sign = alive.beat if term.wait_s is not None else alive.stand_by

    def beat(entry: ControllerEntry) -> None:
        sign()
        if standing_by is not None and isinstance(entry, KeptPresence):
            standing_by.answer(entry.name, entry.controllers())

    return beat
