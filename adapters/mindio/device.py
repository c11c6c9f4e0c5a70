"""The device of a job with MindIO's handlers: they stop it and make it usable again; the rest is the device's own."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...devices.base import Damage, Device

if TYPE_CHECKING:
    import torch

    from ...protocol.types import FaultAction


class HandledDevice:
    """See Device. `damage` is what the clean handler has found, until it was told."""

    stopped = False

    def __init__(self, own: Device) -> None:
        """Wrap the device of the policy."""
        self._own = own
        self.name = own.name
        self.damage = Damage.NONE

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

    def capture_random(self) -> bytes:
        """Return the state of the device's own generator."""
        return self._own.capture_random()

    def restore_random(self, state: bytes) -> None:
        """Restore it."""
        self._own.restore_random(state)

    def now_us(self) -> int | None:
        """Return the device's own clock."""
        return self._own.now_us()

    def rebuilt(self) -> None:
        """Do nothing: the groups are the framework's."""

    def inject(self, action: "FaultAction") -> None:
        """Inject a fault into the device of the policy."""
        self._own.inject(action)
