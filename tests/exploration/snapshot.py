"""Copies and fingerprints of the recovery machine, so that a state can be left and be known again."""

import enum
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash

from midstep.controller.recovery.machine import RecoveryMachine

# The same in all states of one job.
SHARED = frozenset({"ladder", "job", "_parts"})
# Written for people, or by each event, and read by no decision: two orders of the same events leave one state.
FOR_PEOPLE = frozenset({"history", "turn"})
ATOMS = (str, int, float, bool, bytes, type(None), enum.Enum, msgspec.Struct, frozenset)
_encode = msgspec.msgpack.Encoder().encode


def copied(machine: RecoveryMachine) -> RecoveryMachine:
    """Return a machine that goes its own way from here."""
    new: RecoveryMachine = _copy(machine)
    return new


def fingerprint(machine: RecoveryMachine) -> bytes:
    """Return 16 bytes that stand for all that the machine will ever do."""
    state = machine.state
    memory = [(name, _ordered(value)) for name, value in vars(state).items() if name not in SHARED | FOR_PEOPLE]
    incident = state.history.open
    told = None if incident is None else len(incident.decisions)
    return digest((memory, told))


def digest(value: object) -> bytes:
    """Return 16 bytes that stand for a value of structs, tuples, numbers and texts."""
    return xxhash.xxh3_128_digest(_encode(value))


def _copy(value: Any) -> Any:
    return _way(value, _COPIES, _copy_of_object)(value)


def _ordered(value: Any) -> Any:
    """Return a value in which nothing depends on the order of entry."""
    return _way(value, _ORDERS, _order_of_object)(value)


def _way(value: Any, ways: dict[type, Callable[[Any], Any]], of_objects: Callable[[Any], Any]) -> Callable[[Any], Any]:
    way = ways.get(type(value))
    if way is None:
        way = ways[type(value)] = _itself if isinstance(value, ATOMS) or not hasattr(value, "__dict__") else of_objects
    return way


def _itself(value: Any) -> Any:
    return value


def _copy_of_object(value: Any) -> Any:
    new = object.__new__(type(value))
    for name, each in vars(value).items():
        object.__setattr__(new, name, each if name in SHARED else _copy(each))
    return new


def _order_of_object(value: Any) -> Any:
    return list(map(_ordered, vars(value).values()))


_COPIES: dict[type, Callable[[Any], Any]] = {
    tuple: lambda value: tuple(map(_copy, value)),
    list: lambda value: list(map(_copy, value)),
    dict: lambda value: {key: _copy(each) for key, each in value.items()},
    set: set.copy,
    deque: lambda value: deque(map(_copy, value), value.maxlen),
}
_ORDERS: dict[type, Callable[[Any], Any]] = {
    tuple: lambda value: list(map(_ordered, value)),
    list: lambda value: list(map(_ordered, value)),
    deque: lambda value: list(map(_ordered, value)),
    dict: lambda value: [(key, _ordered(value[key])) for key in sorted(value)],
    set: sorted,
    frozenset: sorted,
}
