"""Which platforms there are: midstep's own, and those that other packages bring as entry points."""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import cast

from ..protocol.errors import ConfigurationError
from .base import PlatformFactory

GROUP = "midstep.platforms"
# name -> module and factory. Each imports its engine's client, which an extra of its name installs.
OWN: MappingProxyType[str, tuple[str, str]] = MappingProxyType(
    {
        "kubernetes": (".kubernetes.platform", "kubernetes_platform"),
    }
)


def names() -> list[str]:
    """Return the names of all platforms that are there."""
    return sorted({*OWN, *(found.name for found in entry_points(group=GROUP))})


def platform_factory(name: str) -> PlatformFactory:
    """Return what makes the platform of a name. Raises ConfigurationError: there is none, or it cannot be imported."""
    if name in OWN:
        module, factory = OWN[name]
        return cast(PlatformFactory, getattr(import_module(module, __package__), factory))
    found = [each for each in entry_points(group=GROUP) if each.name == name]
    if not found:
        known = ", ".join(names()) or "none"
        raise ConfigurationError(
            f"there is no platform {name!r} to be hosted (there is: {known}). A package that brings one names it in "
            f"its entry points, in the group {GROUP}."
        )
    return _loaded(found[0])


def _loaded(found: EntryPoint) -> PlatformFactory:
    try:
        factory = found.load()
    except Exception as error:  # of somebody else's package
        raise ConfigurationError(f"the platform {found.name} ({found.value}) cannot be imported: {error}.") from error
    if not callable(factory):
        raise ConfigurationError(f"the platform {found.name} ({found.value}) is nothing that can be called.")
    return cast(PlatformFactory, factory)
