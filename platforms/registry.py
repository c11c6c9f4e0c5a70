"""Which platforms there are: midstep's own, and those that other packages bring as entry points."""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import NamedTuple, cast

from ..protocol.errors import ConfigurationError
from .base import PlatformCheck, PlatformFactory

GROUP = "midstep.platforms"


class OwnPlatform(NamedTuple):
    """Where a platform of midstep's is. The module imports the engine's client, which an extra of its name installs."""

    module: str
    factory: str
    check: str


OWN: MappingProxyType[str, OwnPlatform] = MappingProxyType(
    {
        "kubernetes": OwnPlatform(".kubernetes.platform", "kubernetes_platform", "check_kubernetes"),
    }
)


def names() -> list[str]:
    """Return the names of all platforms that are there."""
    return sorted({*OWN, *(found.name for found in entry_points(group=GROUP))})


def platform_factory(name: str) -> PlatformFactory:
    """Return what makes the platform of a name. Raises ConfigurationError: there is none, or it cannot be imported."""
    if name in OWN:
        return cast(PlatformFactory, _own(name, OWN[name].factory))
    found = [each for each in entry_points(group=GROUP) if each.name == name]
    if not found:
        known = ", ".join(names()) or "none"
        raise ConfigurationError(
            f"there is no platform {name!r} to be hosted (there is: {known}). A package that brings one names it in "
            f"its entry points, in the group {GROUP}."
        )
    return _loaded(found[0])


def platform_check(name: str) -> PlatformCheck | None:
    """Return what checks the platform of a name beforehand, if it has that. Raises as `platform_factory` does."""
    if name in OWN:
        return cast(PlatformCheck, _own(name, OWN[name].check))
    platform_factory(name)
    return None


def _own(name: str, attribute: str) -> object:
    return getattr(import_module(OWN[name].module, __package__), attribute)


def _loaded(found: EntryPoint) -> PlatformFactory:
    try:
        factory = found.load()
    except Exception as error:  # of somebody else's package
        raise ConfigurationError(f"the platform {found.name} ({found.value}) cannot be imported: {error}.") from error
    if not callable(factory):
        raise ConfigurationError(f"the platform {found.name} ({found.value}) is nothing that can be called.")
    return cast(PlatformFactory, factory)
