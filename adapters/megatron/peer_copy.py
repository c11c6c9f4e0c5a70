"""The copy of another rank's piece of a distributed optimizer: main parameters and both moments.

A distributed optimizer with one instance has each piece of its state once (`adapters/buddies.py`). A copy is an
optimizer of its own, in device or in host memory. In host memory it takes no device memory beyond a stretch of it at a
time. The update is still done by the device, since a host's would not give the same bits: each stretch is copied there,
updated, and copied back.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...processor import tree
from ...processor.optimizer_state import OptimizerState
from ...processor.shard import Shard
from .shards import ShardParts, main_parameters

_RATES = ("lr", "weight_decay")  # of a param group: what a scheduler changes between steps
_RATE_BYTES = len(_RATES) * 8
_STRETCH_BYTES = 64 << 20  # of parameters that are on the device at once, their state beside them
_COPY_BYTES, _TRAFFIC_BYTES = 12, 8  # of an element: parameter and moments; gradients that leave and arrive
_PARAMS = "params"
_CPU = torch.device("cpu")


def piece_name(rank: int) -> str:
    """Return the name of the shard that is a rank's own optimizer piece."""
    return f"optimizer.rank{rank}"


class PeerCopy:
    """The copy of another rank's piece in device memory: a shard like any other. Its owner is the copied rank."""

    first = False

    def __init__(self, own: ShardParts, device: torch.device) -> None:
        self.device = device  # of the model, and of what the owner sends
        self._own = own
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

    @property
    def elements(self) -> int:
        """The number of elements of this rank's own piece; its peer copy is about as large."""
        return sum(parameter.numel() for parameter in main_parameters(self._own.leaves.values()))

    @property
    def sent_bytes(self) -> int:
        """The bytes that are sent to the buddy in each step."""
        return sum(parameter.nbytes for parameter in main_parameters(self._own.leaves.values()))

    @property
    def arriving_bytes(self) -> int:
        """The size of the message that the copied rank sends in each step."""
        return sum(_RATE_BYTES for _ in self.groups()) + sum(parameter.nbytes for parameter in self.parameters())

    def message(self) -> list[torch.Tensor]:
        """Return rates and gradients of this rank's own piece."""
        groups = [group for leaf in self._own.leaves.values() for group in leaf.optimizer.param_groups]
        rates = [[group[rate] for rate in _RATES] for group in groups]
        flat = torch.tensor(rates, dtype=torch.float64, device=self.device).view(-1)
        gradients = [parameter.grad.reshape(-1) for group in groups for parameter in group[_PARAMS]]
        return [each.view(torch.uint8) for each in (flat, *gradients)]

    def take(self, message: torch.Tensor) -> None:
        """Set the owner's rates, and keep its gradients of this step until `update` or `forget`."""
        groups, parameters = list(self.groups()), self.parameters()
        rates = message[: len(groups) * _RATE_BYTES].cpu().view(torch.float64).view(-1, len(_RATES))
        for group, values in zip(groups, rates.tolist(), strict=True):
            group.update(zip(_RATES, values, strict=True))
        sizes = [parameter.nbytes for parameter in parameters]
        pieces = torch.split(message[len(groups) * _RATE_BYTES :], sizes) if sizes else ()
        self._gradients = [flat.view(each.dtype).view_as(each) for flat, each in zip(pieces, parameters, strict=True)]

    def update(self, name: str = "") -> bool:
        """Apply the owner's update with the gradients that were taken. In the update, after the commit barrier."""
        for parameter, gradient in zip(self.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self._gradients = []
        return True

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

    def update(self, name: str = "") -> bool:
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
        return True

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
        return torch.empty(slot.shape, dtype=slot.dtype, pin_memory=self._pinned, device=_CPU)


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
        entries[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned, device=_CPU)
    entries[key].copy_(value, non_blocking=True)
