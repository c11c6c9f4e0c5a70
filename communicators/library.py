"""A device's collective library, as torch.distributed knows it: the name of a backend that makes groups."""

from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from .generation_scope import GenerationScope
from .hccl_group import HcclGroup


class Library(NamedTuple):
    """A collective library: torch-npu's calls, the backend of torch.distributed that it registers, its device."""

    calls: Any
    backend: str
    device: str


def build(library: Library, group: HcclGroup, name: str, store: Any, scope: GenerationScope) -> None:
    """Have the library make its group behind ours, with its own part of `store`. Connects nothing."""
    options = c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    options.store = PrefixStore(name, store)
    options.group_rank = group.group_rank
    options.group_size = len(group.members)
    options.timeout = group.timeout
    options.group_id = name
    options.global_ranks_in_group = list(group.members)
    backend = dist.Backend._plugins[library.backend.upper()].creator_fn(options, None)
    process_group = backend
    if not isinstance(backend, dist.ProcessGroup):  # torch's own rule: a process group stands for itself
        process_group = dist.ProcessGroup(options.store, group.group_rank, len(group.members))
        process_group._register_backend(torch.device(library.device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        process_group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        process_group._set_group_name(c10d.GroupName(name))
    group.serve(process_group, backend, scope)
