"""Know the node of each process, and the connection through which it is reached: that of the node's agent.

The controller believes a rank only over the connection of the node on which it has ordered that process to start.

Learned from what is said and ordered anyway, so that a restarted controller knows the routes again once it has replayed
its journal.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..protocol import messages as m
from ..protocol.bounds import MOST_OF_A_NODE
from ..protocol.types import PLATFORM, RankProgress, RunningProcess, node_address, rank_address, rank_of
from .journaled import Journaled
from .recovery.events import Action, Send

_NODE_PREFIX = node_address("")
WEIGHT_LIMIT = 8192  # of the orders in one message: each unit is a name and some numbers, of at most 1 kB
UNROUTED_LIMIT = 64  # orders for a rank that no node has at present

_Order = m.CommandToRank | m.StartProcess


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
                case m.StartProcess(rank=rank, incarnation=incarnation):
                    self._ordered(rank, incarnation, action.receiver)
                case m.DeleteNode(node=node):
                    self._given_back.add(node_address(node))
                case m.CreateNode(node=node):
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

    def has_all(self, processes: Iterable[RankProgress], address: str) -> bool:
        """Say whether all these processes were ordered to start on the node."""
        latest, moves = self._latest, self._moves
        for each in processes:
            rank, incarnation = each.rank, each.incarnation
            if latest.get(rank) == incarnation:  # of most there is one alone
                if moves[rank][-1][1] != address:
                    return False
            elif self.node_of(rank, incarnation) != address:
                return False
        return True

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

    def learn(self, event: Journaled, actions: Iterable[Action]) -> None:
        """Update the routes from an event and the commands that followed from it."""
        actions = tuple(actions)
        self.placement.learn(actions)
        if isinstance(event, m.NodeJoined):
            self._hosted(event.node, event.processes)
        elif isinstance(event, m.ProcessStarted):
            self._hosted(event.node, (event.process,))
        elif isinstance(event, m.NodeLost):
            gone = node_address(event.node)
            self._hosts = {rank: host for rank, host in self._hosts.items() if host[1] != gone}
            for rank, (incarnation, host) in list(self._early.items()):
                if host == gone:  # the node may come back, with a process that is not waited for any more
                    del self._early[rank]
                    self._void.setdefault(rank, set()).add(incarnation)
        for action in actions:
            if not isinstance(action, Send):
                continue
            if isinstance(action.body, m.StartProcess):
                self._started(rank_address(action.body.rank), action.body, action.receiver)
            elif isinstance(action.body, m.StopProcess):
                self._stopped(rank_address(action.body.rank), action.body.incarnation)

    def learned(self) -> "Routes":
        """Return what follows from events and commands, which is all of it."""
        return self

    def restore(self, learned: "Routes") -> None:
        """Know what an earlier controller had learned, and nothing else."""
        self.placement, self._hosts = learned.placement, learned._hosts
        self._early, self._void = learned._early, learned._void

    def _started(self, rank: str, order: m.StartProcess, connection: str) -> None:
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


class TurnOrders:
    """The orders of one turn, by the connection through which nodes and their ranks are reached."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._open: dict[str, list[_Order]] = {}
        self._where: dict[int, set[str]] = {}  # the connections for which an order to a rank is open
        self._unrouted: dict[int, list[m.CommandToRank]] = {}  # they wait until a node has the rank

    def take(self, receiver: str, body: m.Command, generation: int) -> bool:
        """Put what leaves with others into the next message for its node; say whether it is such an order."""
        rank = rank_of(receiver)
        if rank is not None and isinstance(body, m.RankCommand):
            self.add(m.CommandToRank(rank, generation, body))
        elif isinstance(body, m.StartProcess):
            self._open.setdefault(receiver, []).append(body)
        else:
            return False
        return True

    def add(self, order: m.CommandToRank) -> None:
        """Put an order into the next message for its rank's node."""
        connection = self._routes.connection(rank_address(order.rank))
        if connection is not None:
            self._open.setdefault(connection, []).extend((*self._unrouted.pop(order.rank, ()), order))
            self._where.setdefault(order.rank, set()).add(connection)
            return
        waiting = self._unrouted.setdefault(order.rank, [])
        waiting.append(order)
        del waiting[:-UNROUTED_LIMIT]

    def forget(self, rank: int) -> None:
        """Drop what is for a rank, and not its next process's start. What has gone to its agent is the agent's."""
        self._unrouted.pop(rank, None)
        for connection in self._where.pop(rank, ()):
            orders = self._open.pop(connection, ())
            left = [each for each in orders if isinstance(each, m.StartProcess) or each.rank != rank]
            if left:
                self._open[connection] = left

    def forget_node(self, connection: str) -> None:
        """Drop what is for a node that is gone."""
        self._open.pop(connection, None)

    def close(self, connection: str) -> Iterator[m.OrderRanks | m.StartProcesses]:
        """Yield the messages for a node, before anything else is sent to it: orders arrive as they were given."""
        for starts, group in groupby(self._open.pop(connection, ()), lambda each: isinstance(each, m.StartProcess)):
            orders = list(group)
            while orders:
                count = _fitting(orders)
                together = tuple(orders[:count])
                yield m.StartProcesses(together) if starts else m.OrderRanks(together)  # type: ignore[arg-type]
                del orders[:count]

    def flush(self) -> Iterator[tuple[str, m.OrderRanks | m.StartProcesses]]:
        """Yield all messages with their connections, at the end of a turn."""
        for rank in [rank for rank in self._unrouted if self._routes.connection(rank_address(rank)) is not None]:
            for order in self._unrouted.pop(rank):
                self.add(order)
        for connection in list(self._open):
            for message in self.close(connection):
                yield connection, message
        self._where.clear()


def _fitting(orders: Sequence[_Order]) -> int:
    """Return how many of the first orders go into one message: one at least."""
    weight = 0
    for count, order in enumerate(orders):
        weight += _weight(order)
        if count and (weight > WEIGHT_LIMIT or count >= MOST_OF_A_NODE):
            return count
    return len(orders)


def _weight(order: _Order) -> int:
    """Return how many entries of lists a command has, and one."""
    if isinstance(order, m.StartProcess):
        return 1
    command = order.command
    if isinstance(command, m.Rejoin):
        part = command.part
        return 1 + len(part.transfers) + len(part.copy_transfers) + len(part.local_states)
    return 1 + len(command.shards) + len(command.writers) if isinstance(command, m.SaveCheckpoint) else 1
