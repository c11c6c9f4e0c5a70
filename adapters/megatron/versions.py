"""Which names of megatron-core the adapter uses, checked against the version that is installed.

The adapter hooks calls and reads attributes that megatron-core does not promise to keep. `tests/contract` reads
published versions for all of them; here the installed one is looked at, before the first step.
"""

import importlib
from typing import Any

from ...protocol.errors import ConfigurationError

TESTED = ("0.14.0", "0.15.3", "0.16.1")

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
    "megatron.core.optimizer.optimizer.MegatronOptimizer": ("step", "step_with_ready_grads", "zero_grad"),
    "megatron.core.optimizer.optimizer.ChainedOptimizer": ("step", "step_with_ready_grads", "zero_grad"),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": ("_copy_main_params_to_model_params",),
    "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler": ("step",),
    "megatron.core.num_microbatches_calculator": (
        "_GLOBAL_NUM_MICROBATCHES_CALCULATOR",
        "get_current_running_global_batch_size",
    ),
    "megatron.core.rerun_state_machine": ("RerunDataIterator", "RerunMode", "RerunState", "get_rerun_state_machine"),
    "megatron.core.tensor_parallel.random": ("get_cuda_rng_tracker",),
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
    return hasattr(found, name)
