"""Answers while a controller does not lead: its phase, and which one leads.

One that stands by listens at its own endpoint, where that is known to others (`StandingBy`). It reads nothing of what
comes, so that no stranger's bytes are decoded for an answer that is always the same. One that was elected and loads the
journal has its sockets already (`WhileLoading`): operators get "try later", and what nodes say waits.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ...protocol.codec import PROTOCOL_VERSION, frame_of
from ...protocol.discovery import MOST_ENDPOINTS
from ...protocol.errors import ConfigurationError
from ...protocol.identities import OPERATOR_PREFIX
from ...protocol.incidents import ControllerPhase, ControllerStatus, leader_of
from ...protocol.keys import ServerKeys
from ...protocol.messages import JOINING_FAMILY, ControllersListed, Envelope
from ...protocol.transport import RouterSocket
from ...protocol.types import CONTROLLER
from .control_requests import TryLater
from .remote_operators import OperatorRequests

ANSWER_S = 0.1  # between two times that a controller which loads its journal looks for requests

_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)


def listed(controllers: Iterable[ControllerStatus], *, serves: bool) -> ControllersListed:
    """Return where the controllers of a job listen, the one that leads first."""
    known = [each for each in controllers if each.endpoint]
    leader = leader_of(known)
    others = sorted(each.endpoint for each in known if each is not leader)
    endpoints = others if leader is None else [leader.endpoint, *others]
    return ControllersListed(tuple(endpoints[:MOST_ENDPOINTS]), serves, "" if leader is None else leader.endpoint)


class StandingBy:
    """Listens for one controller until it leads. Never blocks. For the thread that waits for the lead."""

    def __init__(self, listen: str | None, keys: ServerKeys, job: str) -> None:
        """Listen, unless another process does so there: the one that leads may be on this machine."""
        self._job = job
        self._router: RouterSocket | None = None
        try:
            self._router = None if listen is None else RouterSocket(listen, curve=keys)
        except ConfigurationError as error:
            _log.warning("while this controller stands by it answers nobody: %s", error)

    def answer(self, name: str, controllers: Sequence[ControllerStatus]) -> None:
        """Tell all who have come, or have said something, that `name` does not lead, and which of the others does."""
        if self._router is None:
            return
        came = {received.identity for received in self._router.receive()} | set(self._router.newcomers())
        if not came:
            return
        others = [each for each in controllers if each.name != name]
        operators, nodes = self._answers(name, others)
        for identity in came:
            if identity.startswith(OPERATOR_PREFIX):
                self._router.send(identity, operators)
            else:
                self._router.send(identity, frame_of(msgspec.structs.replace(nodes, receiver=identity)))

    def _answers(self, name: str, others: Sequence[ControllerStatus]) -> tuple[bytes, Envelope]:
        leader = leader_of(others)
        later = TryLater(name, ControllerPhase.COLD)
        if leader is not None:
            later = msgspec.structs.replace(later, leader=leader.name, endpoint=leader.endpoint)
        body = listed(others, serves=False)
        return _encode(later), Envelope(PROTOCOL_VERSION, self._job, CONTROLLER, JOINING_FAMILY, 0, 0, 0, 0, body)

    def hand_over(self) -> RouterSocket | None:
        """Return the socket for the controller to lead with, and who has connected to it; None if there is none."""
        router, self._router = self._router, None
        return router

    def close(self) -> None:
        """Stop listening, unless the socket was handed over. Idempotent."""
        if self._router is not None:
            self._router.close()
            self._router = None


class WhileLoading:
    """Tells operators to try later. `set_aside` reads what nodes and operators elsewhere have sent, for later."""

    def __init__(self, name: str, control: OperatorRequests, set_aside: Callable[[], None]) -> None:
        self._later = TryLater(name, ControllerPhase.LOADING)
        self._control = control
        self._set_aside = set_aside
        self._next_s = time.monotonic() + ANSWER_S  # a journal that is short is loaded by then

    def beat(self) -> None:
        """Answer those who have asked, now and then. Called often, and cheap."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._set_aside()
        for asker, _ in self._control.requests():
            self._control.answer(asker, self._later)
        self._next_s = time.monotonic() + ANSWER_S


class ToldNodes:
    """Answers heartbeats with where the controllers are: to each node once, on a change, and again after a while."""

    AGAIN_S = 30.0  # an answer may be lost
    LOOK_S = 1.0

    def __init__(self, controllers: Callable[[], Sequence[ControllerStatus]]) -> None:
        self._controllers = controllers
        self._listed = ControllersListed((), serves=True)
        self._look_s = 0.0
        self._told: dict[str, tuple[ControllersListed, float]] = {}

    def answer(self, node: str, now: float) -> ControllersListed | None:
        """Return the answer to a node's heartbeat; None where it knows all."""
        if now >= self._look_s:
            self._look_s = now + self.LOOK_S
            self._listed = listed(self._controllers(), serves=True)
        told, at_s = self._told.get(node, (None, 0.0))
        if not self._listed.endpoints or (told == self._listed and now - at_s < self.AGAIN_S):
            return None
        self._told[node] = self._listed, now
        return self._listed

    def forget(self, node: str) -> None:
        """Drop what is remembered of a node that is lost."""
        self._told.pop(node, None)
