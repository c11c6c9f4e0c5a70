"""Interface of a device: what a recovery needs of it to stop, clean, inspect and restart it.

A device can be stuck in an operator, or hold resources of one, long after its process was to stop. Its memory can
be damaged while the process lives. What it has queued may fail after the call that queued it has returned. These hooks
deal with that; everything else about a device is left to the framework.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ..protocol.types import FaultAction


class Damage(enum.Enum):
    """Damage that an uncorrectable error has done to the device's memory, as found by `clean`."""

    NONE = "none"
    TEMPORARY = "temporary"  # memory that nothing lasting uses: repeating the step is enough
    PERSISTENT = "persistent"  # some tensor; `corrupted` says which, as far as the device knows


class Device(Protocol):
    """The device of one training process."""

    @property
    def name(self) -> str:
        """The name of the device in the policy."""
        ...

    @property
    def torch_device(self) -> "torch.device":
        """The device as torch names it, for tensors of this process. After `prepare`."""
        ...

    @property
    def stopped(self) -> bool:
        """Return whether `stop` was called since the last `clean`, so that the device executes nothing."""
        ...

    def prepare(self, local_rank: int, environment: Mapping[str, str], link_up_s: float) -> None:
        """Take the device of this process, and check that it can be recovered. Once, before process groups are made.

        Args:
            local_rank: Number of the device on its node.
            environment: Variables of the process.
            link_up_s: Time that the policy allows for one attempt to build the communicators.

        Raises ConfigurationError that lists every wrong setting of `environment`.
        """
        ...

    def stop(self) -> None:
        """Abort what the device is executing, so that a thread that waits for it raises.

        Called in **stop**, from any thread, right after the communicators were aborted. Must not wait. May be called
        again. Raises RecoveryError if the device refuses.
        """
        ...

    def memory_error_raised(self) -> None:
        """Take note that this process has raised a memory error: the next `clean` has to find out where.

        Called in the train thread, when the text of an exception says so.
        """
        ...

    def clean(self) -> Damage:
        """Release resources of aborted operators, make the device usable again, and return the damage to its memory.

        Called in **clean** and before **rebuild**, in the train thread. Does nothing if the device was not stopped.
        Raises RecoveryError if the device cannot be used any more; the controller then replaces this process.
        """
        ...

    def release_unused(self) -> None:
        """Give memory that nothing uses any more back to the device.

        Called at the end of **clean**, in the train thread, when the framework has dropped what the step has left.
        """
        ...

    def corrupted(self, tensors: "Sequence[torch.Tensor]") -> bool:
        """Return whether an error has damaged one of these. Call it after `clean` returned PERSISTENT."""
        ...

    def mark_safe(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Let these be used again. Their content is lost, and is about to be overwritten from a replica."""
        ...

    def finish(self) -> None:
        """Wait until everything queued is done. Called at the end of each step. Raises what the device raises."""
        ...

    def capture_random(self) -> bytes:
        """Return the state of the device's own random number generator; empty if it has none.

        Called at the end of each step, in the train thread. Must not wait for what is queued.
        """
        ...

    def restore_random(self, state: bytes) -> None:
        """Restore a state that `capture_random` returned, here or in another process. Called in **rollback**."""
        ...

    def now_us(self) -> int | None:
        """Return the device's own clock, by which its errors are timed, in microseconds; None if it has none."""
        ...

    def rebuilt(self) -> None:
        """Take note that the communicators have been rebuilt for a new generation.

        Called at the end of **rebuild**, in the train thread, before any repair traffic. Raises RecoveryError.
        """
        ...

    def inject(self, action: "FaultAction") -> None:
        """Inject a fault, in the train thread, and raise what the device would.

        Raises ConfigurationError if this device cannot do it.
        """
        ...

    def actions(self) -> "Mapping[str, Callable[[Mapping[str, str]], str]]":
        """Return the actions that operators may have this device perform while ranks are held, by name.

        Each takes the arguments of the operator and returns what is to be told; an exception says that it failed.
        Called in a thread of its own, while the train thread waits.
        """
        ...
