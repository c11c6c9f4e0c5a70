"""Megatron's process groups: made by midstep's communicator, and all of one generation.

Groups that Megatron makes must be ones that can be aborted and reconnected. So when a train function is decorated
under `midstep run`, `torch.distributed.init_process_group` and Megatron's `create_group` are redirected to midstep.

Megatron hands its groups to dozens of objects: DDP, buckets, layers, optimizers, configurations, collections. midstep
reconnects groups in place, so all of these keep what they have. A walk over the objects proves it: after each rebuild
every group that a live object holds must be connected in this generation.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ...processor.runtime import Runtime
from ...protocol.errors import ConfigurationError, RecoveryError
from ..process_groups import BACKENDS, HeldGroup, redirect_default_group, walk_groups
from .parts import Parts

_installed = False


def redirect_process_groups() -> None:
    """Make all later groups with midstep's communicator. Runs when a train function is decorated."""
    global _installed  # noqa: PLW0603 - what is redirected is global, too
    if _installed or Runtime.current() is None:
        return
    _installed = True
    from megatron.core import parallel_state

    redirect_default_group()
    parallel_state.create_group = _any_group(parallel_state.create_group)


def check_default_group() -> None:
    """Raise ConfigurationError when torch's default group is not midstep's. Runs before the first step."""
    if not dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is not initialised; Megatron's parallel state and the model must be there before the "
            "train function is called"
        )
    backend = dist.get_backend()
    if not backend.startswith(BACKENDS):
        raise ConfigurationError(
            f"torch.distributed was initialised with {backend!r} before the train function was decorated, so its "
            "groups cannot be recovered. Decorate it at the top of the script, or call midstep.init_process_group()"
        )


def _any_group(plain: Any) -> Any:
    @functools.wraps(plain)
    def create_group(*args: Any, **options: Any) -> Any:
        if options.get("backend") is not None:
            # A twin on gloo, or a pipeline group on a backend of its own: those could not be aborted.
            options["backend"] = None
        return plain(*args, **options)

    return create_group


def held_groups(parts: Parts) -> Iterator[HeldGroup]:
    """Yield every group that Megatron's globals, the model, the optimizer or its configurations hold."""
    from megatron.core import parallel_state

    for name, value in vars(parallel_state).items():
        if name.startswith("_") and name.isupper():
            yield from walk_groups(value, f"parallel_state.{name}", set())
    seen: set[int] = set()
    yield from walk_groups(parts.optimizer, "optimizer", seen)
    for index, chunk in enumerate(parts.chunks):
        yield from walk_groups(chunk, f"model[{index}]", seen)


def refuse_foreign(parts: Parts) -> None:
    """Raise ConfigurationError for a group that is not midstep's. Runs before the first step."""
    for place, group in held_groups(parts):
        backend = group.name() if not hasattr(group, "getBackendName") else group.getBackendName()
        if not isinstance(backend, str) or not backend.startswith(BACKENDS):
            raise ConfigurationError(
                f"{place} is a process group on {backend!r}, which a recovery could not reconnect. Make groups "
                "without naming a backend, after the train function has been decorated"
            )


def refuse_stale(parts: Parts) -> int:
    """Raise RecoveryError for a group that is not connected in this generation; return how many handles there are."""
    count = 0
    for place, group in held_groups(parts):
        count += 1
        if not group.connected:
            raise RecoveryError(f"{place} is a process group of an earlier generation: {group.getGroupName()}")
    return count
