"""A copy of another rank's optimizer piece, kept up to date by doing that rank's updates a second time.

A distributed optimizer with one instance has each piece of its state (main parameters, both moments) once. Each rank
then keeps the piece of a ward, the rank one node back. Not the state is sent in each step but the final gradients,
which are a third of it: they arrive before the commit barrier, and whoever passes it applies its own update and the
ward's. So a copy is always of the step that its holder has committed, and no second generation of anything has to be
kept. On one kind of device the same update of the same numbers gives the same bits.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .copy_times import CopyTimes
from .shards import Piece, main_parameters
from .ward import WardPiece

_RATES = ("lr", "weight_decay")  # of a param group: what a scheduler changes between steps
_RATE_BYTES = len(_RATES) * 8
_GRADIENTS, _UPDATE = "waiting for gradients", "the ward's update"


def piece_name(rank: int) -> str:
    """Return the name of the shard that is a rank's own optimizer piece."""
    return f"optimizer.rank{rank}"


class Buddies:
    """The exchange of gradients around the ring: mine to my buddy, my ward's to me."""

    def __init__(self, own: Piece, ward_piece: WardPiece, rank: int, world_size: int, ranks_per_node: int) -> None:
        shift = ranks_per_node % world_size or 1
        self.buddy = (rank + shift) % world_size
        self.ward = (rank - shift) % world_size
        self.same_node = self.buddy // ranks_per_node == rank // ranks_per_node
        self.piece = ward_piece
        self._own = own
        self._under_way: tuple[list[dist.Work], torch.Tensor, torch.Tensor] | None = None
        self._arrived = False
        self._times = CopyTimes((_GRADIENTS, _UPDATE))

    @property
    def elements(self) -> int:
        """The elements of this rank's own piece, which its ward's is about as large as."""
        return sum(parameter.numel() for parameter in main_parameters(self._own.leaves))

    @property
    def sent_bytes(self) -> int:
        """What is sent to the buddy in each step."""
        return sum(parameter.nbytes for parameter in main_parameters(self._own.leaves))

    def send(self) -> None:
        """Start to send this step's final gradients and rates, and to take the ward's. On all ranks."""
        mine = [group for leaf in self._own.leaves.values() for group in leaf.optimizer.param_groups]
        wards = self.piece.parameters()
        outgoing = _message(mine, self.piece.device)
        size = sum(_RATE_BYTES for _ in self.piece.groups()) + sum(parameter.nbytes for parameter in wards)
        incoming = outgoing.new_empty(size)
        # Kept here until it is over: what is being sent must not be freed.
        self._under_way = (_batch(outgoing, self.buddy, incoming, self.ward), outgoing, incoming)

    def arrive(self) -> None:
        """Wait for what `send` has started. Before the commit barrier; nothing to do when nothing was started."""
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
        """Do the ward's update of this step. In the update, after the commit barrier."""
        if self._arrived:
            with self._times.spent(_UPDATE):
                self.piece.update()
            self._times.step_done()
        self._arrived = False

    def forget_step(self) -> None:
        """The step is rolled back: what is under way or has arrived for it is dropped."""
        self._under_way, self._arrived = None, False
        self.piece.forget()

    def seed(self) -> None:
        """Hand pieces to buddies that have none yet. A collective; end of rollback."""
        wanted = torch.tensor([0 if self.piece.held else 1], device=self.piece.device)
        asked = torch.empty_like(wanted)
        _wait(_batch(wanted, self.ward, asked, self.buddy))
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
        """Take the ward's piece part by part, and with each send one of `leaving`."""

        def arriving(size: int, dtype: torch.dtype) -> torch.Tensor:
            landing = torch.empty(size, dtype=dtype, device=self.piece.device)
            _wait(_batch(next(leaving, None), self.buddy, landing, self.ward))
            return landing

        length = arriving(1, torch.int64)
        header = arriving(int(length.item()), torch.uint8)
        shard = self.piece.accept(header.cpu().numpy().tobytes())
        for tensor in shard.tensors:
            if tensor.numel():
                tensor.copy_(arriving(tensor.numel(), tensor.dtype).view_as(tensor))
        self.piece.adopt(shard)


def _message(groups: Sequence[dict[str, Any]], device: torch.device) -> torch.Tensor:
    """Return rates and gradients as one run of bytes on the device: one message costs less than two."""
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
