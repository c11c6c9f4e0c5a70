"""A copy of another rank's optimizer piece, kept up to date by doing that rank's updates a second time.

A distributed optimizer with one instance has each piece of its state (main parameters, both moments) once. Each rank
then keeps the piece of a ward, the rank one node back. Not the state is sent in each step but the final gradients,
which are a third of it: they arrive before the commit barrier, and whoever passes it applies its own update and the
ward's. So a copy is always of the step that its holder has committed, and no second generation of anything has to be
kept. On one kind of device the same update of the same numbers gives the same bits.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...processor import tree
from ...processor.optimizer_state import OptimizerState
from ...processor.shard import Shard
from .shards import Piece, main_parameters


def piece_name(rank: int) -> str:
    """Return the name of the shard that is a rank's own optimizer piece."""
    return f"optimizer.rank{rank}"


class WardPiece:
    """The copy of the ward's piece: a shard like any other, and an optimizer of its own."""

    first = False

    def __init__(self, own: Piece) -> None:
        self._kinds = {name: type(leaf.optimizer) for name, leaf in own.leaves.items()}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._names: dict[str, list[list[str]]] = {}

    @property
    def held(self) -> bool:
        """Whether the copy is there."""
        return bool(self._optimizers)

    def open(self) -> Shard:
        """Open the copy, as a source for the ward, or to write it down."""
        parameters: dict[str, torch.Tensor] = {}
        states = {}
        for name, optimizer in self._optimizers.items():
            for names, group in zip(self._names[name], optimizer.param_groups, strict=True):
                parameters |= {key: p.detach() for key, p in zip(names, group["params"], strict=True)}
            states[name] = OptimizerState(name, optimizer).collect()
        content = {"parameters": parameters, "optimizers": states, "groups": self._names}
        return Shard(*tree.flatten(content, "ward"))

    def accept(self, header: bytes) -> Shard:
        """Make room for the ward's piece. What is there stays until `adopt`."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        return Shard(header, [torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in tree.slots(header)])

    def adopt(self, shard: Shard) -> None:
        """Make what has arrived the copy."""
        content = tree.unflatten(shard.header, shard.tensors)
        self._names = content["groups"]
        for name, kind in self._kinds.items():
            state = content["optimizers"][name]
            groups = [
                {**scalars, "params": [content["parameters"][key] for key in names]}
                for scalars, names in zip(state["groups"], self._names[name], strict=True)
            ]
            self._optimizers[name] = kind(groups)
            OptimizerState(name, self._optimizers[name]).adopt(state)

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield all param groups, in the order in which the ward has them."""
        for optimizer in self._optimizers.values():
            yield from optimizer.param_groups

    def update(self) -> None:
        """Do the ward's update."""
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


class Buddies:
    """The exchange of gradients around the ring: mine to my buddy, my ward's to me."""

    def __init__(self, own: Piece, rank: int, world_size: int, ranks_per_node: int) -> None:
        shift = ranks_per_node % world_size or 1
        self.buddy = (rank + shift) % world_size
        self.ward = (rank - shift) % world_size
        self.same_node = self.buddy // ranks_per_node == rank // ranks_per_node
        self.piece = WardPiece(own)
        self._own = own
        self._arrived = False

    @property
    def extra_bytes(self) -> int:
        """The memory that the copy takes on this rank, with the two gradient buffers of the exchange; an estimate."""
        elements = sum(parameter.numel() for parameter in main_parameters(self._own.leaves))
        return elements * 4 * (3 + 2)

    @property
    def sent_bytes(self) -> int:
        """What is sent to the buddy in each step."""
        return sum(parameter.numel() for parameter in main_parameters(self._own.leaves)) * 4

    def exchange(self) -> None:
        """Send this step's final gradients and rates, and take the ward's. Before the commit barrier, on all ranks."""
        mine = [group for leaf in self._own.leaves.values() for group in leaf.optimizer.param_groups]
        wards = list(self.piece.groups())
        gradients = [p.grad.reshape(-1) for group in mine for p in group["params"]]
        parameters = [p for group in wards for p in group["params"]]
        flat = torch.cat(gradients)
        taken = flat.new_empty(sum(p.numel() for p in parameters))
        rates = torch.tensor([[group["lr"], group["weight_decay"]] for group in mine], dtype=torch.float64)
        their_rates = torch.empty((len(wards), 2), dtype=torch.float64)
        for outgoing, incoming in ((rates, their_rates), (flat, taken)):
            _swap(outgoing, self.buddy, incoming, self.ward)
        pieces = torch.split(taken, [p.numel() for p in parameters])
        for parameter, gradient in zip(parameters, pieces, strict=True):
            parameter.grad = gradient.view_as(parameter)
        for group, (rate, decay) in zip(wards, their_rates.tolist(), strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        self._arrived = True

    def update(self) -> None:
        """Do the ward's update of this step. In the update, after the commit barrier."""
        if self._arrived:
            self.piece.update()
        self._arrived = False

    def forget_step(self) -> None:
        """The step is rolled back: what has arrived for it is dropped."""
        self._arrived = False
        for group in self.piece.groups():
            for parameter in group["params"]:
                parameter.grad = None

    def seed(self) -> None:
        """Hand pieces to buddies that have none yet. A collective; end of rollback."""
        wanted = torch.tensor([0 if self.piece.held else 1])
        asked = torch.empty_like(wanted)
        _swap(wanted, self.ward, asked, self.buddy)
        sends: list[Any] = []
        if asked.item():
            shard = self._own.open()
            header = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
            sends.append(dist.isend(torch.tensor([header.numel()]), self.buddy))
            sends += [dist.isend(tensor, self.buddy) for tensor in (header, *shard.tensors) if tensor.numel()]
        if wanted.item():
            self._receive()
        for send in sends:
            send.wait()

    def _receive(self) -> None:
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, self.ward)
        header = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.recv(header, self.ward)
        shard = self.piece.accept(header.numpy().tobytes())
        for tensor in shard.tensors:
            if tensor.numel():
                dist.recv(tensor, self.ward)
        self.piece.adopt(shard)


def _swap(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    send = dist.isend(outgoing, to)
    receive = dist.irecv(incoming, source)
    assert send is not None
    assert receive is not None
    receive.wait()
    send.wait()
