"""The interface for scripts on megatron-core: the decorator for its train function, and `skip_initial_values`.

Megatron's own switch for initial values, `perform_initialization`, is not used. In megatron-core 0.16.1 the call that
it leaves out also marks a parameter as divided among tensor parallel ranks, so without it the gradient norm would be
another one there.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar, overload

from ...processor.building import refuse_building
from ...processor.callbacks import Lifecycle
from ...processor.runtime import Runtime
from ...processor.session import SessionStage
from ...processor.train_thread import TrainThread
from ...protocol.errors import ConfigurationError
from .compatibility import check_version, refuse_scaling, refuse_unsupported
from .parts import ITERATION, find_parts
from .process_groups import check_default_group, redirect_process_groups, refuse_foreign
from .replicas import RankPlace, Replica
from .state import MegatronState

Train = TypeVar("Train", bound=Callable[..., Any])
Config = TypeVar("Config")
# Those of a TransformerConfig; older versions of megatron-core lack the last one.
METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")


@overload
def resilient(train: Train) -> Train: ...
@overload
def resilient(
    *, replica: Replica | str | None = None, scheduler_increment: int | None = None, lifecycle: Lifecycle | None = None
) -> Callable[[Train], Train]: ...
def resilient(
    train: Any = None,
    *,
    replica: Replica | str | None = None,
    scheduler_increment: int | None = None,
    lifecycle: Lifecycle | None = None,
) -> Any:
    """Decorate a Megatron train function: after a fault it is called again, and repeats the interrupted step.

    Decorate it before torch.distributed is initialised. Its arguments must hold the model chunks (Megatron's DDP), the
    optimizer, and `iteration`, where it begins; if there are any, the scheduler, data iterators and `consumed_samples`.
    When it is called again, `iteration` and `consumed_samples` are those of the job, and the other arguments are the
    same objects, restored to that step.

    Outside `midstep run` the function is called once, as it is.

    Args:
        train: The train function; left out where the decorator has arguments.
        replica: Where a copy of each piece of a distributed optimizer is kept: `instances`, `buddy_device`,
            `buddy_host` or `none`; by default with the optimizer instances if there are several, else at a buddy.
        scheduler_increment: By how much the train function moves the scheduler on in each step, if that is not the
            global batch size.
        lifecycle: Callbacks in place of midstep's, one by one (`midstep.Lifecycle`).

    Returns:
        The resilient train function, or a decorator.

    Raises:
        ConfigurationError: When the function is called: an argument is missing or not supported.
    """
    if train is None:
        return functools.partial(
            resilient, replica=replica, scheduler_increment=scheduler_increment, lifecycle=lifecycle
        )
    wanted = _replica_named(replica)
    redirect_process_groups()

    @functools.wraps(train)
    def run(*args: Any, **kwargs: Any) -> Any:
        runtime = Runtime.current()
        if runtime is None:
            return train(*args, **kwargs)
        if runtime.session.stage is not SessionStage.BOOTING:
            raise ConfigurationError("a process can call one resilient train function, and only once")
        refuse_scaling(runtime.settings)
        refuse_building("Megatron")
        check_default_group()
        bound = inspect.signature(train).bind(*args, **kwargs)
        bound.apply_defaults()
        check_version()
        parts = find_parts(train, bound.arguments)
        refuse_unsupported(parts)
        refuse_foreign(parts)
        place = RankPlace(runtime.rank, runtime.world_size, runtime.ranks_per_node)
        state = MegatronState(parts, place, replica=wanted, scheduler_increment=scheduler_increment)

        def call() -> Any:
            bound.arguments[ITERATION] = state.iteration
            if parts.consumed_name is not None:
                bound.arguments[parts.consumed_name] = state.consumed_samples
            return train(*bound.args, **bound.kwargs)

        return TrainThread(runtime, state, lifecycle).run(call)

    return run


def _replica_named(name: Replica | str | None) -> Replica | None:
    try:
        return None if name is None else Replica(name)
    except ValueError:
        raise ConfigurationError(
            f"replica is {name!r}; it can be {', '.join(repr(kind.value) for kind in Replica)}"
        ) from None


def skip_initial_values(config: Config) -> Config:
    """Have a process that takes another one's place skip its initial values. In the script, before the model is built.

    All other processes compute them, also outside `midstep run`. Parameters of a newcomer are not a number (NaN) until
    their values arrive, where Megatron would have drawn them at random.

    Args:
        config: Megatron's TransformerConfig. In a newcomer its methods for initial values are replaced.

    Returns:
        The same object.

    Raises:
        NotUnderMidstep: See `Runtime.current`.
    """
    runtime = Runtime.current()
    if runtime is not None and not runtime.connected:
        for name in METHODS:
            if hasattr(config, name):
                setattr(config, name, _leave_out)
    return config


def _leave_out(weight: Any) -> Any:
    return weight.detach().fill_(math.nan)
