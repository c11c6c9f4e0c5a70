"""Checks what the controller decides and orders after every event of a simulated job, and how the job ends."""

from collections import Counter
from typing import TYPE_CHECKING

from ...controller.handlers.platform import NODE_GOING
from ...controller.recovery.events import Action, Event, Send
from ...controller.recovery.state import Phase
from ...controller.recovery.world import NodeState, RankState
from ...policies.budgets import WORLD_RESTARTS
from ...policies.fault_codes import Treatment
from ...processor.session import SessionStage
from ...protocol.incidents import Incident, Outcome
from ...protocol.messages import Rejoin, Resume, StartProcess, StopProcess
from ...protocol.types import Decision, RestoreSource, Rung
from .contradictions import contradictions
from .invariants import Invariant
from .scaling_watch import ScalingWatch

if TYPE_CHECKING:
    from .process import Process
    from .world import SimulatedWorld

KEEPING = frozenset({Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER})  # they keep the processes without a fault
_TO_BE_LEFT = frozenset({Treatment.LEAVE})


class ControllerWatch:
    """Looks on after every event."""

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self._began_s = world.timeline.now
        self.scaling = ScalingWatch(world)
        self.seen: Counter[tuple[Phase, str, Phase]] = Counter()  # (phase, event, phase it led to)
        self._decisions_seen: dict[int, int] = {}
        self._before: dict[int, tuple[int, RankState]] = {}  # which process held each rank, in which state
        self._taken: list[tuple[Rung, float]] = []
        self._charged: list[tuple[Rung, float]] = []  # those that --max-restarts does not pay for
        self._attempt: set[Rung] = set()
        self._decided_s: float | None = None  # when what the next controller takes over was decided; None: by itself

    def recorded(self, now: float) -> None:
        """An event is recorded, and its controller dies: what follows from it counts from now on."""
        self._decided_s = now

    def handled(self, event: Event, before: Phase, actions: list[Action]) -> None:
        """Check what can be seen after each event."""
        world, machine = self._world, self._world.machine
        self.seen[before, type(event).__name__, machine.phase] += 1
        for what in contradictions(machine.state):
            world.fail(Invariant.CONSISTENT, what)
        self._waits_have_a_deadline()
        if self._reasons_are_given(before):
            self._budgets_hold()
        self._decided_s = None
        orders = [action.body for action in actions if isinstance(action, Send)]
        self._no_healthy_process_is_replaced([each for each in orders if isinstance(each, StartProcess | StopProcess)])
        world.allowed.handled(actions)
        self.scaling.handled(event, before, actions)
        self._hardware_is_sound()
        self._before = {each.rank: (each.incarnation, each.state) for each in machine.state.world.holders}
        self._all_are_ready([order for order in orders if isinstance(order, Resume)])
        rejoins = [order for order in orders if isinstance(order, Rejoin)]
        if rejoins and machine.phase is Phase.REJOINING:
            self._nothing_is_lost(rejoins[0])

    def held(self, process: "Process") -> bool:
        """Whether a process held its rank before the event that is being handled."""
        return self._before.get(process.rank, (0, RankState.ABSENT))[0] == process.incarnation

    # --- after every event --------------------------------------------------------------------------------------------

    def _waits_have_a_deadline(self) -> None:
        """Always ends: where the machine waits, time runs out one day."""
        machine = self._world.machine
        if machine.phase in {Phase.RUNNING, Phase.ENDED} or machine.next_deadline() is not None:
            return
        if machine.phase is not Phase.STARTING or machine.state.ever_resilient:  # a plain script never joins
            self._world.fail(Invariant.ALWAYS_ENDS, f"{machine.phase} has no deadline")

    def _hardware_is_sound(self) -> None:
        """No rank trains where a fault stands that asks for the node to be left, unless that is about to be handled."""
        world, machine = self._world, self._world.machine
        state, due_s = machine.state, machine.next_deadline()
        if machine.phase is not Phase.RUNNING or (due_s is not None and due_s <= world.timeline.now):
            return
        for name in state.world.named(NodeState.ACTIVE):
            devices = {holder.rank % world.ranks_per_node for holder in state.world.on(name)}
            for fault in state.book.on(name, _TO_BE_LEFT):
                if devices and (fault.device is None or fault.device in devices):
                    world.fail(Invariant.SOUND_NODES, f"{fault.level} of {name} stands, and ranks train there")

    def _all_are_ready(self, resumes: list[Resume]) -> None:
        """Same step: no rank is ordered to resume before all have come back."""
        world = self._world
        if not resumes or world.machine.phase is not Phase.RESUMING or len(resumes) < world.size:
            return  # after a restart those that may not have heard are told again
        for process in world.living():
            there = (
                process.session.generation >= resumes[0].generation
                and process.session.stage is not SessionStage.REJOINING
            )
            if world.rank_watch.is_current(process) and not there and process.agent.is_heard:
                stage = f"{process.session.stage} in generation {process.session.generation}"
                world.fail(Invariant.SAME_STEP, f"all resume while rank {process.rank} is {stage}")

    def _nothing_is_lost(self, rejoin: Rejoin) -> None:
        """Nothing lost: with a clean copy of every shard and local state alive, the newest committed step is kept."""
        world, target, commits = self._world, rejoin.part.target_step, self._world.rank_watch.commits
        everywhere = max((step for step, count in commits.items() if count >= world.size), default=0)
        current = [process for process in world.living() if world.rank_watch.is_current(process)]
        holding = {each: each.memory.stands for each in current if each.memory.stands is not None}
        newest = max(holding.values(), default=0)
        newest_on = [process for process, step in holding.items() if step == newest]
        sources = newest_on + [process for process in holding if process.memory.gradients == newest]
        shards = {shard for process in sources for shard in process.memory.left}
        needed = {shard for rank in range(world.size) for shard in world.shards(rank, world.size)}
        behind = set(range(world.size)) - {process.rank for process in sources}
        own = {(copy.rank, copy.step) for process in current for copy in process.place.copies()}
        whole = needed <= shards and all((rank, newest) in own for rank in behind)
        if whole and target < newest and RestoreSource.REPLICA in world.policy.restore:
            what = f"all goes back to step {target}, and step {newest} is alive on {[p.rank for p in newest_on]}"
            world.fail(Invariant.NOTHING_LOST, what)
        if rejoin.part.restore is RestoreSource.REPLICA and newest > 0 and target < everywhere:
            what = f"all goes back to step {target}, and every rank has committed {everywhere}"
            world.fail(Invariant.NOTHING_LOST, what)
        if target < newest:
            world.log(f"steps lost: {newest} -> {target}; shards whole: {needed <= shards}, own copies {sorted(own)}")
        for step in [step for step in commits if step > target]:
            del commits[step]

    def _no_healthy_process_is_replaced(self, orders: list[StartProcess | StopProcess]) -> None:
        """A process without a fault stays, where the rung keeps those."""
        world, machine = self._world, self._world.machine
        incident = machine.incidents[-1] if machine.incidents else None
        if incident is None or incident.rung not in KEEPING:
            return
        for order in orders:
            starts = isinstance(order, StartProcess)
            if isinstance(order, StartProcess) and order.early:  # it takes the place of no process yet
                continue
            for process in world.living():
                held_before = (
                    process.incarnation < order.incarnation if starts else process.incarnation == order.incarnation
                )
                if process.rank != order.rank or not held_before:
                    continue
                stays = machine.state.world.nodes[process.agent.name].state is NodeState.ACTIVE
                state = self._before.get(order.rank, (0, RankState.ABSENT))[1]
                trained = self.held(process) and state is not RankState.STARTING
                if stays and trained and not world.allowed.replacing(process, incident):
                    what = f"rank {process.rank} pid {process.pid} is healthy and is replaced"
                    world.fail(Invariant.NOBODY_KILLED_FOR_NOTHING, what)

    # --- decisions and budgets --------------------------------------------------------------------------------------

    def _budgets_hold(self) -> None:
        """Budgets hold: no rung is taken more often than the policy allows, whatever the machine has counted."""
        world, now = self._world, self._world.timeline.now
        for rung in world.policy.ladder:
            since_s = now - rung.budget.window_s if rung.budget.window_s else 0.0
            used = sum(taken is rung.rung and at_s > since_s for taken, at_s in self._charged)
            if rung.rung is not Rung.STOP and used > (rung.budget.per_job or used):
                what = f"{rung.rung} was taken {used} times, {rung.budget.per_job} are allowed"
                world.fail(Invariant.BUDGETS_HOLD, what)
        restarts = sum(taken in {Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB} for taken, _ in self._taken)
        limit = world.setting.max_restarts
        if world.setting.plain and restarts > limit:
            world.fail(Invariant.BUDGETS_HOLD, f"{restarts} restarts of a plain script, {limit} are allowed")
        for use in world.machine.state.ladder.budgets(tuple(world.machine.state.spent), now):
            if use.used > use.limit and len(self._charged) == len(self._taken):
                world.fail(Invariant.BUDGETS_HOLD, f"budget {use.name}: {use.used} of {use.limit}")

    def _count(self, decision: Decision, before: Phase, *, free: bool) -> None:
        """Count an attempt of the job's ladder; a fault that comes while all are being stopped only widens it.

        `free`: the platform takes a node away, and no budget is asked.
        """
        if before is not Phase.QUIESCING:
            self._attempt.clear()
        if decision.rung not in self._attempt and (not decision.roles or decision.rung in WORLD_RESTARTS):
            now = self._world.timeline.now
            self._taken.append((decision.rung, now if self._decided_s is None else self._decided_s))
            if self._world.machine.state.ever_resilient and not free:
                self._charged.append(self._taken[-1])
        self._attempt.add(decision.rung)

    def _reasons_are_given(self, before: Phase) -> bool:
        """Every decision has a reason. Say whether there was one."""
        decided = len(self._taken)
        for incident in self._world.machine.incidents[-1:]:
            seen = self._decisions_seen.get(incident.number, 0)
            for number, decision in enumerate(incident.decisions[seen:], seen):
                self._count(decision, before, free=number == 0 and _was_going(incident))
                if not decision.reason or not all(skipped.reason for skipped in decision.skipped):
                    self._world.fail(Invariant.REASONS_GIVEN, f"a decision without a reason: {decision}")
            self._decisions_seen[incident.number] = len(incident.decisions)
            if incident.outcome is not Outcome.OPEN and not incident.ended_reason:
                self._world.fail(Invariant.REASONS_GIVEN, f"incident {incident.number} ended without a reason")
        return len(self._taken) > decided

    # --- the end ----------------------------------------------------------------------------------------------------

    def at_the_end(self) -> None:
        """Always ends; and nothing is left behind."""
        world, machine, now = self._world, self._world.machine, self._world.timeline.now
        finish = world.controller.finish
        if machine.phase is not Phase.ENDED or finish is None:
            what = f"the job has not ended: {machine.phase}, deadline {machine.next_deadline()}"
            world.fail(Invariant.ALWAYS_ENDS, what)
        for incident in machine.incidents:
            if incident.outcome is Outcome.OPEN:
                world.fail(Invariant.ALWAYS_ENDS, f"incident {incident.number} is open in the end")
            times = [self._began_s, incident.began_s, incident.resumed_s or now, now]
            if times != sorted(times):
                world.fail(Invariant.TIMES_ARE_TRUE, f"incident {incident.number} was from {times[1]} to {times[2]}")
        world.controller.replay()
        given_back = {node.name for node in machine.state.world.nodes.values() if node.given_back}
        kept = given_back - world.platform.deleted
        if kept:
            what = f"nodes {sorted(kept)} are given back, and the platform was not asked"
            world.fail(Invariant.NOTHING_LEFT, what)
        left = [process.pid for process in world.living()]
        if left:
            world.fail(Invariant.NOTHING_LEFT, f"processes {left} are left behind")
        done = world.rank_watch.done
        if finish is not None and finish.exit_code == 0 and not done >= set(range(world.size)):
            world.fail(Invariant.ALWAYS_ENDS, f"the job ended well, and only ranks {done} have done all steps")


def _was_going(incident: Incident) -> bool:
    """Say whether an incident began with a planned change, for a node that the platform takes away."""
    return bool(incident.reports) and incident.reports[0].code == NODE_GOING
