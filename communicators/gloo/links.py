"""The gloo device of this process, and the sockets that are its links.

Gloo has no way to end a collective that is under way. Shutting down the sockets under it has the same effect, if
exactly its sockets are found: those accepted at the device's own listener, and those connected to the listener of
another member.
"""

import os
import socket
import threading
from collections.abc import Iterable

from torch import distributed as dist

from ...protocol.errors import CommunicatorError
from ...protocol.types import StoreEndpoint
from ..own_sockets import each_socket, local_address

Endpoint = tuple[str, int]

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_DEVICE_ATTEMPTS = 5


class GlooLinks:
    """The gloo device that all groups of this process share, and its connections."""

    def __init__(self, store: StoreEndpoint) -> None:
        """Open the device on the address from which `store` is reached, or on the interface that GLOO_SOCKET_IFNAME
        names. Raises CommunicatorError."""
        interface = os.environ.get(_INTERFACE_VARIABLE, "").split(",")[0]
        host = "" if interface else local_address(store)
        for _ in range(_DEVICE_ATTEMPTS):
            before = _listeners()
            self.device = dist.ProcessGroupGloo.create_device(hostname=host, interface=interface)
            new = _listeners() - before
            if len(new) == 1:
                self.listener: Endpoint = new.pop()
                break
            # Another thread opened a listener at the same moment; which one is the device's is not known.
        else:
            raise CommunicatorError(
                f"cannot tell which listening socket is gloo's, after {_DEVICE_ATTEMPTS} attempts; "
                "other threads keep opening listening sockets while process groups are connected; open them earlier"
            )
        self._generation = -1
        self._peers: frozenset[Endpoint] = frozenset()
        self._lock = threading.Lock()

    def expect(self, generation: int, listeners: Iterable[Endpoint]) -> None:
        """Set the listeners of a generation's members; connections to them are links from now on."""
        with self._lock:
            if generation > self._generation:  # an abandoned reconnect may be late
                self._generation = generation
                self._peers = frozenset(listeners) - {self.listener}

    def cut(self) -> int:
        """Shut down all links; return how many there were. Any thread."""
        return sum(each_socket(self._cut_if_link))

    def _cut_if_link(self, link: socket.socket) -> bool:
        if link.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            there = link.getpeername()[:2]
        except OSError:  # not connected: the listener itself, or a link that is down already
            return False
        if link.getsockname()[:2] != self.listener and there not in self._peers:
            return False
        try:
            link.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer has closed it
            return False
        return True


def _listeners() -> set[Endpoint]:
    def endpoint(candidate: socket.socket) -> Endpoint | None:
        if candidate.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        host, port = candidate.getsockname()[:2]
        return host, port

    return {found for found in each_socket(endpoint) if found is not None}
