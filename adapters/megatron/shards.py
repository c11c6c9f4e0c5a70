"""Megatron's state as shards: what is replicated over which ranks, under names that replicas share.

Parameters of one tensor and pipeline coordinate are the same on all ranks of its data and context parallel group;
experts, over the expert data parallel group. With a plain optimizer so is the optimizer's state. A distributed one
cuts its state over the ranks of one optimizer instance; each further instance holds a copy of each piece. The model's
parameters are no shard then: they follow from the pieces by a copy and a gather (`derive_parameters`).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...processor import tree
from ...processor.framework import ModelReplica
from ...processor.optimizer_state import OptimizerState
from ...processor.shard import Shard
from ...protocol.errors import RecoveryError
from .compatibility import EARLIER_NAMES
from .parts import Parts, bucket_groups
from .rank_order import Sizes, find_members


class ShardParts:
    """The contents of one shard: parameters of the model, and optimizers with the parameters that they update.

    `first`: of all ranks that hold it, this one writes it into checkpoints.
    """

    def __init__(self, parameters: dict[str, torch.Tensor], leaves: dict[str, Any], *, first: bool) -> None:
        self.first = first
        self.leaves = leaves
        self._states = {name: OptimizerState(name, leaf.optimizer) for name, leaf in leaves.items()}
        known = {id(parameter) for parameter in parameters.values()}
        self._parameters = dict(parameters)
        self._groups: dict[str, list[list[str]]] = {}
        for name, leaf in leaves.items():
            self._groups[name] = []
            for index, group in enumerate(leaf.optimizer.param_groups):
                mains = {f"{name}.main.{index}.{i}": p for i, p in enumerate(group["params"])}
                self._groups[name].append(list(mains))
                self._parameters |= {place: p for place, p in mains.items() if id(p) not in known}

    def open(self) -> Shard:
        """Open the live tensors, to send from them."""
        content = {
            "parameters": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "optimizers": {name: state.collect() for name, state in self._states.items()},
            "groups": self._groups,
        }
        skeleton, tensors = tree.flatten(content, "shard")
        return Shard(skeleton, [tensor.contiguous() for tensor in tensors])

    def accept(self, header: bytes) -> Shard:
        """Return the tensors that receive a shard. Raises RecoveryError when it does not fit the live ones."""
        outline = tree.outline(header)
        if outline["parameters"].keys() != self._parameters.keys():
            raise RecoveryError(
                "the parameters of a shard differ between ranks; do all ranks build the same model and optimizer?"
            )
        slots = tree.slots(header)
        tensors: list[torch.Tensor | None] = [None] * len(slots)
        for name, slot in outline["parameters"].items():
            live = self._parameters[name].data
            if live.shape != slot.shape or live.dtype != slot.dtype:
                raise RecoveryError(
                    f"{name} arrives as {slot.dtype} {list(slot.shape)}, but here it is {live.dtype} "
                    f"{list(live.shape)}; do all ranks build the same model?"
                )
            tensors[slot.index] = live if live.is_contiguous() else torch.empty_like(live).contiguous()
        for name, state in self._states.items():
            for _, slot, held, device in state.targets(outline["optimizers"][name]):
                fits = held is not None and held.is_contiguous()
                tensors[slot.index] = held if fits else torch.empty(slot.shape, dtype=slot.dtype, device=device)
        filled = [
            torch.empty(slot.shape, dtype=slot.dtype, device="cpu") if tensor is None else tensor
            for slot, tensor in zip(slots, tensors, strict=True)
        ]
        return Shard(header, filled)

    def adopt(self, shard: Shard) -> None:
        """Make a received shard the state of this rank."""
        content = tree.unflatten(shard.header, shard.tensors)
        for name, parameter in self._parameters.items():
            arrived = content["parameters"][name]
            if arrived.data_ptr() != parameter.data_ptr():
                parameter.data.copy_(arrived)
        for name, state in self._states.items():
            state.adopt(content["optimizers"][name])


def find_pieces(parts: Parts, *, alone: str | None) -> dict[str, ShardParts]:
    """Return the shards that this rank must hold, by name.

    `alone`: the name for everything of distributed optimizers, where no other rank holds the same pieces.
    """
    names = {id(p): f"model{i}.{name}" for i, chunk in enumerate(parts.chunks) for name, p in chunk.named_parameters()}
    models = [p for chunk in parts.chunks for p in chunk.parameters()]
    pieces: dict[str, ShardParts] = {}
    lonely: dict[str, Any] = {}
    for place, expert in ((_dense_place(), False), (_expert_place(), True)):
        leaves = {f"optimizer{i}": leaf for i, leaf in enumerate(parts.leaves) if _is_expert(leaf) is expert}
        cut = {name: leaf for name, leaf in leaves.items() if is_distributed(leaf)}
        whole = {name: leaf for name, leaf in leaves.items() if name not in cut}
        covered = {id(p) for leaf in cut.values() for p in _model_parameters(leaf)}
        mine = {
            names[id(p)]: p for p in models if (not getattr(p, "allreduce", True)) is expert and id(p) not in covered
        }
        if mine or whole:
            pieces[place] = ShardParts(mine, whole, first=_replicas(expert).rank() == 0)
        if alone is not None:
            lonely |= cut
        elif cut:
            leaf = next(iter(cut.values()))
            group, first = leaf.data_parallel_group, leaf.distributed_optimizer_instance_id == 0
            pieces[f"{place}.piece{group.rank()}of{group.size()}"] = ShardParts({}, cut, first=first)
    if alone is not None and lonely:
        pieces[alone] = ShardParts({}, lonely, first=True)
    return pieces


def replica_ranks(parts: Parts) -> dict[str, list[int]]:
    """Return the ranks that hold the same as this one, by a name for what they hold."""
    held = {}
    for leaf in parts.leaves:
        what = "experts" if _is_expert(leaf) else "dense parameters"
        group = _replicas(_is_expert(leaf))
        if is_distributed(leaf):
            what = f"the optimizer piece of {what}"
            group = _between_instances()
        held[what] = dist.get_process_group_ranks(group)
    return held


def sizes(parts: Parts) -> Sizes:
    """Return how many ways each kind of parallelism has."""
    cut = any(is_distributed(leaf) for leaf in parts.leaves)
    return _sizes(instances=parts.chunks[0].ddp_config.num_distributed_optimizer_instances if cut else 0)


def _sizes(instances: int) -> Sizes:
    from megatron.core import parallel_state as ps

    return Sizes(
        tensor=ps.get_tensor_model_parallel_world_size(),
        context=ps.get_context_parallel_world_size(),
        pipeline=ps.get_pipeline_model_parallel_world_size(),
        data=ps.get_data_parallel_world_size(),
        expert=ps.get_expert_model_parallel_world_size(),
        expert_tensor=ps.get_expert_tensor_parallel_world_size(),
        expert_data=ps.get_expert_data_parallel_world_size(),
        instances=instances,
    )


def find_replica() -> ModelReplica | None:
    """Return the ranks that hold one copy of the model, and those that have this rank's place in the other copies.

    With expert parallelism a copy has as many data parallel ranks as experts are spread over. None: there is one copy,
    or its ranks are not counted in an order that is known.
    """
    from megatron.core import parallel_state as ps

    experts = ps.get_expert_model_parallel_world_size() > 1
    between = ps.get_expert_data_parallel_group() if experts else ps.get_data_parallel_group()
    inside = [
        ps.get_tensor_model_parallel_group(),
        ps.get_context_parallel_group(),
        ps.get_pipeline_model_parallel_group(),
        ps.get_expert_model_parallel_group(),
    ]
    peers = tuple(sorted(dist.get_process_group_ranks(between)))
    together = {rank for group in inside for rank in dist.get_process_group_ranks(group)}
    members = find_members(_sizes(instances=0), dist.get_rank(), peers, together)
    return ModelReplica(members, peers) if members and len(peers) > 1 else None


def derive_parameters(parts: Parts) -> None:
    """Copy and gather parameters from the pieces of distributed optimizers. A collective; end of rollback."""
    if not any(is_distributed(leaf) for leaf in parts.leaves):
        return
    for leaf in parts.leaves:
        leaf._copy_main_params_to_model_params()
    for chunk in parts.chunks:
        type(chunk).start_param_sync(chunk, force_sync=True)
    for group in bucket_groups(parts):
        group.param_gather_dispatched = False


def main_parameters(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the parameters that optimizers update, in their order."""
    for leaf in leaves:
        for group in leaf.optimizer.param_groups:
            yield from group["params"]


def is_distributed(leaf: Any) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(leaf, DistributedOptimizer)


def _is_expert(leaf: Any) -> bool:
    return any(group.get("is_expert_parallel") for group in leaf.optimizer.param_groups)


def _model_parameters(leaf: Any) -> list[torch.Tensor]:
    """Return all model parameters that a distributed optimizer is responsible for, of this and of other ranks."""
    return [parameter for buffer in leaf.buffers for parameter in buffer.params]


def _replicas(expert: bool) -> Any:
    """Return the group of the ranks that hold the same parameters."""
    from megatron.core import parallel_state as ps

    return ps.get_expert_data_parallel_group() if expert else ps.get_data_parallel_group(with_context_parallel=True)


def _between_instances() -> Any:
    """Return the group of the ranks that hold the same piece, one in each instance of a distributed optimizer."""
    from megatron.core import parallel_state as ps

    name = "get_inter_distributed_optimizer_instance_group"
    return getattr(ps, name if hasattr(ps, name) else EARLIER_NAMES[name])()


def _dense_place() -> str:
    from megatron.core import parallel_state as ps

    return f"dense.tp{ps.get_tensor_model_parallel_rank()}.pp{ps.get_pipeline_model_parallel_rank()}"


def _expert_place() -> str:
    from megatron.core import parallel_state as ps

    return (
        f"expert.tp{ps.get_expert_tensor_parallel_rank()}.ep{ps.get_expert_model_parallel_rank()}"
        f".pp{ps.get_pipeline_model_parallel_rank()}"
    )
