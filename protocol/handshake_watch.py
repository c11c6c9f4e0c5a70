"""Watches how a connection comes about: to a client whose keys do not fit libzmq says nothing, and tries for ever."""

import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from .transport import DealerSocket

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

    def __init__(self, socket: DealerSocket) -> None:
        self._socket = socket
        self.monitor = socket.raw.get_monitor_socket(_EVENTS)
        self.reached = self.admitted = self.turned_away = False
        self._misfits: list[float] = []

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
        """Stop watching. Before the socket is closed."""
        self._socket.raw.disable_monitor()
        self.monitor.close(linger=0)
