"""Initial values that a process in place of another one need not compute: its parameters come from a replica.

Megatron's own switch, `perform_initialization`, is not used. In megatron-core 0.16.1 the call that it leaves out also
marks a parameter as divided among tensor parallel ranks, so without it the gradient norm would be another one there.
"""

import math
from typing import Any, TypeVar

from ...processor.runtime import Runtime

Config = TypeVar("Config")

# Those of a TransformerConfig; older versions of megatron-core lack the last one.
METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")


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
