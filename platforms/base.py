"""Interface of a platform: provides nodes when the controller asks for them, and reports when they are lost.

A platform is a peer of the controller, at the address "platform". It decides nothing. `PlatformPeer` carries its
messages; `registry.py` finds it by its name.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..protocol.messages import CreateNode, DeleteNode, EndJob, KillNode, PlatformJoined, Report
from ..protocol.token import FullToken

Post = Callable[[Report], None]
"""Tell the controller something; it is sent again until it has arrived. Returns at once."""


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


EndedIncidents = Callable[[int], Awaitable[tuple[EndedIncident, ...]]]
"""Return the incidents of the job that are over and have higher numbers. Raises MidstepError without an answer."""


async def no_incidents(after: int) -> tuple[EndedIncident, ...]:
    """Return none: there is no controller to ask."""
    return ()


@dataclass(frozen=True)
class PlatformContext:
    """What a platform is made with, in the running loop. `options`: those of `midstep platform --option`."""

    job: str
    controllers: tuple[str, ...]  # where they may listen, tcp://; for agents
    token: FullToken
    options: Mapping[str, str]
    post: Post
    incidents: EndedIncidents = no_incidents


PlatformCheck = Callable[[PlatformContext], Awaitable[None]]
"""Check beforehand that a platform has what it needs. Raises ConfigurationError, which says what is missing."""

PlatformFactory = Callable[[PlatformContext], Platform]
"""Make a platform. Raises ConfigurationError for options that it does not know, or that do not fit."""
