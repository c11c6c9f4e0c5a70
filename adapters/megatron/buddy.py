"""A copy of another rank's optimizer piece, kept up to date by doing that rank's updates a second time.

A distributed optimizer with one instance has each piece of its state (main parameters, both moments) once. So each rank
keeps a peer copy: the piece of the rank one node back, of which it is the buddy. In each step the final gradients are
sent, not the state, which is three times as large: they arrive before the commit barrier, and a rank that passes it
applies its own update and the peer copy's. So a copy is always of the step that its holder has committed, and nothing
has to be kept twice. On one kind of device the same update of the same numbers gives the same bits.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .peer_copy import PeerCopy
from .shards import ShardParts, main_parameters

_RATES = ("lr", "weight_decay")  # of a param group: what a scheduler changes between steps
_RATE_BYTES = len(_RATES) * 8
_GRADIENTS, _UPDATE = "waiting for gradients", "the peer copy's update"


def piece_name(rank: int) -> str:
    """Return the name of the shard that is a rank's own optimizer piece."""
    return f"optimizer.rank{rank}"


class Buddies:
    """Exchanges gradients around the ring: a rank sends its own to its buddy, and receives those of its peer copy."""

    def __init__(self, own: ShardParts, peer_copy: PeerCopy, rank: int, world_size: int, ranks_per_node: int) -> None:
        shift = ranks_per_node % world_size or 1
        self.buddy = (rank + shift) % world_size
        self.copied_rank = (rank - shift) % world_size
        self.same_node = self.buddy // ranks_per_node == rank // ranks_per_node
        self.piece = peer_copy
        self._own = own
        self._under_way: tuple[list[dist.Work], torch.Tensor, torch.Tensor] | None = None
        self._arrived = False
        self._times = CopyTimes((_GRADIENTS, _UPDATE))

    @property
    def elements(self) -> int:
        """The number of elements of this rank's own piece; its peer copy is about as large."""
        return sum(parameter.numel() for parameter in main_parameters(self._own.leaves))

    @property
    def sent_bytes(self) -> int:
        """The bytes that are sent to the buddy in each step."""
        return sum(parameter.nbytes for parameter in main_parameters(self._own.leaves))

    def send(self) -> None:
        """Start to send this step's final gradients and rates, and to receive the peer copy's. On all ranks."""
        mine = [group for leaf in self._own.leaves.values() for group in leaf.optimizer.param_groups]
        copied = self.piece.parameters()
        outgoing = _message(mine, self.piece.device)
        size = sum(_RATE_BYTES for _ in self.piece.groups()) + sum(parameter.nbytes for parameter in copied)
        incoming = outgoing.new_empty(size)
        # Kept here until it is over: what is being sent must not be freed.
        self._under_way = (_batch(outgoing, self.buddy, incoming, self.copied_rank), outgoing, incoming)

    def arrive(self) -> None:
        """Wait for what `send` has started, if anything. Before the commit barrier."""
        if self._under_way is None:
            return
        (works, _, incoming), self._under_way = self._under_way, None
        with self._times.spent(_GRADIENTS):
            _wait(works)
        groups, parameters = list(self.piece.groups()), self.piece.parameters()
        rates = incoming[: len(groups) * _RATE_BYTES].cpu().view(torch.float64).view(-1, len(_RATES))
        for group, values in zip(groups, rates.tolist(), strict=True):
            group.update(zip(_RATES, values, strict=True))
        sizes = [parameter.nbytes for parameter in parameters]
        pieces = torch.split(incoming[len(groups) * _RATE_BYTES :], sizes) if sizes else ()
        self.piece.take([flat.view(p.dtype).view_as(p) for flat, p in zip(pieces, parameters, strict=True)])
        self._arrived = True

    def update(self) -> None:
        """Apply this step's update to the peer copy. In the update, after the commit barrier."""
        if self._arrived:
            with self._times.spent(_UPDATE):
                self.piece.update()
            self._times.step_done()
        self._arrived = False

    def forget_step(self) -> None:
        """Drop what is under way or has arrived for a step that is rolled back."""
        self._under_way, self._arrived = None, False
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

    def _parts(self) -> Iterator[torch.Tensor]:
        """Yield what makes up this rank's own piece, in the order in which `_receive` takes it."""
        device, shard = self.piece.device, self._own.open()
        header = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
        for part in (torch.tensor([header.numel()]), header, *shard.tensors):
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


def _message(groups: Sequence[dict[str, Any]], device: torch.device) -> torch.Tensor:
    """Return rates and gradients as one uint8 tensor on the device: one message costs less than two."""
    rates = torch.tensor([[group[rate] for rate in _RATES] for group in groups], dtype=torch.float64, device=device)
    gradients = [parameter.grad.reshape(-1) for group in groups for parameter in group["params"]]
    return torch.cat([flat.view(torch.uint8) for flat in (rates.view(-1), *gradients)])


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


_STEPS = 10  # that are measured, after one that warms up


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
