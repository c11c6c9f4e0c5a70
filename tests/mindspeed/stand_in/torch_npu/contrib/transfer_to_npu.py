"""As torch-npu's module of the name: torch.cuda becomes the device, and nccl its communicator, the fake HCCL.

Faults of a test begin to be watched for when the script makes its groups.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import faults
import script_group
import torch
import torch.cuda.memory
import torch.cuda.random
import torch.distributed as dist

import torch_npu
from midstep.devices import fake

BACKEND = "fake_hccl"
NAMES = frozenset({"nccl", "hccl"})
PROPERTIES = SimpleNamespace(total_memory=torch_npu.MEMORY_BYTES, name="Ascend910B2", major=8, minor=0)


class Options:
    """Options of a communicator, which the fake one has none of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.hccl_config: dict[str, Any] = {}


def _backend(name: Any) -> Any:
    return BACKEND if name in NAMES else name


def _changed(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return make(_backend(backend or "nccl"), *args, **kwargs)

    return init_process_group


def _changed_part(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def new_group(
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        **more: Any,
    ) -> Any:
        return make(ranks, timeout, _backend(backend), None, **more)

    return new_group


def _change() -> None:
    script_group.register()
    generator = torch.default_generator
    randomness = {
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "set_rng_state": lambda state, *_, **__: generator.set_state(state),
        "manual_seed": torch_npu.seed,
        "manual_seed_all": torch_npu.seed,
    }
    device = {
        **torch_npu.device_names(),
        **randomness,
        "current_device": fake.current_device,
        "default_generators": fake.default_generators,
        "empty_cache": fake.empty_cache,
        "get_device_name": fake.get_device_name,
        "get_device_properties": lambda *_: PROPERTIES,
        "set_device": fake.set_device,
        "synchronize": lambda *_: fake.synchronize(),
        "_lazy_init": lambda: None,
    }
    vars(torch.cuda).update(device)
    vars(torch.cuda.random).update(randomness)
    vars(torch.cuda.memory).update({**torch_npu.memory_names(), "empty_cache": fake.empty_cache})
    group: Any = dist
    group.init_process_group = group.distributed_c10d.init_process_group = _changed(dist.init_process_group)
    faults.begin_with_groups()
    group.new_group = group.distributed_c10d.new_group = _changed_part(dist.new_group)
    kind = type("ProcessGroup", (), {"Options": Options})
    group.ProcessGroupNCCL = sys.modules["torch_npu._C._distributed_c10d"].ProcessGroupHCCL = kind  # type: ignore[attr-defined]


_change()
