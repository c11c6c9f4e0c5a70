"""Where the members of a generation meet, and what keeps others out.

Every node serves a rendezvous store, and one of them is enough. A store that is alive and does not answer, or one that
is disturbed, must not cost the job all its attempts: where a link-up has failed, the next generation meets
elsewhere.
"""

import hashlib
from dataclasses import dataclass

from ...protocol.types import Rendezvous, StoreEndpoint
from .world import Node, NodeState, World

KEY_BYTES = 32
_SECRET_BYTES = 16
_NOWHERE = StoreEndpoint("", 0)


@dataclass
class Meeting:
    """The store of the present generation. `key`: what the secrets of all generations are derived from."""

    key: bytes = b""
    node: str = ""  # whose store it is; empty: not chosen yet
    failed: bool = False  # ranks could not link up there

    def rendezvous(self, world: World, purpose: str) -> Rendezvous:
        """Return where the present generation meets: the same for all its members, and in a replay.

        The secret follows from the job's key and the purpose, which names job and generation, so that the machine needs
        no chance of its own. Where no store is known the answer leads nowhere: the link-up fails, and the ladder takes
        the next rung.
        """
        node = self._chosen(world)
        endpoint = node.store if node is not None and node.store is not None else _NOWHERE
        return Rendezvous(endpoint.host, endpoint.port, self.secret(purpose))

    def secret(self, purpose: str) -> str:
        """Return the secret of those who meet for a purpose."""
        return hashlib.blake2b(purpose.encode(), key=self.key, digest_size=_SECRET_BYTES).hexdigest()

    def begin(self) -> None:
        """Forget the store of the generation before. Runs when a generation is opened."""
        self.node, self.failed = "", False

    def link_up_failed(self, world: World) -> None:
        """Prefer other stores to that of the present generation from now on, however many ranks report it."""
        if self.node in world.nodes and not self.failed:
            self.failed = True
            world.nodes[self.node].failed_link_ups += 1

    def linked_up(self, world: World) -> None:
        """Trust the store of the present generation: all ranks have met there."""
        if self.node in world.nodes:
            world.nodes[self.node].failed_link_ups = 0

    def _chosen(self, world: World) -> Node | None:
        node = world.nodes.get(self.node)
        if node is None or node.store is None or node.state not in {NodeState.ACTIVE, NodeState.SPARE}:
            node = world.best_store()
            self.node = node.name if node is not None else ""
        return node
