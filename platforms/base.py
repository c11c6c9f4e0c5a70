"""The interface of a platform, which provides nodes and reports when they are lost; and how one is found by its name.

A platform is a peer of the controller, at the address "platform". It decides nothing. `PlatformPeer` carries its
messages. Besides midstep's own platforms there are those that other packages bring as entry points.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import msgspec

from ..protocol.errors import ConfigurationError
from ..protocol.messages import CreateNode, DeleteNode, EndJob, KillNode, PlatformJoined, Report
from ..protocol.token import FullToken

GROUP = "midstep.platforms"

#: Tell the controller something; it is sent again until it has arrived. Returns at once.
Post = Callable[[Report], None]


class Platform(Protocol):
    """Provides nodes. Each command may come twice; the second must change nothing. None may block.

    The loss of a node that the controller has not deleted is reported as NodeLost, once, whatever caused it; that a
    node is about to be taken away as NodeGoing, and that it is not after all as NodeStaying.
    """

    def describe(self) -> PlatformJoined:
        """Return what this platform can do, and which nodes it has, or has on their way. Told to every controller."""
        ...

    def create_node(self, command: CreateNode) -> None:
        """Make a node and start its agent, which then joins by itself. Answers with NodeRefused if it cannot.

        Called when a job begins, while a recovery waits for a replacement, or ahead of time, for spare nodes.
        """
        ...

    def delete_node(self, command: DeleteNode) -> None:
        """End the node's agent and everything on it, and forget it. Called when a rung leaves a node."""
        ...

    def kill_node(self, command: KillNode) -> None:
        """Kill the node's agent and processes at once, as a power cut would, to inject a fault. NodeLost follows."""
        ...

    def end_job(self, command: EndJob) -> None:
        """Take note that the job has ended: agents exit by themselves, and are no longer reported as lost."""
        ...

    async def close(self) -> None:
        """End the nodes that are left, and let go of everything else. Returns after a bounded time."""
        ...


class EndedIncident(msgspec.Struct, frozen=True):
    """An incident that is over, for those who look at the platform.

    `rung`: the one taken last, or "". `text`: a line. `nodes`: those at fault. `stopped`: it ended the job.
    """

    number: int
    rung: str
    text: str
    nodes: tuple[str, ...]
    stopped: bool = False


#: Return the incidents of the job that are over and have higher numbers. Raises MidstepError without an answer.
EndedIncidents = Callable[[int], Awaitable[tuple[EndedIncident, ...]]]


async def no_incidents(after: int) -> tuple[EndedIncident, ...]:
    """Return none: there is no controller to ask."""
    return ()


@dataclass(frozen=True)
class PlatformContext:
    """The arguments of a platform's factory, in the running loop. `options`: those of `midstep platform --option`."""

    job: str
    controllers: tuple[str, ...]  # where they may listen, tcp://; for agents
    token: FullToken
    options: Mapping[str, str]
    post: Post
    incidents: EndedIncidents = no_incidents


#: Check beforehand that a platform has what it needs. Raises ConfigurationError, which says what is missing.
PlatformCheck = Callable[[PlatformContext], Awaitable[None]]

#: Make a platform. Raises ConfigurationError for options that it does not know, or that do not fit.
PlatformFactory = Callable[[PlatformContext], Platform]


class OwnPlatform(NamedTuple):
    """One of midstep's own platforms, by module and functions. The module imports the client of an extra."""

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
