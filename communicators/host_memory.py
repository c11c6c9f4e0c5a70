"""Host memory that collectives and transfers read and write: torch's tensors, or numpy's arrays.

A job whose framework is not torch need not have torch installed. Where it is, buffers are torch's, as gloo takes
nothing else; where it is not, they are numpy's. What holds for both is here, so that no other module has to ask.
"""

import ctypes
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from .libraries import HAS_TORCH

if TYPE_CHECKING:
    import torch

    Buffer = torch.Tensor | np.ndarray[Any, Any]

TORCH: Any = import_module("torch") if HAS_TORCH else None
# Python's own, and several times faster than a view of a tensor: state can be a thousand small ones.
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ_ONLY = 0x100


def dtype_of(name: str) -> "torch.dtype":
    """Return the dtype of this name: torch's, or numpy's without torch. Raises TypeError for any other name."""
    if TORCH is None:
        return np.dtype(name)  # type: ignore[return-value]
    dtype = getattr(TORCH, name, None)
    if not isinstance(dtype, TORCH.dtype):
        raise TypeError(f"this torch ({TORCH.__version__}) has no dtype {name!r}")
    return dtype  # type: ignore[no-any-return]


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, e.g. `float32`, as torch's namespace and numpy's have it."""
    return str(dtype).removeprefix("torch.")


def empty(shape: tuple[int, ...], dtype: Any) -> "torch.Tensor":
    """Return an uninitialized buffer of a dtype that `dtype_of` has given."""
    return (np if TORCH is None else TORCH).empty(shape, dtype=dtype)  # type: ignore[no-any-return]


def empty_bytes(length: int) -> "torch.Tensor":
    """Return an uninitialized buffer of flat bytes."""
    return empty((length,), dtype_of("uint8"))


def from_bytes(data: bytearray) -> "torch.Tensor":
    """Return a buffer of flat bytes on the memory of `data`, which must not be empty."""
    array = np.frombuffer(data, np.uint8)
    return array if TORCH is None else TORCH.from_numpy(array)  # type: ignore[return-value]


def on_memory(memory: memoryview) -> "torch.Tensor":
    """Return a buffer of flat bytes on this memory, which is writable and not empty."""
    array = np.frombuffer(memory, np.uint8)
    return array if TORCH is None else TORCH.from_numpy(array)  # type: ignore[return-value]


def is_array(buffer: object) -> bool:
    """Return whether it is numpy's."""
    return isinstance(buffer, np.ndarray)


def on_host(buffer: Any) -> bool:
    """Return whether it lies in memory of the CPU."""
    return is_on(buffer, "cpu")


def is_on(buffer: Any, device_type: str) -> bool:
    """Return whether it lies in memory of this type of device: `cpu` for the host's."""
    return bool(device_type == "cpu" if is_array(buffer) else buffer.device.type == device_type)


def flat_view(buffer: Any) -> Any:
    """Return the memory of a contiguous buffer, wherever it lies, as flat bytes of the same kind of buffer."""
    if is_array(buffer):
        return buffer.reshape(-1).view(np.uint8)
    return buffer.detach().view(-1).view(TORCH.uint8)


def as_array(buffer: Any) -> Any:
    """Return a buffer on the host as a numpy array on the same memory."""
    return buffer if is_array(buffer) else buffer.detach().numpy()


def memory_of(buffer: Any) -> memoryview:
    """Return the memory of a contiguous buffer on the host as flat bytes."""
    return memoryview(as_array(flat_view(buffer)))


def address_of(buffer: Any) -> int:
    """Return where a contiguous buffer on the host begins in memory."""
    return int(buffer.ctypes.data if is_array(buffer) else buffer.data_ptr())


def memory_at(address: int, length: int) -> memoryview:
    """Return memory of this process for reading, as flat bytes. The caller keeps what lies there."""
    view: memoryview = _memory_at(address, length, _READ_ONLY)
    return view


def copy_into(target: Any, source: Any) -> None:
    """Copy one buffer of flat bytes into another, of the other kind or on another device too."""
    if is_array(target):
        target[:] = as_array(source)
    else:
        target.copy_(TORCH.from_numpy(source) if is_array(source) else source)
