"""A process group on gloo whose gloo group is replaced in every generation."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ..generation_scope import GenerationScope
from ..loopback import Loopback
from ..process_group import GroupOwner, ReplaceableGroup
from .work import FuturelessGroupWork, GroupWork

BACKEND = "midstep_gloo"
GLOO_SOURCES = "/gloo/"  # in the text of an error that comes from a link, and not from wrong arguments


class GlooBackend(NamedTuple):
    """A connected gloo group: torch's `process_group` in front of it, and `gloo` itself.

    `store` is what both were given: a Python object must be kept for as long as C++ may call it.
    """

    process_group: Any
    gloo: dist.ProcessGroupGloo
    store: Any


class GlooGroup(ReplaceableGroup):
    """A process group whose collectives gloo does. They can be aborted, and wait no longer than the group's timeout."""

    backend_name = BACKEND

    def __init__(
        self, owner: GroupOwner, members: Sequence[int], group_rank: int, scope: GenerationScope, timeout: timedelta
    ) -> None:
        """Make the group of the global ranks `members`, in which this process is `group_rank`. Not connected."""
        super().__init__(owner, members, group_rank, scope)
        # Gloo would hand what a group of one does to a thread and back, and torch 2.13's now and then crashes over it:
        # in a reduce-scatter of one member, on a busy machine. What is left of the heap looks like a second free.
        self._alone = len(self.members) == 1
        self._backend: GlooBackend | None = None
        self._allreduce = self._delegate.allreduce
        self._timeout_s = timeout.total_seconds()

    @property
    def connected(self) -> bool:
        """Return whether the group is connected and its scope is open."""
        return self._backend is not None and self._scope.reason is None

    def connect(self, backend: GlooBackend, scope: GenerationScope) -> GlooBackend | None:
        """Put `backend` behind the group; return the old one, which the caller must dispose of."""
        old, self._backend = self._backend, backend
        self._scope = scope
        if self._alone:
            return old
        self._delegate = backend.process_group
        # Of every bucket in every step: without the way through torch's dispatcher.
        self._allreduce = backend.gloo.allreduce  # type: ignore[attr-defined]
        return old

    def grow(self, members: Sequence[int]) -> None:
        """Be the group of these ranks, the present ones first. As its parent."""
        super().grow(members)
        self._alone = False
        self._allreduce = self._delegate.allreduce

    def disconnect(self, scope: GenerationScope) -> GlooBackend | None:
        """Remove the backend, and let every collective raise as `scope`, which is over, says; return the old one."""
        old, self._backend = self._backend, None
        self._delegate = Loopback(self.group_rank, len(self.members))
        self._allreduce = self._delegate.allreduce
        self._scope = scope
        return old

    def start(self, op: str, futureless: bool, observed: bool, args: Any, kwargs: Any = None) -> dist.Work:
        """Start the collective `op`. Raises CommunicatorAborted or CommunicatorFailed."""
        scope = self._scope
        if scope.reason is not None:
            raise scope.error(op)
        observer = self._owner.observer if observed else None
        if observer is not None:
            observer.entered(op, self.members)
        try:
            call: Callable[..., dist.Work] = self._allreduce if op == "allreduce" else getattr(self._delegate, op)
            work = call(*args, **kwargs) if kwargs else call(*args)
        except BaseException as error:
            if observer is not None:
                observer.left(op)
            if isinstance(error, RuntimeError) and GLOO_SOURCES in str(error):
                raise scope.fail(op, error) from error
            raise
        if self._backend is None or self._alone:
            if observer is not None:
                observer.left(op)
            return work
        return (FuturelessGroupWork if futureless else GroupWork)(scope, work, op, observer, self._timeout_s)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes: torch's checkpoints ask before they save in the background."""
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        """Return what does the collectives: torch 2.15 asks it, before a batch, whether it makes one of it."""
        return self if self._backend is None else self._backend.gloo

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives take `timeout` from now on, until the next reconnect."""
        self._timeout_s = timeout.total_seconds()
        if self._backend is not None:
            self._backend.gloo._set_default_timeout(timeout)
