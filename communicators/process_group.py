"""The process group that models, reducers and device meshes hold on to.

It is a torch ProcessGroup in its own right, so that everything of torch takes it; the collectives are done by what
sits behind it: a gloo group of the present generation, or a loopback while there is none, and always where the group
has one member. Seating it anew changes what is behind, never the object.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from ..protocol.errors import CommunicatorFailed
from .generation_scope import GenerationScope
from .loopback import Loopback
from .rendezvous import GlooBackend
from .work import FuturelessGroupWork, GroupWork

if TYPE_CHECKING:
    from .gloo import GlooCommunicator

BACKEND = "midstep_gloo"

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
# Gloo's works for these have no future, and are not complete before somebody waits for them.
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
GLOO_SOURCES = "/gloo/"  # in the text of an error that comes from a link, and not from wrong arguments


class Group(dist.ProcessGroup):
    """A process group whose backend can be replaced."""

    def __init__(
        self,
        owner: "GlooCommunicator",
        members: Sequence[int],
        group_rank: int,
        scope: GenerationScope,
        timeout: timedelta,
    ) -> None:
        """Make the group of the global ranks `members`, in which this process has `place`. Not seated."""
        super().__init__(group_rank, len(members))  # type: ignore[call-arg]
        self.members = tuple(members)
        # Gloo would hand what such a group does to a thread and back, and torch 2.13's now and then crashes over it: in
        # a reduce-scatter of one member, on a busy machine. What is left of the heap then looks like a second free.
        self._alone = len(self.members) == 1
        self.group_rank = group_rank
        self._owner = owner
        self._scope = scope
        self._backend: GlooBackend | None = None
        self._delegate: Any = Loopback(group_rank, len(members))
        self._allreduce = self._delegate.allreduce
        self._timeout_s = timeout.total_seconds()
        self._name = ""
        self._desc = "undefined"

    @property
    def connected(self) -> bool:
        """Whether the group is connected, and nothing has gone wrong with it."""
        return self._backend is not None and self._scope.reason is None

    def connect(self, connected: GlooBackend, scope: GenerationScope) -> GlooBackend | None:
        """Put a new backend behind the group; return the old one, which the caller must retire."""
        old, self._backend = self._backend, connected
        self._scope = scope
        if self._alone:
            return old
        self._delegate = connected.process_group
        # Of every bucket in every step: without the way through torch's dispatcher.
        self._allreduce = connected.gloo.allreduce  # type: ignore[attr-defined]
        return old

    def disconnect(self, scope: GenerationScope) -> GlooBackend | None:
        """Take the backend away, and let every collective raise as `scope` has it; return the old one."""
        old, self._backend = self._backend, None
        self._delegate = Loopback(self.group_rank, len(self.members))
        self._allreduce = self._delegate.allreduce
        self._scope = scope
        return old

    def start(self, op: str, silent: bool, observed: bool, args: Any, kwargs: Any = None) -> dist.Work:
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
        return (FuturelessGroupWork if silent else GroupWork)(scope, work, op, observer, self._timeout_s)

    def abort(self) -> None:
        """End all collectives of this process: a broken group cannot be told from a broken link."""
        self._owner.abort(f"abort of group {self._name} was asked for")

    def shutdown(self) -> None:
        """Leave the communicator. Called by torch's destroy_process_group."""
        self._owner.remove(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives take `timeout` from now on, until the next seating."""
        self._timeout_s = timeout.total_seconds()
        if self._backend is not None:
            self._backend.gloo._set_default_timeout(timeout)

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
        return BACKEND

    def getRank(self) -> int:  # noqa: N802
        return self.group_rank

    def getSize(self) -> int:  # noqa: N802
        return len(self.members)


def _collective(op: str, silent: bool) -> Callable[..., dist.Work]:
    def call(self: Group, *args: Any, **kwargs: Any) -> dist.Work:
        return self.start(op, silent, True, args, kwargs)

    call.__name__ = op
    call.__doc__ = f"Start `{op}` in the backend of the present generation."
    return call


for _op in WITH_FUTURE + WITHOUT_FUTURE:
    if hasattr(dist.ProcessGroup, _op):
        setattr(Group, _op, _collective(_op, _op in WITHOUT_FUTURE))


def incomplete_group(missing: Sequence[int], generation: int) -> GenerationScope:
    """Return the scope of a group that not all of its members have: every collective raises."""
    scope = GenerationScope(lambda: None)
    ranks = ", ".join(str(rank) for rank in missing)
    scope.end(
        CommunicatorFailed,
        f"rank {ranks}, which joined in generation {generation}, has not made this group; make groups before the "
        "train function, or anew at its beginning",
    )
    return scope


def group_name(members: Sequence[int], ordinal: int) -> str:
    """Return the same name in every rank that made its groups of these `members` in the same order."""
    digest = hashlib.blake2b(repr(tuple(members)).encode(), digest_size=8).hexdigest()
    return f"{len(members)}x{digest}.{ordinal}"


def group_names(groups: Sequence[Group]) -> list[str]:
    """Name groups such that all ranks that made the same ones in the same order agree."""
    made: Counter[tuple[int, ...]] = Counter()
    names = []
    for group in groups:
        names.append(group_name(group.members, made[group.members]))
        made[group.members] += 1
    return names
