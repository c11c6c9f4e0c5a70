"""The CPU as a device: its operators run in the train thread, so there is nothing to stop or clean."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..protocol.errors import ConfigurationError
from .base import Damage

if TYPE_CHECKING:
    import torch

    from ..protocol.types import FaultAction


class CpuDevice:
    """See Device. Its operators end when their calls return."""

    name = "cpu"
    stopped = False

    @property
    def torch_device(self) -> "torch.device":
        """The CPU."""
        import torch

        return torch.device("cpu")

    def prepare(self, local_rank: int, environment: Mapping[str, str], link_up_s: float) -> None:
        """Do nothing: there is nothing to take and nothing to check."""

    def stop(self) -> None:
        """Do nothing: an operator ends by itself, and the communicator aborts its collectives."""

    def memory_error_raised(self) -> None:
        """Do nothing: a process does not survive an error in its memory."""

    def clean(self) -> Damage:
        """Return NONE: operators hold no resources but tensors, and an error in memory ends the process."""
        return Damage.NONE

    def release_unused(self) -> None:
        """Do nothing: memory goes back when its tensor goes."""

    def corrupted(self, tensors: "Sequence[torch.Tensor]") -> bool:
        """Return False: a process does not survive an error in its memory."""
        return False

    def mark_safe(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Do nothing: no tensor is ever locked."""

    def finish(self) -> None:
        """Return at once: nothing is queued."""

    def capture_random(self) -> bytes:
        """Return no bytes: the CPU's generator is torch's own, which frameworks capture."""
        return b""

    def restore_random(self, state: bytes) -> None:
        """Do nothing: there is no generator of its own."""

    def now_us(self) -> int | None:
        """Return None: there is no clock of its own."""
        return None

    def rebuilt(self) -> None:
        """Do nothing: the CPU holds nothing that depends on communicators."""

    def inject(self, action: "FaultAction") -> None:
        """Raise ConfigurationError: a CPU has no faults to inject."""
        raise ConfigurationError(
            f"{action} is a fault of an NPU, and this job runs on the CPU. Use `midstep run --device fake`."
        )

    def actions(self) -> "Mapping[str, Callable[[Mapping[str, str]], str]]":
        """Return no action."""
        return {}
