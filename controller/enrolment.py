"""The nodes that have joined a job by themselves, and the decision whether one more is admitted. Pure.

Each admission is an event of the journal, so the next controller knows the same nodes, and gives no session twice. A
name costs a node nothing but a request, so names of nodes that never come up do not last: they are forgotten after
`COMES_UP_S`, and those of lost nodes when there is no room for another one.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from ..protocol.messages import (
    LONGEST_NODE_NAME,
    EnrolmentRefused,
    EnrolmentRequested,
    NodeEnrolled,
    NodeJoined,
    NodeLost,
    RefusedBecause,
)
from ..protocol.token import expiry_text, is_key
from ..protocol.types import node_address
from .journaled import Journaled

MOST_NODES = 16_384  # that one job knows, lost ones included
COMES_UP_S = 60.0  # from a node's admission to its first word; until then its name is taken
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Standing(msgspec.Struct, frozen=True):
    """The rest of the controller's knowledge of nodes. `lives`: it is heard; `given_back`: it is to end."""

    lives: Callable[[str], bool]
    given_back: Callable[[str], bool]


@dataclass
class EnrolmentBook:
    """The nodes that have joined by themselves, by name."""

    _nodes: dict[str, NodeEnrolled] = field(default_factory=dict)
    _by_key: dict[str, str] = field(default_factory=dict)
    _comes_until_s: dict[str, float] = field(default_factory=dict)  # nodes that were admitted and never heard
    _lost: dict[str, None] = field(default_factory=dict)  # the longest lost first
    _forgotten_session: int = 0  # the highest one of all names that were forgotten
    came_up: int = 0  # admitted nodes that were heard, counted

    @property
    def nodes(self) -> Mapping[str, NodeEnrolled]:
        """The latest admission of each name."""
        return self._nodes

    def restore(self, learned: "EnrolmentBook") -> None:
        """Know what an earlier controller knew, and nothing else."""
        self.__dict__.update(learned.__dict__)

    def learn(self, event: Journaled, now: float) -> tuple[str, ...]:
        """Take in an admission, and the arrival or loss of a node. Return the keys that are withdrawn by it."""
        if isinstance(event, NodeEnrolled):
            return self._admitted(event, now)
        if isinstance(event, NodeJoined):
            self.came_up += self._comes_until_s.pop(event.node, None) is not None
            self._lost.pop(event.node, None)
        elif isinstance(event, NodeLost) and event.node in self._nodes:
            self._comes_until_s.pop(event.node, None)
            self._lost[event.node] = None
        return ()

    def _admitted(self, event: NodeEnrolled, now: float) -> tuple[str, ...]:
        before = self._nodes.get(event.node)
        if before == event:  # learned when it was decided, and again when it is durable
            return ()
        withdrawn = [] if before is None else [self._remove(before)]
        never_came = list(itertools.takewhile(lambda name: self._is_late(name, now), self._comes_until_s))
        longest_lost = itertools.islice(self._lost, len(self._nodes) - len(never_came) >= MOST_NODES)
        for name in (*never_came, *longest_lost):
            self._forgotten_session = max(self._forgotten_session, self._nodes[name].session)
            withdrawn.append(self._remove(self._nodes[name]))
        self._nodes[event.node] = event
        self._by_key[event.public_key] = event.node
        self._comes_until_s[event.node] = now + COMES_UP_S
        return tuple(withdrawn)

    def _remove(self, enrolled: NodeEnrolled) -> str:
        """Forget a node; return its key."""
        del self._nodes[enrolled.node]
        self._by_key.pop(enrolled.public_key, None)
        self._comes_until_s.pop(enrolled.node, None)
        self._lost.pop(enrolled.node, None)
        return enrolled.public_key

    def _is_late(self, node: str, now: float) -> bool:
        """Say whether a node that was admitted should have been heard by now."""
        return now >= self._comes_until_s[node]

    def _is_full(self, now: float) -> bool:
        if len(self._nodes) < MOST_NODES or self._lost:
            return False
        return not any(self._is_late(node, now) for node in itertools.islice(self._comes_until_s, 1))

    def decide(
        self,
        request: EnrolmentRequested,
        standing: Standing,
        now: float,
        *,
        owner: str | None = None,
        expires_s: int,
        wall_s: float,
    ) -> NodeEnrolled | EnrolmentRefused:
        """Admit a node, or say why not.

        `owner`: whom the job knows by the key that the node says it has made. `expires_s`: of the token, 0: never;
        `wall_s`: the time of day. A node that asks again before it is heard gets the same answer.
        """
        if expires_s and wall_s >= expires_s:
            return EnrolmentRefused(
                RefusedBecause.EXPIRED,
                f"the job's token expired at {expiry_text(expires_s)}: replace it (`midstep token --renew`)",
            )
        known = self._by_key.get(request.public_key)
        refusal = _malformed(request) or self._refusal_of_key(known, owner, standing)
        if refusal is not None:
            return refusal
        if known is not None and not self._is_late(known, now):
            return self._nodes[known]
        name = known or self._free_name(request, standing, now)
        if name is None:
            return EnrolmentRefused(
                RefusedBecause.NAME_IN_USE,
                f"a node {request.node} of this job lives, or was given back: choose another --node, or leave it out",
            )
        before = self._nodes.get(name)
        if before is None and self._is_full(now):
            return EnrolmentRefused(RefusedBecause.TOO_MANY, f"the job has {MOST_NODES} nodes")
        session = 1 + (self._forgotten_session if before is None else before.session)
        return NodeEnrolled(name, session, request.public_key, request.failure_domain)

    def _refusal_of_key(self, known: str | None, owner: str | None, standing: Standing) -> EnrolmentRefused | None:
        """Refuse a key that is known, unless by a node that was admitted with it and not heard yet, `known`."""
        if known is not None and standing.given_back(known):
            return EnrolmentRefused(
                RefusedBecause.GIVEN_BACK, f"{known} is not to be used any more by this job: start it on another node"
            )
        heard = known is not None and known not in self._comes_until_s
        if heard or (owner is not None and owner != node_address(known or "")):
            return EnrolmentRefused(RefusedBecause.BAD_KEY, "it sent a key that stands for somebody else")
        return None

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
    return None if is_key(request.public_key) else EnrolmentRefused(RefusedBecause.BAD_KEY, "it sent no public key")
