"""Reach into torch's `fully_shard` by names that are not public: refuse what cannot be recovered, clear what was cut.

The names are looked up, not the versions: those that differ between torch 2.6 and 2.15 are found under either. A
release that lacks one that is needed is refused at start, by that name.

An interrupted step leaves states of training in the middle of a pass, the root of an iteration, parameters that are
gathered and not released, gathers of a dead generation that would be waited for, and gradients that were accumulated
and not reduced. The next forward pass would compute with half of them, wait for the dead, or add this step's gradients
to the last one's. torch 2.13 has a `reset_iter_state`. It waits for a gather that is under way, which raises once the
group was aborted, it must be called on the module that ran, and it leaves accumulated gradients. Earlier releases have
nothing.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...processor.optimizer_state import is_plain
from ...processor.runtime import Runtime
from ...protocol.errors import ConfigurationError

TESTED = ("2.9.1", "2.13.0", "2.14.1", "2.15.0")
_STATE_HOMES = ("torch.distributed.fsdp._fully_shard._fsdp_state", "torch.distributed._composable.fsdp._fsdp_state")
_BACKWARD_DONE = "_root_post_backward_final_callback"  # called on the outermost module that has run
_CUDA_GRAPHS = "triton.cudagraphs"
_STAGES = "torch.distributed.pipelining.stage"

# What must be there, by the object that has it.
_OF_STATES = ("_comm_ctx", "_state_ctx", "_training_state")
_OF_CONTEXTS = ("is_last_backward", "iter_forward_root", "post_backward_final_callback_queued", "post_optim_event")
_OF_GROUPS = (
    "_all_gather_result",
    "_post_forward_indices",
    "_sharded_state",
    "_training_state",
    "fsdp_params",
    "is_sharded",
    "modules",
    "offload_policy",
    "reshard",
)
_OF_PARAMETERS = ("sharded_param", "sharded_state", "to_sharded", "unsharded_accumulated_grad")


def fsdp_states(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Yield what each call of `fully_shard` on these modules or inside them has made."""
    state_of = _state_getter()
    if state_of is None:
        return
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            state = state_of(module)
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                yield state


def tells_backward(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether the end of a backward pass of sharded modules can be heard of."""
    states = list(fsdp_states(modules))
    return bool(states) and all(hasattr(state, _BACKWARD_DONE) for state in states)


def call_after_backward(modules: Iterable[torch.nn.Module], call: Callable[[], None]) -> None:
    """Call `call` at the end of each backward pass, when its gradients are reduced."""
    for state in fsdp_states(modules):
        setattr(state, _BACKWARD_DONE, _followed(getattr(state, _BACKWARD_DONE), call))


def _followed(plain: Callable[[], None], call: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        plain()
        call()

    return both


def parameter_groups(state: Any) -> list[Any]:
    """Return the parameters that one call of `fully_shard` gathers together: a list from torch 2.11 on, else one."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    only = getattr(state, "_fsdp_param_group", None)
    return [] if only is None else [only]


def _state_getter() -> Callable[[torch.nn.Module], Any] | None:
    for home in _STATE_HOMES:  # where fully_shard was called one of them is loaded
        module = sys.modules.get(home)
        if module is not None:
            getter: Callable[[torch.nn.Module], Any] = module._get_module_fsdp_state
            return getter
    return None


def refuse_unsupported(modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Any]) -> None:
    """Refuse what a recovery could not bring back, and a torch that lacks what is needed. When state is registered.

    Raises:
        ConfigurationError: The text names each of them.
    """
    groups = [group for state in fsdp_states(modules.values()) for group in parameter_groups(state)]
    found = [*_missing_names(modules.values()), *_offloading(groups), *_own_communication(groups)]
    found += [*_graphs(modules), *_collective_updates(optimizers), *_scaling()]
    if found:
        raise ConfigurationError("this script shards its model in a way that cannot be recovered. " + "; ".join(found))


def refuse_pipelines() -> None:
    """Refuse stages of a pipeline, which a script may make after its state. Once, before a process trains.

    Nothing that is registered leads to them, so the kinds of all objects are looked at, where that part of torch was
    loaded: some 50 ms.

    Raises:
        ConfigurationError: There is one.
    """
    module = sys.modules.get(_STAGES)
    kinds = set() if module is None else {type(each) for each in gc.get_objects()}
    if module is not None and any(issubclass(kind, module._PipelineStageBase) for kind in kinds):
        raise ConfigurationError(
            "this script has a stage of a pipeline (torch.distributed.pipelining), which cannot be recovered: in its "
            "first step a schedule has the stages agree on shapes, which a new process would begin with, and all "
            "others would not. Use fully_shard without it"
        )


def _missing_names(modules: Iterable[torch.nn.Module]) -> Iterator[str]:
    missing: set[str] = set()
    for state in fsdp_states(modules):
        missing |= {name for name in _OF_STATES if not hasattr(state, name)}
        missing |= {name for name in _OF_CONTEXTS if not hasattr(getattr(state, "_state_ctx", None), name)}
        for group in parameter_groups(state):
            missing |= {name for name in _OF_GROUPS if not hasattr(group, name)}
            for parameter in getattr(group, "fsdp_params", ()):
                missing |= {name for name in _OF_PARAMETERS if not hasattr(parameter, name)}
    if missing:
        yield (
            f"torch {torch.__version__}: fully_shard lacks {', '.join(sorted(missing))}, by which an interrupted step "
            f"is cleared away. Versions that were run: {', '.join(TESTED)}"
        )


def _offloading(groups: Iterable[Any]) -> Iterator[str]:
    if any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in groups):
        yield "CPUOffloadPolicy: parameters that travel between host and device were never tried. Leave it out"


def _own_communication(groups: Iterable[Any]) -> Iterator[str]:
    """Find communication that keeps a group, or memory of one: symmetric memory, the group's allocator."""
    names = ("_all_gather_comm", "_reduce_scatter_comm")
    kinds = {type(getattr(group, name)).__name__ for group in groups for name in names if hasattr(group, name)}
    own = sorted(kind for kind in kinds if kind not in {"DefaultAllGather", "DefaultReduceScatter"})
    if own:
        yield (
            f"communication by {', '.join(own)} (symmetric memory, or memory of the process group): it is tied to a "
            "generation of the links. Leave set_symm_mem_for_comm, set_allocate_memory_from_process_group_for_comm "
            "and set_custom_all_gather out"
        )


def _graphs(modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Find modules that are compiled into CUDA graphs, which hold the links of the generation that recorded them."""
    for name, root in modules.items():
        for path, module in root.named_modules():
            for compiled in (module, getattr(module, "_compiled_call_impl", None)):
                options: dict[str, Any] = getattr(compiled, "get_compiler_config", dict)() or {}
                if options.get(_CUDA_GRAPHS):
                    yield (
                        f"{name}{'.' if path else ''}{path} is compiled into CUDA graphs, which hold the links of the "
                        "generation in which they were recorded. Compile it without mode='reduce-overhead' or "
                        "'max-autotune'"
                    )
                    return
    config = sys.modules.get("torch._inductor.config")
    if config is not None and config.triton.cudagraphs:
        yield "torch._inductor.config.triton.cudagraphs is set: graphs hold the links of one generation. Unset it"


def _collective_updates(optimizers: Mapping[str, Any]) -> Iterator[str]:
    for name, optimizer in optimizers.items():
        if "Muon" in type(optimizer).__name__:
            yield (
                f"{name} is a {type(optimizer).__name__}, whose step does collectives on sharded parameters: inside "
                "the update there may be none"
            )
        elif isinstance(optimizer, torch.optim.Optimizer) and not is_plain(optimizer):
            yield (
                f"{name} is a {type(optimizer).__name__} with a state_dict, or hooks of it, of its own: the pieces of "
                "its state are read as they are, between two steps. Use an optimizer of torch.optim"
            )


def _scaling() -> Iterator[str]:
    runtime = Runtime.current()
    if runtime is not None and runtime.settings.resizes:
        yield (
            "scale.min_nodes in the policy: which pieces a rank holds follows from the number of ranks. Leave it out, "
            "and have spare nodes instead (--spares)"
        )


_NOTHING = (
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_all_reduce_state",
    "_partial_reduce_output",
)
_SHARED_LISTS = ("reduce_scatter_states", "post_forward_order", "_last_post_reduce_events")
_SHARED_WORK = ("all_gather_state", "reduce_scatter_state", "active_gradient_reduction")


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Release what a forward pass without a backward pass has left gathered. Between two steps."""
    for state in fsdp_states(modules):
        for group in parameter_groups(state):
            if not group.is_sharded:
                group.reshard()


def clear_iteration(modules: Iterable[torch.nn.Module]) -> None:
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
                gathered = getattr(parameter, "_unsharded_param", None)  # there is none before the first forward pass
                if gathered is not None:
                    gathered.grad = None
                if parameter.unsharded_accumulated_grad is not None:  # from torch 2.15 on it is the gathered one's
                    parameter.unsharded_accumulated_grad = None
            # Accumulation may have left the gathered ones to take gradients of another type.
            restore_types = getattr(group, "_set_unsharded_grad_dtypes", None)
            if restore_types is not None:
                restore_types(defer_upcast=False)


def _reset_context(context: Any) -> None:
    """Reset what all states of one root share."""
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    context.is_last_backward = True
    context.post_optim_event = None
    if hasattr(context, "gradient_reduction_pending"):
        context.gradient_reduction_pending = False
        context.manual_backward_finalization_active = None


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
    if hasattr(group, "_post_backward_pending"):
        group._post_backward_pending = False
        group._partial_reduce_output_layout.clear()
    for parameter in group.fsdp_params:
        # Each is asked: an exception in the middle of a change leaves some on this side and some on that.
        if not group.is_sharded or parameter.sharded_state is not type(parameter.sharded_state).SHARDED:
            parameter.to_sharded()
            for name in ("_sharded_post_forward_param", "_sharded_post_forward_param_data"):
                if getattr(parameter, name, None) is not None:
                    setattr(parameter, name, None)
    group._sharded_state = type(group._sharded_state).SHARDED


def offsets_of(parameter: Any) -> tuple[int, ...]:
    """Return where this rank's piece of a sharded parameter begins in the whole of it.

    Raises ConfigurationError where the piece is not one block of it.
    """
    shape, offsets = place_of(parameter)
    if shape != tuple(parameter._local_tensor.shape):
        raise ConfigurationError(
            f"checkpoint.format: dcp cannot name a piece of {list(parameter._local_tensor.shape)} of a parameter that "
            f"is {list(parameter.shape)} and placed as {parameter.placements}. Leave the format as it is: safetensors"
        )
    return offsets


def place_of(parameter: Any, rank: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a rank's piece of a sharded parameter, and where it begins in the whole. None: this rank's.

    The rank is one of the parameter's mesh.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = parameter.device_mesh
    seen = mesh if rank is None else _SeenFrom(mesh, (mesh.mesh == rank).nonzero()[0].tolist())
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, seen, parameter.placements)
    return tuple(shape), tuple(offsets)


class _SeenFrom:
    """A device mesh as another rank has it."""

    def __init__(self, mesh: Any, coordinate: list[int]) -> None:
        self._mesh = mesh
        self._coordinate = coordinate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def get_coordinate(self) -> list[int]:
        return self._coordinate

    def _sym_get_coordinate(self, dimension: int) -> int:  # from torch 2.11 on
        return self._coordinate[dimension]
