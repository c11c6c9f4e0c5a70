"""The contract of the collective layer: what a recovery needs of it.

A process has many process groups, and a fault breaks all of them at once. A communicator treats them as one: it aborts
them together, from any thread, and reconnects them together in the next generation, while the group objects that
models, reducers and device meshes hold stay the same.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..protocol.types import Rendezvous


class CollectiveObserver(Protocol):
    """Observes each collective of the training, for the step clock and for injected faults.

    The communicator's own traffic (link checks, `isend`, `irecv`, `swap`, `barrier`) is not reported.
    """

    def entered(self, op: str, group: tuple[int, ...] = ()) -> None:
        """Handle the start of `op` in the group of these ranks, in the calling thread.

        When this raises, the collective is not started.
        """
        ...

    def left(self, op: str) -> None:
        """Handle the end of `op`, successful or not: its wait returned, or its future is done (then in any thread)."""
        ...

    def waited(self, seconds: float) -> None:
        """Handle that the calling thread stood still for so long, until a collective was over or had failed."""
        ...


class ContributionListener(Protocol):
    """Hears of each collective of a step what this rank gives to it, before it starts.

    A thread of the script's own may do others meanwhile, such as one that writes checkpoints.

    Attributes:
        thread: The identifier of the thread that calls the train function.
    """

    thread: int

    def given(self, op: str, args: "Sequence[Any]", members: tuple[int, ...]) -> bool:
        """Take note of the arguments, which are torch's. Return whether the collective is to be done.

        Otherwise it ends at once with this rank's own input, as one of a process without peers. `members`: the ranks of
        its group, in the order in which torch counts them.
        """
        ...


class Transfer(Protocol):
    """A tensor that is being sent or received."""

    def wait(self) -> bool:
        """Wait until the tensor has been sent or received. Raises CommunicatorAborted or CommunicatorFailed."""
        ...

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        ...


class Communicator(Protocol):
    """All process groups of this process."""

    @property
    def name(self) -> str:
        """The name in the policy (`communicator.name`)."""
        ...

    @property
    def generation(self) -> int:
        """The generation in which the groups were last connected, or which was being tried."""
        ...

    @property
    def failed(self) -> str | None:
        """Why no collective can succeed until the next `reconnect`; None while all is well."""
        ...

    def init(
        self,
        *,
        rank: int,
        world_size: int,
        generation: int,
        store: "Rendezvous | None",
        collective_s: float,
        link_up_s: float,
    ) -> None:
        """Make the default process group, where there is torch that of torch.distributed. Once, in the train thread.

        With `store` None the group is not connected: collectives return this rank's own input, until `reconnect`. A
        collective that takes longer than `collective_s` fails. Raises LinkUpFailed after `link_up_s`.
        """
        ...

    def abort(self, reason: str) -> None:
        """Make every collective that is under way, or tried from now on, raise CommunicatorAborted.

        Runs in **stop**, in any thread; also ends a `reconnect` in progress. Wakes a blocked thread within
        milliseconds, and returns when that is done. May be called again.
        """
        ...

    def reconnect(self, generation: int, store: "Rendezvous", link_up_s: float) -> None:
        """Connect all live groups, in place, to the members of `generation`, and check the links.

        Runs in **rebuild**, in the train thread of every rank of the generation. Raises LinkUpFailed if that is not
        done within `link_up_s`, and CommunicatorAborted if `abort` was called meanwhile; `reconnect` may then be called
        for another generation, never for the same one.
        """
        ...

    def isend(self, tensor: "torch.Tensor", rank: int) -> Transfer:
        """Start to send `tensor`, in host memory, to `rank`. Runs in **repair**.

        Raises CommunicatorAborted or CommunicatorFailed.
        """
        ...

    def irecv(self, tensor: "torch.Tensor", rank: int) -> Transfer:
        """Start to receive into `tensor`, in host memory, from `rank`. Runs in **repair**.

        Raises CommunicatorAborted or CommunicatorFailed.
        """
        ...

    def swap(self, blob: bytes, to: int, source: int, *, apart: bool = False) -> bytes:
        """Send `blob` to rank `to` and return what rank `source` sends. On all ranks, at the end of each step.

        The rank `to` must name this rank as its `source`. `apart`: not all ranks do as many, but both of these do.
        Raises CommunicatorAborted or CommunicatorFailed.
        """
        ...

    def barrier(self, *, agrees: bool = False, verdict: int = 0, gathering: "Gathering | None" = None) -> "Met":
        """Wait for all ranks; return what they have in common. Raises CommunicatorAborted or CommunicatorFailed.

        What ranks say in `gathering` all of them that gather have heard when they are through.
        """
        ...

    def watch(self, observer: CollectiveObserver | None) -> None:
        """Report the collectives from now on to `observer`; None stops it."""
        ...

    def close(self) -> None:
        """Release threads and sockets, at the end of the process or of the job. Returns within a second."""
        ...


class Met(NamedTuple):
    """The outcome of a barrier, the same on all ranks: whether all agree, and the highest verdict of any."""

    agrees: bool
    verdict: int = 0


class Gathering(Protocol):
    """Something that ranks tell all others with a barrier. With each of its rounds a rank hears of more of them."""

    def said(self) -> bytes:
        """Return what this rank knows by now: its own, and what it has heard."""
        ...

    def heard(self, said: bytes) -> None:
        """Take in what another rank knows. The same may come twice."""
        ...


class DeviceMessage(NamedTuple):
    """A tensor on the device that is to be sent to `peer`, or received from it."""

    tensor: "torch.Tensor"
    peer: int
    sending: bool


@runtime_checkable
class GrowingGroups(Protocol):
    """A communicator whose world can get more ranks while the process of each rank that it has stays."""

    def only_whole_groups(self) -> None:
        """Refuse from now on groups that not all ranks are in: what they become in a larger world is not known.

        `new_group` raises ConfigurationError for them.
        """
        ...

    def grow(self, world_size: int) -> None:
        """Have all groups consist of so many ranks, from the next `reconnect` on. Runs in **rebuild**."""
        ...


@runtime_checkable
class Listening(Protocol):
    """A communicator whose collectives can be listened to. `listener` is asked in the thread that starts one.

    It is asked of those that its `thread` starts, or a backward pass, for which devices have threads of their own.
    """

    listener: "ContributionListener | None"


@runtime_checkable
class DeviceLinks(Protocol):
    """A communicator whose own links carry memory of the device, so that a repair needs no copy on the hosts.

    `carries_shards` is set before a reconnect, to the same on all ranks: whether `exchange` is about to be called.
    """

    carries_shards: bool

    @property
    def device_type(self) -> str:
        """The type of the device whose memory the links carry, as torch names it."""
        ...

    def exchange(self, messages: Sequence[DeviceMessage]) -> Transfer:
        """Start to send and receive tensors on the device, all together. Runs in **repair**.

        Messages between two ranks are matched by their order. What is done on the device after `wait` of the returned
        transfer finds them sent and received. Raises CommunicatorAborted or CommunicatorFailed, and what the device
        raises.
        """
        ...


class PairLinks(Protocol):
    """Links of this rank to a few others in one generation, which come up while its groups do. From host to host.

    One thread, not the train thread, connects and uses them, and closes them in the end.
    """

    @property
    def agreed(self) -> bool:
        """Return whether all ranks have opened pair links, once the groups are connected: the same on all of them."""
        ...

    def connect(self, peers: Sequence[int]) -> None:
        """Find `peers`, which do the same. Runs in **rebuild**, beside the link-up.

        Raises LinkUpFailed, and as `isend` does.
        """
        ...

    def isend(self, tensor: "torch.Tensor", rank: int) -> Transfer:
        """Start to send `tensor`, in host memory, to a peer. Raises CommunicatorAborted or CommunicatorFailed."""
        ...

    def irecv(self, tensor: "torch.Tensor", rank: int) -> Transfer:
        """Start to receive into `tensor`, in host memory, from a peer. Raises as `isend` does."""
        ...

    def abort(self, reason: str) -> None:
        """Make what is under way raise CommunicatorAborted. Any thread; returns at once."""
        ...

    def close(self) -> None:
        """Close what `connect` has opened."""
        ...


@runtime_checkable
class PairLinking(Protocol):
    """A communicator that can link single pairs of ranks while its groups come up."""

    def open_pairs(self, generation: int, store: "Rendezvous", link_up_s: float) -> PairLinks:
        """Take part in pair links of `generation`. Runs in **rebuild**, in the train thread, before `reconnect`.

        Also on a rank that has no peer to be linked with: a rank that does not call it objects for all. An `abort` of
        the communicator ends them, too, as does the next `reconnect` for another generation.
        """
        ...


@runtime_checkable
class HostCollectives(Protocol):
    """A communicator with collectives of its own for arrays in host memory: of a framework that is not torch."""

    def allreduce(self, array: "np.ndarray[Any, Any]") -> None:
        """Add up `array`, which is contiguous, over all ranks, in place: bit for bit the same on every rank.

        Raises CommunicatorAborted or CommunicatorFailed.
        """
        ...

    def broadcast(self, array: "np.ndarray[Any, Any]", source: int) -> None:
        """Copy `array`, which is contiguous, from rank `source` to all, in place. Raises as `allreduce`."""
        ...
