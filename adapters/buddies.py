"""A copy of another rank's piece of the state, kept up to date by doing that rank's updates a second time.

Where parameters or optimizer state are cut over all ranks, each piece is held once. So each rank keeps a peer copy: the
piece of the rank one node back, of which it is the buddy. In each step the final gradients are sent, not the state,
which is three times as large: they arrive before the commit barrier, and a rank that passes it applies its own update
and the peer copy's. So a copy is always of the step that its holder has committed, and nothing has to be kept twice. On
one kind of device the same update of the same numbers gives the same bits.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..processor.framework import OpenShard
from ..processor.shard import Shard

_GRADIENTS, _UPDATE = "waiting for gradients", "the peer copy's update"
_STEPS = 10  # that are measured, after one that warms up


class UpdatedCopy(Protocol):
    """The copy of another rank's piece, on the device of the job or in host memory."""

    device: torch.device  # of the model, and of what is sent

    @property
    def held(self) -> bool:
        """True once the copy is there."""
        ...

    @property
    def arriving_bytes(self) -> int:
        """The size of the message that the copied rank sends in each step."""
        ...

    def message(self) -> list[torch.Tensor]:
        """Return what the copy of this rank's own piece needs of a step: parts of a message, uint8 on the device."""
        ...

    def take(self, message: torch.Tensor) -> None:
        """Keep the copied rank's message of this step until `update` or `forget`."""
        ...

    def update(self, name: str) -> bool:
        """Apply the copied rank's update, or that of one of its optimizers, in the update; return whether it is whole.

        After the commit barrier.
        """
        ...

    def forget(self) -> None:
        """Drop what was taken for a step that is rolled back."""
        ...

    def accept(self, header: bytes) -> Shard:
        """Return the tensors that receive the copied rank's piece: until `adopt` there may be no copy."""
        ...

    def adopt(self, shard: Shard) -> None:
        """Make the received piece the copy."""
        ...


Copy = TypeVar("Copy", bound=UpdatedCopy)


class Pair(NamedTuple):
    """The two ranks that a rank has to do with: the one that copies its piece, and the one whose piece it copies."""

    buddy: int
    copied: int
    same_node: bool  # this rank and its buddy are on one node


def pair(rank: int, among: Sequence[int], ranks_per_node: int) -> Pair:
    """Return the neighbours of a rank in a ring of ranks, one node apart if these are on several.

    `among`: in their order, as many on each node.
    """
    here, first = among.index(rank), among[0] // ranks_per_node
    shift = sum(each // ranks_per_node == first for each in among) % len(among) or 1
    buddy, copied = among[(here + shift) % len(among)], among[(here - shift) % len(among)]
    return Pair(buddy, copied, buddy // ranks_per_node == rank // ranks_per_node)


class Buddies(Generic[Copy]):
    """Exchanges gradients around the ring: a rank sends its own to its buddy, and receives those of its peer copy."""

    def __init__(self, open_own: Callable[[], OpenShard], peer_copy: Copy, ring: Pair) -> None:
        self.buddy, self.copied_rank, self.same_node = ring
        self.piece = peer_copy
        self._open_own = open_own
        self._under_way: tuple[list[dist.Work], torch.Tensor, torch.Tensor] | None = None
        self._arrived = False
        self._kept: list[torch.Tensor] = []
        self._times = CopyTimes((_GRADIENTS, _UPDATE))

    def send(self) -> None:
        """Start to send this step's final gradients and rates, and to receive the peer copy's. On all ranks."""
        parts = self.piece.message()
        outgoing, incoming = self._room(sum(part.numel() for part in parts), self.piece.arriving_bytes)
        torch.cat(parts, out=outgoing)
        # Kept here until it is over: what is being sent must not be freed.
        self._under_way = (_batch(outgoing, self.buddy, incoming, self.copied_rank), outgoing, incoming)

    def arrive(self) -> None:
        """Wait for what `send` has started, if anything. Before the commit barrier."""
        if self._under_way is None:
            return
        (works, _, incoming), self._under_way = self._under_way, None
        with self._times.spent(_GRADIENTS):
            _wait(works)
        self.piece.take(incoming)
        self._arrived = True

    def update(self, name: str = "") -> None:
        """Apply this step's update to the peer copy, or that of one optimizer. In the update, after the barrier."""
        if not self._arrived:
            return
        with self._times.spent(_UPDATE):
            self._arrived = not self.piece.update(name)
        if not self._arrived:
            self._times.step_done()

    def forget_step(self) -> None:
        """Drop what is under way or has arrived for a step that is rolled back."""
        self._under_way, self._arrived, self._kept = None, False, []  # what was cut off may yet write there
        self.piece.forget()

    def seed(self) -> None:
        """Send pieces to buddies that have no copy yet. A collective; end of rollback."""
        wanted = torch.tensor([0 if self.piece.held else 1], device=self.piece.device)
        asked = torch.empty_like(wanted)
        _wait(_batch(wanted, self.copied_rank, asked, self.buddy))
        leaving = self._parts() if asked.item() else iter(())
        if wanted.item():
            self._receive(leaving)
        for part in leaving:
            _wait(_batch(part, self.buddy))

    def _room(self, *sizes: int) -> list[torch.Tensor]:
        """Return memory for the messages of a step: of a host the same as in the step before, as fresh pages cost time.

        A device has an allocator for that, and in between the memory is another's.
        """
        kept = self._kept
        if [room.numel() for room in kept] != [*sizes]:
            kept = [torch.empty(size, dtype=torch.uint8, device=self.piece.device) for size in sizes]
        self._kept = kept if self.piece.device.type == "cpu" else []
        return kept

    def _parts(self) -> Iterator[torch.Tensor]:
        """Yield what makes up this rank's own piece, in the order in which `_receive` takes it."""
        device, shard = self.piece.device, self._open_own()
        header = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
        for part in (torch.tensor([header.numel()], device="cpu"), header, *shard.tensors):
            if part.numel():
                yield part.to(device)

    def _receive(self, leaving: Iterator[torch.Tensor]) -> None:
        """Receive the peer copy part by part, and with each send one of `leaving`."""

        def arriving(size: int, dtype: torch.dtype) -> torch.Tensor:
            landing = torch.empty(size, dtype=dtype, device=self.piece.device)
            _wait(_batch(next(leaving, None), self.buddy, landing, self.copied_rank))
            return landing

        length = arriving(1, torch.int64)
        header = arriving(int(length.item()), torch.uint8)
        shard = self.piece.accept(header.cpu().numpy().tobytes())
        for tensor in shard.tensors:
            if tensor.numel():
                tensor.copy_(arriving(tensor.numel(), tensor.dtype).view_as(tensor))
        self.piece.adopt(shard)


def _batch(
    outgoing: torch.Tensor | None, to: int, incoming: torch.Tensor | None = None, source: int = -1
) -> list[dist.Work]:
    """Start to send and to receive, as one batch: where a send waits for its receive, both ranks would wait."""
    sends = [] if outgoing is None else [dist.P2POp(dist.isend, outgoing, to)]
    receives = [] if incoming is None else [dist.P2POp(dist.irecv, incoming, source)]
    return dist.batch_isend_irecv([*sends, *receives])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class CopyTimes:
    """Measures how much of a step its copies take, over the first steps, and prints it once."""

    def __init__(self, what: tuple[str, ...]) -> None:
        self._seconds: dict[str, list[float]] = {name: [] for name in what}
        self._ends: list[float] = []
        self._told = False

    @contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Measure a part of a step. Where a device works behind the thread's back its work is not seen here."""
        began_s = time.perf_counter()
        yield
        if not self._told:
            self._seconds[name].append(time.perf_counter() - began_s)

    def step_done(self) -> None:
        """Note the end of a step's copies; after the last step that is measured print what they took."""
        if self._told:
            return
        self._ends.append(time.perf_counter())
        if len(self._ends) <= _STEPS:
            return
        self._told = True
        steps_s = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        told = ", ".join(f"{statistics.median(taken[1:]) * 1e3:.1f} ms for {n}" for n, taken in self._seconds.items())
        say(f"copies take of a step of {statistics.median(steps_s) * 1e3:.1f} ms: {told} (medians of {_STEPS})")


def say(text: str) -> None:
    """Print a line in this rank's log, whatever the script has made of logging."""
    sys.stderr.write(f"midstep: {text}\n")
    sys.stderr.flush()
