"""Drops what an interrupted step leaves in Megatron: handles, counters, gradients, scratch memory."""

from typing import Any

from .parts import Parts


def bucket_groups(parts: Parts) -> list[Any]:
    """Return DDP's bucket groups, of dense and of expert parameters."""
    return [group for chunk in parts.chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]


def drop_handles(parts: Parts) -> None:
    """Forget collectives that were under way. In clean, after stop."""
    for group in bucket_groups(parts):
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False


def drop_gradients(parts: Parts) -> None:
    """Drop gradients and the counting of them. End of rollback: until then a rank may have to finish its update."""
    parts.optimizer.zero_grad()
    for chunk in parts.chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
            parameter.grad_added_to_main_grad = False
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.reset()
    for group in bucket_groups(parts):
        group.is_last_microbatch = True
        if hasattr(group, "per_param_grad_ready_counts"):
            group.per_param_grad_ready_counts = {}
        if hasattr(group, "params_with_grad"):
            group.params_with_grad = set()


def reset_globals() -> None:
    """Reset what Megatron keeps beside its objects for the length of a step."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
        parallel_state.destroy_global_memory_buffer()  # an aborted collective may have been writing into it
        parallel_state._set_global_memory_buffer()
    if parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    if hasattr(megatron_random, "_unset_checkpointing"):  # not in megatron-core before 0.16
        megatron_random._unset_checkpointing()
    _clear_expert_losses()


def _clear_expert_losses() -> None:
    try:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker as tracker
    except ImportError:  # megatron-core before 0.16
        from megatron.core.parallel_state import get_moe_layer_wise_logging_tracker as tracker
    tracker().clear()
