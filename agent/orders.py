"""What an agent, its zygote and its standbys say to each other, and how it travels between them.

They share a pair of sockets that keeps messages whole. A message's bytes lie in a memfd whose descriptor is
passed first, so that an environment of any size fits; the other descriptors of the message follow it.
"""

import os
import socket

import msgspec

from ..protocol.errors import AgentError

MAX_FDS = 4
CHANNEL_FD = 3  # where a spawned process finds its end


class ForkStandby(msgspec.Struct, frozen=True, tag=True):
    """To the zygote: fork a standby that listens on the passed socket."""


class Preload(msgspec.Struct, frozen=True, tag=True):
    """To the zygote: import these modules too, looking in `paths` as the user's script will."""

    modules: tuple[str, ...]
    paths: tuple[str, ...]


class ZygoteUp(msgspec.Struct, frozen=True, tag=True):
    """From the zygote: it has imported what it was told to. More than one thread makes a fork unsafe."""

    threads: int
    failed: tuple[str, ...] = ()  # what could not be imported, and why


class Ping(msgspec.Struct, frozen=True, tag=True):
    """To zygote, standby or store: say that you are there (Pong)."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to Ping. A store has asked itself first."""


class StandbyUp(msgspec.Struct, frozen=True, tag=True):
    """From a standby: it is the agent's child, will die with it, and waits for its order."""

    pid: int


class TrainingOrder(msgspec.Struct, frozen=True, tag=True):
    """To a standby: become a training process. Descriptors: black box, log file."""

    command: tuple[str, ...]
    is_module: bool
    no_python: bool
    environment: dict[str, str]
    working_directory: str


class StoreOrder(msgspec.Struct, frozen=True, tag=True):
    """To a standby: serve a rendezvous store. Descriptors: the listening socket, a channel on which it is pinged."""

    host: str
    port: int


Order = ForkStandby | Preload | ZygoteUp | Ping | Pong | StandbyUp | TrainingOrder | StoreOrder

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def channel() -> tuple[socket.socket, socket.socket]:
    """Make the two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, order: Order, fds: tuple[int, ...] = ()) -> None:
    """Send an order with descriptors. Raises AgentError when the other end is gone or its queue is full."""
    try:
        with os.fdopen(os.memfd_create("midstep-order", os.MFD_CLOEXEC), "wb") as payload:
            payload.write(_encoder.encode(order))
            payload.flush()
            socket.send_fds(end, [b"."], [payload.fileno(), *fds], socket.MSG_NOSIGNAL)
    except OSError as error:
        raise AgentError(f"a {type(order).__name__} could not be sent: {error}") from error


def receive(end: socket.socket) -> tuple[Order, list[int]] | None:
    """Receive an order and its descriptors, which are the caller's from then on. None: the other end is gone.

    Blocks if the socket does; else raises BlockingIOError when there is nothing. Raises AgentError for what
    is no order.
    """
    try:
        _, fds, flags, _ = socket.recv_fds(end, 1, MAX_FDS)
    except ConnectionError:
        return None
    if not fds:
        return None
    payload, *others = fds
    try:
        if flags & socket.MSG_CTRUNC:
            raise AgentError("an order came with descriptors that were cut off: the limit of open files is reached")
        with os.fdopen(payload, "rb") as file:
            file.seek(0)
            order = _decoder.decode(file.read())
    except (msgspec.MsgspecError, AgentError) as error:
        close_all(others)
        raise AgentError(f"an order cannot be read: {error}") from error
    for fd in others:
        os.set_inheritable(fd, False)
    return order, others


def close_all(fds: list[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
