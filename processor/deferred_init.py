"""Deferred initialization: parameters get their random values when these are read, and not at all if they never are.

For a newcomer's model (see `building.py`). What is put off is kept as the calls themselves, in their order and with
the state of the random number generator, so that what is read has the bits that it would have had.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TAKEN_SEED = 0x6D69_6473_7465_7000


@dataclass(frozen=True)
class _Call:
    """An in-place operator that was not run."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: torch.Tensor | None  # state of the generator before it, where that was set since the last call


class DeferredInit(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """Puts off operators that fill parameters on the CPU. Active in `with`; one use.

    Put off are random in-place operators on allowed parameters, with torch's default generator, and then all in-place
    operators on them that take nothing else in. Whatever reads such a parameter, or draws other random numbers, has
    all of them run first.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._allowed: dict[int, torch.UntypedStorage] = {}  # by address; kept, so that no other has the same
        self._unset: dict[int, torch.Tensor] = {}  # one tensor of each storage whose values were put off
        self._calls: list[_Call] = []
        # A state that no script sets: while the generator has it, nothing was drawn or seeded since the last call.
        self._taken = torch.Generator().manual_seed(_TAKEN_SEED).get_state()

    def allow(self, parameter: torch.Tensor) -> None:
        """Put off the values of this parameter, which exists and has none yet."""
        if parameter.device.type == "cpu" and parameter.numel():
            storage = parameter.untyped_storage()
            self._allowed[storage.data_ptr()] = storage

    def leave_out(self) -> None:
        """Give up what was put off: such parameters are not a number from now on, where their dtype has that."""
        for tensor in self._unset.values():
            if tensor.is_floating_point() or tensor.is_complex():
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                whole.fill_(float("nan"))
        self._calls.clear()
        self._unset.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Put an operator off, or run it, after all that it may depend on."""
        kwargs = kwargs or {}
        if self._can_be_put_off(func, args, kwargs):
            self._put_off(func, args, kwargs)
            return args[0]
        if self._calls and (_draws(func) or (not func.is_view and any(map(self._is_unset, _tensors((args, kwargs)))))):
            self._make_up()
        return func(*args, **kwargs)

    def _can_be_put_off(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name: str = func.overloadpacket.__name__
        if not name.endswith("_") or name.endswith("__") or not args or not isinstance(args[0], torch.Tensor):
            return False
        others = list(_tensors((args[1:], kwargs)))
        if _draws(func):
            return _address(args[0]) in self._allowed and not others and kwargs.get("generator") is None
        return self._is_unset(args[0]) and all(map(self._is_unset, others))

    def _put_off(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append(_Call(func, args, kwargs, self._take_generator()))
        self._unset.setdefault(_address(args[0]), args[0])

    def _take_generator(self) -> torch.Tensor | None:
        """Return the generator's state where it was set since the last call, and mark it as taken."""
        state = torch.get_rng_state()
        if self._calls and torch.equal(state, self._taken):
            return None
        torch.set_rng_state(self._taken)
        return state

    def _make_up(self) -> None:
        """Run all that was put off, with the random numbers that it would have drawn."""
        calls, seeded = self._calls, torch.get_rng_state()
        self._calls, self._unset = [], {}
        for call in calls:
            if call.generator is not None:
                torch.set_rng_state(call.generator)
            call.operator(*call.args, **call.kwargs)
        if not torch.equal(seeded, self._taken):
            torch.set_rng_state(seeded)

    def _is_unset(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) in self._unset


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
