"""The random number generators of python, numpy and torch, as a few kilobytes.

Dropout, shuffling and augmentation draw from global generators. A step that is repeated must draw the same numbers, so
every rank's generators are captured at each commit and put back in rollback. This is on the path of every step.
"""

import array
import random
import sys
from typing import Any

import msgspec

from ..protocol.errors import StateUnreadable
from . import tree

_WORD = "I"  # the generators' state is 32-bit words


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


_DECODER = msgspec.msgpack.Decoder(_Snapshot)
_ENCODER = msgspec.msgpack.Encoder()


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
            snapshot = _DECODER.decode(data)
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
