"""torch's default process group, where a framework makes it itself: redirected to midstep's communicator.

A framework names a backend and a timeout of its own in every job. There the policy holds.
"""

import functools
import inspect

import torch.distributed as dist

from ..processor.group_arguments import GroupArguments
from ..processor.runtime import Runtime

BACKENDS = "midstep_"  # what the names of midstep's backends begin with
_redirected = False


def redirect_default_group() -> None:
    """Have `torch.distributed.init_process_group` make midstep's group from now on. Does nothing the second time."""
    global _redirected  # noqa: PLW0603 - what is redirected is global, too
    if _redirected:
        return
    _redirected = True
    plain = dist.init_process_group
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def init_process_group(*args: object, **options: object) -> None:
        given = signature.bind(*args, **options).arguments
        backend = given.get("backend")
        runtime = Runtime.current()
        if runtime is None or (isinstance(backend, str) and backend.startswith(BACKENDS)):
            plain(*args, **options)  # type: ignore[arg-type]
            return
        known = {name: value for name, value in given.items() if name in GroupArguments.__struct_fields__}
        runtime.init_process_group(GroupArguments(**known).naming_peers)

    dist.init_process_group = init_process_group
