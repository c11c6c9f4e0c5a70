"""The state of a sharded model as midstep's shards: one for each set of ranks that hold the same pieces.

Which ranks those are follows from a parameter's own mesh and placements: they differ in dimensions of the mesh in which
the parameter is replicated, and agree in all others. So FSDP on one dimension gives a shard that one rank holds, HSDP
one that a rank of each replica holds, and a parameter that is not sharded one that all hold.
"""

import copy
import hashlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ...processor.framework import ModelReplica
from ...processor.optimizer_state import OptimizerState
from ...processor.registry import Registry
from ...processor.shard_layout import Extent
from ...protocol.errors import UnsupportedState
from ..ddp.replicated_state import ReplicatedState
from .compatibility import offsets_of

_MOST_NAMED = 4  # ranks in the name of a shard
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
Ranks = tuple[int, ...]
ByModule = dict[str, dict[str, torch.Tensor]]  # parameters by the name of the module and their own


class Piece(ReplicatedState):
    """One shard: the pieces of some parameters, and what optimizers keep for them. The same on all of its `ranks`."""

    held = True

    def __init__(self, ranks: Ranks, parameters: ByModule, registry: Registry, synced_buffers: frozenset[str]) -> None:
        """Make the shard of `parameters`, as they are registered with the optimizers."""
        self.ranks = ranks
        self._sharded = parameters
        mine = [parameter for named in parameters.values() for parameter in named.values()]
        optimizers = {name: ShardedOptimizerState(name, each, mine) for name, each in registry.optimizers.items()}
        super().__init__(registry, synced_buffers, optimizers)

    @property
    def writer(self) -> int:
        """The rank that writes it into checkpoints."""
        return self.ranks[0]

    @property
    def registered(self) -> ByModule:
        """The parameters, as they are registered with the optimizers."""
        return self._sharded

    def meshes(self) -> list[Any]:
        """Return the device meshes on which its parameters are sharded."""
        sharded = [each for named in self._sharded.values() for each in named.values() if isinstance(each, DTensor)]
        return list({id(each.device_mesh): each.device_mesh for each in sharded}.values())

    @property
    def mesh_ranks(self) -> Ranks:
        """The ranks that are on the meshes of all of its parameters."""
        found = [set(mesh.mesh.flatten().tolist()) for mesh in self.meshes()]
        return tuple(sorted(set.intersection(*found))) if found else ()

    def versions(self) -> int:
        """Return a number that is another one when a parameter was written to."""
        return sum(each._version + local(each)._version for named in self._sharded.values() for each in named.values())

    def extent_of(self, parameter: torch.Tensor, also: tuple[str, ...]) -> Extent:
        """Return where this rank's piece of a parameter lies in the whole of it."""
        if not isinstance(parameter, DTensor):
            return super().extent_of(parameter, also)
        return Extent(tuple(parameter.shape), offsets_of(parameter), sharded=True, also=also)

    def _registered(self) -> ByModule:
        return self._sharded

    def _parameters(self) -> ByModule:
        return {name: {path: local(each) for path, each in named.items()} for name, named in self._sharded.items()}


def find_pieces(
    modules: Mapping[str, torch.nn.Module], registry: Registry, synced_buffers: frozenset[str]
) -> dict[str, Piece]:
    """Return the shards that this rank holds, by name. While nothing is gathered: between two steps.

    Raises UnsupportedState for a buffer that is sharded, and for a parameter whose sum over ranks is outstanding.
    """
    by_holders: dict[Ranks, ByModule] = {}
    for name, module in modules.items():
        for path, buffer in module.named_buffers():
            if isinstance(buffer, DTensor):
                raise UnsupportedState(f"{name}.{path} is a sharded buffer; only parameters may be sharded")
        for path, parameter in module.named_parameters():
            holders = holders_of(parameter, f"{name}.{path}")
            by_holders.setdefault(holders, {}).setdefault(name, {})[path] = parameter
    return {
        shard_name(ranks): Piece(ranks, parameters, registry, synced_buffers)
        for ranks, parameters in by_holders.items()
    }


def holders_of(parameter: torch.Tensor, place: str) -> Ranks:
    """Return the ranks that hold the same piece of a parameter as this one."""
    if not isinstance(parameter, DTensor):
        return tuple(range(dist.get_world_size()))
    mesh, here = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    if here is None or any(placement.is_partial() for placement in parameter.placements):
        raise UnsupportedState(f"{place} is {parameter.placements} on {mesh}: this rank has no piece of it of its own")
    return _ranks_along(parameter, replicated=True)


def find_replica(modules: Iterable[torch.nn.Module]) -> ModelReplica | None:
    """Return the ranks that hold one copy of all parameters together, and those that hold what this rank holds.

    None if there is one copy only, or if these are not all ranks of the job: with a pipeline, say.
    """
    sharded = [each for module in modules for each in module.parameters() if isinstance(each, DTensor)]
    if not sharded:
        return None
    # What tensor parallel ranks hold whole has more holders than there are replicas, or is on a mesh without them.
    found = [ModelReplica(*(_ranks_along(each, replicated=way) for way in (False, True))) for each in sharded]
    replica = min(found, key=lambda each: (len(each.peers), -len(each.members)))
    whole = len(replica.members) * len(replica.peers) == dist.get_world_size()
    same = all(set(replica.peers) <= set(each.peers) for each in found)
    return replica if whole and same and len(replica.peers) > 1 else None


def _ranks_along(parameter: DTensor, *, replicated: bool) -> Ranks:
    """Return the ranks that differ from this one only in dimensions of the mesh in which a parameter is replicated.

    Otherwise: only in those in which it is not.
    """
    here, ranks = parameter.device_mesh.get_coordinate(), parameter.device_mesh.mesh
    assert here is not None
    for dimension in reversed(range(parameter.device_mesh.ndim)):
        if parameter.placements[dimension].is_replicate() is not replicated:
            ranks = ranks.select(dimension, here[dimension])
    return tuple(sorted(ranks.flatten().tolist()))


def shard_name(ranks: Ranks) -> str:
    """Return a name by which all holders know their shard; short for any number of them."""
    if len(ranks) <= _MOST_NAMED:
        return "sharded.rank" + "-".join(map(str, ranks))
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=6).hexdigest()
    return f"sharded.rank{ranks[0]}-and-{len(ranks) - 1}-more.{digest}"


class RankLayout(NamedTuple):
    """The ranks of the job, and how many of them a node has."""

    world_size: int
    ranks_per_node: int

    def findings(self, pieces: Mapping[str, Ranks]) -> tuple[str, ...]:
        """Return one sentence for each shard of this rank that the loss of one node would take away."""
        return tuple(sentence for ranks in pieces.values() if (sentence := self._finding(ranks)) is not None)

    def _finding(self, ranks: Ranks) -> str | None:
        if len(ranks) == 1 < self.world_size:
            return (
                f"only rank {ranks[0]} holds its pieces of parameters and optimizer state: if it is lost, all ranks go "
                "back to a checkpoint, or to copies in host memory, which `restore: [replica, host_copy, checkpoint]` "
                "in the policy asks for (on two nodes each with `host_copy: {copies: 2}`). A mesh of two dimensions "
                "(HSDP) has a copy of every piece in each of its rows"
            )
        nodes = {rank // self.ranks_per_node for rank in ranks}
        if len(nodes) == 1 and self.world_size > self.ranks_per_node:
            return (
                f"all copies of the pieces that ranks {', '.join(map(str, ranks))} hold are on one node: if it is "
                "lost, all ranks go back to a checkpoint. Order the mesh so that its rows (the dimension that "
                "replicates) are on different nodes"
            )
        return None


def local(tensor: Any) -> Any:
    """Return this rank's piece of a sharded tensor, not copied; anything else as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class ShardedOptimizerState(OptimizerState):
    """The pieces that an optimizer keeps for the parameters of one shard. The optimizer may have others, too.

    Moments are sharded as their parameter is, and travel as plain tensors. Parameters are named by their position.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        super().__init__(name, optimizer)
        self._ids = {id(parameter) for parameter in parameters}

    def collect(self) -> dict[str, Any]:
        """Return the pieces as a plain structure of live tensors. Raises UnsupportedState for one cut otherwise."""
        content, parameters = super().collect(), self._parameters()
        state: dict[int, dict[str, Any]] = {}
        sharded: list[tuple[int, str]] = []
        for position, entries in content["state"].items():
            parameter = parameters[position]
            if id(parameter) not in self._ids:
                continue
            state[position] = {key: local(value) for key, value in entries.items()}
            for key, value in entries.items():
                if isinstance(value, DTensor):
                    self._check_cut(parameter, value, f"state[{position}].{key}")
                    sharded.append((position, key))
        on_host = [place for place in content["on_host"] if place[0] in state]
        return {**content, "state": state, "on_host": on_host, "sharded": sharded}

    def _check_cut(self, parameter: torch.Tensor, value: DTensor, place: str) -> None:
        same_cut = isinstance(parameter, DTensor) and value.placements == parameter.placements
        if not same_cut or value.shape != parameter.shape:
            raise UnsupportedState(
                f"{self._name}.{place} is sharded as {value.placements} with shape {list(value.shape)}, unlike its "
                "parameter; only state that is cut as its parameter can be carried"
            )

    def _entries(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {key: local(value) for key, value in super()._entries(parameter).items()}

    def _take(self, content: dict[str, Any]) -> None:
        kept, parameters = self._optimizer.state, self._parameters()
        sharded = set(map(tuple, content["sharded"]))
        for parameter in parameters:
            if id(parameter) in self._ids:
                kept.pop(parameter, None)
        for position, entries in content["state"].items():
            parameter = parameters[position]
            kept[parameter] = {
                key: _as_sharded(parameter, value) if (position, key) in sharded else value
                for key, value in entries.items()
            }


def _as_sharded(parameter: Any, piece: torch.Tensor) -> DTensor:
    """Return a piece as a tensor that is sharded like its parameter. No collective."""
    sharded: DTensor = DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded


def rehearse_update(optimizer: torch.optim.Optimizer) -> str:
    """Do one update of stand-ins without memory, cut as the parameters are; return why it could not be done, or "".

    The first operation of each kind and shape on sharded tensors has torch work out how its result is sharded, which
    each thread then remembers. For a first update that takes longer than the update itself. Neither the optimizer nor
    its hooks are touched. Only for optimizers of which it is known that they do nothing but arithmetic on elements.
    """
    kind = type(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if kind not in ELEMENTWISE:
        return f"a {kind.__name__} may do more than arithmetic on elements"
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return "on a device updates are of all parameters at once, which stand-ins without memory are not"
    stand_in = copy.copy(optimizer)
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [
        {**group, "params": [_stand_in(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    try:
        with torch.no_grad():
            inspect.unwrap(kind.step)(stand_in)  # without what surrounds it: hooks, and the mode of gradients
    except Exception as error:  # whatever it is, the first update does without
        return f"{type(error).__name__}: {error}"
    return ""


def _stand_in(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter like this one, with a gradient if it trains, and no memory behind either."""
    stand_in, gradient = (_without_memory(parameter) for _ in range(2))
    made = torch.nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
    made.grad = gradient if parameter.requires_grad else None
    return made


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    piece = torch.empty_like(local(parameter), device="meta")
    return _as_sharded(parameter, piece) if isinstance(parameter, DTensor) else piece
