"""The sockets of this process: found among its open files, and the address from which it reaches a store."""

import os
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

from ..protocol.errors import CommunicatorError
from ..protocol.types import StoreEndpoint

_OPEN_FILES = "/proc/self/fd"
_MAPPED = "::ffff:"  # an IPv4 address, as IPv6 writes it


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

    each_socket(cut)


def local_address(store: StoreEndpoint) -> str:
    """Return the address of this machine from which `store` is reached. Raises CommunicatorError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(address)  # sends nothing: it only looks up the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CommunicatorError(f"no route to the store at {store.host}:{store.port}: {error}") from error


def each_socket(look: Callable[[socket.socket], Any]) -> list[Any]:
    """Return what `look` returns for each socket of this process, but for those on which it raises OSError."""
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
