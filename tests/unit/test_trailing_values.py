"""Values that a script changes after they were captured in a step, and hashes of what ranks hold."""

import queue
import random
import threading
from itertools import product
from typing import Any, cast

import pytest
import torch

from midstep.adapters.ddp.state import TrainState
from midstep.devices.base import Device
from midstep.processor.local_state import LocalState
from midstep.processor.runtime import Runtime
from midstep.processor.shard import refuse_differing
from midstep.processor.values import TrailingValues, as_value, replicated
from midstep.protocol.errors import ConfigurationError, RecoveryError, StateUnreadable


class NoDevice:
    """A device without random numbers."""

    name = "none"

    def capture_random(self) -> bytes:
        return b""

    def restore_random(self, numbers: bytes) -> None: ...


def state_of(values: dict[str, Any], model: torch.nn.Module | None = None) -> TrainState:
    """A train state of a small model."""
    model = model or torch.nn.Linear(2, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), values=values)


def local_state(state: TrainState) -> LocalState:
    return LocalState(state, cast(Device, NoDevice()))


def test_only_values_that_have_changed_are_captured_again() -> None:
    """Equal contents are no change, whoever has written them."""
    mean, other = {"n": 1}, [1.0]
    values = TrailingValues({"mean": as_value("mean", mean), "other": as_value("other", other)})
    values.captured()
    assert values.changes() is None
    mean["n"], other[:] = 2, [1.0]
    changed = values.changes()
    assert changed is not None
    assert values.changed == {"mean"}
    mean["n"], other[0] = 7, 7.0
    values.restore(changed)
    assert (mean, other) == ({"n": 2}, [7.0])


def test_generators_and_replicated_values_stay_as_they_were_captured() -> None:
    """Numbers that are drawn ahead are drawn again; what is replicated is copied from another rank."""
    dice, shared = random.Random(1), {"n": 1}
    values = TrailingValues({"dice": as_value("dice", dice), "shared": replicated(shared)})
    values.captured()
    dice.random()
    shared["n"] = 2
    assert values.changes() is None


def test_values_that_are_not_registered_or_not_readable_are_refused() -> None:
    """Another script, or damage: the one keeps the checkpoint, the other marks it."""
    kept = {"n": 1}
    values = TrailingValues({"kept": as_value("kept", kept)})
    values.captured()
    kept["n"] = 2
    changed = values.changes()
    assert changed is not None
    with pytest.raises(RecoveryError, match="has a value 'kept', which this rank has not registered"):
        TrailingValues({}).restore(changed)
    with pytest.raises(StateUnreadable):
        values.restore(b"nothing of ours")


def test_a_local_state_with_trailing_values_puts_back_what_came_last() -> None:
    """Both in this world and in one of another size; the rest is as of the barrier."""
    running = {"n": 0}
    own = local_state(state := state_of({"running": running}))
    before = own.capture()
    assert own.with_trailing() is None
    running["n"] = 1
    after = own.with_trailing()
    assert after is not None
    for blob, expected in ((before, 0), (after, 1)):
        running["n"] = 5
        own.restore(blob, 1)
        assert running["n"] == expected
    running["n"] = 5
    own.adopt(state, after, random_numbers=False)
    assert running["n"] == 1


def test_the_audit_names_what_changes_too_late() -> None:
    """Rank-local values in or after the update; parameters and replicated values after it, and none inside it."""
    running, shared, model = {"n": 0}, {"n": 0}, torch.nn.Linear(2, 1)
    state = state_of({"running": running, "shared": replicated(shared)}, model)
    state.capture_local()
    with torch.no_grad():
        model.weight.mul_(2)
    shared["n"] = running["n"] = 1
    state.update_applied()
    state.capture_trailing()
    assert [each.partition(" ")[0] for each in state.audit()] == ["values['running']"]

    state.capture_local()
    state.update_applied()
    with torch.no_grad():
        model.weight.mul_(2)
    shared["n"] = 2
    state.capture_trailing()
    late = [each for each in state.audit() if "changes after the update block" in each]
    assert [each.partition(" changes")[0] for each in late] == ["the parameters of model", "values['shared']"]


def test_bytes_that_are_no_train_state_s_are_unreadable() -> None:
    """A checkpoint of which a rank-local file is such is damaged; one of another script is not."""
    state = state_of({"a": {"n": 1}})
    with pytest.raises(StateUnreadable):
        state.restore_local(b"nothing of ours")
    with pytest.raises(RecoveryError, match="this rank has registered") as caught:
        state.restore_local(state_of({"b": {"n": 1}}).capture_local())
    assert not isinstance(caught.value, StateUnreadable)


class Links:
    """Ranks in threads, of which each swaps with any other."""

    def __init__(self, world_size: int) -> None:
        # Made beforehand: two threads that both find one missing would each make it, and a message would be lost.
        self.mail = {pair: queue.Queue[bytes]() for pair in product(range(world_size), repeat=2)}

    def of(self, rank: int, world_size: int) -> Runtime:
        """Return what a rank compares with."""

        def swap(blob: bytes, to: int, source: int) -> bytes:
            self.mail[rank, to].put(blob)
            return self.mail[source, rank].get(timeout=10)

        communicator = type("Communicator", (), {"swap": staticmethod(swap)})
        return cast(Runtime, type("Rank", (), {"rank": rank, "world_size": world_size, "communicator": communicator}))


def compare(held: list[dict[str, int]]) -> list[str]:
    """Have ranks compare what they hold; return what each was refused with."""
    links, found = Links(len(held)), [""] * len(held)

    def one(rank: int) -> None:
        try:
            refuse_differing(held[rank], links.of(rank, len(held)))
        except ConfigurationError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(held))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_ranks_that_hold_the_same_go_on(ranks: int) -> None:
    """However many there are, also where only some hold a shard."""
    assert compare([{"replicated": 7, f"own {rank // 2}": rank // 2} for rank in range(ranks)]) == [""] * ranks


@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (3, 0), (5, 4), (7, 3)])
def test_every_rank_is_refused_where_one_holds_something_else(ranks: int, odd: int) -> None:
    """All of them say the same, so that none goes on alone."""
    found = compare([{"replicated": 7 + (rank == odd)} for rank in range(ranks)])
    assert len(set(found)) == 1
    other = next(rank for rank in range(ranks) if rank != odd)
    assert f"ranks {min(odd, other)} and {max(odd, other)} hold different parameters" in found[0]
