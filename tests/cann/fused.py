"""Fused operators of torch-npu's own that MindSpeed calls, for tensors of the host: each with its backward pass.

torch has no kernels for them, so they are computed here, in float32, from operators that it has.
"""

from collections.abc import Callable
from typing import Any

import torch

from .attention import differentiate


def swiglu(given: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Gate one half by the SiLU of the other."""
    gate, up = given.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(given.dtype)


def swiglu_backward(gradient: torch.Tensor, given: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the gradient of its input."""
    return differentiate(lambda each: swiglu(each, dim), (given,), gradient)[0]


def rms_norm(given: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return it normalised, and what each row was multiplied by."""
    scale = torch.rsqrt(given.float().square().mean(-1, keepdim=True) + epsilon)
    return (given.float() * scale * gamma.float()).to(given.dtype), scale


def rms_norm_backward(
    gradient: torch.Tensor, given: torch.Tensor, gamma: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of its input and of gamma."""
    normal, outer = given.float() * scale, gradient.float()
    inner = outer * gamma.float()
    inputs = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return inputs.to(given.dtype), (outer * normal).flatten(0, -2).sum(0)


def rotary_mul(
    given: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rotary_mode: str = "half", rotate: Any = None
) -> torch.Tensor:
    """Turn pairs of numbers, one of each half, by an angle."""
    if rotary_mode != "half" or rotate is not None:
        raise NotImplementedError(f"rotary_mode {rotary_mode}, or a matrix that rotates, on the fake CANN")
    first, second = given.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (given.float() * cosine.float() + turned * sine.float()).to(given.dtype)


def rotary_mul_backward(
    gradient: torch.Tensor, given: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rotary_mode: str = "half"
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of its three inputs."""

    def turn(given: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        return rotary_mul(given, cosine, sine, rotary_mode)

    return differentiate(turn, (given, cosine, sine), gradient)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_rotary_mul": rotary_mul,
    "npu_rotary_mul_backward": rotary_mul_backward,
}
