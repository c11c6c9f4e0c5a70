"""Admits nodes: takes their requests, and lists their keys when the admission is durable.

Who asks has the job's token, or it would not be connected. It repeats its request until it is answered, so nothing is
lost when the controller dies in between.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...protocol.enrolment import EnrolmentRequested, NodeEnrolled
from ...protocol.errors import ConfigurationError
from ...protocol.keys import JobKeys
from ...protocol.types import node_address
from ..endpoints.control_requests import Accepted, Reply
from ..wire import Arrival, Wire
from .book import EnrolmentBook, Standing

_log = logging.getLogger(__name__)


class Enroller:
    """Answers the nodes that join one job."""

    def __init__(self, wire: Wire, standing: Standing, keys_directory: Path) -> None:
        """`keys_directory`: the job's keys, where each node's is listed."""
        self._wire = wire
        self._standing = standing
        self._keys = keys_directory
        self.book = EnrolmentBook()

    def restore(self) -> None:
        """List the keys of all nodes that an earlier controller has admitted. Raises ConfigurationError."""
        for enrolled in self.book.nodes.values():
            JobKeys.admit(self._keys, node_address(enrolled.node), enrolled.public_key)

    def take(self, request: EnrolmentRequested, arrival: Arrival, now: float, pend: Callable[..., None]) -> None:
        """Have an admission made durable by `pend(event, answer)`, or answer at once that there is none."""
        terms = JobKeys.load_joining(self._keys)
        expires_s = 0 if terms is None else terms.expires_s
        decided = self.book.decide(request, self._standing, now, expires_s=expires_s, wall_s=time.time())
        if isinstance(decided, NodeEnrolled):
            before = self.book.nodes.get(decided.node)
            if before is not None and before.public_key != decided.public_key:
                JobKeys.withdraw(self._keys, before.public_key)
            self.book.learn(decided, now)  # at once: another request may come before this one is durable
            pend(decided, partial(self._confirm, decided, arrival, now))
            return
        self._wire.refuse(f"enrolment: {decided.reason}", arrival.connection)
        _log.warning("node %s is not admitted: %s", ascii(request.node[:80]), decided.detail)
        self._wire.answer(arrival, decided, now)

    def _confirm(self, enrolled: NodeEnrolled, arrival: Arrival, now: float, reply: Reply) -> None:
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
