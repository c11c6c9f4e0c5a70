"""Watches how a connection comes about: to a client whose keys do not fit libzmq says nothing, and tries for ever."""

import time

import zmq
from zmq.utils.monitor import parse_monitor_message

MISFIT_S = 3.0  # handshakes that fail for so long do not fail because a controller comes up or goes
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class HandshakeWatch:
    """The handshakes of one socket. `reached`: something listens there. `admitted`: the keys fit.

    `turned_away`: the keys are those of the server, and the client's are not admitted. `misfit`: the server has others.
    """

    def __init__(self) -> None:
        self.reached = self.admitted = self.turned_away = False
        self._misfits: list[float] = []
        self._monitor: zmq.Socket[bytes] | None = None

    def attach(self, socket: zmq.Socket[bytes]) -> None:
        """Watch a socket that is yet to connect: what happens before is never told."""
        self._monitor = socket.get_monitor_socket(_EVENTS)

    @property
    def monitor(self) -> "zmq.Socket[bytes]":
        """Is readable when there is something to look at. Not before a socket is watched."""
        assert self._monitor is not None
        return self._monitor

    @property
    def misfit(self) -> bool:
        """Whether handshakes have failed for longer than a controller takes to come up or go."""
        return bool(self._misfits) and self._misfits[-1] - self._misfits[0] >= MISFIT_S

    def look(self) -> None:
        """Take note of what has happened since."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())["event"]
            self.reached = True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.admitted = True
                self._misfits.clear()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.turned_away = True
            elif event != zmq.EVENT_CONNECTED:
                self._misfits.append(time.monotonic())

    def close(self) -> None:
        """Hear no more, after the socket was closed. Idempotent."""
        if self._monitor is not None:
            self._monitor.close(linger=0)
