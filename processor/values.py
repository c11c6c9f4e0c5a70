"""Values of a script that a recovery brings back, through a function that reads them and one that puts them back.

The rank-local ones are captured before the update of a step, so that they are safe when another rank commits it. A
script may change them in the update and after it; what has changed is captured a second time when it asks for its next
step. Random number generators are not: numbers that are drawn ahead are drawn again.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from ..communicators.host_memory import TORCH
from ..protocol.errors import ConfigurationError, RecoveryError, StateUnreadable
from . import tree


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the script, through a function that reads it and one that puts it back.

    Values of one rank are captured at every step, so they should be small.

    Attributes:
        get: Returns numbers, text, bytes, lists, dicts, tensors or arrays.
        set: Takes what `get` returned and puts it back.
        replicated: Whether it is the same on all ranks at the same step and changes only inside the update. Otherwise
            it is this rank's own, and may change at any time.
        generator: Whether it is a random number generator, which goes back to where it was before the update.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    replicated: bool = False
    generator: bool = False


def replicated(target: object) -> Value:
    """Mark an object that is the same on all ranks and changes only inside the update, e.g. averaged weights.

    Args:
        target: What `values` of a train state takes.

    Returns:
        A value that a lost rank copies from another rank.

    Raises:
        ConfigurationError: The object cannot be put back in place.
    """
    return dataclasses.replace(as_value("replicated", target), replicated=True)


def as_value(name: str, target: Any) -> Value:  # noqa: PLR0911 - one return for each kind of object
    """Make a Value of a mutable object. Raises ConfigurationError for one that cannot be put back in place."""
    if isinstance(target, Value):
        return target
    if hasattr(target, "state_dict") and hasattr(target, "load_state_dict"):
        return Value(target.state_dict, target.load_state_dict)
    if TORCH is not None and isinstance(target, TORCH.Generator):
        return Value(target.get_state, target.set_state, generator=True)
    if isinstance(target, np.random.Generator):
        generator = target.bit_generator
        return Value(lambda: dict(generator.state), lambda state: setattr(generator, "state", state), generator=True)
    if isinstance(target, np.random.RandomState):
        return Value(lambda: target.get_state(legacy=False), target.set_state, generator=True)
    if isinstance(target, random.Random):
        return Value(target.getstate, target.setstate, generator=True)
    if TORCH is not None and isinstance(target, TORCH.Tensor):
        return Value(lambda: target, target.data.copy_)
    if isinstance(target, np.ndarray):
        return Value(lambda: target, lambda array: np.copyto(target, array))
    if isinstance(target, dict):
        return Value(lambda: target, lambda items: _refill(target.clear, target.update, items))
    if isinstance(target, list):
        return Value(lambda: target, lambda items: _refill(target.clear, target.extend, items))
    if isinstance(target, collections.deque):
        return Value(lambda: list(target), lambda items: _refill(target.clear, target.extend, items))
    raise ConfigurationError(
        f"values[{name!r}] is a {type(target).__name__}, which cannot be put back in place. Give a dict, list, tensor "
        "or array, an object with state_dict and load_state_dict, or midstep.Value(get=..., set=...)"
    )


def _refill(clear: Callable[[], None], fill: Callable[[Any], Any], items: Any) -> None:
    clear()
    fill(items)


class TrailingValues:
    """Watches the rank-local values of a script for changes after they were captured in a step."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = {name: each for name, each in values.items() if not (each.replicated or each.generator)}
        self._captured: dict[str, bytes] = {}
        self.changed: set[str] = set()  # names of those that have done so in any step

    def captured(self) -> None:
        """Remember the values as they are. Runs when they are captured, before the commit barrier."""
        self._captured = self._packed()

    def changes(self) -> bytes | None:
        """Return the values that are others now, or None where all are as they were captured."""
        changed = {name: blob for name, blob in self._packed().items() if blob != self._captured.get(name)}
        self.changed |= changed.keys()
        return msgspec.msgpack.encode(changed) if changed else None

    def restore(self, blob: bytes) -> None:
        """Put back what `changes` has returned. Raises RecoveryError for a value that is not registered here."""
        try:
            changed = msgspec.msgpack.decode(blob, type=dict[str, bytes])
        except msgspec.MsgspecError as error:
            raise StateUnreadable(f"values that had changed after an update cannot be read: {error}") from error
        for name, packed in changed.items():
            if name not in self._values:
                raise RecoveryError(f"the captured state has a value {name!r}, which this rank has not registered")
            self._values[name].set(tree.unpack(packed))

    def _packed(self) -> dict[str, bytes]:
        return {name: tree.pack(each.get(), f"values[{name!r}]") for name, each in self._values.items()}
