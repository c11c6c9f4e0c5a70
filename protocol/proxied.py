"""Frames between a proxy and the controller: the words of many nodes in one, each as its node has sent it.

A controller of thousands of nodes spends most of its time on connections: a handshake, pings, a read and a decryption
for each frame. A proxy (`launch/proxy.py`) has the connections in its place, and one of its own to the controller. It
has the controller's keys, as every machine has on which a controller may run, so nodes see a controller in it. Whose
key a node has was proven to the proxy; that a proxy speaks was proven to the controller, by a key that follows from
the job's secret.

A frame of a proxy begins with a byte with which nothing else begins that is said on a connection.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import msgspec

from .codec import MAX_FRAME_BYTES
from .errors import MalformedMessage

HEAD = b"\xc1"  # which MessagePack never uses
SIGN_OF_LIFE = HEAD  # to each node: a proxy is there; from a node: it lives, and has nothing to say
SIGN_EVERY_S = 0.25  # to nodes, and to the controller
SILENT_S = 1.0  # after so long without one a node looks for another way
# For the nodes of a proxy that is silent: libzmq has given up its connection by then, and they have found another way.
GRACE_S = 7.0
_OVERHEAD_BYTES = 64  # of a frame, and of a parcel beside its node's name
_KEY_HEX = 64
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Key = Annotated[str, msgspec.Meta(max_length=_KEY_HEX, pattern=rf"^[0-9a-f]{{{_KEY_HEX}}}\Z")]
_MOST = 65_536  # of anything in a frame


class Parcel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A frame of one node, or for it, and the identity of its connection. No data: it has just connected."""

    node: _Name
    data: bytes


class FromProxy(msgspec.Struct, frozen=True, array_like=True):
    """A proxy speaks. `begins`: its connection is new, and it knows no keys. `gone`: connections that are not there.

    `alive`: connections on which nothing but a sign of life came. Without anything it is a sign of life itself.
    """

    parcels: Annotated[tuple[Parcel, ...], msgspec.Meta(max_length=_MOST)] = ()
    gone: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=_MOST)] = ()
    begins: bool = False
    alive: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=_MOST)] = ()


class ToProxy(msgspec.Struct, frozen=True, array_like=True):
    """The controller speaks to a proxy.

    `keys`: what is listed of public keys (`JobKeys`) and has changed; empty: it is not listed any more. `whole`: all
    keys follow, and no others are admitted. `serves`: it knows all of them by now, and nodes may come.
    """

    parcels: Annotated[tuple[Parcel, ...], msgspec.Meta(max_length=_MOST)] = ()
    keys: Annotated[dict[_Key, str], msgspec.Meta(max_length=_MOST)] = {}
    whole: bool = False
    serves: bool = False


Said = TypeVar("Said", FromProxy, ToProxy)
_encode = msgspec.msgpack.Encoder().encode


def is_proxied(data: bytes) -> bool:
    """Say whether a frame is one between a proxy and the controller, or a proxy's sign of life."""
    return data[:1] == HEAD


def frame_of(said: FromProxy | ToProxy) -> bytes:
    """Return the frame that says this."""
    return HEAD + _encode(said)


def said_in(frame: bytes, kind: type[Said]) -> Said:
    """Return what a frame says. Raises MalformedMessage."""
    try:
        return msgspec.msgpack.decode(memoryview(frame)[1:], type=kind)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise MalformedMessage(f"{len(frame)} bytes are no frame of a proxy: {error}.") from error


def together(parcels: Iterable[Parcel]) -> Iterator[tuple[Parcel, ...]]:
    """Yield parcels, in their order, in as few groups as fit a frame each."""
    held: list[Parcel] = []
    size_bytes = _OVERHEAD_BYTES
    for parcel in parcels:
        own_bytes = len(parcel.data) + len(parcel.node) + _OVERHEAD_BYTES
        if held and size_bytes + own_bytes > MAX_FRAME_BYTES:
            yield tuple(held)
            held, size_bytes = [], _OVERHEAD_BYTES
        held.append(parcel)
        size_bytes += own_bytes
    if held:
        yield tuple(held)
