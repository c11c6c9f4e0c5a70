"""A copy of another rank's optimizer piece, kept up to date by doing that rank's updates a second time.

A distributed optimizer with one instance has each piece of its state (main parameters, both moments) once. So each rank
keeps a peer copy: the piece of the rank one node back, of which it is the buddy. In each step the final gradients are
sent, not the state, which is three times as large: they arrive before the commit barrier, and a rank that passes it
applies its own update and the peer copy's. So a copy is always of the step that its holder has committed, and nothing
has to be kept twice. On one kind of device the same update of the same numbers gives the same bits.

A copy is an optimizer of its own, in device or in host memory. In host memory it takes no device memory beyond a
stretch of it at a time. The update is still done by the device, since a host's would not give the same bits: each
stretch is copied there, updated, and copied back.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...processor import tree
from ...processor.optimizer_state import OptimizerState
from ...processor.shard import Shard
from .shards import ShardParts, main_parameters

_RATES = ("lr", "weight_decay")  # of a param group: what a scheduler changes between steps
_RATE_BYTES = len(_RATES) * 8
_GRADIENTS, _UPDATE = "waiting for gradients", "the peer copy's update"
_STEPS = 10  # that are measured, after one that warms up
_STRETCH_BYTES = 64 << 20  # of parameters that are on the device at once, their state beside them
_COPY_BYTES, _TRAFFIC_BYTES = 12, 8  # of an element: parameter and moments; gradients that leave and arrive
_PARAMS = "params"
_CPU = torch.device("cpu")


def piece_name(rank: int) -> str:
    """Return the name of the shard that is a rank's own optimizer piece."""
    return f"optimizer.rank{rank}"


class Buddies:
    """Exchanges gradients around the ring: a rank sends its own to its buddy, and receives those of its peer copy."""

    def __init__(self, own: ShardParts, peer_copy: "PeerCopy", rank: int, world_size: int, ranks_per_node: int) -> None:
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
        return sum(parameter.numel() for parameter in main_parameters(self._own.leaves.values()))

    @property
    def sent_bytes(self) -> int:
        """The bytes that are sent to the buddy in each step."""
        return sum(parameter.nbytes for parameter in main_parameters(self._own.leaves.values()))

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


class PeerCopy:
    """The copy of another rank's piece in device memory: a shard like any other. Its owner is the copied rank."""

    first = False

    def __init__(self, own: ShardParts, device: torch.device) -> None:
        self.device = device  # of the model, and of what the owner sends
        self._kinds = {name: type(leaf.optimizer) for name, leaf in own.leaves.items()}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._names: dict[str, list[list[str]]] = {}
        self._on_host: dict[str, Any] = {}  # what of an optimizer's state its owner keeps in host memory
        self._gradients: list[torch.Tensor] = []

    @property
    def held(self) -> bool:
        """True once the copy is there."""
        return bool(self._optimizers)

    def open(self) -> Shard:
        """Open the copy, to send it to its owner or to write it into a checkpoint."""
        parameters: dict[str, torch.Tensor] = {}
        states = {}
        for name, optimizer in self._optimizers.items():
            for names, group in zip(self._names[name], optimizer.param_groups, strict=True):
                parameters |= {key: p.detach() for key, p in zip(names, group[_PARAMS], strict=True)}
            states[name] = {**OptimizerState(name, optimizer).collect(), "on_host": self._on_host[name]}
        content = {"parameters": parameters, "optimizers": states, "groups": self._names}
        return Shard(*tree.flatten(content, "peer copy"))

    def accept(self, header: bytes) -> Shard:
        """Return the tensors that receive the owner's piece. The present copy stays until `adopt`."""
        return Shard(header, [self._room(slot) for slot in tree.slots(header)])

    def adopt(self, shard: Shard) -> None:
        """Make the received piece the copy."""
        content = tree.unflatten(shard.header, shard.tensors)
        self._names = content["groups"]
        for name, kind in self._kinds.items():
            state = content["optimizers"][name]
            groups = [
                {**scalars, _PARAMS: [content["parameters"][key] for key in names]}
                for scalars, names in zip(state["groups"], self._names[name], strict=True)
            ]
            self._optimizers[name] = kind(groups)
            self._on_host[name] = state["on_host"]
            OptimizerState(name, self._optimizers[name]).adopt(state)

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield all param groups, in the owner's order."""
        for optimizer in self._optimizers.values():
            yield from optimizer.param_groups

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters, in the owner's order."""
        return [parameter for group in self.groups() for parameter in group[_PARAMS]]

    def take(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keep the owner's gradients of this step, one for each parameter, until `update` or `forget`."""
        self._gradients = list(gradients)

    def update(self) -> None:
        """Apply the owner's update with the gradients that were taken. In the update, after the commit barrier."""
        for parameter, gradient in zip(self.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self._gradients = []

    def forget(self) -> None:
        """Drop gradients of a step that is rolled back."""
        self._gradients = []
        for parameter in self.parameters():
            parameter.grad = None

    def memory(self, elements: int) -> tuple[int, int]:
        """Return the bytes that a copy of so many elements takes on the device and on the host; an estimate.

        Gradients that leave and arrive are on the device in both cases, for the length of an update.
        """
        return elements * (_COPY_BYTES + _TRAFFIC_BYTES), 0

    def _room(self, slot: tree.TensorSlot) -> torch.Tensor:
        return torch.empty(slot.shape, dtype=slot.dtype, device=self.device)


class HostPeerCopy(PeerCopy):
    """The copy in host memory, pinned where there is a device. Between updates nothing of it is on the device."""

    def update(self) -> None:
        """Apply the owner's update on the device, a stretch of parameters at a time.

        The copies are queued on the device's stream like the update itself; the end of the update waits for all.
        """
        gradients = iter(self._gradients)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                scalars = {key: value for key, value in group.items() if key != _PARAMS}
                after = scalars
                for stretch in _stretches(group[_PARAMS]):
                    after = self._update_stretch(optimizer, scalars, stretch, [next(gradients) for _ in stretch])
                group.update(after)  # some optimizers count their steps in the group
        self._gradients = []

    def _update_stretch(
        self,
        optimizer: torch.optim.Optimizer,
        scalars: dict[str, Any],
        stretch: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> dict[str, Any]:
        """Update some parameters of a group; return what the group's scalars are after the update."""
        on_device = [parameter.detach().to(self.device, non_blocking=True, copy=True) for parameter in stretch]
        kind: Any = type(optimizer)
        worker: torch.optim.Optimizer = kind([{**scalars, _PARAMS: on_device}])
        for kept, moved, gradient in zip(stretch, on_device, gradients, strict=True):
            moved.grad = gradient
            entries = optimizer.state.get(kept, {})
            if entries:
                worker.state[moved] = {key: self._moved(value) for key, value in entries.items()}
        worker.step()
        for kept, moved in zip(stretch, on_device, strict=True):
            kept.detach().copy_(moved.detach(), non_blocking=True)
            entries = optimizer.state[kept]
            for key, value in worker.state[moved].items():
                _put(entries, key, value, pinned=self._pinned)
        return {key: value for key, value in worker.param_groups[0].items() if key != _PARAMS}

    def memory(self, elements: int) -> tuple[int, int]:
        """Return the bytes on the device, gradients and one stretch, and on the host; an estimate."""
        stretch = min(elements * _COPY_BYTES, _STRETCH_BYTES * _COPY_BYTES // 4)
        return elements * _TRAFFIC_BYTES + stretch, elements * _COPY_BYTES

    @property
    def _pinned(self) -> bool:
        return self.device.type != _CPU.type

    def _moved(self, value: Any) -> Any:
        if not _is_staged(value):
            return value
        return value.to(self.device, non_blocking=True, copy=True)

    def _room(self, slot: tree.TensorSlot) -> torch.Tensor:
        return torch.empty(slot.shape, dtype=slot.dtype, pin_memory=self._pinned)


def _stretches(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters in their order, so many at a time as fit; a larger one alone."""
    stretch: list[torch.Tensor] = []
    for parameter in parameters:
        if stretch and sum(each.nbytes for each in stretch) + parameter.nbytes > _STRETCH_BYTES:
            yield stretch
            stretch = []
        stretch.append(parameter)
    if stretch:
        yield stretch


def _is_staged(value: Any) -> bool:
    """Return whether `value` goes to the device with its parameter. A count of steps stays on the host."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _put(entries: dict[str, Any], key: str, value: Any, *, pinned: bool) -> None:
    if not _is_staged(value):
        entries[key] = value
        return
    if key not in entries:  # the first update makes the moments
        entries[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
    entries[key].copy_(value, non_blocking=True)
