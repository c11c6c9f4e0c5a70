"""Registered values come back; mutable ones that are not registered are named."""

import collections
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from midstep.processor import tree
from midstep.processor.registry import Registry, by_name
from midstep.processor.values import Value, as_value, replicated
from midstep.protocol.errors import ConfigurationError, RecoveryError, UnsupportedState


class _Position:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _registry(**given: Any) -> Registry:
    empty: dict[str, Any] = {
        "modules": {},
        "optimizers": {},
        "schedulers": {},
        "scalers": {},
        "data": {},
        "values": {},
    }
    return Registry(**{**empty, **given})


def _round_trip(registry: Registry) -> dict[str, Any]:
    restored: dict[str, Any] = tree.unpack(tree.pack(registry.capture_local(), "own"))
    return restored


def test_values_of_every_kind_are_put_back_in_place() -> None:
    """The script's own objects are filled, not replaced."""
    held: dict[str, Any] = {
        "list": [1, 2],
        "dict": {"a": 1},
        "deque": collections.deque([1], maxlen=3),
        "tensor": torch.arange(3),
        "array": np.arange(3),
        "torch": torch.Generator().manual_seed(1),
        "numpy": np.random.default_rng(1),
        "legacy": np.random.RandomState(1),
        "python": random.Random(1),
        "object": _Position(),
    }
    registry = _registry(values={name: as_value(name, target) for name, target in held.items()})
    captured = _round_trip(registry)
    drawn = [
        torch.rand(2, generator=held["torch"]).tolist(),
        held["numpy"].random(),
        held["legacy"].rand(),
        held["python"].random(),
    ]
    held["list"].append(3)
    held["dict"]["b"] = 2
    held["deque"].append(5)
    held["tensor"].add_(1)
    held["array"][:] = 9
    held["object"].at = 4
    registry.restore_local(captured)
    assert (held["list"], held["dict"], list(held["deque"]), held["object"].at) == ([1, 2], {"a": 1}, [1], 0)
    assert held["tensor"].tolist() == held["array"].tolist() == [0, 1, 2]
    again = [
        torch.rand(2, generator=held["torch"]).tolist(),
        held["numpy"].random(),
        held["legacy"].rand(),
        held["python"].random(),
    ]
    assert again == drawn


def test_a_value_that_cannot_be_put_back_in_place_is_refused() -> None:
    """A number is no object of the script's."""
    with pytest.raises(ConfigurationError, match=r"values\['best'\] is a float"):
        as_value("best", 0.5)


def test_replicated_values_travel_with_the_shard_and_own_ones_with_the_rank() -> None:
    """Each is in one part only."""
    shared, mine = {"n": 1}, {"n": 2}
    registry = _registry(values={"shared": replicated(shared), "mine": as_value("mine", mine)})
    assert set(registry.capture_local()["values"]) == {"mine"}
    small = tree.unpack(tree.pack(registry.small_replicated(), "small"))
    shared["n"] = 7
    registry.adopt_small_replicated(small)
    assert shared == {"n": 1}


def test_a_state_with_other_names_is_refused() -> None:
    """It came from another script."""
    captured = _round_trip(_registry(data={"data": _Position()}))
    with pytest.raises(RecoveryError, match="same script"):
        _registry().restore_local(captured)


def test_data_without_a_position_is_refused() -> None:
    """The error says what to use."""
    with pytest.raises(ConfigurationError, match="ResumableBatches"):
        _registry(data={"data": [1, 2, 3]})


def test_state_that_needs_pickle_is_found_at_start() -> None:
    """With its path, before the first step."""
    odd = Value(lambda: {"fn": len}, lambda _: None)
    with pytest.raises(UnsupportedState, match=r"odd\.fn"):
        _registry(values={"odd": odd}).check()


def test_names_follow_how_objects_were_given() -> None:
    """One, several, or by name."""
    assert by_name("model", None) == {}
    assert by_name("model", 1) == {"model": 1}
    assert by_name("model", [1, 2]) == {"model[0]": 1, "model[1]": 2}
    assert by_name("model", {"g": 1}) == {"model[g]": 1}


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.generator = torch.Generator()

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


def test_what_is_mutable_and_not_registered_is_named() -> None:
    """Loose parameters, a missing scheduler, extra state, generators, an unregistered optimizer, functions."""
    module, stray = _Odd(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*module.parameters(), *stray.parameters()], lr=0.1)
    other = torch.optim.SGD(stray.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with_scheduler = _registry(
        modules={"model": module}, optimizers={"optimizer": optimizer}, schedulers={"scheduler": scheduler}
    )
    without = _registry(modules={"model": module}, optimizers={"optimizer": optimizer})
    text = "\n".join((*with_scheduler.audit(), *without.audit()))
    for part in (
        "holds 2 parameter(s) of no registered module",
        "model has extra state",
        "model.generator is a random number generator",
        "scheduler drives an optimizer that is not registered",
        "scheduler computes with functions",
        "looks driven by a learning rate scheduler",
    ):
        assert part in text


def test_a_complete_registration_has_no_findings() -> None:
    """Nothing is cried out for nothing."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    registry = _registry(
        modules={"model": module}, optimizers={"optimizer": optimizer}, schedulers={"scheduler": scheduler}
    )
    registry.check()
    assert registry.audit() == ()
