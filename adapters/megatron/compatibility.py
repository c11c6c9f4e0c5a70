"""The supported part of Megatron: the features that are refused, and the names that an installed version must have.

All of it is checked before the first step. `docs/megatron.md` lists the refused features under the same names. The
adapter hooks calls and reads attributes that megatron-core does not promise to keep: `tests/contract` reads published
versions for all of them, here the installed one is checked.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ...protocol.errors import ConfigurationError
from ...protocol.types import JobSettings
from .parts import Parts


class UnsupportedFeature(NamedTuple):
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
    UnsupportedFeature(
        "Megatron FSDP (use_megatron_fsdp)",
        lambda parts: bool(_ddp(parts, "use_megatron_fsdp")),
        "its parameters are sharded in other buffers, which this adapter does not know",
    ),
    UnsupportedFeature(
        "overlap_param_gather_with_optimizer_step",
        lambda parts: bool(_optimizer(parts, "overlap_param_gather_with_optimizer_step")),
        "it sends parameters in the middle of the update, which must be free of collectives",
    ),
    UnsupportedFeature(
        "use_precision_aware_optimizer",
        lambda parts: bool(_optimizer(parts, "use_precision_aware_optimizer")),
        "main parameters and moments then live inside a fused optimizer, in forms that are not read yet",
    ),
    UnsupportedFeature(
        "optimizer_cpu_offload",
        lambda parts: bool(_optimizer(parts, "optimizer_cpu_offload")),
        "state moves between host and device behind the recovery's back",
    ),
    UnsupportedFeature(
        "optimizers other than FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer",
        lambda parts: not _known_optimizers(parts),
        "what they keep, and where, is not known",
    ),
    UnsupportedFeature(
        "fp8 and fp4",
        lambda parts: bool(_model(parts, "fp8") or _model(parts, "fp4")),
        "scaling histories of Transformer Engine are not captured yet",
    ),
    UnsupportedFeature(
        "CUDA graphs",
        lambda parts: bool(
            _model(parts, "enable_cuda_graph")
            or _model(parts, "external_cuda_graph")
            or _model(parts, "cuda_graph_impl") not in {None, "none"}
        ),
        "a recorded graph holds communicators of the generation in which it was recorded",
    ),
    UnsupportedFeature(
        "fused operators with a collective in them (use_ascend_mc2, use_ascend_coc of MindSpeed)",
        lambda parts: bool(_model(parts, "use_ascend_mc2") or _model(parts, "use_ascend_coc")),
        "they keep the names of HCCL's communicators, which are others after a process was replaced",
    ),
    UnsupportedFeature(
        "timers with barriers inside the optimizer (timing_log_level above 0 with barrier_with_L1_time)",
        _barriers_in_timers,
        "the update must be free of collectives; set timing_log_level 0 or barrier_with_L1_time False",
    ),
    UnsupportedFeature(
        "the rerun state machine in another mode than disabled",
        _rerun_statistics,
        "it repeats steps by itself, which has not been tried together with a recovery",
    ),
)


SCALING = "a world of another size (scale.min_nodes in the policy)"

# Refused elsewhere, where they are seen: by process_groups.py, rank_local_state.py and `check_version`.
REFUSED_ELSEWHERE = (
    SCALING,
    "process groups on another backend, or made before the decorator",
    "data iterators that cannot be put back to a sample",
    "param groups that only some pipeline stages have",
    "versions of megatron-core that lack a name which is used",
)


def refuse_scaling(settings: JobSettings) -> None:
    """Raise ConfigurationError when the policy would let the job continue with fewer ranks. Before the first step."""
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


TESTED = ("0.12.1", "0.14.0", "0.15.3", "0.16.1")

GRADIENT_NORMS = ("clip_grad_norm", "get_grad_norm")  # the first is called by one optimizer, the other by a chain

# Module or class, and what must be there: functions, methods and module globals.
NAMES: dict[str, tuple[str, ...]] = {
    "megatron.core.parallel_state": (
        "create_group",
        "destroy_global_memory_buffer",
        "get_data_parallel_group",
        "get_expert_data_parallel_group",
        "get_inter_distributed_optimizer_instance_group",
        "get_context_parallel_world_size",
        "get_data_parallel_world_size",
        "get_expert_data_parallel_world_size",
        "get_expert_model_parallel_rank",
        "get_expert_model_parallel_world_size",
        "get_expert_tensor_parallel_rank",
        "get_expert_tensor_parallel_world_size",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_world_size",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "set_virtual_pipeline_model_parallel_rank",
        "_set_global_memory_buffer",
        "_GLOBAL_MEMORY_BUFFER",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    ),
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": (
        "finish_grad_sync",
        "no_sync",
        "start_param_sync",
        "zero_grad_buffer",
    ),
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup": ("start_param_sync",),
    "megatron.core.optimizer.optimizer.MegatronOptimizer": (
        *GRADIENT_NORMS,
        "step",
        "step_with_ready_grads",
        "zero_grad",
    ),
    "megatron.core.optimizer.optimizer.ChainedOptimizer": (
        *GRADIENT_NORMS,
        "step",
        "step_with_ready_grads",
        "zero_grad",
    ),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": ("_copy_main_params_to_model_params",),
    "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler": ("step",),
    "megatron.core.num_microbatches_calculator": (
        "_GLOBAL_NUM_MICROBATCHES_CALCULATOR",
        "get_current_running_global_batch_size",
    ),
    "megatron.core.rerun_state_machine": ("RerunDataIterator", "RerunMode", "RerunState", "get_rerun_state_machine"),
    "megatron.core.tensor_parallel.random": ("get_cuda_rng_tracker",),
}

# What some of these were called before: either will do.
EARLIER_NAMES = {
    "get_inter_distributed_optimizer_instance_group": "get_inter_partial_data_parallel_group",  # 0.12
}

# Attributes that objects of these classes have once they are made; the contract test looks for them in the source.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": (
        "bucket_groups",
        "buffers",
        "ddp_config",
        "expert_parallel_bucket_groups",
        "expert_parallel_buffers",
    ),
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup": (
        "buckets",
        "grad_reduce_handle",
        "is_last_microbatch",
        "param_gather_dispatched",
        "param_gather_handle",
    ),
    "megatron.core.optimizer.optimizer.ChainedOptimizer": ("chained_optimizers",),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "buffers",
        "data_parallel_group",
        "distributed_optimizer_instance_id",
    ),
    "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler": ("num_steps",),
}


def check_version() -> None:
    """Raise ConfigurationError when megatron-core lacks what is used. Runs before the first step."""
    import megatron.core

    missing = [f"{owner}.{name}" for owner, names in NAMES.items() for name in names if not _has(owner, name)]
    if missing:
        raise ConfigurationError(
            f"megatron-core {megatron.core.__version__} lacks {', '.join(missing)}, which midstep hooks. Versions that "
            f"it is tested with: {', '.join(TESTED)}"
        )


def _has(owner: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(owner)
    except ImportError:
        module, _, kind = owner.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError):
            return False
    return hasattr(found, name) or hasattr(found, EARLIER_NAMES.get(name, name))
