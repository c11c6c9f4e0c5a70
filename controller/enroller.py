"""Admit nodes that join a job by themselves, with its token, and list their keys once that is durable.

A node repeats its request until it is answered, so nothing is lost when the controller dies in between. A token may be
in wrong hands: admissions are limited in rate, each connection has its turn, and a key that the job knows already is
refused.

Such a job has no process that makes nodes (`HostsWire`): what it would be ordered to do, the nodes' agents are. A node
that is given back hears it from the controller. Its key still opens connections, so that one that was cut off hears it,
too; nothing else that it says is believed (`admission.py`).
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ..protocol import messages as m
from ..protocol.errors import ConfigurationError
from ..protocol.exits import ANOTHER_NODE
from ..protocol.keys import JobKeys
from ..protocol.mailbox import Mailbox
from ..protocol.transport import RouterSocket
from ..protocol.types import PLATFORM, ArmedFault, FaultAction, node_address
from .endpoints.control_requests import Accepted, Reply
from .enrolment import EnrolmentBook, Standing
from .liveness import Liveness
from .routes import Routes
from .wire import Arrival, Wire

BURST = 2000  # nodes that are admitted at once; each that comes up makes room for another one
ADMISSIONS_PER_S = 50  # of nodes that do not come up
TURN_S = 0.5  # between two requests of one connection that are looked at
_MOST_TURNS = 4096

GIVEN_BACK = "this node is not to be used any more: start the agent on another one"
_log = logging.getLogger(__name__)


class _Rate:
    """How many more nodes may be admitted now, and which connections have had their turn."""

    def __init__(self) -> None:
        self._left, self._at_s, self._came_up = float(BURST), 0.0, 0
        self._asked_s: dict[str, float] = {}

    def has_turn(self, connection: str, now: float) -> bool:
        """Give each connection its turn: one that asks without end does not take that of others."""
        if now - self._asked_s.get(connection, -TURN_S) < TURN_S:
            return False
        if len(self._asked_s) >= _MOST_TURNS:
            self._asked_s = {each: at_s for each, at_s in self._asked_s.items() if now - at_s < TURN_S}
        self._asked_s[connection] = now
        return True

    def has_room(self, came_up: int, now: float) -> bool:
        """Say whether one more may be admitted. `came_up`: how many of those that were have been heard."""
        grown = (now - self._at_s) * ADMISSIONS_PER_S + (came_up - self._came_up)
        self._left = min(float(BURST), self._left + grown)
        self._at_s, self._came_up = now, came_up
        return self._left >= 1

    def spend(self) -> None:
        """Count an admission."""
        self._left -= 1


class Enroller:
    """Answers the nodes that join one job."""

    def __init__(self, wire: Wire, standing: Standing, keys_directory: Path) -> None:
        """`keys_directory`: the job's keys, where each node's is listed."""
        self._wire = wire
        self._standing = standing
        self._keys = keys_directory
        self._rate = _Rate()
        self.book = EnrolmentBook()

    def restore(self) -> None:
        """List the keys of the nodes that earlier controllers have admitted, and no other ones of nodes that joined.

        Raises ConfigurationError.
        """
        own = {enrolled.public_key: node_address(enrolled.node) for enrolled in self.book.nodes.values()}
        taken = JobKeys.reserved(self._keys)
        admitted = {public: identity for public, identity in own.items() if public not in taken}
        for public, identity in JobKeys.listed(self._keys, node_address("")):
            if admitted.get(public) != identity and not JobKeys.folder(self._keys, identity).exists():
                JobKeys.withdraw(self._keys, public)
        for public, identity in admitted.items():
            JobKeys.admit(self._keys, identity, public)

    def take(self, request: m.EnrolmentRequested, arrival: Arrival, now: float, pend: Callable[..., None]) -> None:
        """Have an admission made durable by `pend(event, answer)`, or answer at once that there is none."""
        if not self._rate.has_turn(arrival.connection, now):
            self._wire.refuse("enrolment: asked too often", arrival.connection)
            return
        decided = self._decided(request, now)
        if isinstance(decided, m.NodeEnrolled):
            self._rate.spend()
            for public in self.book.learn(decided, now):  # at once: another request may come before it is durable
                JobKeys.withdraw(self._keys, public)
            pend(decided, partial(self._confirm, decided, arrival, now))
            return
        self._wire.refuse(f"enrolment: {decided.reason}", arrival.connection)
        _log.warning("node %s is not admitted: %s", ascii(request.node[:80]), decided.detail)
        self._wire.answer(arrival, decided, now)

    def _decided(self, request: m.EnrolmentRequested, now: float) -> m.NodeEnrolled | m.EnrolmentRefused:
        if not self._rate.has_room(self.book.came_up, now):
            return m.EnrolmentRefused(m.RefusedBecause.LATER, "too many nodes ask to join at once: ask again")
        terms = JobKeys.load_joining(self._keys)
        return self.book.decide(
            request,
            self._standing,
            now,
            owner=JobKeys.owner_of(self._keys, request.public_key),
            expires_s=0 if terms is None else terms.expires_s,
            wall_s=time.time(),
        )

    def _confirm(self, enrolled: m.NodeEnrolled, arrival: Arrival, now: float, reply: Reply) -> None:
        """Let the node in, now that it is durable. Where that is not so it gets no answer, and asks on."""
        if not isinstance(reply, Accepted):
            return
        try:
            JobKeys.admit(self._keys, node_address(enrolled.node), enrolled.public_key)
        except ConfigurationError as error:
            _log.error("node %s cannot be let in: %s", enrolled.node, error)
            return
        _log.info("node %s is admitted, session %d", enrolled.node, enrolled.session)
        self._wire.answer(arrival, enrolled, now)


class Order(msgspec.Struct, frozen=True):
    """A command for an agent, by its address."""

    receiver: str
    body: m.Command


def agent_order(command: m.Command) -> Order | None:
    """Return the order for an agent that a command to the platform comes to; None where no agent has to do anything.

    Each agent gets the end of the job by itself.
    """
    match command:
        case m.DeleteNode(node=node):
            return Order(node_address(node), m.EndJob(exit_code=ANOTHER_NODE, reason=GIVEN_BACK))
        case m.KillNode(node=node):
            return Order(node_address(node), m.ArmFault(ArmedFault(rank=0, action=FaultAction.KILL_NODE)))
        case _:
            return None


class HostsWire(Wire):
    """As Wire, where there is no platform. `bring`: is called with the name of each node that is wanted."""

    bring: Callable[[str], None] | None = None

    def send(self, receiver: str, body: m.Command, generation: int, now: float) -> None:
        """Send a command, to the agent that can do it if it is for the platform."""
        if receiver != PLATFORM:
            super().send(receiver, body, generation, now)
            return
        order = agent_order(body)
        if order is not None:
            super().send(order.receiver, order.body, generation, now)
        if isinstance(body, m.CreateNode) and self.bring is not None:
            self.bring(body.node)
        elif isinstance(body, m.CreateNode):
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
    proxies: bool = False,
) -> tuple[Wire, Enroller]:
    """Return the wire of a job, and what lets nodes in. `keys`: the job's; they say whether nodes may join.

    `platform`: the one that makes the nodes which join; empty: there is none. `proxies`: may speak for nodes.
    """

    def given_back(node: str) -> bool:
        return routes.placement.is_given_back(node_address(node))

    kind = Wire if platform or JobKeys.load_joining(keys) is None else HostsWire
    wire = kind(router, mailbox, routes, world_size, JobKeys.load_server(keys) if proxies else None)
    return wire, Enroller(wire, Standing(liveness.watches, given_back), keys)
