"""What the members of a generation tell each other before they connect, and how far it is believed.

A member's word is signed, so it is a member's. That it makes sense is checked all the same, because what follows from
it is a connection to a group_rank, and code that trusts it.
"""

import ipaddress
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

MOST_GROUPS = 100_000
MOST_BYTES = 1 << 24
NONCE_BYTES = 16

Host = Annotated[str, msgspec.Meta(min_length=2, max_length=64)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
GroupNames = Annotated[tuple[GroupName, ...], msgspec.Meta(max_length=MOST_GROUPS)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]

T = TypeVar("T")


class Listener(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a socket listens. The host is an address: a name would be looked up, and lookups take their time."""

    host: Host
    port: Port

    def __post_init__(self) -> None:
        """Refuse what is no address."""
        ipaddress.ip_address(self.host)


class NeighbourAddress(NamedTuple):
    """Where a rank waits for its neighbours. `nonce` is its own, so that no greeting can be used twice."""

    listener: Listener
    nonce: Nonce


class GlooMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each rank tells the others before gloo connects them."""

    listener: Listener
    groups: GroupNames
    neighbours: NeighbourAddress


class HcclMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each rank tells the others before HCCL's communicators are resumed or rebuilt."""

    groups: GroupNames
    linked: Annotated[int, msgspec.Meta(ge=-1)]  # the generation in which all its communicators were last up, or -1


def encode(word: Any) -> bytes:
    """Return a word's bytes."""
    return msgspec.json.encode(word)


def decode(data: bytes, kind: type[T]) -> T:
    """Return the word in `data`. Raises ValueError for all that is none of this kind."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data)} bytes, the limit is {MOST_BYTES}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"{len(data)} bytes that nest too deeply, or want too much memory") from error
