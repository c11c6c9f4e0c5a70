"""Find what a Megatron train function trains with: Megatron's own objects among its arguments.

Users need not register what Megatron already knows. What is not found is named in an error.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...protocol.errors import ConfigurationError

ITERATION = "iteration"
CONSUMED = ("consumed_samples", "consumed_train_samples")
_DEPTH = 2  # a list of model chunks, a list of data iterators


@dataclasses.dataclass(frozen=True)
class Parts:
    """The objects that a train function trains with. `iterators`: by argument name. `first`: the first iteration."""

    chunks: tuple[Any, ...]
    optimizer: Any
    scheduler: Any
    iterators: dict[str, Any]
    first: int
    consumed_name: str | None
    first_consumed: int

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The optimizers behind a chained one, without stubs."""
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return tuple(leaf for leaf in chained if not getattr(leaf, "is_stub_optimizer", False))


def find_parts(train: Callable[..., Any], arguments: Mapping[str, Any]) -> Parts:
    """Find everything among the arguments of a call of `train`, and in its closure.

    Raises ConfigurationError naming all that is missing.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from torch.optim.lr_scheduler import LRScheduler

    candidates = {**inspect.getclosurevars(train).nonlocals, **arguments}
    chunks = tuple(_of_kind(DistributedDataParallel, candidates))
    optimizers = tuple(_of_kind(MegatronOptimizer, candidates))
    schedulers = tuple(_of_kind((OptimizerParamScheduler, LRScheduler), candidates))
    missing = []
    if not chunks:
        missing.append("the model (megatron.core.distributed.DistributedDataParallel, or a list of them)")
    if len(optimizers) != 1:
        missing.append(f"one optimizer of get_megatron_optimizer (there are {len(optimizers)})")
    if len(schedulers) > 1:
        missing.append(f"at most one learning rate scheduler (there are {len(schedulers)})")
    first = arguments.get(ITERATION)
    if not isinstance(first, int):
        missing.append(f"an argument `{ITERATION}` (int): where the function begins, also after a recovery")
    if missing:
        raise ConfigurationError(
            f"{train.__name__}({', '.join(arguments)}) cannot be made resilient. Among its arguments there must be: "
            + "; ".join(missing)
        )
    consumed = next((name for name in CONSUMED if name in arguments), None)
    return Parts(
        chunks=chunks,
        optimizer=optimizers[0],
        scheduler=schedulers[0] if schedulers else None,
        iterators={name: item for name, item in arguments.items() if _is_data(name, item)},
        first=int(first or 0),
        consumed_name=consumed,
        first_consumed=int(arguments[consumed] or 0) if consumed else 0,
    )


def bucket_groups(parts: Parts) -> list[Any]:
    """Return DDP's bucket groups, of dense and of expert parameters."""
    return [group for chunk in parts.chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]


def flat_buffers(parts: Parts) -> list[Any]:
    """Return DDP's buffers of gradients, and of parameters if they are gathered, of dense and of expert parameters."""
    return [buffer for chunk in parts.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def _of_kind(kind: Any, candidates: Mapping[str, Any]) -> Iterator[Any]:
    seen: set[int] = set()
    for item in flat(candidates.values()):
        if isinstance(item, kind) and id(item) not in seen:
            seen.add(id(item))
            yield item


def flat(items: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield what is in lists, tuples and dicts, a few of them deep."""
    for item in items:
        if isinstance(item, list | tuple) and depth:
            yield from flat(item, depth - 1)
        elif isinstance(item, dict) and depth:
            yield from flat(item.values(), depth - 1)
        else:
            yield item


def _is_data(name: str, item: Any) -> bool:
    if "iterator" in name or hasattr(item, "__next__") or hasattr(item, "rebuild"):
        return item is not None
    placed = hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
    return placed and hasattr(item, "__iter__")
