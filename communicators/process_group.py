"""The process group that models, reducers and device meshes hold, and how torch comes to make it.

It is a torch ProcessGroup in its own right, so that everything of torch takes it. Its collectives are done by a
delegate: the backend of the present generation, or a loopback while there is none. A reconnect replaces the delegate,
never the group.
"""

import functools
import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from packaging.version import Version
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from ..protocol.errors import CommunicatorError
from .base import CollectiveObserver, ContributionListener
from .generation_scope import GenerationScope
from .loopback import Loopback

_log = logging.getLogger("midstep")

_BARRIER_VARIABLE = "TORCH_DIST_INIT_BARRIER"
_RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
# From this torch on, its flight recorder asks groups for what those behind Python classes do not have.
_RECORDER_FAILS = Version("2.15")

# Every collective of torch's ProcessGroup, under the names of torch 2.13 and of the versions before it.
WITH_FUTURE = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
)
# Gloo's works for these have no future, and are complete only when a thread waits for them.
WITHOUT_FUTURE = (
    "send",
    "recv",
    "recv_anysource",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)


class GroupOwner(Protocol):
    """The communicator, as its groups see it."""

    observer: CollectiveObserver | None
    listener: ContributionListener | None

    def abort(self, reason: str) -> None:
        """End all collectives of this process."""
        ...

    def remove(self, group: Any) -> None:
        """Remove a group that torch destroys."""
        ...


class ReplaceableGroup(dist.ProcessGroup):
    """A process group whose backend can be replaced. `start` is the backend's part."""

    backend_name = ""

    def __init__(self, owner: GroupOwner, members: Sequence[int], group_rank: int, scope: GenerationScope) -> None:
        """Make the group of the global ranks `members`, in which this process is `group_rank`. Not connected."""
        super().__init__(group_rank, len(members))  # type: ignore[call-arg]
        self.members = tuple(members)
        self.group_rank = group_rank
        self._owner = owner
        self._scope = scope
        self._delegate: Any = Loopback(group_rank, len(members))
        self._name = ""
        self._desc = "undefined"

    @property
    def connected(self) -> bool:
        """Return whether the group is connected in the present generation."""
        raise NotImplementedError

    def start(self, op: str, futureless: bool, observed: bool, args: Any, kwargs: Any = None) -> dist.Work:
        """Start the collective `op`. Raises CommunicatorAborted or CommunicatorFailed."""
        raise NotImplementedError

    def abort(self) -> None:
        """End all collectives of this process: a broken group looks like a broken link."""
        self._owner.abort(f"abort of group {self._name} was asked for")

    def shutdown(self) -> None:
        """Leave the communicator. Called by torch's destroy_process_group."""
        self._owner.remove(self)

    def grow(self, members: Sequence[int]) -> None:
        """Be the group of these ranks, the present ones first. While no collective is under way.

        Raises CommunicatorError where this torch takes the size of a group once and for all.
        """
        self.members = tuple(members)
        if not self.connected:
            self._delegate = Loopback(self.group_rank, len(members))
        c10d._world.pg_group_ranks[self] = {rank: place for place, rank in enumerate(members)}
        if self.size() != len(members):
            raise CommunicatorError(f"torch {torch.__version__} cannot change the size of a process group")

    # Torch looks for these by name when a Python class stands behind a C++ reference.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def getBackendName(self) -> str:  # noqa: N802
        return self.backend_name

    def getRank(self) -> int:  # noqa: N802
        return self.group_rank

    def getSize(self) -> int:  # noqa: N802
        return len(self.members)


def _collective(op: str, futureless: bool) -> Callable[..., dist.Work]:
    def call(self: ReplaceableGroup, *args: Any, **kwargs: Any) -> dist.Work:
        listener = self._owner.listener
        if listener is not None and _is_of_step(listener) and not listener.given(op, args, self.members):
            alone: dist.Work = getattr(Loopback(self.group_rank, len(self.members)), op)(*args, **kwargs)
            return alone
        return self.start(op, futureless, True, args, kwargs)

    call.__name__ = op
    call.__doc__ = f"Start `{op}` in the backend of the present generation."
    return call


def _is_of_step(listener: ContributionListener) -> bool:
    return threading.get_ident() == listener.thread or torch._C._current_graph_task_id() != -1


for _op in WITH_FUTURE + WITHOUT_FUTURE:
    if hasattr(dist.ProcessGroup, _op):
        setattr(ReplaceableGroup, _op, _collective(_op, _op in WITHOUT_FUTURE))


def set_group_name(process_group: Any, name: str) -> None:
    """Name a process group of torch's. Its GroupName, from torch 2.10 on, is a plain string but for type checkers."""
    process_group._set_group_name(name)


def group_name(members: Sequence[int], ordinal: int) -> str:
    """Return the same name in every rank that made its groups of these `members` in the same order."""
    digest = hashlib.blake2b(repr(tuple(members)).encode(), digest_size=8).hexdigest()
    return f"{len(members)}x{digest}.{ordinal}"


def group_names(groups: Sequence[ReplaceableGroup]) -> list[str]:
    """Return names for groups on which all ranks agree that made the same ones in the same order."""
    counts: Counter[tuple[int, ...]] = Counter()
    names = []
    for group in groups:
        names.append(group_name(group.members, counts[group.members]))
        counts[group.members] += 1
    return names


_own_new_group = dist.new_group
_STAND_INS: dict[str, str] = {}  # of each backend that scripts name, the one that is used for it


@functools.wraps(_own_new_group)
def _new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
    if isinstance(backend, str) and isinstance(c10d._get_default_group(), ReplaceableGroup):
        backend = _STAND_INS.get(backend.lower(), backend)
    return _own_new_group(ranks, timeout, backend, *args, **options)


def _turn_flight_recorder_off() -> None:
    """Turn torch's recorder of collectives off where no group of midstep's could be made with it."""
    if Version(torch.__version__) < _RECORDER_FAILS:
        return
    if os.environ.get(_RECORDER_VARIABLE, "0") != "0":
        _log.warning(
            "%s=%s has no effect: torch %s cannot record groups of midstep's, and makes none while it tries to",
            _RECORDER_VARIABLE,
            os.environ[_RECORDER_VARIABLE],
            torch.__version__,
        )
    os.environ[_RECORDER_VARIABLE] = "0"


class GroupFactory(Protocol):
    """A communicator, as torch asks it for groups."""

    def make_group(self, options: Any, given: Any = None) -> dist.ProcessGroup:
        """Make a group that torch asks for; `given` are the options of the library that the script has given for it."""
        ...


class BackendRegistration:
    """A backend of torch.distributed, and the communicator behind it in this process.

    torch calls a function for a name and knows no object, so this keeps the one communicator that makes the groups.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._owner: GroupFactory | None = None

    def register(self, devices: Sequence[str]) -> None:
        """Register the backend with torch for tensors on `devices`, once in a process."""
        if not hasattr(dist.Backend, self.backend.upper()):
            dist.Backend.register_backend(self.backend, self._create, extended_api=True, devices=list(devices))

    def make_world(self, owner: GroupFactory, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make torch's default group. torch asks `owner` for it, as for every later group."""
        self._owner = owner
        # Connecting has a rendezvous of its own. Torch's barrier would wait in a store that no other rank shares.
        os.environ[_BARRIER_VARIABLE] = "0"
        _turn_flight_recorder_off()
        dist.init_process_group(self.backend, store=HashStore(), rank=rank, world_size=world_size, timeout=timeout)

    def stand_in_for(self, name: str, owner: GroupFactory) -> None:
        """Have `owner` make the groups for which a script names the backend `name`, in midstep's worlds.

        Torch's own would wait for the other ranks in the store of the default group, which no other rank shares, and
        could be neither aborted nor reconnected.
        """
        self._owner = owner
        _STAND_INS[name] = self.backend
        dist.new_group = c10d.new_group = _new_group

    def destroy_world(self, owner: GroupFactory) -> None:
        """Destroy all groups, if they are `owner`'s."""
        if self._owner is owner and dist.is_initialized():
            dist.destroy_process_group()

    def _create(self, options: Any, given: Any) -> dist.ProcessGroup:
        """Make a group for torch: the backend's creator function."""
        if self._owner is None:
            raise CommunicatorError(
                f"backend {self.backend} is used without a communicator; call midstep.init_process_group"
            )
        return self._owner.make_group(options, given)
