"""Follow a ZMTP handshake by the bytes that are relayed, without taking part in it.

The front of a router (`front.py`) has to know when a connection is authenticated, and when it asks to be. Greeting and
commands of a handshake are framed in clear text (RFC 23, RFC 26); what they hold is libzmq's business alone.
"""

from collections.abc import Iterator

SIGNATURE = 0xFF  # the first byte of every ZMTP greeting
LONGEST_BYTES = 64 * 1024  # of a handshake, in each direction
_GREETING_BYTES = 64
_LONG = 0x02
_SHORT_HEAD, _LONG_HEAD = 2, 9  # flags, then the length in one byte or in eight
_READY = b"\x05READY"


class Handshake:
    """The handshake of one connection with CURVE: HELLO, WELCOME, INITIATE, and READY if it is admitted."""

    def __init__(self) -> None:
        self._held = bytearray()  # from the client, not passed on yet
        self._passed = 0  # bytes from the client that were passed on
        self._answer = bytearray()  # from the router

    def from_client(self, data: bytes) -> bytes:
        """Take in bytes of the client; return those that may be passed on. INITIATE is held until `initiate`.

        Raises ValueError when they are too many for a handshake.
        """
        self._held += data
        if self._passed + len(self._held) > LONGEST_BYTES:
            raise ValueError("longer than a handshake")
        hello_end = self._hello_end()
        if hello_end is None:
            return self._pass(max(0, min(len(self._held), _GREETING_BYTES - self._passed)))
        return self._pass(max(0, hello_end - self._passed))

    @property
    def asks(self) -> bool:
        """Whether the client has sent all of INITIATE, with which it asks for admission."""
        return self._passed > _GREETING_BYTES and next(_frames(self._held), None) is not None

    @property
    def unwelcome(self) -> bool:
        """Whether the router has not answered HELLO, which it does where the client knows its key."""
        return self._passed > _GREETING_BYTES and next(_frames(self._answer[_GREETING_BYTES:]), None) is None

    def initiate(self) -> bytes:
        """Return everything that was held."""
        return self._pass(len(self._held))

    def from_router(self, data: bytes) -> bool | None:
        """Take in bytes of the router; return whether it admitted the client, None while that is open.

        Raises ValueError when they are too many for a handshake.
        """
        self._answer += data
        if len(self._answer) > LONGEST_BYTES:
            raise ValueError("longer than a handshake")
        frames = list(_frames(self._answer[_GREETING_BYTES:]))
        return frames[1].startswith(_READY) if len(frames) > 1 else None

    def _hello_end(self) -> int | None:
        """Return where HELLO ends in all that the client has sent; None before it is complete."""
        if self._passed > _GREETING_BYTES:
            return self._passed
        rest = self._held[_GREETING_BYTES - self._passed :]
        hello = next(_frames(rest), None)
        if hello is None:
            return None
        return _GREETING_BYTES + (_LONG_HEAD if rest[0] & _LONG else _SHORT_HEAD) + len(hello)

    def _pass(self, count: int) -> bytes:
        data = bytes(self._held[:count])
        del self._held[:count]
        self._passed += count
        return data


def _frames(data: bytearray) -> Iterator[bytes]:
    """Yield the bodies of the complete frames at the start of `data`."""
    start = 0
    while len(data) - start >= _SHORT_HEAD:
        long = data[start] & _LONG
        head = _LONG_HEAD if long else _SHORT_HEAD
        if len(data) - start < head:
            return
        size = int.from_bytes(data[start + 1 : start + head], "big")
        if len(data) - start - head < size:
            return
        yield bytes(data[start + head : start + head + size])
        start += head + size
