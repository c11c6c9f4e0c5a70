"""Have torchtitan train on a machine without an accelerator. To be imported before torchtitan.

torchtitan looks for a device and reads its memory statistics, attends by a compiled kernel that has no backward pass on
a CPU, scales gradients by a sum that gloo lacks, and imports kernels of Triton, which torch's CPU builds come without.
Nothing here has to do with midstep: with an accelerator leave it
out.
"""

import sys
import types
from importlib.util import find_spec
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
    """Compute causal attention. Unlike torchtitan's it does not end at the beginning of a document."""
    gqa = bool(options.get("enable_gqa"))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=options.get("scale"), enable_gqa=gqa
    )
    return out, None


class _Kernels(types.ModuleType):
    """Kernels by which experts exchange tokens on accelerators: none is called here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _leave_kernels_out() -> None:
    """Have torchtitan 0.3.0, and 0.2.2, find its kernels of Triton without Triton."""
    if find_spec("triton") is None:
        for name in ("torchtitan.distributed.minimal_async_ep.kernels", "torchtitan.models.moe.kernels"):
            sys.modules[name] = _Kernels(name)


def _replace_attention() -> None:
    """Put it in the place of the compiled kernel, which 0.3.0 compiles when the module is imported."""
    compile_now = torch.compile
    torch.compile = lambda function=None, **_: function if function is not None else lambda each: each  # type: ignore
    try:
        from torchtitan.models.common import attention
    except ImportError:  # 0.2.2, whose debug model attends by torch's own function
        return
    finally:
        torch.compile = compile_now
    attention.FlexAttention._compiled_flex_attn = staticmethod(_attention)
    attention.FlexAttention.compiled_flex_attn = staticmethod(_attention)


def _sum_gradients() -> None:
    """Have gradients reduced by a plain sum, also where torchtitan switches torch's division off."""
    plain: Any = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(module: Any, factor: float) -> None:
        plain(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def prepare() -> None:
    """Make this process one in which torchtitan trains on the CPU."""
    assert "torchtitan.tools.utils" not in sys.modules, "import on_cpu before torchtitan"
    torch._utils._get_available_device_type = lambda: "cpu"
    lacking: dict[str, Any] = {
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 34),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
    }
    for name, value in lacking.items():
        setattr(torch.cpu, name, value)
    _leave_kernels_out()
    _sum_gradients()
    _replace_attention()
