"""`midstep.building`: what a process that takes another one's place need not compute of its model.

Initial values are the largest part of what a script does before it trains, and a newcomer's are thrown away: its
parameters come from a replica or a checkpoint. Which values those are is known before they are registered, because
every parameter that is made in the block has to be registered afterwards.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..communicators.libraries import HAS_TORCH
from ..protocol.errors import ConfigurationError
from .runtime import Runtime

if TYPE_CHECKING:
    import torch

_SHOWN = 3

_built: list[tuple[str, "weakref.ref[torch.Tensor]"]] = []


@contextmanager
def building() -> Iterator[None]:
    """Skip initial values in a process that takes another one's place. In the script, around the model's construction.

    All other processes compute them. Inside, nothing else changes: what is read there has the values that it would have
    without this block. Afterwards torch's random numbers on the CPU continue from where they were before, in every
    process. Parameters of a newcomer are not a number (NaN) until its state has arrived.

    Without torch, the block does nothing.

    Raises:
        NotUnderMidstep: See `Runtime.current`.
    """
    if not HAS_TORCH:
        yield
        return
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    from .deferred_init import DeferredInit

    runtime = Runtime.current()
    deferred = DeferredInit() if runtime is not None and not runtime.connected else None

    def note(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            _built.append((f"{type(module).__name__}.{name}", weakref.ref(parameter)))
            if deferred is not None:
                deferred.allow(parameter)

    hook = register_module_parameter_registration_hook(note)
    try:
        with torch.random.fork_rng(devices=[]):
            if deferred is None:
                yield
            else:
                with deferred:
                    yield
                deferred.leave_out()
    finally:
        hook.remove()


def check_registered(parameters: "Iterable[torch.Tensor]") -> None:
    """Refuse parameters that were made in `building` and are in no registered module. When state is registered.

    Args:
        parameters: Those of all registered modules.

    Raises:
        ConfigurationError: A newcomer would train with parameters that no other process gives it.
    """
    known = {id(parameter) for parameter in parameters}
    alive = ((name, parameter()) for name, parameter in _built)
    missing = [name for name, parameter in alive if parameter is not None and id(parameter) not in known]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ConfigurationError(
            f"{', '.join(missing[:_SHOWN])}{more} were made in `with midstep.building():` and belong to no registered "
            "module: a process that takes another one's place would not get their values. Register the module with the "
            "train state, or make it outside of the block"
        )


def refuse_building(framework: str) -> None:
    """Refuse the block for a framework that reads the generator's state while it builds. When state is registered.

    Raises:
        ConfigurationError: Parameters were made in `building`.
    """
    if any(parameter() is not None for _, parameter in _built):
        raise ConfigurationError(
            f"parameters were made in `with midstep.building():`, which is for plain PyTorch: {framework} keeps states "
            "of the random number generator while it builds a model. Take the block away; for Megatron's configuration "
            "there is midstep.adapters.megatron.skip_initial_values"
        )
