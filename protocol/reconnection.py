"""When a connection is given up, and how soon it is tried again: the options of the side that connects.

A cable that is cut tells neither side. Left to TCP, a connection stays silent for up to twice as long as it was cut,
and is kept for a quarter of an hour: keepalive does not act while data is underway. So one on which no word comes is
given up, and tried again until there is an answer. The other side gives it up by itself (`front`).
"""

import zmq

_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 200
_HEARTBEAT_MS = 1_000
_HEARTBEAT_TIMEOUT_MS = 2_000  # for the answer
_CONNECT_TIMEOUT_MS = 1_000  # TCP would ask again after 1, 3, 7, 15, ... s


def reconnect_by_itself(socket: zmq.Socket[bytes], *, between_machines: bool) -> None:
    """Have a socket reconnect for ever. On one machine, each end sees at once that the other is gone."""
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    if between_machines:
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
