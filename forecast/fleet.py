"""A large job, played cheaply: no object per process, and answers of many ranks at once.

It answers the commands of the recovery machine as healthy agents, processes and a platform would, after the times of
a `Model`. What is wrong is reported by the forecast and the benchmarks, which inject it.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from ..controller.recovery.events import Action, DeadlinePassed, Event, Finish, Send
from ..controller.recovery.machine import RecoveryMachine
from ..controller.recovery.world import Holder, NodeState, RankState
from ..policies.schema import Policy
from ..protocol import messages as m
from ..protocol import types as t
from .fault_trace import Model

SHARD_BYTES = 2_000_000_000
Handled = Callable[[Event, list[Action]], None]


class Fleet:
    """All nodes and processes of a job, on a clock that jumps. `step` is what every rank has committed."""

    def __init__(self, machine: RecoveryMachine, model: Model, *, nodes_to_come: int, handled: Handled) -> None:
        self.machine, self.model = machine, model
        self.now = 0.0
        self.step = self.checkpoint = 0
        self.hung: dict[int, int] = {}  # rank -> the incarnation that hangs
        self.gone: set[str] = set()
        self.finish: Finish | None = None
        self._copies = _HostCopies(machine.state.policy, model)
        self._nodes_to_come = nodes_to_come
        self._handled = handled
        self._heap: list[tuple[float, int, Callable[[], Iterable[Event]]]] = []
        self._count = 0

    @property
    def size(self) -> int:
        """How many ranks the world has now: fewer than asked for, where the policy allows it."""
        return self.machine.state.world.size

    def after(self, delay_s: float, events: Callable[[], Iterable[Event]]) -> None:
        """Have events happen; what they are is asked when their time has come."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, events))

    def run_until(self, end_s: float) -> None:
        """Let everything happen that is due before `end_s`, or until the job is over."""
        while self.finish is None:
            due_s = self.machine.next_deadline()
            next_s = self._heap[0][0] if self._heap else float("inf")
            first_s = min(next_s, due_s if due_s is not None else float("inf"))
            if first_s >= end_s:
                self.now = end_s
                return
            self.now = max(self.now, first_s)
            if due_s is not None and due_s < next_s:
                self.feed((DeadlinePassed(),))
            else:
                self.feed(heapq.heappop(self._heap)[2]())

    def feed(self, events: Iterable[Event]) -> None:
        """Hand events to the machine, and answer what it commands."""
        machine, now = self.machine, self.now
        for event in events:
            actions = machine.handle(event, now)
            self._handled(event, actions)
            if actions:
                self._answer(actions)

    def join(self, name: str) -> m.NodeJoined:
        """Return what the agent of a new node says."""
        return m.NodeJoined(name, name, t.StoreEndpoint(name, 1))

    # --- answers ------------------------------------------------------------------------------------------------

    def _answer(self, actions: list[Action]) -> None:
        """Gather the commands by kind: all that got the same answer at the same time."""
        by_kind: dict[type, list[Send]] = {}
        for action in actions:
            if isinstance(action, Send):
                by_kind.setdefault(type(action.body), []).append(action)
            elif isinstance(action, Finish):
                self.finish = action
        for kind, sends in by_kind.items():
            answer = _ANSWERS.get(kind)
            if answer is not None:
                answer(self, [send.body for send in sends])

    def _start(self, orders: list[m.StartProcess]) -> None:
        def joined() -> Iterable[Event]:
            for order in orders:
                holder = self._holds(order.rank, order.incarnation, RankState.STARTING)
                if holder is not None:
                    process = t.RunningProcess(order.rank, self._pid(order), order.incarnation, order.generation)
                    yield m.ProcessStarted(holder.node, process, warm=True)
                    report = self._report(order.rank, clean=order.connected, step=0)
                    numbers = (order.rank, order.generation, order.incarnation, self._pid(order))
                    yield m.RankJoined(*numbers, report, self.model.start_s)

        self.after(self.model.start_s, joined)

    def _pid(self, order: m.StartProcess) -> int:
        return order.rank + order.incarnation * self.machine.state.job.world_size

    def _quiesce(self, orders: list[m.Quiesce]) -> None:
        def quiesced() -> Iterable[Event]:
            peers = self._peers()
            for order in orders:
                holder = self.machine.state.world.holder(order.rank)
                if holder is not None and holder.state is RankState.QUIESCING and not self._hangs(order.rank):
                    report = self._report(order.rank, clean=True, step=self.step, peer=peers.get(order.rank))
                    yield m.RankQuiesced(order.rank, order.generation, holder.incarnation, report, {})

        self.after(self.model.stop_s, quiesced)

    def _rejoin(self, orders: list[m.Rejoin]) -> None:
        from_disk = orders[0].part.restore is t.RestoreSource.CHECKPOINT
        target = orders[0].part.target_step
        generation = orders[0].generation
        ranks = [order.rank for order in orders if not self._hangs(order.rank)]
        self._copies.planned([order.part for order in orders], self.machine.state.world.holders)

        def ready() -> Iterable[Event]:
            if self.machine.generation != generation:
                return
            self.step = target
            holders = self.machine.state.world.holders
            for rank in ranks:
                yield m.RankReady(rank, generation, holders[rank].incarnation, target, {})

        self.after(self.model.load_s if from_disk else self.model.rejoin_s, ready)

    def _resume(self, orders: list[m.Resume]) -> None:
        generation, step = orders[0].generation, orders[0].step + 1

        def committed() -> Iterable[Event]:
            if self.machine.generation != generation:
                return
            self.step = step
            holders = self.machine.state.world.holders
            self._copies.resumed(step)
            for order in orders:
                incarnation = holders[order.rank].incarnation
                yield m.StepCommitted(order.rank, generation, incarnation, step, self.now, self.model.step_s)

        self.after(self.model.step_s, committed)

    def _save(self, orders: list[m.SaveCheckpoint]) -> None:
        def saved() -> Iterable[Event]:
            for order in orders:
                if order.publish:
                    self.checkpoint = max(self.checkpoint, order.step)
                yield m.CheckpointSaved(order.rank, order.generation, order.step, "checkpoints")

        self.after(self.model.checkpoint_s, saved)

    def _probe(self, orders: list[m.ProbeProgress]) -> None:
        def read() -> Iterable[Event]:
            world, generation = self.machine.state.world, self.machine.generation
            on: dict[str, list[t.RankProgress]] = {name: [] for name in world.group_nodes()}
            for holder in world.holders:
                hangs = self._hangs(holder.rank)
                activity = t.Activity.COMPUTING if hangs else t.Activity.COLLECTIVE
                age_s = 4 * self.model.step_s + 60.0
                clock = t.RankProgress(
                    holder.rank, holder.incarnation, generation, self.step, activity,
                    1 if hangs else 2, age_s, age_s, self.model.step_s,
                )  # fmt: skip
                on[holder.node].append(clock)
            for name, clocks in on.items():
                if name not in self.gone:
                    yield m.ProgressReported(name, orders[0].probe, self.now, tuple(clocks))

        self.after(0.05, read)

    def _create(self, orders: list[m.CreateNode]) -> None:
        for order in orders:
            if self._nodes_to_come > 0:
                self._nodes_to_come -= 1
                self.after(self.model.node_start_s, lambda name=order.node: (self.join(name),))  # type: ignore[misc]
            else:
                refused = m.NodeRefused(order.node, "no more machines")
                self.after(1.0, lambda refused=refused: (refused,))  # type: ignore[misc]

    def _delete(self, orders: list[m.DeleteNode]) -> None:
        self._nodes_to_come += sum(order.node not in self.gone for order in orders)

    # --- state --------------------------------------------------------------------------------------------------

    def _holds(self, rank: int, incarnation: int, state: RankState) -> Holder | None:
        """Return the holder of a rank if it is in this state, in this incarnation, on a node that can be used."""
        world = self.machine.state.world
        holder = world.holder(rank)
        if holder is None or holder.incarnation != incarnation or holder.state is not state:
            return None
        usable = world.nodes[holder.node].state is NodeState.ACTIVE and holder.node not in self.gone
        return holder if usable else None

    def _hangs(self, rank: int) -> bool:
        holder = self.machine.state.world.holder(rank)
        return holder is not None and self.hung.get(rank) == holder.incarnation

    def _report(self, rank: int, *, clean: bool, step: int, peer: int | None = None) -> t.StepReport:
        shards = self._shards(rank)
        copies = [t.LocalStateCopy(rank, self.step if not clean else step)]
        if peer is not None:
            copies.append(t.LocalStateCopy(peer, self.step))
        holder = self.machine.state.world.holders[rank]
        own, guests = self._copies.of(rank, holder.node, self.step)
        return t.StepReport(
            committed=step, ready=False, clean=clean, needs=shards,
            holds=tuple(t.ShardHold(shard, SHARD_BYTES) for shard in shards) if clean else (),
            local_states=tuple(copies), checkpoints=(self.checkpoint,) if self.checkpoint else (),
            host_copies=own, guest_copies=guests,
        )  # fmt: skip

    def _shards(self, rank: int) -> tuple[str, ...]:
        """Return the shard of a rank and, where it alone would hold that, the one that it keeps as a buddy."""
        held = [rank]
        if self.model.replicas == 1 and self.machine.state.policy.replica == "buddy":
            held.append((rank - self.machine.state.world.ranks_per_node) % self.size)
        apart = max(1, self.size // self.model.replicas)
        return tuple(dict.fromkeys(f"shard{each % apart}" for each in held))

    def _peers(self) -> dict[int, int]:
        """Return of which rank each one keeps a peer copy, on the next node."""
        shift = self.machine.state.world.ranks_per_node
        return {(rank + shift) % self.size: rank for rank in range(self.size)}


class _HostCopies:
    """Where copies in host memory are, and of which step: on the nodes that ranks had when training went on."""

    def __init__(self, policy: Policy, model: Model) -> None:
        self._on = t.RestoreSource.HOST_COPY in policy.restore
        every = policy.host_copy.every_steps
        self._late = max(1, math.ceil(model.host_copy_s / model.step_s))  # steps until a copy is whole
        self._every = max(self._late, 0 if every == "auto" else every)
        self._twice = policy.host_copy.copies > 1
        self._kept = self._begun = 0  # the step that was kept by the last plan, and that from which steps were done
        self._nodes: dict[int, str] = {}  # of the ranks, in the last plan and since training went on
        self._guests: dict[int, int] = {}  # the rank whose copies each keeps
        self._next: tuple[int, dict[int, str], dict[int, int]] = (0, {}, {})

    def planned(self, parts: Sequence[t.RepairPart], holders: Sequence[Holder]) -> None:
        """Take note of a plan for all ranks."""
        if self._on:
            guests = {rank: part.copy_guest for rank, part in enumerate(parts) if part.copy_guest is not None}
            nodes = {holder.rank: holder.node for holder in holders}
            self._next = (parts[0].host_copy, nodes, guests if self._twice else {})

    def resumed(self, step: int) -> None:
        """Take note that all ranks go on by the last plan, and have taken a copy after the first step."""
        (self._kept, self._nodes, self._guests), self._begun = self._next, step

    def of(self, rank: int, node: str, step: int) -> tuple[tuple[int, ...], tuple[t.GuestCopy, ...]]:
        """Return the copies that a process of a rank finds on a node when `step` steps are done."""
        if not self._on or self._nodes.get(rank) != node:
            return (), ()
        past = step - self._late - self._begun
        newest = self._begun + past // self._every * self._every if past >= 0 else self._kept
        guest = self._guests.get(rank)
        if not newest:
            return (), ()
        return (newest,), () if guest is None else (t.GuestCopy(guest, newest, SHARD_BYTES),)


_ANSWERS: dict[type, Callable[[Fleet, list], None]] = {  # type: ignore[type-arg]
    m.StartProcess: Fleet._start,
    m.Quiesce: Fleet._quiesce,
    m.Rejoin: Fleet._rejoin,
    m.Resume: Fleet._resume,
    m.SaveCheckpoint: Fleet._save,
    m.ProbeProgress: Fleet._probe,
    m.CreateNode: Fleet._create,
    m.DeleteNode: Fleet._delete,
}
