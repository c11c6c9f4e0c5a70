"""Read how busy the connections of training processes to other machines are, as the kernel counts it.

All ranks wait for each other in a collective, so a slow link makes all of them wait, and no rank's own time is longer.
The kernel knows better: for each TCP connection it counts for how long sent data was not yet acknowledged while the
receiver had room for it. At a slow link that is most of the step, elsewhere little of it. `controller/slow_links.py`
compares.

The kernel is asked over netlink (sock_diag(7), linux/inet_diag.h), which takes no rights and disturbs no process. Which
connection is whose is read from /proc. Of connections within a machine, and of HCCL's and NCCL's over RDMA, nothing is
known here. Where the kernel does not answer, no links are told.
"""

import contextlib
import logging
import math
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..protocol.bounds import MOST_LINKS
from ..protocol.types import LinkUse, RankProgress

PROC = Path("/proc")
LEAST_BYTES = 1024  # for each step: over a link that carries less only barriers and the like go, and no gradients
MOST_CONNECTIONS = 2048  # to go through them takes the agent's loop some 10 us each
LOOK_S = 2.0  # between two looks at which connections a process has: it may have hundreds of files
Process = tuple[int, int]  # rank and incarnation
_SOCK_DIAG = 4
_OF_ALL_FAMILIES = 18  # TCPDIAG_GETSOCK: the kernel goes through its table once, and not for each family
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_ESTABLISHED = 1 << 1
_INFO = 2  # INET_DIAG_INFO: a struct tcp_info follows
_HEAD = struct.Struct("=IHHII")
_ASKED = struct.Struct("=B2xB48xI4x")
_FOUND = struct.Struct("=B3x4x16s16s4x8x4x4x4x4xI")
_ATTRIBUTE = struct.Struct("=HH")
_COUNTED = struct.Struct("=120xQ40xQQ")  # of tcp_info: acknowledged bytes, busy and held up by the receiver, in us
_MAPPED = bytes(10) + b"\xff\xff"
_BUFFER_BYTES = 1 << 16
_ANSWER_S = 0.2  # the kernel answers at once
_log = logging.getLogger(__name__)


class TcpConnection(NamedTuple):
    """One TCP connection of this machine: its inode, both addresses, and what the kernel has counted so far."""

    inode: int
    here: str
    there: str
    busy_us: int
    sent_bytes: int


class _Sums:
    """The sums of one process's connections, those that are closed included."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.next_look_s = -math.inf
        self.inodes: frozenset[int] = frozenset()
        self.links: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        self.counted: dict[int, tuple[int, int]] = {}


class LinkReader:
    """Reads the links of the processes of a node. Used by the agent's loop alone."""

    def __init__(self) -> None:
        self._sums: dict[Process, _Sums] = {}
        self._is_deaf = False
        self._not_before_s = -math.inf  # the kernel is asked again; where no rank has a link, not with each heartbeat

    def added(
        self, readings: Sequence[RankProgress], pids: Mapping[Process, int], now: float
    ) -> tuple[RankProgress, ...]:
        """Return step clocks with the links of their processes, of which `pids` has the ids; for a heartbeat."""
        if self._is_deaf or now < self._not_before_s:
            return tuple(readings)
        self._sums = {process: self._sums.get(process) or _Sums(pid) for process, pid in pids.items()}
        try:
            connections = {each.inode: each for each in islice(each_connection(), MOST_CONNECTIONS + 1)}
        except OSError as error:
            return self._give_up(readings, f"the kernel does not tell of connections: {error}")
        if len(connections) > MOST_CONNECTIONS:
            return self._give_up(readings, f"this machine has more than {MOST_CONNECTIONS} connections to others")
        told = tuple(self._with_links(reading, connections, now) for reading in readings)
        if not any(sums.links for sums in self._sums.values()):  # as in a job on one machine
            self._not_before_s = now + LOOK_S
        return told

    def _give_up(self, readings: Sequence[RankProgress], why: str) -> tuple[RankProgress, ...]:
        self._is_deaf = True
        _log.warning("slow links are not looked for: %s", why)
        return tuple(readings)

    def _with_links(self, reading: RankProgress, connections: Mapping[int, TcpConnection], now: float) -> RankProgress:
        sums = self._sums.get((reading.rank, reading.incarnation))
        if sums is None:
            return reading
        if now >= sums.next_look_s:
            sums.next_look_s, sums.inodes = now + LOOK_S, _sockets_of(sums.pid)
        for inode in sums.inodes & connections.keys():
            each = connections[inode]
            before = sums.counted.get(inode, (0, 0))
            sums.counted[inode] = (each.busy_us, each.sent_bytes)
            link = sums.links[each.here, each.there]
            link[0] += max(0, each.busy_us - before[0])
            link[1] += max(0, each.sent_bytes - before[1])
        for inode in sums.counted.keys() - connections.keys():
            del sums.counted[inode]
        if reading.times is None:
            return reading
        least_bytes = LEAST_BYTES * reading.times.steps
        uses = [LinkUse(*ends, *counts) for ends, counts in sums.links.items() if counts[1] >= least_bytes]
        uses.sort(key=lambda use: -use.sent_bytes)
        return msgspec.structs.replace(reading, links=tuple(uses[:MOST_LINKS]))


def _sockets_of(pid: int) -> frozenset[int]:
    """Return the inodes of the sockets that a process has open; none of one that has ended."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                kind, _, rest = os.readlink(descriptor.path).partition(":[")
                if kind == "socket":
                    found.add(int(rest.rstrip("]")))
    return frozenset(found)


def each_connection() -> Iterator[TcpConnection]:
    """Ask the kernel for all TCP connections from this machine to others. Raises OSError where it does not answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_S)
        asked = _ASKED.pack(socket.AF_INET, 1 << (_INFO - 1), _ESTABLISHED)
        kernel.send(_HEAD.pack(_HEAD.size + len(asked), _OF_ALL_FAMILIES, _REQUEST_DUMP, 0, 0) + asked)
        for message in _answers(kernel):
            found = _connection(message)
            if found is not None and found.here != found.there:
                yield found


def _answers(kernel: socket.socket) -> Iterator[memoryview]:
    """Yield the messages of a dump up to its end. Raises OSError when the kernel refuses it."""
    while True:
        received = memoryview(kernel.recv(_BUFFER_BYTES))
        while len(received) >= _HEAD.size:
            size, kind, *_ = _HEAD.unpack_from(received)
            body = received[_HEAD.size : size]
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -int.from_bytes(body[:4], "little", signed=True)
                raise OSError(code, os.strerror(code))
            yield body
            received = received[_aligned(size) :]


def _connection(message: memoryview) -> TcpConnection | None:
    family, source, target, inode = _FOUND.unpack_from(message)
    rest = message[_FOUND.size :]
    while len(rest) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        counted = rest[_ATTRIBUTE.size : size]
        if kind == _INFO and len(counted) >= _COUNTED.size:  # an old kernel counts less
            sent_bytes, busy_us, held_up_us = _COUNTED.unpack_from(counted)
            return TcpConnection(inode, _text(family, source), _text(family, target), busy_us - held_up_us, sent_bytes)
        rest = rest[_aligned(size) or len(rest) :]
    return None


def _text(family: int, address: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[:4])
    if address.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, address[len(_MAPPED) :])
    return socket.inet_ntop(family, address)


def _aligned(size: int) -> int:
    return (size + 3) & ~3
