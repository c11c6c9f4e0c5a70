"""What of Megatron is refused, and why: checked before the first step, and all of it named at once.

`docs/megatron.md` lists the same features under the same names; a unit test holds one against the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ...protocol.errors import ConfigurationError
from ...protocol.types import JobSettings
from .parts import Parts


class Refusal(NamedTuple):
    """A feature that cannot be recovered: how to see it, and why."""

    feature: str
    used: Callable[[Parts], bool]
    reason: str


def _model(parts: Parts, name: str) -> Any:
    return getattr(parts.chunks[0].config, name, None)


def _ddp(parts: Parts, name: str) -> Any:
    return getattr(parts.chunks[0].ddp_config, name, None)


def _optimizer(parts: Parts, name: str) -> Any:
    return getattr(parts.optimizer.config, name, None)


def _known_optimizers(parts: Parts) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    return all(type(leaf) in known for leaf in parts.leaves)


def _barriers_in_timers(parts: Parts) -> bool:
    timers = _optimizer(parts, "timers")
    return (
        timers is not None and bool(_optimizer(parts, "barrier_with_L1_time")) and getattr(timers, "_log_level", 0) > 0
    )


def _rerun_statistics(_: Parts) -> bool:
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    return get_rerun_state_machine().get_mode() is not RerunMode.DISABLED


REFUSALS = (
    Refusal(
        "Megatron FSDP (use_megatron_fsdp)",
        lambda parts: bool(_ddp(parts, "use_megatron_fsdp")),
        "its parameters are sharded in other buffers, which this adapter does not know",
    ),
    Refusal(
        "overlap_param_gather_with_optimizer_step",
        lambda parts: bool(_optimizer(parts, "overlap_param_gather_with_optimizer_step")),
        "it sends parameters in the middle of the update, which must be free of collectives",
    ),
    Refusal(
        "use_precision_aware_optimizer",
        lambda parts: bool(_optimizer(parts, "use_precision_aware_optimizer")),
        "main parameters and moments then live inside a fused optimizer, in forms that are not read yet",
    ),
    Refusal(
        "optimizer_cpu_offload",
        lambda parts: bool(_optimizer(parts, "optimizer_cpu_offload")),
        "state moves between host and device behind the recovery's back",
    ),
    Refusal(
        "optimizers other than FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer",
        lambda parts: not _known_optimizers(parts),
        "what they keep, and where, is not known",
    ),
    Refusal(
        "fp8 and fp4",
        lambda parts: bool(_model(parts, "fp8") or _model(parts, "fp4")),
        "scaling histories of Transformer Engine are not captured yet",
    ),
    Refusal(
        "CUDA graphs",
        lambda parts: bool(
            _model(parts, "enable_cuda_graph")
            or _model(parts, "external_cuda_graph")
            or _model(parts, "cuda_graph_impl") not in {None, "none"}
        ),
        "a recorded graph holds communicators of the generation in which it was recorded",
    ),
    Refusal(
        "timers with barriers inside the optimizer (timing_log_level above 0 with barrier_with_L1_time)",
        _barriers_in_timers,
        "the update must be free of collectives; set timing_log_level 0 or barrier_with_L1_time False",
    ),
    Refusal(
        "the rerun state machine in another mode than disabled",
        _rerun_statistics,
        "it repeats steps by itself, which has not been tried together with a recovery",
    ),
)


SCALING = "a world of another size (scale.min_nodes in the policy)"

# Refused elsewhere, where they are seen: by live_groups.py, starting.py, own.py and versions.py.
REFUSED_ELSEWHERE = (
    SCALING,
    "process groups on another backend, or made before the decorator",
    "data iterators that cannot be put back to a sample",
    "param groups that only some pipeline stages have",
    "versions of megatron-core that lack a name which is used",
)


def refuse_scaling(settings: JobSettings) -> None:
    """Raise ConfigurationError when the policy would let the job go on with fewer ranks. Before the first step."""
    if settings.resizes:
        raise ConfigurationError(
            f"{SCALING} is not possible with Megatron: which parameters and optimizer pieces a rank holds, and how "
            "batches are divided, follow from the number of ranks. Leave scale.min_nodes out of the policy; have spare "
            "nodes instead (--spares), or change the size between two runs with a checkpoint of Megatron's own"
        )


def refuse_unsupported(parts: Parts) -> None:
    """Raise ConfigurationError naming every feature in use that cannot be recovered."""
    found = [f"{refusal.feature}: {refusal.reason}" for refusal in REFUSALS if refusal.used(parts)]
    if found:
        raise ConfigurationError("this job uses what midstep cannot recover in Megatron. " + "; ".join(found))
