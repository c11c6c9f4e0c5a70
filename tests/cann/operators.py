"""Runs torch's operators on the fake device: torch's own CPU kernels, on the device's memory.

On the fake CANN device memory is host memory. Import this after torch_npu: every operator of torch that torch-npu has a
kernel for gets another one, except those that only touch a tensor's shape, memory or place. It first sends a number
through torch-npu's real queue to the device and waits for it. So an operator feels a stopped device and a failed one.
Where the number does not arrive, since the queue is dead, the operator is not run and nobody is told: like torch-npu.
"""

# torch.npu is there once torch_npu was imported, which no type checker sees.
# mypy: disable-error-code="attr-defined, import-not-found, unused-ignore"

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import attention, fused
from .attention import differentiate

NPU = "npu"
# Operators that stay torch-npu's own: they allocate, look, copy, or change nothing but a tensor's shape.
_OWN = """
    _copy_from _copy_from_and_resize _local_scalar_dense _pin_memory _reshape_alias _to_copy _unsafe_view alias
    as_strided chunk clone contiguous copy_ detach detach_ diagonal empty empty_like empty_strided empty_with_format
    expand fill_ is_pinned is_set_to item lift lift_fresh narrow new_empty new_empty_strided npu_dtype_cast one_ ones
    permute pin_memory record_stream reshape resize_ select set_ slice split split_with_sizes squeeze t to transpose
    unbind unfold unsqueeze view view_as_complex view_as_real zero_ zeros zeros_like
"""
OWN = frozenset(_OWN.split())
# Operators that draw from the device's generator: its offset goes on by this much.
OFFSET = 12


class Queue:
    """Torch-npu's queue of the current stream, as an operator sees it."""

    def __init__(self) -> None:
        self._number = 0
        self._lock = threading.Lock()
        self._slots = threading.local()

    def arrives(self) -> bool:
        """Send a number through the queue to the device; return whether it has come there. Raises what that raises."""
        with self._lock:
            self._number += 1
            number = self._number
        slot = getattr(self._slots, "slot", None)
        if slot is None:
            slot = self._slots.slot = torch.empty(1, dtype=torch.int64, device=NPU)
        slot.fill_(number)
        torch.npu.current_stream().synchronize()
        return ctypes.c_int64.from_address(slot.data_ptr()).value == number


_QUEUE = Queue()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same memory."""
    if tensor.device.type != NPU:
        return tensor
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")  # whatever a script's default device is
    if size:
        memory = (ctypes.c_byte * size).from_address(storage.data_ptr())
        there = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return made.set_(there, tensor.storage_offset(), tensor.size(), tensor.stride())
    return made.set_(made.untyped_storage(), 0, tensor.size(), tensor.stride())


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=NPU)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device with the content of a CPU tensor."""
    made = _unwritten(tensor)
    if tensor.numel():
        on_host(made).copy_(tensor)
    return made


def _generator() -> torch.Generator:
    """Return a generator for one operator, and let the device's own go on: a pair of a seed and an offset."""
    state = torch.npu.get_rng_state().numpy().view("int64").copy()
    drawing = torch.Generator()
    drawing.manual_seed((int(state[0]) * 1_000_003 + int(state[1])) % 2**63)
    state[1] += OFFSET
    torch.npu.set_rng_state(torch.from_numpy(state.view("uint8")))
    return drawing


def _written(schema: Any) -> list[str]:
    return [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]


def kernel(operator: Any, *, draws: bool = False) -> Callable[..., Any]:
    """Return the device's kernel of an operator; it draws if torch says so, or `draws`."""
    schema = operator._schema
    names = [each.name for each in schema.arguments]
    written = _written(schema)
    draws = draws or torch.Tag.nondeterministic_seeded in operator.tags

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arrived = _QUEUE.arrives()
        host = {name: _moved(value, on_host) for name, value in given.items()}
        if "device" in host:
            host["device"] = torch.device("cpu")
        if host.get("pin_memory"):
            host["pin_memory"] = False
        outside: list[torch.Generator | None] = []
        if draws:
            if "generator" in names:
                host["generator"] = _generator()
            else:
                outside.append(_generator())
        places = {name: _places(host.get(name)) for name in written}
        if not arrived:  # whatever is in the memory is taken for the result
            return _returned(schema, given, None if written else _run(operator, host, outside), _unwritten)
        result = _run(operator, host, outside)
        for name in written:
            _resized(given.get(name), host.get(name), places[name])
        return _returned(schema, given, result, on_device)

    return run


def _run(operator: Any, host: dict[str, Any], outside: Sequence[torch.Generator | None]) -> Any:
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for index, each in enumerate(operator._schema.arguments):
        if each.name not in host:
            continue
        if each.kwarg_only or len(positional) != index:
            keywords[each.name] = host[each.name]
        else:
            positional.append(host[each.name])
    if not outside or outside[0] is None:
        return operator(*positional, **keywords)
    before = torch.get_rng_state()
    torch.set_rng_state(outside[0].get_state())
    try:
        return operator(*positional, **keywords)
    finally:
        torch.set_rng_state(before)


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, move) for each in value)
    return value


def _places(value: Any) -> list[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each.data_ptr() for each in values if isinstance(each, torch.Tensor)]


def _resized(given: Any, host: Any, before: list[int]) -> None:
    """Give an output that had to grow its new memory."""
    if not isinstance(given, torch.Tensor) or (host.data_ptr() == before[0] and host.size() == given.size()):
        return
    given.resize_(host.size())
    on_host(given).copy_(host)


def _returned(schema: Any, given: dict[str, Any], result: Any, new: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return what an operator returns: arguments that it has written to, and new tensors."""
    changed = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    written = {tuple(each.alias_info.before_set): each.name for each in changed}
    results = result if isinstance(result, tuple) else (result,)
    found = []
    for index, each in enumerate(schema.returns):
        if each.alias_info is not None and tuple(each.alias_info.before_set) in written:
            found.append(given[written[tuple(each.alias_info.before_set)]])
        else:
            found.append(_moved(results[index], new))
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _matmul_backward(
    grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Compute on the host what torch has no CPU kernel for, as no other device differentiates `matmul` at once."""
    found = iter(differentiate(torch.matmul, (first, second), grad, wanted))
    return tuple(next(found) if each else torch.empty(0, device="cpu") for each in wanted)


_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_own_library: Any = torch.library.Library("npu", "IMPL")  # type: ignore[no-untyped-call]


def install() -> int:
    """Put the kernels in the place of torch-npu's; return how many there are."""
    # As scripts on NPUs do. torch-npu 2.6.0 would compile operators just in time in each thread that it makes itself.
    torch.npu.set_compile_mode(jit_compile=False)
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for full in sorted(torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")):
            space, _, name = full.partition("::")
            base, _, overload = name.partition(".")
            if space != "aten" or base in OWN:
                continue
            try:
                operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            except AttributeError:
                continue
            _library.impl(name, kernel(operator), "PrivateUse1")
            count += 1
        _library.impl("matmul_backward", _matmul_backward, "CPU")
        for name, (on_cpu, draws) in _own_kernels().items():
            operator = getattr(torch.ops.npu, name, None)
            if operator is None:  # of a newer release
                continue
            _own_library.impl(name, on_cpu(operator.default), "CPU")
            _own_library.impl(name, kernel(operator.default, draws=draws), "PrivateUse1")
            count += 1
    return count


def _own_kernels() -> dict[str, tuple[Callable[..., Any], bool]]:
    """Return what makes the host's kernel of each operator that is torch-npu's own, and whether it draws."""
    plain = {name: (lambda _, on_cpu=on_cpu: on_cpu, False) for name, on_cpu in fused.KERNELS.items()}
    return {**{name: (make, True) for name, make in attention.KERNELS.items()}, **plain}
