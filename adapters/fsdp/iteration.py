"""Clear away what an interrupted step leaves in modules that `fully_shard` was applied to.

States of training in the middle of a pass, the root of an iteration, parameters that are gathered and not released,
gathers of a dead generation that would be waited for, and gradients that were accumulated and not reduced. The next
forward pass would compute with half of them, wait for the dead, or add this step's gradients to the last one's.

torch 2.13 has a `reset_iter_state`. It waits for a gather that is under way, which raises once the group was aborted,
it must be called on the module that ran, and it leaves accumulated gradients. Earlier releases have nothing.
"""

from collections.abc import Iterable
from typing import Any

import torch

from .compatibility import fsdp_states, parameter_groups

_NOTHING = (
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_all_reduce_state",
    "_partial_reduce_output",
)
_SHARED_LISTS = ("reduce_scatter_states", "post_forward_order", "_last_post_reduce_events")
_SHARED_WORK = ("all_gather_state", "reduce_scatter_state")


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Release what a forward pass without a backward pass has left gathered. Between two steps."""
    for state in fsdp_states(modules):
        for group in parameter_groups(state):
            if not group.is_sharded:
                group.reshard()


def reset(modules: Iterable[torch.nn.Module]) -> None:
    """Bring everything back to what it is between two steps, but for gradients. Waits for nothing, sends nothing.

    Runs in clean. A rank that stood at the commit barrier may yet have to apply its update: reduced gradients stay.
    """
    for state in fsdp_states(modules):
        idle = type(state._training_state).IDLE
        state._training_state = idle
        _reset_context(state._state_ctx)
        getattr(state, "_modules_to_run_forward", set()).clear()
        _reset_communication(state._comm_ctx)
        for group in parameter_groups(state):
            group._training_state = idle
            _reset_group(group)


def drop_gradients(modules: Iterable[torch.nn.Module]) -> None:
    """Drop reduced, local and accumulated gradients. Runs at the end of rollback."""
    for state in fsdp_states(modules):
        for group in parameter_groups(state):
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad = None
                parameter.unsharded_accumulated_grad = None
                gathered = getattr(parameter, "_unsharded_param", None)  # there is none before the first forward pass
                if gathered is not None:
                    gathered.grad = None


def _reset_context(context: Any) -> None:
    """Reset what all states of one root share."""
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    context.is_last_backward = True
    context.post_optim_event = None


def _reset_communication(shared: Any) -> None:
    """Drop works and buffers. Most attributes are there after the first forward pass only, and not in every release."""
    for name in _SHARED_WORK:
        if getattr(shared, name, None) is not None:
            setattr(shared, name, None)
    for name in _SHARED_LISTS:
        held = getattr(shared, name, None)
        if held:
            held.clear()


def _reset_group(group: Any) -> None:
    group._all_gather_result = None
    group._post_forward_indices.clear()
    for name in _NOTHING:
        if getattr(group, name, None) is not None:
            setattr(group, name, None)
    for parameter in group.fsdp_params:
        # Each is asked: an exception in the middle of a change leaves some on this side and some on that.
        if not group.is_sharded or parameter.sharded_state is not type(parameter.sharded_state).SHARDED:
            parameter.to_sharded()
            for name in ("_sharded_post_forward_param", "_sharded_post_forward_param_data"):
                if getattr(parameter, name, None) is not None:
                    setattr(parameter, name, None)
    group._sharded_state = type(group._sharded_state).SHARDED
