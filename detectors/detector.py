"""What a detector is to midstep: something that tells of faults of hardware, in its own name, until it is stopped."""

from collections.abc import Callable
from typing import Protocol

from ..protocol.types import FaultReport

Tell = Callable[[FaultReport], None]


class Detector(Protocol):
    """One source of fault reports. `FileDetector` and `LineDetector` are the two that come along."""

    async def watch(self, tell: Tell) -> None:
        """Tell of every fault that occurs or recovers. Ends when the source has ended, or when it is cancelled.

        What cannot be understood is told as a fault of the kind `detector` or logged, and skipped: it ends nothing.
        """
