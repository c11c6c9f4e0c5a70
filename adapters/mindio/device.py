"""The device and the process groups of a job with MindIO's handlers.

The handlers stop the device and make it usable again; the rest is the device's own. They also make the process groups
again, with names on which survivors and newcomers have to agree. torch counts the groups that a process has made. A
newcomer has made fewer than the survivors when both make one in the rebuild handler, and would wait for its peers under
another name. So names say the generation, and count from there.

A process that is built ahead may make no group before it has a rank: it would meet those that train.
"""

import contextlib
import functools
import hashlib
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...devices.base import Damage, Device
from ...devices.device_busy import held_s
from ...protocol.errors import ConfigurationError
from .values import is_mindspore

if TYPE_CHECKING:
    import torch


_HOME = "torch.distributed.distributed_c10d"
_NAMING = "_process_group_name"


class HandledDevice:
    """See Device. `damage` is what the clean handler has found, until it was told."""

    stopped = False

    def __init__(self, own: Device) -> None:
        """Wrap the device of the policy."""
        self._own = own
        self.name = own.name
        self.damage = Damage.NONE

    @property
    def torch_device(self) -> "torch.device":
        """The device of the policy."""
        return self._own.torch_device

    def prepare(self, local_rank: int, environment: Mapping[str, str], link_up_s: float) -> None:
        """Do nothing: the script has taken its device."""

    def stop(self) -> None:
        """Do nothing: the stop handler does."""

    def memory_error_raised(self) -> None:
        """Do nothing: the clean handler is given that there was a memory error."""

    def release_unused(self) -> None:
        """Do nothing: the training thread does when it has left the training function."""

    def clean(self) -> Damage:
        """Return what the clean handler has found."""
        damage, self.damage = self.damage, Damage.NONE
        return damage

    def corrupted(self, tensors: "Sequence[torch.Tensor]") -> bool:
        """Return False: it is not known which tensors are damaged, so all count as lost."""
        return False

    def mark_safe(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Do nothing: the clean handler does."""

    def finish(self) -> None:
        """Do nothing: the handlers' own stack waits for the device."""

    def rebuilt(self) -> None:
        """Do nothing: the groups are the framework's."""

    def __getattr__(self, name: str) -> Any:
        """Ask the device of the policy for the rest: random numbers, the clock, injected faults."""
        return getattr(self._own, name)


def await_free_device() -> None:
    """Wait until the process before has let go of this process's NPU for sure. Do nothing where there is no NPU.

    Handlers build communicators without expecting that they fail. To ask would need a group with other ranks: HCCL
    takes nothing of the device for a group of one.
    """
    library = sys.modules.get("torch_npu")
    if library is not None:
        time.sleep(held_s(library))


def await_rank_before_groups() -> None:
    """Have a script that is run ahead wait for its rank where it makes its first group. Without torch: do nothing.

    Raises ConfigurationError for MindSpore, whose ranks meet in a scheduler before anything here is called.
    """
    if is_mindspore():
        raise ConfigurationError("no process of MindSpore is built ahead: set standby.depth to imported")
    with contextlib.suppress(ImportError):
        from ...processor.runtime import Runtime

        home: Any = importlib.import_module("torch.distributed")
        original = home.init_process_group

        @functools.wraps(original)
        def init_process_group(*arguments: Any, **options: Any) -> Any:
            runtime = Runtime.current()
            assert runtime is not None
            runtime.await_rank()
            return original(*arguments, **options)

        home.init_process_group = home.distributed_c10d.init_process_group = init_process_group


class GroupNames:
    """Names of the groups that this process makes. All ranks make those of one generation in one order."""

    def __init__(self) -> None:
        """Begin in the world's first generation."""
        self._generation = 0
        self._count = 0

    def install(self) -> None:
        """Have torch ask here, from now on. Do nothing where torch is not used, or names its groups otherwise."""
        home: Any = sys.modules.get(_HOME)
        original: Callable[..., str] | None = getattr(home, _NAMING, None)
        if home is None or original is None:
            return

        def name(ranks: Sequence[int], use_hashed_name: bool) -> str:
            return self._name(ranks, original(ranks, use_hashed_name), home, use_hashed_name)

        setattr(home, _NAMING, name)

    def rename(self, generation: int) -> None:
        """Name the groups of a new generation."""
        self._generation, self._count = generation, 0

    def _name(self, ranks: Sequence[int], own: str, home: Any, hashed: bool) -> str:
        if not hashed:
            self._count += 1
            return f"midstep-g{self._generation}-{self._count}"
        digest = hashlib.sha1(f"{self._generation}:{'_'.join(map(str, ranks))}".encode(), usedforsecurity=False)
        name = digest.hexdigest()
        while name in home._world.pg_names.values():  # a second group of the same ranks
            name = hashlib.sha1(f"{name}_".encode(), usedforsecurity=False).hexdigest()
        return name
