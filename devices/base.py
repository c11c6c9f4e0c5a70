"""What a recovery asks of the device that a process computes on.

A device can be stuck in an operator, or hold resources of one, long after its process was told to stop; its memory can
be damaged while the process lives; and what it has queued may fail after the call that queued it has returned. These
hooks are where that is dealt with; everything else about a device is the framework's own business.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ..protocol.types import Injury


class Damage(enum.Enum):
    """What an error has done to the device's memory, as `clean` finds it."""

    NONE = "none"
    TEMPORARY = "temporary"  # memory that nothing lasting uses: repeating the step is enough
    PERSISTENT = "persistent"  # some tensor; `struck` says which, as far as the device knows


class Device(Protocol):
    """The device of one training process."""

    @property
    def name(self) -> str:
        """The name that the policy uses."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called since the last `clean`, so that nothing can be executed."""
        ...

    def prepare(self, local_rank: int, environment: Mapping[str, str], link_up_s: float) -> None:
        """Take the device of this process, and see that it can be recovered. Once, before process groups are made.

        Raises ConfigurationError naming every setting of `environment` that is wrong.
        """
        ...

    def stop(self) -> None:
        """Abort what the device is executing, so that a thread that waits for it raises.

        Runs in **stop**, in any thread, right after the communicators were aborted. Must not wait. May be called
        again. Raises RecoveryError if the device refuses.
        """
        ...

    def clean(self) -> Damage:
        """Release what aborted operators left behind, make the device usable again, and say what became of its memory.

        Runs in **clean** and before **rebuild**, in the train thread; does nothing if the device was not stopped.
        Raises RecoveryError if the device cannot be used any more; the controller then replaces this process.
        """
        ...

    def struck(self, tensors: "Sequence[torch.Tensor]") -> bool:
        """Say whether an error has hit one of these. After `clean` answered PERSISTENT."""
        ...

    def mended(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Let these be used again: what was in them is about to be overwritten from a replica."""
        ...

    def finish(self) -> None:
        """Return when everything queued is done. Runs at the end of each step. Raises what the device raises."""
        ...

    def capture_random(self) -> bytes:
        """Capture the state of the device's own random number generator; empty if it has none of its own.

        Runs at the end of each step, in the train thread; must not wait for what is queued.
        """
        ...

    def restore_random(self, state: bytes) -> None:
        """Put back what `capture_random` gave, here or in another process. Runs in **rollback**."""
        ...

    def now_us(self) -> int | None:
        """Read the device's own clock, which its errors are stamped with, in microseconds; None if it has none."""
        ...

    def rebuilt(self) -> None:
        """Take note that the communicators have been seated for a new generation.

        Runs at the end of **rebuild**, in the train thread, before any repair traffic. Raises RecoveryError.
        """
        ...

    def harm(self, injury: "Injury") -> None:
        """Cause a fault on purpose, in the train thread; raises what the device would. Raises ConfigurationError if
        this device cannot be harmed."""
        ...
