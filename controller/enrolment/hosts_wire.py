"""The wire of a job whose machines join by themselves: what would be said to a platform is said to the agents.

There is no platform process to talk to. A node that is given back hears it from the controller. Its key still opens
connections, so that one that was cut off hears it, too; nothing else that it says is believed (`node_admission.py`).
"""

import logging
from pathlib import Path

from ...platforms.hosts import agent_order
from ...protocol.keys import JobKeys
from ...protocol.mailbox import Mailbox
from ...protocol.messages import Command, CreateNode
from ...protocol.transport import RouterSocket
from ...protocol.types import PLATFORM, node_address
from ..liveness import Liveness
from ..routes import Routes
from ..wire import Wire
from .book import Standing
from .enroller import Enroller

_log = logging.getLogger(__name__)


class HostsWire(Wire):
    """As Wire, where there is no platform."""

    def send(self, receiver: str, body: Command, generation: int, now: float) -> None:
        """Send a command, to the agent that can do it if it is for the platform."""
        if receiver != PLATFORM:
            super().send(receiver, body, generation, now)
            return
        order = agent_order(body)
        if order is not None:
            super().send(order.receiver, order.body, generation, now)
        if isinstance(body, CreateNode):
            _log.warning("one more node is needed: start an agent, or `midstep run`, with the job's token")


def open_wire(
    router: RouterSocket,
    mailbox: Mailbox,
    routes: Routes,
    *,
    liveness: Liveness,
    world_size: int,
    keys: Path,
    platform: str = "",
) -> tuple[Wire, Enroller]:
    """Return the wire of a job, and what lets nodes in. `keys`: the job's; they say whether nodes may join.

    `platform`: the one that makes the nodes which join; empty: there is none.
    """

    def given_back(node: str) -> bool:
        return routes.placement.is_given_back(node_address(node))

    kind = Wire if platform or JobKeys.load_joining(keys) is None else HostsWire
    wire = kind(router, mailbox, routes, world_size)
    return wire, Enroller(wire, Standing(liveness.watches, given_back), keys)
