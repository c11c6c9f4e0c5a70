"""torch-npu's names for MindSpeed-LLM's own program on a CPU: midstep's fake device, and tensors in host memory.

MindSpeed names hundreds of operators when it is imported, and calls a handful. Whatever is not known here is a
placeholder, which raises when it is called.
"""

import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from placeholders import OF_CANN, NamedModules, PlaceholderModule  # type: ignore[import-not-found]  # in common

from midstep.devices import fake

__version__ = "2.7.1"
__path__ = [os.path.dirname(__file__)]
DEVICES = frozenset({"npu", "cuda", "privateuseone"})
MAKERS = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "randint", "randn", "randperm", "tensor", "tril_indices", "zeros", "zeros_like",
)  # fmt: skip
MEMORY_BYTES = 1 << 36


class Stream:
    """A stream, or an event, of a device that does everything at once. Also a context that changes nothing."""

    npu_stream = cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def query(self) -> bool:
        """Say that all is done."""
        return True

    def record_event(self, *args: Any) -> "Stream":
        """Return an event."""
        return Stream()

    def elapsed_time(self, other: "Stream") -> float:
        """Return no time."""
        return 0.0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *args: object) -> None:
        pass


def seed(number: int) -> None:
    """Seed the device's generator, which is torch's own here."""
    torch.default_generator.manual_seed(number)


def memory_names() -> dict[str, Callable[..., Any]]:
    """Return the functions that ask for the device's memory."""
    sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {
        **dict.fromkeys(sizes, lambda *_: 0),
        "memory_stats": lambda *_: {},
        "mem_get_info": lambda *_: (MEMORY_BYTES // 2, MEMORY_BYTES),
        "reset_peak_memory_stats": lambda *_: None,
    }


def device_names() -> dict[str, Any]:
    """Return what torch.npu has and torch.cuda as well, over the fake device."""
    return {
        **memory_names(),
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_capability": lambda *_: (8, 0),
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "is_initialized": lambda: True,
        "manual_seed": seed,
        "manual_seed_all": seed,
        "stream": lambda *_: Stream(),
        "Event": Stream,
        "Stream": Stream,
        "_lazy_call": lambda call, *_, **__: call(),
    }


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """As the fused operator."""
    gate, up = torch.chunk(x, 2, dim=dim)
    return torch.nn.functional.silu(gate.float()).to(x.dtype) * up


def npu_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """As the fused operator."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * gamma, scale


def npu_rotary_mul(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rotary_mode: str = "half") -> Any:
    """As the fused operator."""
    first, second = torch.chunk(x, 2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def _host(device: Any) -> Any:
    """Return the CPU in place of a device of the library."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type in DEVICES else device
    if isinstance(device, str):
        return torch.device("cpu") if device.partition(":")[0] in DEVICES else device
    return torch.device("cpu") if isinstance(device, int) and not isinstance(device, bool) else device


def _in_host_memory(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function that makes a tensor make it in host memory, which is not pinned."""

    @functools.wraps(call)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _host(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return call(*args, **kwargs)

    return made


def _moved_nowhere(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have `to` know the library's devices as the CPU."""

    @functools.wraps(call)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _host(kwargs["device"])
        devices = (str, torch.device, int)
        here = (_host(each) if isinstance(each, devices) and not isinstance(each, bool) else each for each in args)
        return call(self, *here, **kwargs)

    return moved


def _module(name: str, **names: Any) -> types.ModuleType:
    module: types.ModuleType = PlaceholderModule(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(module).update({"__path__": [], **names})
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


def _make_modules() -> Any:
    fake.default_generators = fake.npu.default_generators = (torch.default_generator,) * 16  # type: ignore[assignment]
    sys.modules[__name__].__class__ = PlaceholderModule
    own = {name: getattr(fake.npu, name) for name in vars(fake.npu)}
    device = _module(f"{__name__}.npu", **{**own, **device_names()}, device=lambda *_: Stream())
    vars(device).update(
        is_jit_compile_false=lambda: True, set_compile_mode=lambda **_: None, set_option=lambda *_: None
    )
    _module(f"{__name__}.npu._recovery", **vars(fake.npu._recovery))
    _module(f"{__name__}.npu.utils", get_cann_version=lambda *_, **__: "9.1.0")
    _module(f"{__name__}._C", _NPUGeneratorBase=None)
    _module(f"{__name__}._C._distributed_c10d")
    _module(f"{__name__}.utils", reset_thread_affinity=lambda: None, set_thread_affinity=lambda *_: None)
    _module(f"{__name__}.utils.collect_env", get_cann_version=lambda: "9.1.0")
    _module(f"{__name__}.distributed", reinit_process_group=fake.reinit_process_group)
    return device


def _change_torch(device: Any) -> None:
    torch.npu = sys.modules["torch.npu"] = device  # type: ignore[attr-defined]
    dist.reinit_process_group = fake.reinit_process_group  # type: ignore[attr-defined]
    for name in MAKERS:
        setattr(torch, name, _in_host_memory(getattr(torch, name)))
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(tensor, name, _in_host_memory(getattr(tensor, name)))
    kind = tensor.type
    for moved in (tensor, module):
        moved.to = _moved_nowhere(moved.to)
        moved.cuda = moved.npu = lambda self, *_, **__: self
    tensor.pin_memory = tensor.record_stream = lambda self, *_: self
    tensor.is_cuda = tensor.is_npu = property(lambda _: True)
    tensor.type = lambda self, *args, **kwargs: (
        kind(self, *args, **kwargs) if args or kwargs else kind(self).replace("torch.", "torch.cuda.", 1)
    )


npu = _make_modules()
_change_torch(npu)
sys.meta_path.append(NamedModules((*OF_CANN, __name__), but=f"{__name__}.contrib"))
