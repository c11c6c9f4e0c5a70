"""The rendezvous store

It has no access control of torch's: whoever can connect may list, read, replace and delete everything.
"""

from __future__ import annotations

import importlib
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from midstep.agent.kept_process import MAX_EARLY_EXITS
from midstep.agent.training_process import separate_generations
from midstep.communicators import rendezvous
from midstep.communicators.gloo.host_group import HostGroup
from midstep.protocol.errors import LinkUpFailed
from midstep.protocol.types import InjectionPoint, Rendezvous

from ..chaos.comparing import assert_nobody_harmed, finish
from ..chaos.conftest import StartJob, device, start_job  # noqa: F401 - fixtures
from ..chaos.jobs import Job, inject
from ..chaos.node_processes import agents_of
from ..contract.gloo.conftest import Rank, Ranks
from .attack import attack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NONSENSE = (b"\xff\xfe", b'{"listener": 1}', b"[" * 100_000, b"\0" * 1_000_000)
LINK_UP_S = 1.5


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.end()


class Stranger:
    """Connects to the store and puts one value wherever there is another."""

    def __init__(self, store: Rendezvous, value: bytes) -> None:
        self._store = TCPStore(
            store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._value: Any = value  # torch takes bytes, and says that it does not
        self._old = self._keys()
        self._over = threading.Event()
        self.written = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _keys(self) -> set[str]:
        return set(self._store.list_keys())  # type: ignore[attr-defined,unused-ignore]

    def _write(self) -> None:
        with suppress(RuntimeError):  # the store has ended
            while not self._over.is_set():
                for key in self._keys() - self._old:
                    self._store.set(key, self._value)
                    self.written.set()
                time.sleep(0.001)

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)


def _reconnects(rank: Rank) -> None:
    communicator = rank.join(connected=False)
    rank.say("here")
    while (generation := rank.hear()) is not None:
        try:
            communicator.reconnect(generation, rank.store, LINK_UP_S)
        except LinkUpFailed as error:
            rank.say(str(error))
        else:
            communicator.barrier()
            rank.say("up")


@pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch does not list the keys of a store")
@attack(
    "writes nonsense over everything in the store while ranks link up",
    holds="no process ends: the link-up fails and is tried again under the next generation",
    reads="which store, which key, and that somebody else writes there",
)
def test_foreign_values_in_the_store_are_a_failed_link_up_and_nothing_else(ranks: Ranks) -> None:
    """Both ranks stay alive through every kind of nonsense, and link up when it is over."""
    ranks.start_all(2, _reconnects)
    assert ranks.hear_all() == ["here", "here"]
    reasons = []
    for generation, value in enumerate(NONSENSE, start=1):
        stranger = Stranger(ranks.store, value)
        ranks.say(generation, 0)
        assert stranger.written.wait(30.0)  # now rank 0 has come, and what it left is gone
        ranks.say(generation, 1)
        reasons += ranks.hear_all()
        stranger.close()
    assert "up" not in reasons
    assert any("no member of this generation wrote" in reason for reason in reasons)
    assert any("rendezvous store at 127.0.0.1" in reason and "member/" in reason for reason in reasons)
    ranks.say(len(NONSENSE) + 1)
    assert ranks.hear_all() == ["up", "up"]
    ranks.say(None)


class _Hostile(Store):
    """A store that answers a question with one error."""

    error: Exception

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def set(self, key: str, value: Any) -> None:
        pass

    def check(self, keys: Sequence[str]) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        pass

    def get(self, key: str) -> bytes:
        raise self.error


@attack(
    "a store answers so that torch raises an error of any kind",
    holds="each is a failed link-up",
    reads="which store, which key, and the error",
)
@pytest.mark.parametrize(
    "error",
    [
        ValueError("basic_string::_M_create"),
        KeyError("member"),
        IndexError("vector::_M_range_check"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        RuntimeError("Connection was likely closed"),
        OverflowError("too large"),
        MemoryError("std::bad_alloc"),
        dist.DistNetworkError("Connection reset by peer"),
        TypeError("no bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_of_a_store_is_a_failed_link_up(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Where it came from is said with it."""
    monkeypatch.setattr(rendezvous, "TCPStore", type("Hostile", (_Hostile,), {"error": error}))
    communicator = HostGroup()
    store = Rendezvous("127.0.0.1", 29400, "secret")
    communicator.init(rank=0, world_size=2, generation=0, store=None, collective_s=5.0, link_up_s=5.0)
    try:
        with pytest.raises(LinkUpFailed, match=r"127\.0\.0\.1:29400.*world/member/1"):
            communicator.reconnect(1, store, 5.0)
    finally:
        communicator.close()


@attack(
    "prepares the store of a plain script's `init_process_group` before its next start",
    holds="nothing that can be known before a start is read by it",
)
def test_a_plain_script_reads_only_under_a_name_that_others_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix of `env://` is another one for each secret."""
    torch_rendezvous = importlib.import_module("torch.distributed.rendezvous")
    store = HashStore()
    seen = []

    def rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        yield store, 0, 1

    for secret in ("one", "two"):
        monkeypatch.setitem(torch_rendezvous._rendezvous_handlers, "env", rendezvous)
        separate_generations(3, secret)
        [(prefixed, _, _)] = torch_rendezvous._rendezvous_handlers["env"]("env://")
        assert not prefixed.check(["master"])
        prefixed.set("master", "here")
        seen.append(prefixed)
    assert all(prefixed.get("master") == b"here" for prefixed in seen)
    assert not store.check(["midstep/g3/env/master"])  # type: ignore[attr-defined,unused-ignore]


class Freezer:
    """Stops the store's process of one node, the fork server that would replace it, and some that take their places.

    A node whose store ends five times in a row is given up, rightly: a busy machine, on which the killed rank's process
    takes its time to start, must not be brought there.
    """

    NAMES = frozenset({"midstep-store", "midstep-forksrv"})
    TIMES = MAX_EARLY_EXITS - 2

    def __init__(self, job: Job, node: str) -> None:
        self._agent = agents_of(job.launcher.pid)[node]
        self._stopped: dict[str, set[int]] = {name: set() for name in self.NAMES}
        self._over = threading.Event()
        self._freeze_all()
        self._thread = threading.Thread(target=self._freeze, daemon=True)
        self._thread.start()

    def _freeze(self) -> None:
        with suppress(psutil.Error):
            while not self._over.wait(0.02):
                self._freeze_all()

    def _freeze_all(self) -> None:
        for child in self._agent.children():
            with suppress(psutil.Error):  # it is being replaced
                pids = self._stopped.get(child.name())
                if pids is not None and (child.pid in pids or len(pids) < self.TIMES):
                    pids.add(child.pid)
                    child.suspend()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)


@pytest.mark.soak
@pytest.mark.chaos
@attack(
    "stops the rendezvous store of the first node and its fork server, again and again, and a rank is killed",
    holds="the next generation meets at a store that answers; only the killed rank gets another process",
    reads="that the store is stopped, and is killed and replaced",
)
def test_a_job_recovers_without_the_store_that_it_began_with(start_job: StartJob) -> None:  # noqa: F811
    """Though the agent replaces it, it is stopped again: at once, or after it has served a link-up that was quicker."""
    job = start_job(faults=(inject(1, InjectionPoint.COLLECTIVE, 20),), steps=30, gates=(15,))
    job.held_at(15)
    freezer = Freezer(job, "node0")
    try:
        job.open_gate(15)
        [incident] = finish(job)["incidents"]
    finally:
        freezer.close()
    assert_nobody_harmed(incident, {1})
    assert incident["rung"] == "recover_in_place"
    assert "is stopped; it is killed and replaced" in job.said()
