"""A rank's local state: captured, put back, and kept where it outlives the process.

It is one run of bytes: what the framework captures, and the random numbers of the device.

The framework's part is different for every framework; the device's generator is the same for all of them, so it is
added here, by whatever device there is, and no framework needs to know of it. Copies are in the black box of the rank,
and in that of its buddy.

Dropout, shuffling and augmentation draw from the global generators of Python, numpy and torch. A step that is repeated
must draw the same numbers, so frameworks capture them at each commit, as a few kilobytes, and put them back in
rollback. All of this is on the path of every step.
"""

import array
import logging
import random
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from ..protocol.blackbox import BlackBox
from ..protocol.errors import StateLost, StateUnreadable
from . import tree
from .framework import LeavesOut, Repeatable, Trailing

if TYPE_CHECKING:
    from ..communicators.base import Communicator
    from ..devices.base import Device
    from .framework import Framework, Rescalable

_log = logging.getLogger("midstep")
_ENCODER = msgspec.msgpack.Encoder()
_WORD = "I"  # the generators' state is 32-bit words


class _Parts(msgspec.Struct, frozen=True, array_like=True):
    framework: bytes
    device: bytes  # empty for a device without a generator of its own
    trailing: bytes = b""  # values that the script has changed after the other parts were captured
    left_out: int = 0  # how often the batches that came next were left out, by a rule
    taken: dict[str, int] = {}  # batches of the step before, by data, where they are counted


_DECODER = msgspec.msgpack.Decoder(_Parts)


class LocalState:
    """Puts the parts together and back in their places. Used by the train thread."""

    def __init__(self, framework: "Framework", device: "Device", *, counts: bool = False) -> None:
        """`counts`: note how many batches each step takes, so that those of one that did not end can be left out."""
        self._framework = framework
        self._trailing = framework if isinstance(framework, Trailing) else None
        self._device = device
        self._last = _Parts(b"", b"")
        self._numbers: tuple[bytes, bytes] | None = None
        self._counted = framework if counts and isinstance(framework, LeavesOut) else None
        self._handed_out = self._now_handed_out()

    def capture(self) -> bytes:
        """Capture both parts."""
        return self.whole(self._framework.capture_local())

    def whole(self, part: bytes) -> bytes:
        """Add the device's part, as of now, to the framework's. Runs at each commit."""
        self._last = _Parts(part, self._device.capture_random())
        if self._counted is not None:
            before, self._handed_out = self._handed_out, self._now_handed_out()
            taken = {name: count - before.get(name, 0) for name, count in self._handed_out.items()}
            self._last = msgspec.structs.replace(self._last, taken=taken)
        return _ENCODER.encode(self._last)

    @property
    def can_skip(self) -> bool:
        """Return whether batches of a step that did not end can be left out."""
        return self._counted is not None and self._counted.handed_out is not None

    def _now_handed_out(self) -> dict[str, int]:
        return {} if self._counted is None else self._counted.handed_out or {}

    def advanced(self, times: int, blob: bytes) -> bytes:
        """Return a local state of this rank with the data's position behind the batches of a step that did not end.

        These are as many as the step before has taken, or one each where that is not known. `times`: in all; those that
        were left out of it before count.
        """
        parts = _decoded(blob)
        more = times - parts.left_out
        if more <= 0 or self._counted is None:
            return blob
        batches = {name: more * max(1, parts.taken.get(name, 0)) for name in self._now_handed_out()}
        moved = self._counted.advance(parts.framework, batches)
        return _ENCODER.encode(msgspec.structs.replace(parts, framework=moved, left_out=times))

    def with_trailing(self) -> bytes | None:
        """Return what `whole` gave last with the values that the script has changed since; None: there are none."""
        trailing = None if self._trailing is None else self._trailing.capture_trailing()
        return None if trailing is None else _ENCODER.encode(msgspec.structs.replace(self._last, trailing=trailing))

    def leaving_out(self, times: int, blob: bytes, kept: bytes | None, later: bytes | None) -> bytes:
        """Return a local state with the data's position of a `later` one: what lies between is left out.

        Returns it as it is where batches were left out of it `times` already. `kept`: what the black box has of the
        same step, which may be what an earlier attempt has come to. Any rank's: only bytes are read. Raises StateLost
        if neither is there.
        """
        parts = _decoded(blob)
        if parts.left_out >= times:
            return blob
        done = kept is not None and _decoded(kept).left_out >= times
        chosen = kept if done else later
        if chosen is None:
            raise StateLost(
                "the data's position after the batches that a rule leaves out is lost with every copy of it"
            )
        after = _decoded(chosen)
        assert isinstance(self._framework, LeavesOut)
        moved = self._framework.leave_out(parts.framework, after.framework)
        device = parts.device if self._framework.has_data else after.device
        return _ENCODER.encode(msgspec.structs.replace(parts, framework=moved, device=device, left_out=times))

    def restore(self, blob: bytes, step: int, *, repeats: bool = False) -> None:
        """Put back what `capture` gave, as of `step` committed updates: midstep's own **rollback**.

        `repeats`: only the step begins again, on a rank that repeats another one's, and what it holds has not changed.
        Raises StateUnreadable when the bytes are no such state, and what the framework raises.
        """
        parts = _decoded(blob)
        self._framework.restore_local(parts.framework)
        self._restore_trailing(parts.trailing)
        if repeats:
            assert isinstance(self._framework, Repeatable)
            self._framework.step_left(step)
        else:
            self._framework.rolled_back(step)
        self._restore_device(parts.device)  # last: putting the others back may have drawn numbers
        self._handed_out = self._now_handed_out()

    def remember_random(self) -> None:
        """Remember where all generators are: the global ones of this process, and the device's."""
        self._numbers = (RandomState().capture(), self._device.capture_random())

    def recall_random(self) -> None:
        """Put back what is remembered, and forget it. Does nothing where nothing is."""
        numbers, self._numbers = self._numbers, None
        if numbers is not None:
            RandomState().restore(numbers[0])
            self._restore_device(numbers[1])

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

    The controller pairs the ranks in each generation (`controller/recovery/buddies.py`). Used by the train thread.
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


def framework_part(blob: bytes) -> bytes:
    """Return the framework's part of a local state, any rank's. Raises StateUnreadable."""
    return _decoded(blob).framework


def _decoded(blob: bytes) -> _Parts:
    try:
        return _DECODER.decode(blob)
    except msgspec.MsgspecError as error:
        raise StateUnreadable(f"the captured local state ({len(blob)} bytes) cannot be read: {error}") from error


class _Numpy(msgspec.Struct, frozen=True, array_like=True):
    """numpy's global generator, when it is the usual Mersenne twister."""

    key: bytes
    position: int
    has_gauss: int
    gauss: float


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    python_version: int
    python_words: bytes
    python_gauss: float | None
    torch_cpu: bytes  # empty where torch is not loaded: nothing was drawn from it
    numpy: _Numpy | None = None
    numpy_other: bytes = b""  # any other bit generator, as a packed tree


_NUMBERS_DECODER = msgspec.msgpack.Decoder(_Snapshot)


class RandomState:
    """Captures and restores the global generators of this process. That of its device is in `local_state.py`."""

    def capture(self) -> bytes:
        """Return the state of all generators (about 10 KB). Runs at each commit, in the train thread."""
        version, words, gauss = random.getstate()
        numpy_state, other = _capture_numpy()
        return _ENCODER.encode(
            _Snapshot(
                python_version=version,
                python_words=array.array(_WORD, words).tobytes(),
                python_gauss=gauss,
                torch_cpu=_capture_torch(),
                numpy=numpy_state,
                numpy_other=other,
            )
        )

    def restore(self, data: bytes) -> None:
        """Put back what `capture` gave, in this process or another one. Runs in rollback.

        Raises StateUnreadable when the bytes are no such state.
        """
        try:
            snapshot = _NUMBERS_DECODER.decode(data)
            words = array.array(_WORD)
            words.frombytes(snapshot.python_words)
            random.setstate((snapshot.python_version, tuple(words), snapshot.python_gauss))
            _restore_torch(snapshot.torch_cpu)
            _restore_numpy(snapshot)
        except (msgspec.MsgspecError, ValueError, TypeError, RuntimeError) as error:  # of a generator, too
            raise StateUnreadable(f"the captured random state ({len(data)} bytes) cannot be read: {error}") from error


def _capture_torch() -> bytes:
    torch: Any = sys.modules.get("torch")
    return b"" if torch is None else torch.default_generator.get_state().numpy().tobytes()


def _restore_torch(state: bytes) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and state:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _capture_numpy() -> tuple[_Numpy | None, bytes]:
    numpy = sys.modules.get("numpy")  # a process that has not imported it has drawn nothing from it
    if numpy is None:
        return None, b""
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None, tree.pack(state, "numpy.random")
    inner = state["state"]
    return _Numpy(inner["key"].tobytes(), int(inner["pos"]), state["has_gauss"], state["gauss"]), b""


def _restore_numpy(snapshot: _Snapshot) -> None:
    if snapshot.numpy is None and not snapshot.numpy_other:
        return
    import numpy as np

    if snapshot.numpy is None:
        np.random.set_state(tree.unpack(snapshot.numpy_other))
        return
    held = snapshot.numpy
    key = np.frombuffer(held.key, np.uint32)
    np.random.set_state(("MT19937", key, held.position, held.has_gauss, held.gauss))
