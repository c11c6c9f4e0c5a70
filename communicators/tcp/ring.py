"""Collectives around a ring of ranks: each sends to the next and receives from the one before.

An allreduce cuts the array into as many parts as there are ranks. Each part goes around once to be added up, in an
order that follows from its number alone, and once more to be told to all. So every rank ends with the same bits,
whatever the timing, and sends less than twice the array.
"""

from typing import Any

import numpy as np

from ..messages import Messages

PIECE_BYTES = 1 << 20  # a broadcast hands on so much while more comes in


class Ring:
    """The ring of all ranks. Every call raises CommunicatorAborted or CommunicatorFailed."""

    def __init__(self, messages: Messages, rank: int, size: int) -> None:
        self._messages = messages
        self._rank = rank
        self._size = size
        self._next = (rank + 1) % size
        self._previous = (rank - 1) % size

    def allreduce(self, array: "np.ndarray[Any, Any]") -> None:
        """Add up `array` over all ranks, in place."""
        if self._size == 1:
            return
        parts = np.array_split(array.reshape(-1), self._size)
        arriving = np.empty(max(map(len, parts)), array.dtype)
        for step in range(self._size - 1):
            leaving, coming = parts[(self._rank - step) % self._size], parts[(self._rank - step - 1) % self._size]
            self._pass(leaving, arriving[: len(coming)])
            np.add(arriving[: len(coming)], coming, out=coming)
        for step in range(self._size - 1):
            self._pass(parts[(self._rank + 1 - step) % self._size], parts[(self._rank - step) % self._size])

    def broadcast(self, array: "np.ndarray[Any, Any]", source: int) -> None:
        """Copy `array` from rank `source` to all, in place, piece by piece along the ring."""
        flat = array.reshape(-1).view(np.uint8)
        pieces = [flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES)]
        sends = []
        for piece in pieces if self._size > 1 else ():
            if self._rank != source:
                self._messages.irecv(piece, self._previous).wait()
            if self._next != source:
                sends.append(self._messages.isend(piece, self._next))
        for send in sends:
            send.wait()

    def _pass(self, leaving: "np.ndarray[Any, Any]", coming: "np.ndarray[Any, Any]") -> None:
        sending = self._messages.isend(leaving, self._next)
        self._messages.irecv(coming, self._previous).wait()
        sending.wait()
