"""A rank's local state: captured, put back, and kept where it outlives the process.

It is one run of bytes: what the framework captures, and the random numbers of the device.

The framework's part is different for every framework; the device's generator is the same for all of them, so it is
added here, by whatever device there is, and no framework needs to know of it. Copies are in the black box of the rank,
and in that of its buddy.
"""

import logging
from typing import TYPE_CHECKING

import msgspec

from ..protocol.blackbox import BlackBox
from ..protocol.errors import StateUnreadable
from .framework import Trailing

if TYPE_CHECKING:
    from ..communicators.base import Communicator
    from ..devices.base import Device
    from .framework import Framework, Rescalable

_log = logging.getLogger("midstep")


class _Parts(msgspec.Struct, frozen=True, array_like=True):
    framework: bytes
    device: bytes  # empty for a device without a generator of its own
    trailing: bytes = b""  # values that the script has changed after the other parts were captured


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Parts)


class LocalState:
    """Puts the parts together and back in their places. Used by the train thread."""

    def __init__(self, framework: "Framework", device: "Device") -> None:
        self._framework = framework
        self._trailing = framework if isinstance(framework, Trailing) else None
        self._device = device
        self._last = _Parts(b"", b"")

    def capture(self) -> bytes:
        """Capture both parts."""
        return self.whole(self._framework.capture_local())

    def whole(self, part: bytes) -> bytes:
        """Add the device's part, as of now, to the framework's. Runs at each commit."""
        self._last = _Parts(part, self._device.capture_random())
        return _ENCODER.encode(self._last)

    def with_trailing(self) -> bytes | None:
        """Return what `whole` gave last with the values that the script has changed since; None: there are none."""
        trailing = None if self._trailing is None else self._trailing.capture_trailing()
        return None if trailing is None else _ENCODER.encode(msgspec.structs.replace(self._last, trailing=trailing))

    def restore(self, blob: bytes, step: int) -> None:
        """Put back what `capture` gave, as of `step` committed updates: midstep's own **rollback**.

        Raises StateUnreadable when the bytes are no such state, and what the framework raises.
        """
        parts = _decoded(blob)
        self._framework.restore_local(parts.framework)
        self._restore_trailing(parts.trailing)
        self._framework.rolled_back(step)
        self._restore_device(parts.device)  # last: putting the others back may have drawn numbers

    def adopt(self, framework: "Rescalable", blob: bytes, *, random_numbers: bool) -> None:
        """Put back the local state of a world of another size. See Rescalable."""
        parts = _decoded(blob)
        framework.adopt_local(parts.framework, random_numbers=random_numbers)
        self._restore_trailing(parts.trailing)
        if random_numbers:
            self._restore_device(parts.device)

    def _restore_trailing(self, trailing: bytes) -> None:
        if trailing and self._trailing is not None:
            self._trailing.restore_trailing(trailing)

    def _restore_device(self, numbers: bytes) -> None:
        if bool(numbers) == bool(self._device.capture_random()):
            self._device.restore_random(numbers)
            return
        _log.warning(
            "the state that is put back was captured on another kind of device than %s: its generator keeps the "
            "numbers of its own start",
            self._device.name,
        )


class LocalStateCopies:
    """Write this rank's local state to its black box, and swap copies with its buddies.

    The controller pairs the ranks in each generation (`controller/recovery/repair.py`). Used by the train thread.
    """

    def __init__(self, *, rank: int, black_box: BlackBox, communicator: "Communicator") -> None:
        self._buddy: int | None = None
        self._copied_rank: int | None = None
        self._black_box = black_box
        self._communicator = communicator
        self._rank = rank

    def pair(self, buddy: int | None, copied_rank: int | None) -> None:
        """Swap with these from here on: the rank that keeps this one's copy, and the one whose copy is kept here."""
        self._buddy, self._copied_rank = buddy, copied_rank

    def keep(self, step: int, blob: bytes) -> None:
        """Write the local state as of `step` committed updates to the black box."""
        self._black_box.write_local(step, blob)

    def swap(self, step: int, blob: bytes) -> None:
        """Send the local state to the buddy, and keep the peer copy that arrives. Return when it is written.

        Raises CommunicatorAborted or CommunicatorFailed.
        """
        if self._buddy is None or self._copied_rank is None:
            return  # this rank is alone
        arrived = self._communicator.swap(blob, self._buddy, self._copied_rank)
        self._black_box.write_peer(self._copied_rank, step, arrived)

    def read(self, rank: int, step: int) -> bytes | None:
        """Return the copy of a rank's local state as of `step` that is kept here, if there is one."""
        return self._black_box.read_local(step) if rank == self._rank else self._black_box.read_peer(rank, step)


def _decoded(blob: bytes) -> _Parts:
    try:
        return _DECODER.decode(blob)
    except msgspec.MsgspecError as error:
        raise StateUnreadable(f"the captured local state ({len(blob)} bytes) cannot be read: {error}") from error
