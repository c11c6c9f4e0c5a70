"""Which nodes are on machines that Ray is about to take away. Pure."""

from collections.abc import Mapping

from ...protocol.messages import NodeGoing, NodeStaying


class Drains:
    """Remembers what the controller has heard of drained machines."""

    def __init__(self) -> None:
        self._going: set[str] = set()

    def changes(
        self, machines: Mapping[str, str], draining: Mapping[str, float], now_s: float
    ) -> list[NodeGoing | NodeStaying]:
        """Return what is new. `machines`: by node; `draining`: until when each is there, 0 where it is not said."""
        found: list[NodeGoing | NodeStaying] = []
        for node, machine in machines.items():
            ends_s = draining.get(machine)
            if ends_s is not None and node not in self._going:
                self._going.add(node)
                found.append(NodeGoing(node, "Ray drains its machine", max(0.0, ends_s - now_s) if ends_s else None))
            elif ends_s is None and node in self._going:
                self._going.discard(node)
                found.append(NodeStaying(node))
        self._going &= machines.keys()
        return found
