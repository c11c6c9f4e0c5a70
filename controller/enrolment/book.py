"""Which nodes are enrolled in a job, and whether one more is admitted, under which name and session. Pure.

What was decided is an event of the journal, so the next controller knows the same nodes, and gives no session twice.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from zmq.utils import z85

from ...protocol.enrolment import (
    LONGEST_NODE_NAME,
    EnrolmentRefused,
    EnrolmentRequested,
    NodeEnrolled,
    RefusedBecause,
)
from ...protocol.messages import NodeLost
from ...protocol.token import expiry_text
from ..events import Event

MOST_NODES = 16_384  # names that one job gives, dead ones included
COMES_UP_S = 60.0  # from a node's admission to its first word; until then its name is taken
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Standing(msgspec.Struct, frozen=True):
    """What the rest of the controller knows of nodes: `lives`: it is heard; `given_back`: it is to end."""

    lives: Callable[[str], bool]
    given_back: Callable[[str], bool]


@dataclass
class EnrolmentBook:
    """The nodes that have joined by themselves, by name."""

    _nodes: dict[str, NodeEnrolled] = field(default_factory=dict)
    _by_key: dict[str, str] = field(default_factory=dict)
    _comes_until_s: dict[str, float] = field(default_factory=dict)

    @property
    def nodes(self) -> Mapping[str, NodeEnrolled]:
        """The latest admission of each name."""
        return self._nodes

    def restore(self, learned: "EnrolmentBook") -> None:
        """Know what an earlier controller knew, and nothing else."""
        self._nodes, self._by_key, self._comes_until_s = learned._nodes, learned._by_key, learned._comes_until_s

    def learn(self, event: Event, now: float) -> None:
        """Take in an admission, or the loss of a node, whose name is free then."""
        if isinstance(event, NodeEnrolled):
            before = self._nodes.get(event.node)
            if before is not None:
                self._by_key.pop(before.public_key, None)
            self._nodes[event.node] = event
            self._by_key[event.public_key] = event.node
            self._comes_until_s[event.node] = now + COMES_UP_S
        elif isinstance(event, NodeLost):
            self._comes_until_s.pop(event.node, None)

    def decide(
        self, request: EnrolmentRequested, standing: Standing, now: float, *, expires_s: int, wall_s: float
    ) -> NodeEnrolled | EnrolmentRefused:
        """Admit a node, or say why not. `expires_s`: of the token, 0: never; `wall_s`: what time it is."""
        if expires_s and wall_s >= expires_s:
            return EnrolmentRefused(
                RefusedBecause.EXPIRED,
                f"the job's token expired at {expiry_text(expires_s)}: replace it (`midstep token --renew`)",
            )
        malformed = _malformed(request)
        if malformed is not None:
            return malformed
        known = self._by_key.get(request.public_key)
        if known is not None and standing.given_back(known):
            return EnrolmentRefused(
                RefusedBecause.GIVEN_BACK, f"{known} is not to be used any more by this job: start it on another node"
            )
        name = known or self._free_name(request, standing, now)
        if name is None:
            return EnrolmentRefused(
                RefusedBecause.NAME_IN_USE,
                f"a node {request.node} of this job lives, or was given back: choose another --node, or leave it out",
            )
        before = self._nodes.get(name)
        if before is None and len(self._nodes) >= MOST_NODES:
            return EnrolmentRefused(RefusedBecause.TOO_MANY, f"the job has had {MOST_NODES} nodes")
        session = 1 if before is None else before.session + 1
        return NodeEnrolled(name, session, request.public_key, request.failure_domain)

    def _free_name(self, request: EnrolmentRequested, standing: Standing, now: float) -> str | None:
        """Return the name that is wished for, or that name with the first number for which it is free."""
        if self._is_free(request.node, standing, now):
            return request.node
        if request.exact:
            return None
        stem = request.node[: LONGEST_NODE_NAME - len(f"-{MOST_NODES}")]
        numbered = (f"{stem}-{number}" for number in range(2, MOST_NODES + 2))
        return next((name for name in numbered if self._is_free(name, standing, now)), None)

    def _is_free(self, name: str, standing: Standing, now: float) -> bool:
        comes = now < self._comes_until_s.get(name, 0.0)
        return not (comes or standing.lives(name) or standing.given_back(name))


def is_node_name(name: str) -> bool:
    """Say whether a node can have this name."""
    return len(name) <= LONGEST_NODE_NAME and _NAME.fullmatch(name) is not None


def _malformed(request: EnrolmentRequested) -> EnrolmentRefused | None:
    if not is_node_name(request.node):
        return EnrolmentRefused(
            RefusedBecause.BAD_NAME,
            f"{request.node[:80]!r} cannot be a node's name: up to {LONGEST_NODE_NAME} letters, digits, dots, "
            "underscores and dashes, with a letter or digit first; name it with --node",
        )
    return None if _is_key(request.public_key) else EnrolmentRefused(RefusedBecause.BAD_KEY, "it sent no public key")


def _is_key(text: str) -> bool:
    try:
        return len(z85.decode(text.encode("ascii"))) == 32
    except (ValueError, KeyError, OverflowError, ArithmeticError):
        return False
