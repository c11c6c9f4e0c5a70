"""The collective layer: all process groups of a training process, aborted and reconnected as one.

Implementations are looked up by name and imported when first asked for, because importing them loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..protocol.errors import ConfigurationError

if TYPE_CHECKING:
    from .base import Communicator

_HOMES = {
    "gloo": ("gloo.communicator", "GlooCommunicator"),
    "hccl": ("hccl", "npu_communicator"),
    "fake": ("fake", "fake_communicator"),
}


def communicator_named(name: str) -> "Communicator":
    """Return a new communicator by its `name` in the policy, not initialised yet.

    Runs once in every training process, before its process groups are made. Raises ConfigurationError for an unknown
    name.
    """
    if name not in _HOMES:
        raise ConfigurationError(
            f"unknown communicator {name!r} in the policy (communicator.name); known: {', '.join(sorted(_HOMES))}"
        )
    module, kind = _HOMES[name]
    return cast("Communicator", getattr(import_module(f".{module}", __name__), kind)())
