"""Fold together, on its way, all that ranks tell each other with a commit barrier: pure.

Each rank puts in what it knows and takes in what it hears (`communicators.base.Gathering`). Once the barrier is passed
all ranks know the same. What is united may come in any order, and hearing it twice changes nothing.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from ..protocol.decoders import msgpack_decoder

if TYPE_CHECKING:
    from ..communicators.base import Gathering

Hash = Annotated[int, Meta(ge=0)]
Known = TypeVar("Known", bound=msgspec.Struct)


class Gathered(ABC, Generic[Known]):
    """All that one rank knows by now of the others: it goes through a commit barrier, and gathers what they say."""

    about = ""  # in an error

    def __init__(self, known: Known) -> None:
        """`known`: what is said here."""
        self._known = known
        self._encoded: bytes | None = None

    def said(self) -> bytes:
        """Return what this rank knows by now."""
        if self._encoded is None:
            self._encoded = _encode(self._known)
        return self._encoded

    def heard(self, said: bytes) -> None:
        """Take in what another rank knows. Raises ConnectionError for what no rank says."""
        try:
            theirs = msgpack_decoder(type(self._known)).decode(said)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"a rank says {self.about} what cannot be understood: {error}") from error
        if theirs != self._known:
            self._known, self._encoded = self._united(theirs), None

    @abstractmethod
    def _united(self, theirs: Known) -> Known:
        """Return what is known together."""


class Together:
    """Two things that ranks tell each other in one barrier."""

    def __init__(self, *parts: "Gathering | None") -> None:
        """`parts`: in the same order on all ranks; None for what this rank takes no part in."""
        self._parts = parts

    def said(self) -> bytes:
        """Return what this rank knows by now of each."""
        return _encode([b"" if part is None else part.said() for part in self._parts])

    def heard(self, said: bytes) -> None:
        """Take in what another rank knows of each. Raises ConnectionError for what no rank says."""
        try:
            heard = _decode_parts(said)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"what a rank says in a barrier cannot be understood: {error}") from error
        for part, each in zip(self._parts, heard, strict=False):
            if part is not None and each:
                part.heard(each)


_encode = msgspec.msgpack.Encoder().encode
_decode_parts = msgspec.msgpack.Decoder(list[bytes]).decode
