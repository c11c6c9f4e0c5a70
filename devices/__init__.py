"""Devices that a training process computes on, looked up by name and imported on first use."""

from typing import TYPE_CHECKING, cast

from .kinds import device_kind, made

if TYPE_CHECKING:
    from .base import Device


def device_named(name: str) -> "Device":
    """Return a new device of the kind `name`.

    Called once in every training process, at its start. Raises ConfigurationError for an unknown name, and when the
    library of the device is not installed or too old.
    """
    return cast("Device", made(device_kind(name).factory))
