"""A training process in virtual time, what it really holds, and the disk of the job.

Session, rank state, step order and loop are the product's; the thread is played. A shard is played by one number, the
count of updates in it, so that mixed-up state shows; the simulation judges by it.
"""

import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...processor.own_time import OwnTime
from ...processor.session import Order
from ...protocol import messages as m
from ...protocol.mailbox import Mailbox
from ...protocol.messages import SaveCheckpoint
from ...protocol.types import (
    CONTROLLER,
    Activity,
    CheckpointTrace,
    FaultAction,
    FaultKind,
    FaultLevel,
    FaultReport,
    LinkUse,
    RankProgress,
    StepTimes,
    rank_address,
)
from ..invariants import Invariant
from ..played_agent import FakeProcess
from .audits import PlayedAudits
from .corruption import PlayedIntegrity
from .host_copies import PlayedCopies
from .network import Byzantine, Endpoint, PlayedThread, Thread, falsified
from .rank_thread import thread_of
from .scripts import StepPoint

if TYPE_CHECKING:
    from .node import SimulatedAgent
    from .world import SimulatedWorld


ORDERS_S = 600.0
FLUSH_S = 5.0
INSIDE_S = 0.0001  # from a rank to its agent, and back
EXIT_RAISED = 1
SIGKILL = -9
LOST = -1  # the count of updates in a shard whose memory was hit
TORN = -2  # in one whose update ended halfway
ARRIVING = -3  # and in one that is being overwritten by a repair
DIRECTORY = "/checkpoints"
Part = str | int  # a shard, or the rank of a rank-local state
ON_ITS_WAY_S = (0.002, 0.006)  # that data of a step is, from one machine to the next; as uneven as where cores are busy
SENT_BYTES = 1_000_000


class PlayedLinks:
    """The traffic of a process with the next one in a ring, as the kernel of its machine counts it."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._chance = random.Random(f"{process.world.seed} {process.rank}.{process.incarnation} links")
        self._sums: dict[str, tuple[int, int]] = {}  # by the machine at the other end

    def send(self) -> float:
        """Book what is sent in a step; return how much longer its collective takes for slow cables at both ends."""
        process = self._process
        neighbours = [each for each in process.world.living() if each.rank == (process.rank + 1) % process.world_size]
        here, there = process.agent, max(neighbours, key=lambda each: each.incarnation, default=process).agent
        if here is there:
            return 0.0
        late_s = here.cable_s + there.cable_s
        busy_us, sent_bytes = self._sums.get(there.name, (0, 0))
        busy_us += round(1e6 * (self._chance.uniform(*ON_ITS_WAY_S) + late_s))
        self._sums[there.name] = busy_us, sent_bytes + SENT_BYTES
        return late_s

    def uses(self) -> tuple[LinkUse, ...]:
        """Return what the agent reads."""
        return tuple(LinkUse(self._process.agent.name, there, *counts) for there, counts in self._sums.items())


class Process(FakeProcess, PlayedThread):
    """One incarnation of a rank."""

    def __init__(self, world: "SimulatedWorld", agent: "SimulatedAgent", order: m.StartProcess, pid: int) -> None:
        FakeProcess.__init__(self, order, pid)
        PlayedThread.__init__(self, order.rank, world.timeline)
        self.world, self.agent = world, agent
        self.place = agent.places[order.rank]
        mailbox = Mailbox(job=world.job.job, address=rank_address(self.rank), session=order.incarnation)
        self.endpoint = Endpoint(mailbox, world.timeline, transmit=self._transmit, take=self._hear, complain=world.fail)
        self.raising = False  # the next step raises
        self.armed: dict[StepPoint, FaultKind] = {}  # what will go wrong in the next step, and where
        self.faulty = False  # a fault was injected into it, so it may be replaced
        self.byzantine: Byzantine | None = None  # what will be wrong with what it says next
        self.memory = Memory(world.shards(self.rank, self.world_size), connected=order.connected)
        self.copies = PlayedCopies(self)
        self.integrity = PlayedIntegrity(self)
        self.audits = PlayedAudits(self)
        self.own, self.times = OwnTime(), StepTimes(0, 0, 0, 0)
        self.own.stage = 0
        self.links = PlayedLinks(self)
        self.copied_rank: int | None = None  # the rank whose buddy this one is
        self._said: list[m.RankReady | m.RankQuiesced] = []
        self._waiting: Callable[[Order], None] | None = None  # what lets the train thread go on with an order
        self.play(thread_of(self, order))

    def end(self, status: int) -> None:
        """The process is gone, for whatever reason."""
        if not self.alive:
            return
        self.alive = self.endpoint.open = False
        self.integrity.gone()
        if self.group is not None:
            self.group.leave(self)
        self.world.log(f"rank {self.rank}.{self.incarnation} pid {self.pid} ended with {status}")
        self.agent.report_exit(self, status)

    @property
    def unwatched(self) -> bool:
        """Return whether it may stand still for ever: in a checkpoint, or at its end when no other rank is left."""
        return self.activity is Activity.CHECKPOINTING or (self.activity is Activity.FINISHED and self.world_size == 1)

    def doing(self, activity: Activity) -> None:
        """Set the step clock's activity, and book the time of the one before."""
        super().doing(activity)
        self.own.doing(activity, self.world.timeline.now, 0.0)

    def inject(self, action: FaultAction) -> None:
        """Do what an operator has injected."""
        self.faulty = True
        if action is FaultAction.RAISE:
            self.raising = True
        elif action is FaultAction.STOP:  # which may come later than it was asked for
            if not self.unwatched:
                self.suspend()
        else:
            self.end(SIGKILL)

    def suspend(self) -> None:
        """Be stopped by the operating system, for ever; the agent sees that."""
        self.suspended = True
        self.agent.watch_suspended(self)

    def flush(self) -> Thread[None]:
        """Give the last words a few seconds to arrive."""
        deadline = self.world.timeline.now + FLUSH_S
        while not self.endpoint.quiet and self.world.timeline.now < deadline:
            yield self.sleep(0.1)

    # --- messages -----------------------------------------------------------------------------------------------

    def post(self, body: m.Message) -> None:
        """Report to the controller."""
        if isinstance(body, m.RankReady | m.RankQuiesced):
            self._said.append(body)
        if self.byzantine is not None:
            wrong = falsified(body, self.byzantine, self.world.chance)
            if wrong is not None:
                body, self.byzantine = wrong, None
        mailbox = self.endpoint.mailbox
        mailbox.generation = max(mailbox.generation, self.session.generation)
        self.endpoint.post(body, CONTROLLER)

    def repeat_itself(self) -> None:
        """Say again what it said in earlier generations, where that is what is wrong with it."""
        if self.byzantine is Byzantine.REPEATED and self.world.chance.random() < 0.5:
            self.byzantine = None
            for body in self._said:
                self.endpoint.post(body, CONTROLLER)

    def report_fault(
        self,
        kind: FaultKind,
        detail: str,
        level: FaultLevel = FaultLevel.SOFTWARE,
        *,
        mendable: bool = False,
        **more: Any,
    ) -> None:
        """Report something wrong in this rank. `more`: of FaultReport."""
        now, name = self.agent.wall_s, rank_address(self.rank)
        node, generation = self.agent.name, self.session.generation
        process = (self.rank, node, generation, self.incarnation)
        self.post(m.FaultReported(FaultReport(kind, now, name, detail, *process, level, mendable=mendable, **more)))

    def progress(self) -> RankProgress:
        """Read the step clock."""
        now = self.world.timeline.now
        return RankProgress(
            rank=self.rank, incarnation=self.incarnation, generation=self.session.generation, step=self.standing.count,
            activity=self.activity, collectives=self.collectives, activity_age_s=now - self.since_s,
            step_age_s=now - self.step_since_s, median_step_s=0.1, suspended=self.suspended,
            times=self.times if self.times.steps else None, links=self.links.uses() if self.times.steps else (),
        )  # fmt: skip

    def _transmit(self, envelope: m.Envelope) -> None:
        self.world.timeline.after(INSIDE_S, lambda: self.agent.relay(self, envelope))

    def _hear(self, envelope: m.Envelope) -> bool:
        if self.suspended:
            return False
        body = envelope.body
        if isinstance(body, m.ArmFault):
            self.inject(body.fault.action)
        elif isinstance(body, m.CallAction):
            self.post(m.ActionEnded(self.rank, body.number, True, body.action))
        elif isinstance(body, Order):
            if isinstance(body, m.Quiesce):
                self.repeat_itself()
            if self.session.hear(body).abort:
                self.abort(f"generation {body.generation} is being opened")
            self._wake()
        return True

    def await_order(self, go: Callable[[Order], None]) -> None:
        """Have the train thread wait for the controller's next order; the process ends when none comes for too long."""
        self._waiting = go
        give_up = self.still(lambda _: self.end(EXIT_RAISED))
        self.world.timeline.after(ORDERS_S, lambda: give_up(None))
        self._wake()

    def _wake(self) -> None:
        if self._waiting is None:
            return

        def take(_: object) -> None:
            go = self._waiting
            order = self.session.take_order() if go is not None else None
            if order is not None and go is not None:
                self._waiting = None
                go(order)

        look = self.still(take)
        self.world.timeline.after(0.0005, lambda: look(None))


class Memory:
    """The shards of one process, its rank-local state, and its gradients."""

    def __init__(self, shards: Iterable[str], *, connected: bool) -> None:
        """`connected`: it begins with the others; what a single newcomer begins with is worth nothing."""
        self.shards = dict.fromkeys(shards, 0)
        self.own = 0
        self.gradients: int | None = None  # of which update they are the final ones
        self._updates: int | None = 0 if connected else None

    @property
    def stands(self) -> int | None:
        """The count of updates in everything that is left here; None where that is of no one step."""
        whole = all(count in {self._updates, LOST, ARRIVING} for count in self.shards.values())
        return self._updates if whole else None

    @property
    def left(self) -> list[str]:
        """The shards that are neither lost nor on their way back."""
        return [shard for shard, count in self.shards.items() if count not in {LOST, ARRIVING}]

    @property
    def lost(self) -> list[str]:
        """The shards of which the device would say that they are lost."""
        return [shard for shard, count in self.shards.items() if count == LOST]

    def is_of(self, step: int) -> bool:
        """Return whether everything is here, and of one step."""
        return self.own == step and set(self.shards.values()) == {step}

    def update(self) -> None:
        """The update is applied."""
        assert self._updates is not None
        self._updates = self.own = self._updates + 1
        self.shards = dict.fromkeys(self.shards, self._updates)
        self.gradients = None

    def tear(self) -> None:
        """The update ends halfway."""
        self.shards, self.gradients = dict.fromkeys(self.shards, TORN), None

    def lose(self) -> None:
        """Lose everything that was here."""
        self.shards, self.gradients = dict.fromkeys(self.shards, LOST), None

    def overwrite(self, shard: str) -> None:
        """A shard begins to arrive in the place of what was held: until all has come it is worth nothing."""
        self.shards[shard] = ARRIVING

    def load(self, step: int) -> None:
        """Read a checkpoint."""
        self.shards, self._updates = dict.fromkeys(self.shards, step), None

    def restored(self, step: int) -> None:
        """Repair and rollback are over."""
        self._updates, self.gradients = step, None


class Disk:
    """The checkpoint directory. `steps`: of the checkpoints that are complete and whole."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self._parts: dict[tuple[int, int], set[Part]] = {}  # (generation, step) -> what was written so far
        self.failures = 0  # how many could not be written, or not be made complete
        self.ever = False  # whether a checkpoint has been complete, whatever became of it
        self.damaged = False  # whether something was done to those that were
        self.unlisted = False  # whether the directory cannot be listed

    def complete(self, step: int) -> None:
        """A checkpoint has got its name."""
        self.steps.add(step)
        self.ever = True

    def damage(self, steps: Iterable[int]) -> None:
        """Damage checkpoints: it is seen before they are loaded, and they are passed over."""
        self.steps.difference_update(tuple(steps))
        self.damaged = True

    def survey(self) -> tuple[tuple[int, ...], CheckpointTrace]:
        """Return what a process finds in the directory."""
        if self.unlisted:
            return (), CheckpointTrace(DIRECTORY, unlisted="input/output error")
        unusable = "damaged" if self.ever and not self.steps else ""
        return tuple(sorted(self.steps)), CheckpointTrace(DIRECTORY, unusable=unusable)

    def write(self, process: "Process", order: SaveCheckpoint) -> str:
        """Write what a rank was told to, and every rank-local state of the step that it has; return what went wrong.

        The checkpoint is complete only when everything is in it.
        """
        world, held = process.world, process.memory.shards
        wrong = {shard: held.get(shard) for shard in order.shards if held.get(shard) != order.step}
        if wrong:
            what = f"rank {process.rank} writes {wrong} into a checkpoint of step {order.step}"
            world.fail(Invariant.SAME_NUMBERS, what)
        process.integrity.saves(order.step, order.shards)
        parts = self._parts.setdefault((order.generation, order.step), set())
        parts.update(order.shards)
        parts.update(copy.rank for copy in process.place.copies() if copy.step == order.step)
        if not order.publish:
            return ""
        ranks = range(process.former_size)
        missing = sorted(set(ranks) - parts)  # the rank-local states are what a process looks for before it publishes
        if missing:
            self.failures += 1
            return f"the checkpoint lacks the rank-local states of ranks {missing}"
        lost = {shard for rank in ranks for shard in world.shards(rank, len(ranks))} - parts
        if lost:
            what = f"rank {process.rank} publishes a checkpoint of step {order.step} without {sorted(lost)}"
            world.fail(Invariant.NOTHING_LOST, what)
        self.complete(order.step)
        return ""
