"""A rank's own state as one run of bytes: what its framework captures, and the random numbers of its device.

The framework's part is different for every framework; the device's generator is the same for all of them, so it is
added here, by whatever device there is, and no framework needs to know of it.
"""

import logging
from typing import TYPE_CHECKING

import msgspec

from ..protocol.errors import RecoveryError

if TYPE_CHECKING:
    from ..devices.base import Device
    from .lifecycle import Framework, Rescalable

_log = logging.getLogger("midstep")


class _Parts(msgspec.Struct, frozen=True, array_like=True):
    framework: bytes
    device: bytes  # empty for a device without a generator of its own


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Parts)


class OwnParts:
    """Puts the parts together and back in their places. Used by the train thread."""

    def __init__(self, framework: "Framework", device: "Device") -> None:
        self._framework = framework
        self._device = device

    def capture(self) -> bytes:
        """Capture both parts."""
        return self.whole(self._framework.capture_own())

    def whole(self, part: bytes) -> bytes:
        """Add the device's part, as of now, to the framework's. Runs at each commit."""
        return _ENCODER.encode(_Parts(part, self._device.capture_random()))

    def restore(self, blob: bytes, step: int) -> None:
        """Put back what `capture` gave, as of `step` committed updates: midstep's own **rollback**.

        Raises RecoveryError when the bytes are no such state, and what the framework raises.
        """
        parts = _decoded(blob)
        self._framework.restore_own(parts.framework)
        self._framework.rolled_back(step)
        self._restore_device(parts.device)  # last: putting the others back may have drawn numbers

    def adopt(self, framework: "Rescalable", blob: bytes, *, random_numbers: bool) -> None:
        """Put back the own state of a world of another size. See Rescalable."""
        parts = _decoded(blob)
        framework.adopt_own(parts.framework, random_numbers=random_numbers)
        if random_numbers:
            self._restore_device(parts.device)

    def _restore_device(self, numbers: bytes) -> None:
        if bool(numbers) == bool(self._device.capture_random()):
            self._device.restore_random(numbers)
            return
        _log.warning(
            "the state that is put back was captured on another kind of device than %s: its generator keeps the "
            "numbers of its own start",
            self._device.name,
        )


def _decoded(blob: bytes) -> _Parts:
    try:
        return _DECODER.decode(blob)
    except msgspec.MsgspecError as error:
        raise RecoveryError(f"the captured own state ({len(blob)} bytes) cannot be read: {error}") from error
