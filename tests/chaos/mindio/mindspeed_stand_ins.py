"""Stand-ins for torch-npu and MindSpeed, for MindSpeed-LLM's high_availability folder imported on a CPU.

Its own files and Megatron-LM's are those of the checkouts. The packages above the folder are empty here: what they
import is about models and NPUs.
"""

import functools
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import script_group
import torch
import torch.distributed as dist

from midstep.devices import fake

CHECKOUT = "MIDSTEP_MINDSPEED_LLM"
BACKEND = "fake_hccl"
_EMPTY = ("mindspeed_llm", "mindspeed_llm.core", "mindspeed_llm.tasks", "mindspeed_llm.tasks.high_availability")
_COLLECTIVES = ("all_reduce", "_all_gather_base", "broadcast", "all_gather_into_tensor")


def install() -> None:
    """Make the modules, and have tensors of the device `npu` be on the CPU."""
    script_group.register()
    sys.modules["torch_npu"] = fake
    sys.modules["torch_npu.npu"] = _module("torch_npu.npu")
    sys.modules["torch_npu.npu._recovery"] = _module(
        "torch_npu.npu._recovery", update_npu_tensor_to_safe=fake.update_npu_tensor_to_safe
    )
    torch.npu = fake.npu  # type: ignore[attr-defined]
    torch.cuda.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    vars(torch.cuda).update(set_device=fake.set_device, synchronize=fake.synchronize)
    dist.reinit_process_group = fake.reinit_process_group  # type: ignore[attr-defined]
    for name in ("tensor", "empty"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    sys.modules.setdefault("six", _module("six"))
    sys.modules.setdefault("regex", re)
    for name in _EMPTY:
        place = os.path.join(os.environ[CHECKOUT], *name.split("."))
        sys.modules[name] = _module(name, __path__=[place])
    groups = _module("mindspeed.core.parallel_state", _PIPELINE_MODEL_PARALLEL_GROUP_FOR_NEW_STREAM=None)
    sys.modules["mindspeed"] = _module("mindspeed", __path__=[])
    sys.modules["mindspeed.core"] = _module("mindspeed.core", __path__=[], parallel_state=groups)
    sys.modules["mindspeed.core.parallel_state"] = groups


def patch_torch() -> None:
    """Wrap torch's collectives as MindSpeed-LLM's feature of high availability does."""
    from mindspeed_llm.tasks.high_availability import communication_patch as patches

    dist.barrier = patches.barrier_wrapper(dist.barrier)
    for name in _COLLECTIVES:
        setattr(dist, name, patches.communication_wrapper(getattr(dist.distributed_c10d, name)))
    dist.new_group = patches.new_group_wrapper(dist.new_group)


def add_module(name: str, **names: Any) -> None:
    """Have a module of MindSpeed-LLM be one with these names."""
    package = name.rpartition(".")[0]
    sys.modules[package] = _module(package, __path__=[])
    sys.modules[name] = _module(name, **names)


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    return module


def _on_cpu(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith(("npu", "cuda")):  # as torch-npu's transfer_to_npu reads the latter
            kwargs["device"] = "cpu"
        here = tuple("cpu" if isinstance(arg, str) and arg == "npu" else arg for arg in args)
        return call(*here, **kwargs)

    return on_cpu
