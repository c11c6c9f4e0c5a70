"""Limits of a listener: how many connections it holds, and what each may cost before it is closed."""

import os
import resource

import msgspec

from .identities import is_family
from .operators import OPERATOR_PREFIX

# For the process's own files and local sockets, beside those that it has open: a quarter of all, and no more than this.
RESERVED_DESCRIPTORS = 512
DESCRIPTORS_EACH = 3  # a client's connection, and both ends of what carries its bytes to the router
MOST_UNPROVEN = 4096  # all nodes of a job connect at once when its controller is another one
LEAST_CONNECTIONS = 8
_DESCRIPTORS = "/proc/self/fd"


class ConnectionLimits(msgspec.Struct, frozen=True):
    """What a listener takes. Where a limit is reached the oldest connection that it concerns goes.

    `unproven` connections have not finished their handshake. An identity has more than one connection only while the
    older one has not been noticed to be dead. `carried_bytes`: what one connection carries from a client before it has
    to be made again, and so the most that libzmq collects of a message that never ends.
    """

    connections: int
    unproven: int
    unproven_per_address: int
    per_identity: int = 2
    per_family: int = 1024  # of a key that several peers have
    per_role: int = 32  # of the key that all operators of a role have
    handshake_s: float = 5.0
    idle_s: float | None = None  # without a byte from the client; None: for ever
    carried_bytes: int = 32 * 1024 * 1024
    burst_bytes: int = 32 * 1024 * 1024  # of one identity, over all its connections
    bytes_per_s: int = 8 * 1024 * 1024  # of one identity, after the burst
    role_burst_bytes: int = 1024 * 1024  # of all operators of a role: what they send are small questions
    role_bytes_per_s: int = 32 * 1024


def most_of(identity: str, limits: ConnectionLimits) -> int:
    """Return how many connections a key's identity may have."""
    if identity.startswith(OPERATOR_PREFIX):
        return limits.per_role
    return limits.per_family if is_family(identity) else limits.per_identity


def limits_by_descriptors() -> ConnectionLimits:
    """Return the limits of a listener that may use up all descriptors but those that the process needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(os.listdir(_DESCRIPTORS)) - min(RESERVED_DESCRIPTORS, soft // 4)
    connections = max(LEAST_CONNECTIONS, free // DESCRIPTORS_EACH)
    unproven = min(MOST_UNPROVEN, connections // 2)
    return ConnectionLimits(connections, unproven, max(1, unproven // 2))


class Allowance:
    """What an identity may still send at once. It grows with time, up to a burst."""

    __slots__ = ("_at_s", "_burst", "_left", "_per_s")

    def __init__(self, identity: str, limits: ConnectionLimits) -> None:
        operators = identity.startswith(OPERATOR_PREFIX)
        self._burst = float(limits.role_burst_bytes if operators else limits.burst_bytes)
        self._per_s = limits.role_bytes_per_s if operators else limits.bytes_per_s
        self._left = self._burst
        self._at_s = 0.0

    def spend(self, count: int, now: float) -> float:
        """Take `count` bytes off; return until when nothing more may be sent, 0 when it may."""
        grown = self._left + (now - self._at_s) * self._per_s
        self._left = min(self._burst, grown) - count
        self._at_s = now
        return 0.0 if self._left >= 0 else now - self._left / self._per_s
