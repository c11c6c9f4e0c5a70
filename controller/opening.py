"""How a controller gets its job: it enters the list of controllers, is elected, and opens the journal.

In files of one host, or in an etcd. What is above does not know which.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from ..protocol.incidents import ControllerPhase, ControllerStatus
from .election.file_election import LEASE_S, FileElection
from .election.roster import RosterEntry
from .election.roster import controllers as of_this_host
from .etcd.place import EtcdPlace
from .journal import Journal
from .journal_copy import open_copy
from .journal_head import HEAD_NAME
from .journal_paths import journal_path, lock_path
from .journal_store import JournalStore
from .keepalive import KeepAlive


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


class ControllerEntry(Protocol):
    """This controller in the list of all that a job has."""

    def enter(self, phase: ControllerPhase, term: int = 0) -> None:
        """Say where it stands from now on."""

    def close(self) -> None:
        """Strike it out. Idempotent."""


class Opened(msgspec.Struct, frozen=True):
    """What a controller has when it leads. `controllers` says which there are."""

    entry: ControllerEntry
    journal: JournalStore
    controllers: Callable[[], tuple[ControllerStatus, ...]]


def open_in_files(
    stack: contextlib.ExitStack, job_directory: Path, run_directory: Path, term: Term, alive: KeepAlive
) -> Opened:
    """Stand by until this controller leads, and begin its term in the job's directory. `stack` closes what is open.

    Raises JournalError, ConfigurationError.
    """
    entry = RosterEntry(run_directory, term.name)
    stack.callback(entry.close)
    path, head = journal_path(job_directory), run_directory / HEAD_NAME
    alive.beat()
    if term.in_memory:
        journal = stack.enter_context(open_copy(path, head=head))
    else:
        election = FileElection(lock_path(path), lease_s=term.lease_s)
        journal = stack.enter_context(
            Journal.open(path, wait_s=term.wait_s, head=head, beat=_beat(term, alive), election=election)
        )
    return Opened(entry, journal, lambda: of_this_host(run_directory))


def open_in_etcd(stack: contextlib.ExitStack, place: EtcdPlace, term: Term, alive: KeepAlive) -> Opened:
    """Stand by until this controller leads, and begin its term in etcd. As `open_in_files`."""
    from .etcd.journal import EtcdJournal
    from .etcd.presence import Presence, default_name

    alive.beat()
    lease_s = term.lease_s or LEASE_S
    entry = Presence(place, term.name or default_name(), lease_s)
    stack.callback(entry.close)
    journal = EtcdJournal.open(place, entry, lease_s=lease_s, wait_s=term.wait_s, beat=_beat(term, alive))
    stack.callback(journal.close)
    return Opened(entry, journal, entry.controllers)


def _beat(term: Term, alive: KeepAlive) -> Callable[[], None]:
    return alive.beat if term.wait_s is not None else alive.stand_by
