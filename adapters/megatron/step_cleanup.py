"""Clean up what an interrupted step leaves in Megatron: handles, counters, gradients, scratch memory, contexts.

`no_sync`, the context in which gradients are not reduced, needs the most care. Megatron's pipeline schedules enter it
by hand, and leave it at the last micro-batch. A schedule that an exception ends before that never leaves it: its frame
becomes garbage, and Python closes the context when the garbage collector runs, which may be in the middle of a later
step. From there on gradients of that step would be reduced before they are complete, with other numbers on each rank,
and no error. So open contexts are tracked here, and left when the step is rolled back; a later close changes nothing.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from .parts import Parts

Enter = Callable[[], AbstractContextManager[Any]]


def bucket_groups(parts: Parts) -> list[Any]:
    """Return DDP's bucket groups, of dense and of expert parameters."""
    return [group for chunk in parts.chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]


def drop_handles(parts: Parts) -> None:
    """Drop the handles of collectives that were under way. Runs in clean, after stop."""
    for group in bucket_groups(parts):
        group.grad_reduce_handle = None
        group.param_gather_handle = None
        group.param_gather_dispatched = False


def drop_gradients(parts: Parts) -> None:
    """Drop gradients and their counters. End of rollback: until then a rank may have to finish its update."""
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
    """Reset Megatron's module globals that live as long as a step."""
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


class NoSyncContexts:
    """The `no_sync` contexts of all model chunks that were entered and not left."""

    def __init__(self) -> None:
        self._open: list[_TrackedContext] = []

    def watch(self, chunks: Iterable[Any]) -> None:
        """Track each context from now on, whether a schedule gets it from a chunk or from its configuration."""
        known = {id(chunk): self._known(chunk.no_sync) for chunk in chunks}
        for chunk in chunks:
            given = getattr(chunk.config, "no_sync_func", None)
            if isinstance(given, list | tuple):
                chunk.config.no_sync_func = [_instead_of(each, known) for each in given]
            elif given is not None:
                chunk.config.no_sync_func = _instead_of(given, known)
        for chunk in chunks:
            chunk.no_sync = known[id(chunk)]

    def leave(self) -> None:
        """Leave the contexts that a schedule left open. In rollback, before the next step's flags are set."""
        for context in reversed(self._open.copy()):
            context.__exit__(None, None, None)

    def _known(self, plain: Enter) -> Enter:
        return lambda: _TrackedContext(plain(), self._open)


def _instead_of(given: Any, known: dict[int, Enter]) -> Any:
    """Return the tracked context factory for a chunk's own `no_sync`; anything else unchanged."""
    owner = getattr(given, "__self__", None)
    return known.get(id(owner), given) if getattr(given, "__name__", "") == "no_sync" else given


class _TrackedContext(AbstractContextManager[Any]):
    """One context, left by the schedule or by `leave`, whichever comes first."""

    def __init__(self, plain: AbstractContextManager[Any], among: list["_TrackedContext"]) -> None:
        self._plain = plain
        self._among = among

    def __enter__(self) -> Any:
        self._among.append(self)
        return self._plain.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self in self._among:
            self._among.remove(self)
            return self._plain.__exit__(kind, error, trace)
        return None
