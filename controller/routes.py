"""Through which connection a peer is reached: ranks through the agent of the node that hosts them.

Learned from what is said and ordered anyway, so that a restarted controller knows the routes again once it has replayed
its journal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..protocol.messages import NodeJoined, NodeLost, ProcessStarted, StartProcess, StopProcess
from ..protocol.types import PLATFORM, RunningProcess, node_address, rank_address
from .actions import Action, Send
from .events import Event
from .placement import PlacementHistory

_NODE_PREFIX = node_address("")
_RANK_PREFIX = "rank/"
_UNKNOWN = 0  # the incarnation of a rank that was only heard


@dataclass
class Routes:
    """Rank -> connection of its agent. A higher incarnation of a rank beats a lower one.

    A process that was started early is reached only when the one that holds the rank has been ordered to end.
    """

    placement: PlacementHistory = field(default_factory=PlacementHistory)  # which node may speak for which process
    _hosts: dict[str, tuple[int, str]] = field(default_factory=dict)  # rank address -> (incarnation, connection)
    _early: dict[str, tuple[int, str]] = field(default_factory=dict)  # the same, of those that wait to take a rank over
    # Incarnations that waited in vain; their start may be reported late.
    _void: dict[str, set[int]] = field(default_factory=dict)

    def connection(self, receiver: str) -> str | None:
        """Return the identity of the connection that leads to `receiver`; None while no node hosts it."""
        host = self._hosts.get(receiver)
        if host is not None:
            return host[1]
        return receiver if receiver == PLATFORM or receiver.startswith(_NODE_PREFIX) else None

    def learn(self, event: Event, actions: Iterable[Action]) -> None:
        """Update the routes from an event and the commands that followed from it."""
        actions = tuple(actions)
        self.placement.learn(actions)
        if isinstance(event, NodeJoined):
            self._hosted(event.node, event.processes)
        elif isinstance(event, ProcessStarted):
            self._hosted(event.node, (event.process,))
        elif isinstance(event, NodeLost):
            gone = node_address(event.node)
            self._hosts = {rank: host for rank, host in self._hosts.items() if host[1] != gone}
            for rank, (incarnation, host) in list(self._early.items()):
                if host == gone:  # the node may come back, with a process that is not waited for any more
                    del self._early[rank]
                    self._void.setdefault(rank, set()).add(incarnation)
        for action in actions:
            if not isinstance(action, Send):
                continue
            if isinstance(action.body, StartProcess):
                self._started(rank_address(action.body.rank), action.body, action.receiver)
            elif isinstance(action.body, StopProcess):
                self._stopped(rank_address(action.body.rank), action.body.incarnation)

    def learned(self) -> "Routes":
        """Return what follows from events and commands alone: not what was only heard by the way."""
        hosts = {rank: host for rank, host in self._hosts.items() if host[0] > _UNKNOWN}
        return Routes(self.placement, hosts, self._early, self._void)

    def restore(self, learned: "Routes") -> None:
        """Know what an earlier controller had learned, and nothing else."""
        self.placement, self._hosts = learned.placement, learned._hosts
        self._early, self._void = learned._early, learned._void

    def relayed(self, sender: str, connection: str) -> None:
        """Note that a rank was heard through `connection`: believed where nothing better is known."""
        if sender.startswith(_RANK_PREFIX) and sender not in self._hosts:
            self._hosts[sender] = (_UNKNOWN, connection)

    def _started(self, rank: str, order: StartProcess, connection: str) -> None:
        if order.early:
            self._early[rank] = (order.incarnation, connection)
        else:
            self._hosts[rank] = (order.incarnation, connection)
            self._early.pop(rank, None)
            self._void.pop(rank, None)

    def _stopped(self, rank: str, incarnation: int) -> None:
        """Route a rank to the process that waits for its place when its holder ends, or drop that one when it ends."""
        waiting = self._early.get(rank)
        if waiting is None:
            return
        if waiting[0] == incarnation:
            del self._early[rank]
            self._void.setdefault(rank, set()).add(incarnation)
        elif self._hosts.get(rank, (0, ""))[0] <= incarnation:  # and not a stray of an earlier incarnation
            self._hosts[rank] = self._early.pop(rank)

    def _hosted(self, node: str, processes: Iterable[RunningProcess]) -> None:
        for process in processes:
            rank = rank_address(process.rank)
            if self._early.get(rank) == (process.incarnation, node_address(node)):
                continue
            if process.incarnation in self._void.get(rank, ()):
                continue
            if self._hosts.get(rank, (0, ""))[0] <= process.incarnation:
                self._hosts[rank] = (process.incarnation, node_address(node))
