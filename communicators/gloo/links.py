"""The gloo device of this process, and the sockets that are its links.

Gloo has no way to end a collective that is under way. Shutting down the sockets under it has the same effect, if
exactly its sockets are found: those accepted at the device's own listener, and those connected to the listener of
another member.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from torch import distributed as dist

from ...protocol.errors import CommunicatorError
from ...protocol.types import StoreEndpoint

Endpoint = tuple[str, int]

_OPEN_FILES = "/proc/self/fd"
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_DEVICE_ATTEMPTS = 5
_MAPPED = "::ffff:"  # an IPv4 address, as IPv6 writes it


class GlooLinks:
    """The gloo device that all groups of this process share, and its connections."""

    def __init__(self, store: StoreEndpoint) -> None:
        """Open the device on the address from which `store` is reached, or on the interface that GLOO_SOCKET_IFNAME
        names. Raises CommunicatorError."""
        interface = os.environ.get(_INTERFACE_VARIABLE, "").split(",")[0]
        host = "" if interface else _local_address(store)
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
        return sum(_each_socket(self._cut_if_link))

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


def cut_connections(store: StoreEndpoint) -> None:
    """Shut down this process's connections to `store`, to wake a thread that waits for an answer. Any thread."""
    try:
        found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
    except OSError:
        return
    there = {str(address[0]).removeprefix(_MAPPED) for *_, address in found}

    def cut(connection: socket.socket) -> None:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            host, port = connection.getpeername()[:2]
            if port == store.port and host.removeprefix(_MAPPED) in there:
                connection.shutdown(socket.SHUT_RDWR)

    _each_socket(cut)


def _local_address(store: StoreEndpoint) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(address)  # sends nothing: it only looks up the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CommunicatorError(f"no route to the store at {store.host}:{store.port}: {error}") from error


def _listeners() -> set[Endpoint]:
    def endpoint(candidate: socket.socket) -> Endpoint | None:
        if candidate.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        host, port = candidate.getsockname()[:2]
        return host, port

    return {found for found in _each_socket(endpoint) if found is not None}


def _each_socket(look: Callable[[socket.socket], Any]) -> list[Any]:
    answers = []
    for name in os.listdir(_OPEN_FILES):
        try:
            if not os.readlink(f"{_OPEN_FILES}/{name}").startswith("socket:"):
                continue
            # A copy of the descriptor, so that no other thread can close it, and its number be reused, meanwhile.
            copy = os.dup(int(name))
        except OSError:  # closed in the meantime
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # no longer a socket
            os.close(copy)
            continue
        with closing(found):
            try:
                answers.append(look(found))
            except OSError:
                continue
    return answers
