"""The world as the controller knows it: which process holds each rank, on which node, in which state.

Plain bookkeeping, no decisions. A rank changes its state by the table `NEXT` and in no other way: `World.take` looks it
up there, and keeps the ranks of each state. A test holds the table against what simulated jobs reach.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ...protocol.compat import StrEnum
from ...protocol.reports import PreparedProcesses
from ...protocol.types import Rendezvous, StandbyDepth, StepReport, StoreEndpoint
from .buddies import Location


class RankState(StrEnum):
    """Where the process of a rank stands."""

    ABSENT = "absent"  # no process holds the rank
    STARTING = "starting"  # ordered to start, has not reached its train function
    JOINED = "joined"  # new, parked in front of its train function
    TRAINING = "training"
    QUIESCING = "quiescing"
    QUIESCED = "quiesced"  # a survivor, parked
    REJOINING = "rejoining"
    READY = "ready"
    RESUMING = "resuming"  # ordered to train, has not committed its first step
    FINISHED = "finished"  # train function returned, parked
    RELEASED = "released"
    EXITED = "exited"  # ended well

    @property
    def shown(self) -> str:
        """The name in status: whether the first step is committed is the job's phase, and not a rank's state."""
        return str(RankState.TRAINING if self is RankState.RESUMING else self)


class RankEvent(StrEnum):
    """The events of a rank: what its process was ordered, and what followed."""

    START_ORDERED = "start ordered"
    JOINED = "joined"
    QUIESCE_ORDERED = "quiesce ordered"
    QUIESCED = "quiesced"
    REJOIN_ORDERED = "rejoin ordered"
    READY = "ready"
    RESUME_ORDERED = "resume ordered"
    STEP_COMMITTED = "step committed"
    FINISHED = "finished"
    RELEASE_ORDERED = "release ordered"
    EXITED = "exited"  # well
    LOST = "lost"  # it has failed, was ended, or is out of reach


PARKED = frozenset({RankState.JOINED, RankState.QUIESCED})

GONE = frozenset({RankState.ABSENT, RankState.EXITED})

AT_WORK = frozenset({RankState.RESUMING, RankState.TRAINING})

# A rank that has finished before a step boundary will never stop there.
NOT_STOPPED = (RankState.QUIESCING, RankState.FINISHED)
DONE = frozenset({RankState.FINISHED, RankState.RELEASED, RankState.EXITED})

S, E = RankState, RankEvent

_QUIESCED_FROM = (S.RESUMING, S.TRAINING, S.QUIESCING, S.REJOINING, S.READY, S.FINISHED, S.RELEASED)

NEXT: Mapping[tuple[RankState, RankEvent], RankState] = {
    (S.ABSENT, E.START_ORDERED): S.STARTING,
    (S.STARTING, E.JOINED): S.JOINED,
    **{(state, E.QUIESCE_ORDERED): S.QUIESCING for state in _QUIESCED_FROM},
    (S.QUIESCING, E.QUIESCED): S.QUIESCED,
    (S.JOINED, E.REJOIN_ORDERED): S.REJOINING,
    (S.QUIESCED, E.REJOIN_ORDERED): S.REJOINING,
    (S.REJOINING, E.READY): S.READY,
    (S.READY, E.RESUME_ORDERED): S.RESUMING,
    (S.RESUMING, E.STEP_COMMITTED): S.TRAINING,
    (S.TRAINING, E.STEP_COMMITTED): S.TRAINING,  # as it does not know whether it was heard
    (S.FINISHED, E.STEP_COMMITTED): S.FINISHED,  # what it said first has come last
    (S.RESUMING, E.FINISHED): S.FINISHED,
    (S.TRAINING, E.FINISHED): S.FINISHED,
    (S.QUIESCING, E.FINISHED): S.FINISHED,  # before the boundary at which it was to stop
    (S.FINISHED, E.RELEASE_ORDERED): S.RELEASED,
    (S.RELEASED, E.EXITED): S.EXITED,
    (S.STARTING, E.EXITED): S.EXITED,  # a script that is not resilient never joins
    **{(state, E.LOST): S.ABSENT for state in S},
}


class NodeState(StrEnum):
    """The role of a node in the job."""

    ACTIVE = "active"
    SPARE = "spare"
    REQUESTED = "requested"  # the platform has been asked for it
    LOST = "lost"
    ISOLATED = "isolated"  # alive, and left: not used until it is well, or an operator releases it
    UNFIT = "unfit"  # a spare that is not to be used while a fault of it stands


REACHABLE = (NodeState.ACTIVE, NodeState.SPARE, NodeState.UNFIT, NodeState.ISOLATED)


@dataclass
class Holder:
    """The process that holds a rank, or its absence. `resilient`: it has reached a resilient train function."""

    rank: int
    node: str = ""
    pid: int = 0
    started_s: float = 0.0  # when it was first heard of
    incarnation: int = 0
    given: int = 0  # the highest incarnation that any process of the rank was started with
    resilient: bool = False
    connected: bool = False
    early: bool = False  # it was started early, and joins when it is asked to quiesce
    joined_generation: int = 0
    report: StepReport | None = None
    needs: tuple[str, ...] = ()  # the shards that its processes had to hold, known also when they are gone
    memory_fault_s: float | None = None  # when the process reported a memory error itself
    committed: int = 0  # the most that any incarnation of the rank is known to have committed
    is_new: bool = False  # to a world that trains: it has not been at a step yet
    state: RankState = RankState.ABSENT  # only `World.take` changes it

    def next_incarnation(self) -> int:
        """Return a number for one more process of the rank. Agents take each number once."""
        self.given = max(self.given, self.incarnation) + 1
        return self.given

    def heard(self, pid: int, now: float) -> None:
        """Take note of a sign of life, by whatever message it came."""
        if pid != self.pid:
            self.pid, self.started_s = pid, now

    def reported(self, report: StepReport) -> None:
        """Take note of what the process has said of itself."""
        self.report, self.needs = report, report.needs


class AheadOrder(msgspec.Struct, frozen=True):
    """The nodes for whose ranks a spare has been told to build processes, and what these take over from the world."""

    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    restarts: int = 0
    world_size: int = 0


@dataclass
class Node:
    """A node and its rendezvous store."""

    name: str
    failure_domain: str
    state: NodeState
    store: StoreEndpoint | None = None
    failed_link_ups: int = 0  # at this store, since all ranks last met there
    note: str = ""  # why it is not used; one that a node joins with isolates it
    given_back: bool = False  # the platform has been ordered to end it
    came: int = 0  # its place among those that came, or came back, after the world's first start; 0: before
    ahead: AheadOrder = field(default_factory=AheadOrder)
    prepared: dict[StandbyDepth, PreparedProcesses] = field(default_factory=dict)  # as it says itself

    def greeted(self, store: StoreEndpoint) -> None:
        """Take note of its agent, which may be another one: it says what it has prepared."""
        self.store, self.ahead, self.prepared = store, AheadOrder(), {}


@dataclass
class World:
    """All ranks and nodes of one job."""

    size: int
    ranks_per_node: int
    holders: list[Holder] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    _by_node: dict[str, list[int]] = field(default_factory=dict)  # the ranks of each node, in order
    # The ranks in each state, in the order in which they came to it, which decides: it has to outlive a controller.
    _standing: dict[RankState, dict[int, None]] = field(default_factory=lambda: {state: {} for state in RankState})
    retired: dict[int, Holder] = field(default_factory=dict)  # ranks that the world is too small for now
    late_nodes: int = 0  # that came, or came back, after the first start

    def __post_init__(self) -> None:
        if not self.holders:  # else it is the world of an earlier controller
            self.holders = [Holder(rank) for rank in range(self.size)]
            self._standing[RankState.ABSENT] = dict.fromkeys(range(self.size))

    def take(self, holder: Holder, event: RankEvent) -> None:
        """Move a rank to where an event takes it. What does not fit its state changes nothing.

        A rank that the world has become too small for is not counted.
        """
        state = NEXT.get((holder.state, event), holder.state)
        if self.holder(holder.rank) is holder and state is not holder.state:
            left = self._standing[holder.state]
            left.pop(holder.rank, None)
            if not left:
                left.clear()  # a dict keeps the places of what was removed, and `one_in` would look at each of them
            self._standing[state][holder.rank] = None
        holder.state = state
        holder.is_new = holder.is_new and state is not RankState.READY

    def lose(self, holder: Holder) -> None:
        """Forget the process of a rank; the rank stays."""
        self.take(holder, RankEvent.LOST)
        holder.resilient, holder.report, holder.memory_fault_s = False, None, None
        holder.pid, holder.started_s, holder.connected, holder.early = 0, 0.0, False, False

    def to_be(self, rank: int) -> Holder:
        """Return the holder of a rank; of one that the world is too small for, the one that it will have."""
        return self.holders[rank] if rank < self.size else self.retired.setdefault(rank, Holder(rank))

    def resize(self, size: int) -> None:
        """Change the number of ranks. A rank that comes back later continues its incarnation numbers."""
        for holder in self.holders[size:]:
            self.lose(holder)
            if holder.node:
                self._by_node[holder.node].remove(holder.rank)
            holder.node = ""
            self.retired[holder.rank] = holder
        more = range(len(self.holders), size)
        self.holders = self.holders[:size] + [self.retired.pop(rank, Holder(rank)) for rank in more]
        for state, ranks in self._standing.items():
            for rank in [each for each in ranks if each >= size]:
                del ranks[rank]
            ranks.update(dict.fromkeys(rank for rank in more if self.holders[rank].state is state))
        self.size = size

    def enlarge(self, size: int) -> range:
        """Give a world that trains more ranks; return them."""
        new = range(self.size, size)
        self.resize(size)
        for rank in new:
            self.holders[rank].is_new = True
        return new

    def holder(self, rank: int) -> Holder | None:
        """Return the holder of a rank, None when the world has no such rank."""
        return self.holders[rank] if 0 <= rank < self.size else None

    def on(self, node: str) -> list[Holder]:
        """Return the holders placed on a node, in rank order."""
        return [self.holders[rank] for rank in self._by_node.get(node, ())]

    def ranks(self, *states: RankState) -> set[int]:
        """Return the ranks that stand in one of the states."""
        return set().union(*(self._standing[state] for state in states))

    def count(self, *states: RankState) -> int:
        """Return how many ranks stand in one of the states; the same work in a world of any size."""
        return sum(map(len, map(self._standing.__getitem__, states)))

    def has(self, *states: RankState) -> bool:
        """Return whether some rank stands in one of the states; the same work in a world of any size."""
        return any(map(self._standing.__getitem__, states))

    def one_in(self, state: RankState) -> Holder | None:
        """Return one of the holders in a state, None when there is none; the same work in a world of any size."""
        for rank in reversed(self._standing[state]):  # those that came first leave first, and leave gaps at the start
            return self.holders[rank]
        return None

    def node_called(self, name: str) -> str:
        """Return the node that others call `name`: its own name, or its failure domain, where it is alone there."""
        if name in self.nodes:
            return name
        there = [each.name for each in self.nodes.values() if each.failure_domain == name and each.state in REACHABLE]
        return there[0] if len(there) == 1 else name

    def in_state(self, *states: RankState) -> list[Holder]:
        """Return the holders in one of the states, in rank order."""
        return [self.holders[rank] for rank in sorted(self.ranks(*states))]

    def named(self, *states: NodeState) -> list[str]:
        """Return the names of the nodes in one of the states, in the order in which they came."""
        return [node.name for node in self.nodes.values() if node.state in states]

    def spares(self) -> list[str]:
        """Return the spare nodes in the order in which they are taken: those that have waited longest come first.

        One that has just come, or come back, has yet to import torch. Those that came before the first start are
        taken by name.
        """
        spares = [node for node in self.nodes.values() if node.state is NodeState.SPARE]
        return [node.name for node in sorted(spares, key=lambda node: (node.came, natural(node.name)))]

    def given_back(self) -> list[str]:
        """Return the nodes that the platform has been told to end; that it has done so is not said."""
        return [node.name for node in self.nodes.values() if node.given_back]

    def built_ahead(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks that each spare has built, without those that have built none."""
        built = {name: self.nodes[name].prepared.get(StandbyDepth.BUILT) for name in self.spares()}
        return {name: prepared.ranks for name, prepared in built.items() if prepared is not None and prepared.ranks}

    def group_nodes(self) -> list[str]:
        """Return the nodes that hold ranks, in the order of their lowest rank."""
        return list(dict.fromkeys(holder.node for holder in self.holders if holder.node))

    def place(self, names: Iterable[str]) -> None:
        """Put all ranks on the named nodes, `ranks_per_node` each, in rank order; the rest become spares."""
        names = list(names)
        self._by_node = {}
        for holder in self.holders:
            holder.node = names[holder.rank // self.ranks_per_node]
            self._by_node.setdefault(holder.node, []).append(holder.rank)
        used = set(names[: -(-self.size // self.ranks_per_node)])
        for node in self.nodes.values():
            if node.state in {NodeState.ACTIVE, NodeState.SPARE}:
                node.state = NodeState.ACTIVE if node.name in used else NodeState.SPARE

    def move(self, old: str, new: str) -> None:
        """Move all ranks of one node to another one."""
        moved = self._by_node.pop(old, [])
        for rank in moved:
            self.holders[rank].node = new
        self._by_node[new] = sorted([*self._by_node.get(new, []), *moved])
        self.nodes[new].state = NodeState.ACTIVE

    def places(self) -> dict[int, Location]:
        """Return where each rank runs."""
        return {holder.rank: Location(holder.node, self.nodes[holder.node].failure_domain) for holder in self.holders}

    def best_store(self) -> Node | None:
        """Return the node whose store a new generation meets at, None if no store is known.

        That is the first node in use, unless link-ups have failed at its store more often than at another one.
        """
        in_use = self.group_nodes()
        rest = self.nodes.keys() - set(in_use)
        known = [self.nodes[name] for name in (*in_use, *(each for each in self.nodes if each in rest))]
        usable = (NodeState.ACTIVE, NodeState.SPARE)
        return min(
            (node for node in known if node.store is not None),
            key=lambda node: (node.state not in usable, node.failed_link_ups),
            default=None,
        )

    def add_node(self, name: str, state: NodeState, failure_domain: str = "", *, late: bool = False) -> Node:
        """Enter a node into the books, without what an earlier entry said: what outlives a loss is in `Accounts`.

        Its failure domain is itself where none is named. `late`: the world has started before.
        """
        self.late_nodes += late
        self.nodes[name] = Node(name, failure_domain or name, state, came=self.late_nodes if late else 0)
        return self.nodes[name]

    def new_node_name(self) -> str:
        """Return a name that no node of this job has had."""
        number = len(self.nodes)
        while f"node{number}" in self.nodes:
            number += 1
        return f"node{number}"

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank that has one."""
        return {holder.rank: holder.pid for holder in self.holders if holder.pid}


def natural(name: str) -> tuple[str, int]:
    """Sort node10 after node9."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name.rstrip("0123456789"), int(digits or 0)


KEY_BYTES = 32

_SECRET_BYTES = 16

_NOWHERE = StoreEndpoint("", 0)


@dataclass
class Meeting:
    """The store at which one generation meets. `key`: what the secrets of all generations are derived from.

    Every node serves a rendezvous store, and one of them is enough. A store that is alive and does not answer, or one
    that is disturbed, must not cost the job all its attempts: where a link-up has failed, the next generation meets
    elsewhere.
    """

    key: bytes = b""
    node: str = ""  # whose store it is; empty: not chosen yet
    failed: bool = False  # ranks could not link up there

    def rendezvous(self, world: World, job: str, generation: int) -> Rendezvous:
        """Return where the present generation meets: the same for all its members, and in a replay.

        The secret follows from the job's key, the job and the generation, so that the machine needs no chance of its
        own. Where no store is known the answer leads nowhere: the link-up fails, and the ladder takes
        the next rung.
        """
        node = world.nodes.get(self.node)
        if node is None or node.store is None or node.state not in {NodeState.ACTIVE, NodeState.SPARE}:
            node = world.best_store()
            self.node = node.name if node is not None else ""
        endpoint = node.store if node is not None and node.store is not None else _NOWHERE
        return Rendezvous(endpoint.host, endpoint.port, self.secret(f"{job}/{generation}"))

    def secret(self, purpose: str) -> str:
        """Return the secret of those who meet for a purpose."""
        return hashlib.blake2b(purpose.encode(), key=self.key, digest_size=_SECRET_BYTES).hexdigest()

    def link_up_failed(self, world: World) -> None:
        """Prefer other stores to that of the present generation from now on, however many ranks report it."""
        if self.node in world.nodes and not self.failed:
            self.failed = True
            world.nodes[self.node].failed_link_ups += 1

    def linked_up(self, world: World) -> None:
        """Trust the store of the present generation: all ranks have met there."""
        if self.node in world.nodes:
            world.nodes[self.node].failed_link_ups = 0
