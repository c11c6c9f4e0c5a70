"""The CPU as a device: nothing runs on it behind the train thread's back, so there is nothing to stop or clean."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..protocol.errors import ConfigurationError
from .base import Damage

if TYPE_CHECKING:
    import torch

    from ..protocol.types import Injury


class CpuDevice:
    """A Device whose operators end when their calls return."""

    name = "cpu"
    stopped = False

    def prepare(self, local_rank: int, environment: Mapping[str, str], link_up_s: float) -> None:
        """Do nothing: there is nothing to choose or to set."""

    def stop(self) -> None:
        """Do nothing: an operator on the CPU ends by itself, and collectives are the communicator's to abort."""

    def clean(self) -> Damage:
        """Do nothing: operators on the CPU hold no resources beyond their tensors, and a bad page ends the process."""
        return Damage.NONE

    def struck(self, tensors: "Sequence[torch.Tensor]") -> bool:
        """Say no: a process does not outlive an error in its memory."""
        return False

    def mended(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Do nothing: no tensor is ever locked."""

    def finish(self) -> None:
        """Return at once: nothing is queued."""

    def capture_random(self) -> bytes:
        """Return nothing: the CPU's generator is torch's own, which frameworks capture."""
        return b""

    def restore_random(self, state: bytes) -> None:
        """There is none."""

    def now_us(self) -> int | None:
        """Say that there is no clock of its own."""
        return None

    def rebuilt(self) -> None:
        """Do nothing: the CPU knows no communicators."""

    def harm(self, injury: "Injury") -> None:
        """Refuse."""
        raise ConfigurationError(
            f"{injury} is a fault of a device, and the device is the CPU. Use `midstep run --device fake`."
        )
