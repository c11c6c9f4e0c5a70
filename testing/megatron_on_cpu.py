"""megatron-core on the CPU, for trials and tests: it says "cuda" in many places where it means "the device".

`use_cpu()` makes those places mean the CPU. Each replacement names the place of megatron-core 0.16.1 that fails without
it; the rest of `torch.cuda` stays what it is. Call it before Megatron's own initialisation. Nothing here is used where
there is an accelerator.
"""

import functools
import logging
from typing import Any

import torch

from ..protocol.errors import ConfigurationError

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
_done = False


class _Stream:
    """A CUDA stream or event on a device where everything happens in order anyway."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept the arguments of a CUDA stream."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Return at once: there is nothing to wait for."""

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_: Any) -> "_Stream":
        """Return an event that is complete: everything before it has happened."""
        return _Stream()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave `with torch.cuda.stream(...)`."""


def use_cpu() -> None:
    """Let megatron-core run on the CPU. Raises ConfigurationError where torch sees an accelerator."""
    global _done  # noqa: PLW0603 - what is replaced is global, too
    if torch.cuda.is_available():
        raise ConfigurationError("use_cpu() was called where torch sees a CUDA device; leave the call out there")
    if _done:
        return
    _done = True
    for name in _FACTORIES:  # device="cuda": optimizer/optimizer.py, pipeline_parallel/schedules.py
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU  # tensor_parallel/layers.py, distributed/param_and_grad_buffer.py
    cuda.synchronize = lambda *_: None  # pipeline_parallel/p2p_communication.py
    cuda.Stream = cuda.Event = cuda.stream = _Stream  # several optimizer instances: distributed_data_parallel.py
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self  # models/common/language_module: tied embeddings in a pipeline
    tensor.type = _cuda_type(tensor.type)  # optimizers compare it with "torch.cuda.FloatTensor"
    _one_generator()
    _experts()
    _without_fp8()


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        device = options.get("device")
        if isinstance(device, int) or (device is not None and torch.device(device).type == "cuda"):
            options["device"] = _CPU
        return factory(*args, **options)

    return make


def _cuda_type(plain: Any) -> Any:
    def kind(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if args or options:
            return plain(self, *args, **options)
        return plain(self).replace("torch.", "torch.cuda.", 1)

    return kind


def _one_generator() -> None:
    """Use torch's own generator as the device's: without CUDA the tracker's forks would silently restore nothing."""
    from megatron.core.tensor_parallel import random as megatron_random

    # It warns of a CPU generator that changes inside its forks. Here that is the one that should.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    generator = torch.default_generator
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *_, **__: generator.get_state()
    cuda.set_rng_state = lambda state, *_, **__: generator.set_state(state)
    cuda.manual_seed = generator.manual_seed
    cuda.default_generators = (generator,)
    megatron_random._get_cuda_rng_state = lambda *_, **__: generator.get_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: generator.set_state(state)


def _experts() -> None:
    """Let experts work where there is neither Transformer Engine nor a copy from the device to the host."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):  # only defined with Transformer Engine, and asked for without
        moe_utils.te_general_gemm = None
    plain = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, **options: Any) -> Any:
        moved = plain(tensor, as_numpy=as_numpy, **options)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = to_host  # sizes of an all-to-all must be no tensors


def _without_fp8() -> None:
    """Let distributed optimizers do without Transformer Engine: 0.12 asks for it even if no parameter is fp8."""
    from megatron.core.optimizer import distrib_optimizer

    plain = distrib_optimizer.quantize_param_shard

    def quantize(model_params: Any, *rest: Any, **options: Any) -> None:
        if model_params:
            plain(model_params, *rest, **options)

    distrib_optimizer.quantize_param_shard = quantize
