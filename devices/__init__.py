"""Devices that a training process computes on, looked up by name and imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..protocol.errors import ConfigurationError
from .npu_environment import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Device

# name -> module and class, and the library that is called through them, if any
_DEVICES = {
    "cpu": ("cpu", "CpuDevice", None),
    "npu": ("npu", "NpuDevice", "torch_npu"),
    "fake": ("npu", "NpuDevice", ".fake"),
}


def device_named(name: str) -> "Device":
    """Return a new device of the kind `name`.

    Called once in every training process, at its start. Raises ConfigurationError for an unknown name, and when the
    library of the device is not installed or too old.
    """
    if name not in _DEVICES:
        raise ConfigurationError(
            f"unknown device {name!r} in the policy (device); known: {', '.join(sorted(_DEVICES))}"
        )
    module, kind, driver = _DEVICES[name]
    made = getattr(import_module(f".{module}", __name__), kind)
    return cast("Device", made() if driver is None else made(_driver(name, driver), name))


def rank_environment(name: str) -> "Mapping[str, str]":
    """Return the environment variables that a rank on such a device needs, where the user has not set them."""
    return {} if _DEVICES.get(name, _DEVICES["cpu"])[2] is None else DEFAULTS


def one_node_on_a_machine(name: str) -> bool:
    """Return whether only one node of a machine can have such devices: ranks take them by their local rank."""
    return _DEVICES.get(name, _DEVICES["cpu"])[2] == "torch_npu"


def _driver(name: str, driver: str) -> object:
    try:
        return import_module(driver, __name__)
    except (ImportError, RuntimeError, OSError) as error:  # torch-npu without CANN fails in its own ways
        raise ConfigurationError(
            f"the device {name} of the policy needs {driver}, which cannot be imported here: {error}. "
            "See `midstep doctor`."
        ) from error
