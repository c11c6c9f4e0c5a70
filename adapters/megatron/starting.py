"""Puts midstep's communicator under Megatron: the default group, and the gloo groups that Megatron makes beside it.

Groups that Megatron makes must be ones that can be aborted and seated anew. So when a train function is decorated,
`torch.distributed.init_process_group` and Megatron's `create_group` are led to midstep. Both only under `midstep run`.
"""

import functools
import inspect
from typing import Any

import torch.distributed as dist

from ...processor.group_arguments import GroupArguments
from ...processor.runtime import Runtime
from ...protocol.errors import ConfigurationError

_OURS = "midstep_"  # what the names of midstep's backends begin with
_installed = False


def install() -> None:
    """Lead the groups that are made from now on to midstep. Runs when a train function is decorated."""
    global _installed  # noqa: PLW0603 - what is led elsewhere is global, too
    if _installed or Runtime.current() is None:
        return
    _installed = True
    from megatron.core import parallel_state

    dist.init_process_group = _default_group(dist.init_process_group)
    parallel_state.create_group = _any_group(parallel_state.create_group)


def check_default_group() -> None:
    """Raise ConfigurationError when torch's default group is not midstep's. Runs before the first step."""
    if not dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is not initialised; Megatron's parallel state and the model must be there before the "
            "train function is called"
        )
    backend = dist.get_backend()
    if not backend.startswith(_OURS):
        raise ConfigurationError(
            f"torch.distributed was initialised with {backend!r} before the train function was decorated, so its "
            "groups cannot be recovered. Decorate it at the top of the script, or call midstep.init_process_group()"
        )


def _default_group(plain: Any) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def init_process_group(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options).arguments
        backend = given.get("backend")
        runtime = Runtime.current()
        if runtime is None or (isinstance(backend, str) and backend.startswith(_OURS)):
            plain(*args, **options)
            return
        # Megatron names a backend and a timeout of its own defaults in every job: there the policy holds.
        known = {name: value for name, value in given.items() if name in GroupArguments.__struct_fields__}
        runtime.init_process_group(GroupArguments(**known).naming_peers)

    return init_process_group


def _any_group(plain: Any) -> Any:
    @functools.wraps(plain)
    def create_group(*args: Any, **options: Any) -> Any:
        if options.get("backend") is not None:
            # A twin on gloo, or a pipeline group on a backend of its own: those could not be aborted.
            options["backend"] = None
        return plain(*args, **options)

    return create_group
