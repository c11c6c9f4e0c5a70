"""A bad cable, as a program: carries frames between two interfaces, later, slower, or not at all.

Runs in the switch's namespaces until its standard input is closed: `wire.py PORT NEAR DELAY_S LOSS RATE_BITS SEED`. It
writes a byte when it carries. Frames come and go with the kernel's note about checksums and segments that are still to
be made, so that big ones pass whole: a share of loss is of those.
"""

import errno
import heapq
import os
import random
import select
import socket
import sys
import time
from collections.abc import Iterator

_STDIN = 0
_ALL_PROTOCOLS = 3
_SOL_PACKET = 263
_VNET_HEADER = 15  # PACKET_VNET_HDR: the kernel's note in front of each frame
_IGNORE_OUTGOING = 23  # PACKET_IGNORE_OUTGOING: what is sent here is not received here
_VNET_HEADER_BYTES = 10
_FRAME_BYTES = 128 * 1024
_BUFFER_BYTES = 8 << 20
_FRAMES_AT_ONCE = 64
_LONGEST_QUEUE_S = 0.5  # at a low rate; what comes on top is dropped, as in a switch
_IDLE_S = 1.0


def raw(interface: str) -> socket.socket:
    """Return a socket that gets all frames of an interface, and sends any."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    made.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    made.bind((interface, 0))
    made.setblocking(False)
    return made


class Direction:
    """One way through the cable: when a frame that comes now gets out, if it does."""

    def __init__(self, delay_s: float, loss: float, rate_bits: float, dice: random.Random) -> None:
        self._delay_s, self._loss, self._rate_bits, self._dice = delay_s, loss, rate_bits, dice
        self._free_s = 0.0

    def out_s(self, size_bytes: int, now: float) -> float | None:
        """Return when a frame leaves at the other end; None: it is lost."""
        if self._dice.random() < self._loss:
            return None
        begins_s = max(now, self._free_s)
        if begins_s - now > _LONGEST_QUEUE_S:
            return None
        if self._rate_bits:
            begins_s += 8 * size_bytes / self._rate_bits
            self._free_s = begins_s
        return begins_s + self._delay_s


def carry(ends: tuple[socket.socket, socket.socket], directions: tuple[Direction, Direction]) -> None:
    """Carry frames both ways until the standard input is closed."""
    first, second = ends
    ways = {first.fileno(): (first, second, directions[0]), second.fileno(): (second, first, directions[1])}
    queue: list[tuple[float, int, socket.socket, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, _, sink, frame = heapq.heappop(queue)
            send(sink, frame)
        limit_s = max(0.0, queue[0][0] - now) if queue else _IDLE_S
        ready = select.select([_STDIN, *ways], [], [], limit_s)[0]
        if _STDIN in ready:
            return
        for descriptor in ready:
            source, sink, direction = ways[descriptor]
            for frame in arrived(source):
                now = time.monotonic()
                out_s = direction.out_s(len(frame) - _VNET_HEADER_BYTES, now)
                if out_s is not None:
                    count += 1
                    heapq.heappush(queue, (out_s, count, sink, frame))


def arrived(source: socket.socket) -> Iterator[bytes]:
    """Yield frames that have arrived, some of them if they are many."""
    for _ in range(_FRAMES_AT_ONCE):
        try:
            yield source.recv(_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENETDOWN:  # the cable was cut; it may be healed
                raise


def send(sink: socket.socket, frame: bytes) -> None:
    """Send a frame; the network may lose it when it has no room, or is down."""
    try:
        sink.send(frame)
    except BlockingIOError:
        return
    except OSError as error:
        if error.errno not in (errno.ENETDOWN, errno.ENXIO):
            print(f"wire: a frame of {len(frame)} bytes is lost: {error}", file=sys.stderr, flush=True)


def main(port: str, near: str, *numbers: str) -> None:
    """Carry until the standard input is closed."""
    delay_s, loss, rate_bits, seed = map(float, numbers)
    dice = random.Random(seed)
    directions = Direction(delay_s, loss, rate_bits, dice), Direction(delay_s, loss, rate_bits, dice)
    ends = raw(port), raw(near)
    os.write(sys.stdout.fileno(), b".")
    carry(ends, directions)


if __name__ == "__main__":
    main(*sys.argv[1:])
