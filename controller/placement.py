"""On which node each process of a rank was ordered to start, and which nodes were given back.

The controller believes a rank only over the connection of the node on which it has ordered that process to start. What
was ordered follows from the journal alone, so a restarted controller knows it again once it has replayed.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..protocol.messages import CreateNode, DeleteNode, StartProcess
from ..protocol.types import node_address
from .recovery.events import Action, Send


@dataclass
class PlacementHistory:
    """Incarnation -> node, per rank. Nodes are named by the address of their agent (`node_address`)."""

    # Incarnations of a rank only rise, so an entry is needed only where the node changes.
    _moves: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    _latest: dict[int, int] = field(default_factory=dict)
    _given_back: set[str] = field(default_factory=set)

    def learn(self, actions: Iterable[Action]) -> None:
        """Take in what has been ordered."""
        for action in actions:
            if not isinstance(action, Send):
                continue
            match action.body:
                case StartProcess(rank=rank, incarnation=incarnation):
                    self._ordered(rank, incarnation, action.receiver)
                case DeleteNode(node=node):
                    self._given_back.add(node_address(node))
                case CreateNode(node=node):
                    self._given_back.discard(node_address(node))

    def node_of(self, rank: int, incarnation: int) -> str | None:
        """Return the address of the node that a process was ordered to start on; None if it never was."""
        latest = self._latest.get(rank, 0)
        if not 0 < incarnation <= latest:
            return None
        moves = self._moves[rank]
        if incarnation == latest:
            return moves[-1][1]
        place = bisect_right(moves, incarnation, key=lambda move: move[0])
        return moves[place - 1][1] if place else None

    def has_hosted(self, rank: int, address: str) -> bool:
        """Say whether any process of the rank was ordered to start on the node."""
        return any(node == address for _, node in self._moves.get(rank, ()))

    def is_given_back(self, address: str) -> bool:
        """Return whether the platform was ordered to end the node, and not to create it again since."""
        return address in self._given_back

    def _ordered(self, rank: int, incarnation: int, address: str) -> None:
        if incarnation <= self._latest.get(rank, 0):
            return  # the same order, sent once more
        moves = self._moves.setdefault(rank, [])
        if not moves or moves[-1][1] != address:
            moves.append((incarnation, address))
        self._latest[rank] = incarnation
