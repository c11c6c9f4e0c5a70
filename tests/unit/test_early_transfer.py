"""State that moves beside the link-up: who may, what all ranks agree on, and how it ends."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from midstep.processor import transfer
from midstep.processor.callbacks import Callbacks, Lifecycle
from midstep.processor.recovery_phases import RecoveryPhases
from midstep.processor.step_order import StepState
from midstep.processor.transfer import EarlyTransfers
from midstep.protocol.errors import ChecksumMismatch, CommunicatorAborted, CommunicatorFailed, RecoveryError
from midstep.protocol.messages import Rejoin
from midstep.protocol.types import (
    JobSettings,
    LocalStateTransfer,
    Rendezvous,
    RepairLinks,
    RepairPart,
    RestoreSource,
    ShardHold,
    ShardTransfer,
)

from .transfer_wire import DEADLINE_S, Handle, PlainShards, Wire, WireLinks, together


@pytest.fixture(autouse=True)
def over_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one process could read each other's memory: here the links carry everything."""
    monkeypatch.setattr(transfer, "this_host", lambda: "")


STATE = [torch.arange(2_000_000, dtype=torch.float32), torch.ones(3), torch.zeros(70_000)]
SIZE = sum(tensor.nbytes for tensor in STATE)
TRANSFER = ShardTransfer("a", 0, SIZE, 0, 1)
STORE = Rendezvous("127.0.0.1", 1, "secret")


class Pairs(WireLinks):
    """Links of a pair in memory. Connecting waits until the test says that both have come."""

    def __init__(self, wire: Wire, rank: int, come: threading.Event) -> None:
        super().__init__(wire, rank)
        self.agreed = True
        self.closed = False
        self._come = come
        self._aborted: str | None = None
        self.deaf = False
        self.receiving = False

    def connect(self, peers: list[int]) -> None:
        while not self._come.wait(0.01):
            self._raise_if_aborted()
        self._raise_if_aborted()

    def irecv(self, tensor: torch.Tensor, rank: int) -> Handle:
        self.receiving = True
        return super().irecv(tensor, rank)

    def abort(self, reason: str) -> None:
        self._aborted = None if self.deaf else reason
        with self._wire.changed:
            self._wire.changed.notify_all()

    def _until(self, there: Callable[[], bool]) -> None:
        super()._until(lambda: there() or self._aborted is not None)
        self._raise_if_aborted()

    def close(self) -> None:
        self.closed = True

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise CommunicatorAborted(self._aborted)


class Concurrently(PlainShards):
    """Shards of plain tensors that may move early; writes down in which threads it was asked."""

    moves_early = True

    def __init__(self, held: dict[str, list[torch.Tensor]] | None = None) -> None:
        super().__init__(held or {})
        self.asked: list[tuple[str, str]] = []

    def shards(self) -> tuple[ShardHold, ...]:
        return (ShardHold("a", SIZE),)

    def open_shard(self, shard_id: str) -> Any:
        self._note("open")
        return super().open_shard(shard_id)

    def accept_shard(self, shard_id: str, header: bytes) -> Any:
        self._note("accept")
        return super().accept_shard(shard_id, header)

    def adopt_shard(self, shard_id: str, shard: Any) -> None:
        self._note("adopt")
        super().adopt_shard(shard_id, shard)

    def rebuilt(self) -> None:
        self._note("rebuilt")

    def _note(self, what: str) -> None:
        self.asked.append((what, threading.current_thread().name))


class Linking(WireLinks):
    """A communicator that links pairs. `reconnect` does what the test has it do."""

    def __init__(self, wire: Wire, rank: int, come: threading.Event) -> None:
        super().__init__(wire, rank, "groups")
        self._pairs_wire, self._own_rank, self._come = wire, rank, come
        self.pairs: list[Pairs] = []
        self.on_reconnect: Callable[[], None] = lambda: None
        self.connect: Callable[[list[int]], None] | None = None  # in place of the pairs' own

    def open_pairs(self, generation: int, store: Rendezvous, link_up_s: float) -> Pairs:
        pairs = Pairs(self._pairs_wire, self._own_rank, self._come)
        if self.connect is not None:
            pairs.connect = self.connect  # type: ignore[method-assign,assignment]
        self.pairs.append(pairs)
        return pairs

    def reconnect(self, generation: int, store: Rendezvous, link_up_s: float) -> None:
        self.on_reconnect()


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)


@dataclass
class Process:
    """One rank, as far as rebuild and repair need it."""

    rank: int
    wire: Wire
    come: threading.Event
    framework: Any
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.communicator = Linking(self.wire, self.rank, self.come)
        self.notes: list[str] = []
        runtime: Any = SimpleNamespace(
            rank=self.rank,
            world_size=2,
            former_size=2,
            generation=1,
            communicator=self.communicator,
            callbacks=Callbacks(self.rank, self.lifecycle),
            device=SimpleNamespace(rebuilt=lambda: None),
            settings=JobSettings(link_up_s=5.0),
            step_clock=SimpleNamespace(generation=lambda _: None),
            local_states=SimpleNamespace(read=lambda rank, step: b"state of %d" % rank),
            black_box=SimpleNamespace(copies=tuple),
            debug_log=SimpleNamespace(note=self.notes.append),
            injection_points=SimpleNamespace(sent=lambda shards: shards),
            interrupted=lambda: self.interrupted,
        )
        self.runtime = runtime
        nothing: Any = None
        no_copies: Any = SimpleNamespace(reported=lambda report: report)
        self.phases = RecoveryPhases(runtime, self.framework, nothing, StepState(clean=self.rank == 0), no_copies)

    def until_closed(self) -> None:
        """Wait until the thread has ended."""
        wait_for(lambda: self.communicator.pairs[-1].closed)

    def moved_early(self) -> bool:
        return any("moved early" in note for note in self.notes)


def order(rank: int, **part: Any) -> Rejoin:
    local = () if "local_states" in part else (LocalStateTransfer(1, 0),)
    given = {"transfers": (TRANSFER,), "local_states": local, **part}
    return Rejoin(rank, 1, STORE, connected=False, part=RepairPart(3, RestoreSource.REPLICA, **given))


@pytest.fixture
def pair() -> tuple[Process, Process]:
    """A source that holds the state, and a newcomer; the links come up when `come` is set."""
    wire, come = Wire(), threading.Event()
    return Process(0, wire, come, Concurrently({"a": STATE})), Process(1, wire, come, Concurrently())


def rejoin(process: Process, **part: Any) -> Any:
    """Do what the loop of a rank asks for, up to the end of repair."""
    try:
        process.phases.rebuild(order(process.rank, **part))
        return process.phases.repair(order(process.rank, **part))
    except Exception:
        process.phases.give_up()
        raise


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_state_has_arrived_before_the_groups_are_up_and_is_adopted_after(pair: tuple[Process, Process]) -> None:
    """The link-up ends only when the thread beside it has ended; adopting is left to repair."""
    source, newcomer = pair
    source.come.set()
    for process in pair:
        process.communicator.on_reconnect = process.until_closed
    sent, received = together(lambda: rejoin(source), lambda: rejoin(newcomer))
    assert sent.size_bytes == 0
    assert received.size_bytes >= SIZE + len(b"state of 1")
    assert equal(newcomer.framework.held["a"], STATE)
    assert newcomer.framework.asked == [("accept", "midstep-early"), ("rebuilt", "train1"), ("adopt", "train1")]
    assert source.framework.asked == [("open", "train0"), ("rebuilt", "train0")]
    assert source.moved_early()
    assert newcomer.moved_early()


def test_repair_waits_for_what_is_left(pair: tuple[Process, Process]) -> None:
    """The groups may be up first."""
    source, newcomer = pair
    for process in pair:
        process.phases.rebuild(order(process.rank))
    assert "a" not in newcomer.framework.held
    threading.Timer(0.05, source.come.set).start()
    together(lambda: source.phases.repair(order(0)), lambda: newcomer.phases.repair(order(1)))
    assert equal(newcomer.framework.held["a"], STATE)
    assert newcomer.moved_early()


@pytest.mark.parametrize("moved", [False, True])
def test_where_not_all_agree_everything_moves_in_repair(pair: tuple[Process, Process], moved: bool) -> None:
    """Also when the pair has moved all of it by then: a third rank may have objected."""
    for process in pair:
        process.phases.rebuild(order(process.rank))
        process.communicator.pairs[0].agreed = False
    if moved:
        pair[0].come.set()
        for process in pair:
            process.until_closed()
    source, newcomer = pair
    results = together(lambda: source.phases.repair(order(0)), lambda: newcomer.phases.repair(order(1)))
    assert not any(isinstance(result, BaseException) for result in results), results
    assert equal(newcomer.framework.held["a"], STATE)
    assert not newcomer.moved_early()
    assert all(process.communicator.pairs[0].closed for process in pair)


OBJECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a checkpoint is loaded": ({}, {"restore": RestoreSource.CHECKPOINT}),
    "from device to device": ({}, {"links": RepairLinks.DEVICE}),
    "rebuild is the user's": ({"lifecycle": Lifecycle(rebuild=lambda each: each.default())}, {}),
    "repair is the user's": ({"lifecycle": Lifecycle(repair=lambda each: each.default())}, {}),
    "the framework says nothing of it": ({"framework": PlainShards()}, {}),
}


@pytest.mark.parametrize("why", OBJECTS)
def test_a_rank_with_shards_to_move_objects(why: str) -> None:
    about, part = OBJECTS[why]
    process = Process(1, Wire(), threading.Event(), **{"framework": Concurrently(), **about})
    early = EarlyTransfers(process.runtime, process.framework)
    early.begin(_with(order(1), **part), held=())
    assert process.communicator.pairs == []
    assert not early.agreed()


def _with(rejoining: Rejoin, **part: Any) -> Rejoin:
    return msgspec.structs.replace(rejoining, part=msgspec.structs.replace(rejoining.part, **part))


def test_what_a_rank_holds_is_never_overwritten_early() -> None:
    """It may be the last copy, should the link-up fail; a shard that is lost already may be."""
    process = Process(1, Wire(), threading.Event(), Concurrently())
    early = EarlyTransfers(process.runtime, process.framework)
    early.begin(order(1), held={"a"})
    assert process.communicator.pairs == []
    early.begin(order(1), held={"another"})
    assert len(process.communicator.pairs) == 1
    early.stop()


def test_what_is_held_is_what_was_reported(pair: tuple[Process, Process]) -> None:
    """A newcomer holds nothing. A rank in whose memory all is well holds everything, whatever the plan says."""
    for process, opened in ((pair[1], 1), (Process(1, Wire(), threading.Event(), Concurrently()), 0)):
        process.phases._step_state.clean = not opened
        process.phases.survey(0.0)
        process.phases.rebuild(order(1))
        assert len(process.communicator.pairs) == opened
        process.phases.give_up()


@pytest.mark.parametrize("lifecycle", [Lifecycle(), Lifecycle(repair=lambda each: each.default())])
def test_a_rank_without_shards_to_move_has_nothing_against_it(lifecycle: Lifecycle) -> None:
    process = Process(2, Wire(), threading.Event(), PlainShards(), lifecycle)
    early = EarlyTransfers(process.runtime, process.framework)
    early.begin(order(2, transfers=()), held=())
    assert len(process.communicator.pairs) == 1
    assert not early.agreed(), "nothing is under way"


def test_a_communicator_without_pair_links_is_asked_for_none() -> None:
    process = Process(0, Wire(), threading.Event(), Concurrently({"a": STATE}))
    process.runtime.communicator = WireLinks(process.wire, 0)
    early = EarlyTransfers(process.runtime, process.framework)
    early.begin(order(0), held=())
    assert not early.agreed()
    assert process.framework.asked == []


def test_a_changed_bit_is_found(pair: tuple[Process, Process]) -> None:
    """The shard is not adopted. The next attempt is made in the ordinary way; after a repair, early again."""
    source, newcomer = pair
    source.come.set()
    damaged: list[bool] = []

    def damage(arrived: torch.Tensor) -> None:
        if arrived.dtype is torch.uint8 and len(arrived) > 1_000_000 and not damaged:
            damaged.append(True)
            arrived[17] ^= 1

    source.wire.damage = damage
    _, error = together(lambda: rejoin(source), lambda: rejoin(newcomer))
    assert isinstance(error, ChecksumMismatch)
    assert "a" not in newcomer.framework.held
    newcomer.phases.rebuild(order(1))
    assert len(newcomer.communicator.pairs) == 1, "not early a second time"
    together(lambda: _in_the_ordinary_way(source), lambda: newcomer.phases.repair(order(1)))
    assert equal(newcomer.framework.held["a"], STATE)
    newcomer.phases.rebuild(order(1))
    assert len(newcomer.communicator.pairs) == 2
    newcomer.phases.give_up()


def _in_the_ordinary_way(source: Process) -> Any:
    source.phases.rebuild(order(0))
    source.communicator.pairs[-1].agreed = False
    return source.phases.repair(order(0))


@pytest.mark.parametrize(
    ("error", "early_again"), [(CommunicatorAborted("aborted"), True), (CommunicatorFailed("a peer is gone"), False)]
)
def test_what_the_thread_raises_is_raised_in_repair(
    pair: tuple[Process, Process], error: Exception, early_again: bool
) -> None:
    """An abort says nothing about the links; anything else does."""
    _, newcomer = pair

    def connect(_: list[int]) -> None:
        raise error

    newcomer.communicator.connect = connect
    newcomer.phases.rebuild(order(1, local_states=()))
    with pytest.raises(type(error), match=str(error)):
        newcomer.phases.repair(order(1, local_states=()))
    newcomer.phases.give_up()
    newcomer.phases.rebuild(order(1, local_states=()))
    assert len(newcomer.communicator.pairs) == 1 + early_again
    newcomer.phases.give_up()


def test_a_failed_link_up_ends_it(pair: tuple[Process, Process]) -> None:
    """Before anything else is done, no thread is left."""
    _, newcomer = pair

    def fail() -> None:
        raise CommunicatorFailed("not linked up")

    newcomer.communicator.on_reconnect = fail
    with pytest.raises(CommunicatorFailed, match="not linked up"):
        rejoin(newcomer)
    assert newcomer.communicator.pairs[0].closed
    assert not _threads()


def test_an_order_that_came_before_the_links_were_open_ends_them(pair: tuple[Process, Process]) -> None:
    """Its abort has found nothing to abort."""
    _, newcomer = pair
    newcomer.interrupted = True
    newcomer.phases.rebuild(order(1, local_states=()))
    with pytest.raises(CommunicatorAborted):
        newcomer.phases.repair(order(1, local_states=()))
    newcomer.phases.give_up()


def test_a_thread_that_cannot_be_stopped_ends_the_process(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write into tensors, so the next attempt must not begin: asking again says the same."""
    source, newcomer = pair
    monkeypatch.setattr(transfer, "STOP_S", 0.05)
    source.come.set()
    newcomer.phases.rebuild(order(1))
    wait_for(lambda: newcomer.communicator.pairs[0].receiving)
    newcomer.communicator.pairs[0].deaf = True
    for _ in range(2):
        with pytest.raises(RecoveryError, match="has not ended"):
            newcomer.phases.give_up()
    source.phases.rebuild(order(0))  # sends what the thread waits for
    wait_for(lambda: not _threads())
    newcomer.phases.give_up()


def test_a_thread_that_has_not_begun_to_move_is_left_to_itself(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be inside the store's library, which nothing interrupts; what it comes to later, it does not do."""
    _, newcomer = pair
    monkeypatch.setattr(transfer, "LEAVE_S", 0.01)
    newcomer.phases.rebuild(order(1))
    pairs = newcomer.communicator.pairs[0]
    pairs.deaf = True
    newcomer.phases.give_up()
    newcomer.come.set()
    wait_for(lambda: not _threads())
    assert pairs.closed
    assert not pairs.receiving


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "midstep-early"]
