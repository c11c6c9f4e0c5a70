"""The decorator for a train function that is written on megatron-core."""

import functools
import inspect
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
