"""Admission of connections: answers libzmq whether a CURVE key may connect, and as which identity.

libzmq asks it (ZAP, RFC 27) of one handler per context, during each handshake. The answer binds the key to an
identity, which then comes with every message of the connection. A thread of its own, because handshakes must not
wait for a controller that is busy.
"""

import os
import threading
from collections import Counter

import zmq

from .errors import ConfigurationError, KeyExpired, KeyReplaced, MidstepError
from .keys import ServerKeys

ZAP_DOMAIN = b"midstep"
REPLACED_KEY = "key of a replaced token"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_CURVE = b"CURVE"
_JOIN_S = 5.0
_FIXED_FRAMES = 6  # version, request, domain, address, identity, mechanism; then the credentials


class Gatekeeper:
    """The one authenticator of a zmq context; its maker closes it before the context.

    Raises ConfigurationError when the context has an authenticator already.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._refused: Counter[str] = Counter()  # written by the thread alone
        self._last: tuple[int, str | None] = (0, None)
        self._keys = keys
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        try:
            self._socket.bind(_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigurationError(
                "this zmq context has an authenticator already: give every CURVE router a context of its own."
            ) from error
        self._closing_r, self._closing_w = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="midstep-gatekeeper", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> Counter[str]:
        """Handshakes that were turned away so far, by reason."""
        return Counter(self._refused)

    def last(self) -> tuple[int, str | None]:
        """Return how often it was asked, and which identity asked last; None: one that was turned away."""
        return self._last

    def close(self) -> None:
        """End the thread and release what it held. Idempotent."""
        if self._closing_w < 0:
            return
        os.close(self._closing_w)
        self._closing_w = -1
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise MidstepError(f"the authenticator did not end within {_JOIN_S} s; its context is left open.")
        os.close(self._closing_r)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._closing_r, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())  # ends with close()
                if self._closing_r in ready:
                    return
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        request = frames[1] if len(frames) > 1 else b""
        identity = self._identity(frames)
        self._last = (self._last[0] + 1, identity)
        if identity is None:
            return [_VERSION, request, b"400", b"not admitted to this job", b"", b""]
        return [_VERSION, request, b"200", b"", identity.encode(), b""]

    def _identity(self, frames: list[bytes]) -> str | None:
        """Return the identity that asks for admission, or count why there is none."""
        if len(frames) != _FIXED_FRAMES + 1 or frames[0] != _VERSION or frames[5] != _CURVE:
            self._refused["no CURVE handshake"] += 1
            return None
        try:
            identity = self._keys.identity_of(frames[6])
        except KeyExpired:
            self._refused["expired key"] += 1
            return None
        except KeyReplaced:
            self._refused[REPLACED_KEY] += 1
            return None
        except (OSError, ValueError) as error:
            # The list of clients cannot be read. No client is admitted for that reason, and none is disconnected.
            self._refused[f"client list unreadable: {type(error).__name__}"] += 1
            return None
        if identity is None:
            self._refused["unknown key"] += 1
        return identity
