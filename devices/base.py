"""What a recovery asks of the device that a process computes on.

A device can be stuck in an operator, or hold resources of one, long after its process was told to stop. These three
hooks are where that is dealt with; everything else about a device is the framework's own business.
"""

from typing import Protocol


class Device(Protocol):
    """The device of one training process."""

    @property
    def name(self) -> str:
        """The name that the policy uses."""
        ...

    def stop(self) -> None:
        """Abort what the device is executing.

        Runs in **stop**, in the control thread, right after the communicators were aborted, while the train thread
        may still be waiting for the device. Must not wait for it. Raises RecoveryError if the device refuses.
        """
        ...

    def clean(self) -> None:
        """Release what aborted operators left behind, and make the device usable again.

        Runs in **clean**, in the train thread, after it has left the train function. Raises RecoveryError if the
        device cannot be used any more; the controller then replaces this process too.
        """
        ...

    def rebuilt(self) -> None:
        """Take note that the communicators have been seated for a new generation.

        Runs at the end of **rebuild**, in the train thread, before any repair traffic. Raises RecoveryError.
        """
        ...
