"""What was taken in from whom, as the journal knows it: so that nothing is taken in twice, by any later controller.

A fold of the events' senders, sessions and numbers, small enough to be part of every snapshot.
"""

from collections.abc import Iterator

import msgspec

from ...protocol.mailbox import SenderMemory
from ...protocol.types import CONTROLLER


class _Sender(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`taken`: bit i stands for the number `highest - i`."""

    name: str
    session: int
    highest: int
    taken: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Sender]).decode


class TakenIn:
    """For each sender the numbers of its latest session. The controller's own events are no message."""

    def __init__(self) -> None:
        self._senders: dict[str, SenderMemory] = {}

    def take(self, sender: str, session: int, number: int | None) -> None:
        """Note an event that is in the journal."""
        if number is None or sender == CONTROLLER:
            return
        known = self._senders.get(sender)
        if known is None or known.session < session:
            known = self._senders[sender] = SenderMemory(session)
        if known.session == session:
            known.mark_taken(number)

    def has(self, sender: str, session: int, number: int) -> bool:
        """Say whether an event of the sender's latest session was noted."""
        known = self._senders.get(sender)
        return known is not None and known.session == session and known.was_taken(number)

    def senders(self) -> Iterator[tuple[str, SenderMemory]]:
        """Yield a memory for each sender, for the receiver's mailbox to keep."""
        for name, known in self._senders.items():
            yield name, SenderMemory.of(known.session, known.highest, known.taken)

    def encode(self) -> bytes:
        """Write it down."""
        return _encode(
            [
                _Sender(
                    name, known.session, known.highest, known.taken.to_bytes((known.taken.bit_length() + 7) // 8, "big")
                )
                for name, known in self._senders.items()
            ]
        )

    @classmethod
    def decode(cls, data: bytes) -> "TakenIn":
        """Return what was written down. Raises msgspec.MsgspecError."""
        made = cls()
        for each in _decode(data):
            taken = int.from_bytes(each.taken, "big")
            made._senders[each.name] = SenderMemory.of(each.session, each.highest, taken)
        return made
