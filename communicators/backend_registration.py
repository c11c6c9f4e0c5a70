"""How torch comes to make midstep's groups: a backend's name, and the communicator behind it in this process.

torch calls a function for a name and knows no object, so the registration keeps the one communicator that the groups
of this process belong to.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from ..protocol.errors import CommunicatorError

_BARRIER_VARIABLE = "TORCH_DIST_INIT_BARRIER"


class GroupFactory(Protocol):
    """A communicator, as far as torch asks it for groups."""

    def make_group(self, options: Any) -> dist.ProcessGroup:
        """Make a group that torch asks for."""
        ...


class BackendRegistration:
    """One backend of torch.distributed."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._owner: GroupFactory | None = None

    def register(self, devices: Sequence[str]) -> None:
        """Tell torch of the backend, once in a process."""
        if not hasattr(dist.Backend, self._backend.upper()):
            dist.Backend.register_backend(self._backend, self._create, extended_api=True, devices=list(devices))

    def make_world(self, owner: GroupFactory, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make torch's default group, which asks `owner` for it, as every later group does."""
        self._owner = owner
        # The seating is a rendezvous of its own. Torch's barrier would wait in a store that nobody shares.
        os.environ[_BARRIER_VARIABLE] = "0"
        dist.init_process_group(self._backend, store=HashStore(), rank=rank, world_size=world_size, timeout=timeout)

    def destroy_world(self, owner: GroupFactory) -> None:
        """Destroy all groups, if they are `owner`'s."""
        if self._owner is owner and dist.is_initialized():
            dist.destroy_process_group()

    def _create(self, options: Any, _: Any) -> dist.ProcessGroup:
        """Make a group for torch: the backend's creator function."""
        if self._owner is None:
            raise CommunicatorError(
                f"backend {self._backend} is used without a communicator; call midstep.init_process_group"
            )
        return self._owner.make_group(options)
