"""Attention as torch-npu has it: the fused operator that torch's `scaled_dot_product_attention` calls on NPUs.

CANN's has no counterpart among torch's CPU kernels, so it is computed here, in float32, for tensors of the host. The
backward pass computes it again. Dropout is drawn from a seed that the forward pass returns, as CANN's does.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

# How the dimensions are ordered: B batch, N heads, S places, D width of a head, H = N x D.
LAYOUTS = ("BNSD", "BSND", "BSH", "SBH")
GIVEN, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL = 0, 2, 3  # sparse_mode; 0: the mask that is given
STATISTICS = 8  # numbers of each row's softmax, all of them the same
SEEDS = 2**31 - 1


def _heads(tensor: torch.Tensor, layout: str, width: int) -> torch.Tensor:
    """Return it as BNSD, of heads of this width."""
    if layout == "BNSD":
        return tensor
    if layout == "SBH":
        tensor = tensor.transpose(0, 1)
    if tensor.dim() == 3:
        tensor = tensor.view(*tensor.shape[:2], -1, width)
    return tensor.transpose(1, 2)


def _back(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a BNSD tensor in a layout."""
    if layout == "BNSD":
        return tensor
    tensor = tensor.transpose(1, 2)
    if layout == "BSND":
        return tensor
    tensor = tensor.flatten(2)
    return tensor.transpose(0, 1) if layout == "SBH" else tensor


def _hidden(rows: int, columns: int, mask: torch.Tensor | None, mode: int) -> torch.Tensor | None:
    """Return where a place may not look: True there."""
    if mode == GIVEN:
        return None if mask is None else mask.bool()
    places = torch.ones(rows, columns, dtype=torch.bool)
    return places.triu(1 + (columns - rows if mode == RIGHT_DOWN_CAUSAL else 0))


class Attention:
    """The operator with its settings; `given` holds the arguments by their names, with torch-npu's spelling."""

    def __init__(self, given: dict[str, Any], seed: int) -> None:
        self.layout, self.scale = given["input_layout"], given.get("scale", given.get("scale_value", 1.0))
        self.heads, self.keep, self.seed = given["head_num"], given.get("keep_prob", 1.0), seed
        self.mode, self.mask = given.get("sparse_mode", GIVEN), given.get("atten_mask")
        if self.layout not in LAYOUTS or self.mode not in (GIVEN, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL):
            raise NotImplementedError(f"attention of layout {self.layout}, sparse_mode {self.mode} on the fake CANN")
        if given.get("pse") is not None:
            raise NotImplementedError("attention with a position shift (pse) on the fake CANN")

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what is attended, and the maximum and the sum of each row's softmax."""
        width = query.shape[-1] if query.dim() == 4 else query.shape[-1] // self.heads
        rows, keys, values = (_heads(each, self.layout, width).float() for each in (query, key, value))
        shared = rows.shape[1] // keys.shape[1]  # several heads of the query look at the same keys
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        scores = rows @ keys.transpose(2, 3) * self.scale
        hidden = _hidden(scores.shape[2], scores.shape[3], self.mask, self.mode)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        highest = scores.amax(-1, keepdim=True)
        weights = (scores - highest).exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / total
        if self.keep < 1.0:
            drawing = torch.Generator().manual_seed(self.seed)
            weights = weights * (torch.rand(weights.shape, generator=drawing) < self.keep) / self.keep
        attended = _back(weights @ values, self.layout).to(query.dtype).contiguous()
        return attended, *(each.detach().expand(*each.shape[:3], STATISTICS).contiguous() for each in (highest, total))


def differentiate(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the inputs that are wanted, also in a kernel, where torch has autograd switched off."""
    leaves = [each.detach().requires_grad_(need) for each, need in zip(inputs, wanted, strict=False)]
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(torch._C.DispatchKey.AutogradCPU).remove(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        result = function(*leaves)
        return torch.autograd.grad(result, [each for each in leaves if each.requires_grad], gradient)


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [each.name for each in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _forward(operator: Any) -> Callable[..., Any]:
    in_tensors = operator._schema.returns[4].type.kind() == "TensorType"

    def run(*args: Any, **kwargs: Any) -> Any:
        given = _named(operator, args, kwargs)
        seed = int(torch.randint(SEEDS, (1,)).item())
        attended, highest, total = Attention(given, seed)(given["query"], given["key"], given["value"])
        drawn = (torch.tensor([seed]), torch.tensor([0])) if in_tensors else (seed, 0, 0)
        return (attended, highest, total, torch.empty(0), *drawn)

    return run


def _backward(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = _named(operator, args, kwargs)
        seed = given.get("seed")
        attention = Attention(given, 0 if seed is None else int(seed))
        inputs = [given[name] for name in ("query", "key", "value")]
        gradients = differentiate(lambda *given: attention(*given)[0], inputs, given["dy"])
        rest = len(operator._schema.returns) - len(gradients)
        return (*gradients, *(torch.empty(0) for _ in range(rest)))

    return run


# The operators, with what computes them on the host; newer releases have those with tensors in the place of numbers.
KERNELS = {
    "npu_fusion_attention": _forward,
    "npu_fusion_attention_grad": _backward,
    "npu_fusion_attention_v3": _forward,
    "npu_fusion_attention_grad_v3": _backward,
}
