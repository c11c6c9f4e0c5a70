"""What a training process computes on. Implementations are looked up by name and imported when first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..protocol.errors import ConfigurationError

if TYPE_CHECKING:
    from .base import Device

_HOMES = {"cpu": ("cpu", "CpuDevice")}


def device_named(name: str) -> "Device":
    """Return a new device of the kind `name`.

    Runs once in every training process, at its start. Raises ConfigurationError for an unknown name.
    """
    if name not in _HOMES:
        raise ConfigurationError(f"unknown device {name!r} in the policy (device); known: {', '.join(sorted(_HOMES))}")
    module, kind = _HOMES[name]
    return cast("Device", getattr(import_module(f".{module}", __name__), kind)())
