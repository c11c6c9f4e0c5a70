"""Connect the gloo groups of a generation: meet in the store, exchange addresses, then build each group.

Gloo's own connecting can neither be aborted nor trusted to be quick, so all of this runs in a background task. Members
meet in the store before anything is connected: the most common trouble, a rank that never comes, is found while nothing
is half built.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...protocol.errors import CommunicatorFailed
from ..background import BackgroundTask
from ..handshake import GlooMember, Listener
from ..neighbours import Neighbours
from ..process_group import group_names, set_group_name
from ..rendezvous import GenerationStore
from .group import GlooBackend, GlooGroup
from .links import GlooLinks

_WORLD = "world"
_LEAST_S = 0.001  # torch takes 0 for no limit
# Before this torch, a gloo group keeps for its collectives the timeout that it was connected with.
_TIMEOUT_CHANGES = Version(torch.__version__) >= Version("2.9")

# Torch's default of 2 corrupts the heap: both write the name of the group's last collective, a std::string, without a
# lock (runLoop in ProcessGroupGloo.cpp). Names of more than 15 letters, as of coalesced collectives, are freed twice.
_THREADS = 1


class Connections(NamedTuple):
    """The connections of a process in one generation: backends by group name, and the sockets to its neighbours.

    `missing`: for each group that not all of its members have made, the ranks that lack it.
    `pairs`: whether all ranks have opened pair links.
    """

    generation_store: GenerationStore
    backends: dict[str, GlooBackend]
    missing: dict[str, list[int]]
    neighbours: Neighbours
    pairs: bool


def connect_generation(  # noqa: PLR0917
    task: BackgroundTask[Connections],
    store: GenerationStore,
    generation: int,
    groups: Sequence[GlooGroup],
    links: GlooLinks,
    neighbours: Neighbours,
    collective_s: float,
    *,
    pairs: bool,
) -> Connections:
    """Exchange addresses with all ranks, and connect the groups that all of their members have made.

    `pairs`: whether this rank has opened pair links.

    Raises Abandoned when the task is over, LinkUpFailed when the store fails, RuntimeError (torch's) when gloo does.
    """
    names = group_names(groups)
    own = GlooMember(Listener(*links.listener), tuple(names), neighbours.address, pairs)
    ranks = range(neighbours.world_size)
    missing = f"has not come to group {_WORLD}"
    members = store.exchange(task, _WORLD, ranks, neighbours.rank, own, missing=missing)
    neighbours.expect([member.neighbours for member in members])
    links.expect(generation, [(member.listener.host, member.listener.port) for member in members])
    backends: dict[str, GlooBackend] = {}
    lacking: dict[str, list[int]] = {}
    for group, name in zip(groups, names, strict=True):
        without = [rank for rank in group.members if name not in members[rank].groups]
        if without:
            lacking[name] = without
        else:
            backends[name] = connect_group(
                store, name, group, links, link_up_s=task.remaining_s(), collective_s=collective_s
            )
    return Connections(store, backends, lacking, neighbours, all(member.pairs for member in members))


def connect_group(
    store: GenerationStore, name: str, group: GlooGroup, links: GlooLinks, *, link_up_s: float, collective_s: float
) -> GlooBackend:
    """Connect one group of the generation. Raises RuntimeError (torch's)."""
    size = len(group.members)
    part, rank = store.with_prefix(name), group.group_rank
    return connect_backend(part, name, rank, size, links, link_up_s=link_up_s, collective_s=collective_s)


def connect_backend(
    store: Any, name: str, group_rank: int, size: int, links: GlooLinks, *, link_up_s: float, collective_s: float
) -> GlooBackend:
    """Connect the gloo group `name` of `size` members, all of which do the same. Raises RuntimeError (torch's).

    `link_up_s` limits the connecting, `collective_s` each collective.
    """
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [links.device]
    options._threads = _THREADS
    # Where it stays, a link-up that fails may last that long in its thread. The task is given up in time all the same.
    options._timeout = timedelta(seconds=link_up_s if _TIMEOUT_CHANGES else max(link_up_s, collective_s))
    gloo = dist.ProcessGroupGloo(store, group_rank, size, options)
    gloo._set_default_timeout(timedelta(seconds=collective_s))
    process_group = dist.ProcessGroup(store, group_rank, size)
    for device in tensor_devices():
        process_group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
    process_group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    set_group_name(process_group, name)
    return GlooBackend(process_group, gloo, store)


def tensor_devices() -> tuple[str, ...]:
    """Return the devices whose tensors gloo takes here: those of a GPU by way of the host, if this process has one."""
    return ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)  # type: ignore[no-untyped-call,unused-ignore]


def check_groups(groups: Sequence[GlooGroup], deadline: float) -> None:
    """Add up ones in every connected group, all groups at once. Raises CommunicatorFailed or CommunicatorAborted."""
    checks = []
    for group in groups:
        if len(group.members) > 1:
            ones = torch.ones(1, device="cpu")  # a script may have set another default
            checks.append((group, ones, group.start("allreduce", False, False, ([ones],))))
    for group, ones, work in checks:
        work.wait(timedelta(seconds=max(_LEAST_S, deadline - time.monotonic())))
        if ones.item() != len(group.members):
            raise CommunicatorFailed(f"link check of ranks {group.members} gave {ones.item()}")
