"""Checks the invariants after every event of a simulated job, and says by name which one is broken."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..controller.actions import Action, Send
from ..controller.events import Event
from ..controller.rank_states import RankState
from ..controller.recovery.check import contradictions
from ..controller.recovery.state import Phase
from ..controller.world import Holder, NodeState
from ..policies.roles import WORLD_RESTARTS
from ..processor.session import SessionStage
from ..protocol.incidents import Outcome
from ..protocol.messages import Rejoin, Resume, StartProcess, StopProcess
from ..protocol.types import Decision, RestoreSource, Rung
from . import hardware_watch
from .excuses import Excuses
from .invariants import Invariant
from .scaling_watch import ScalingWatch
from .step_watch import StepWatch

if TYPE_CHECKING:
    from .process import Process
    from .world import World

KEEPING = frozenset({Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER})


class Watch:
    """Looks on and complains."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._began_s = world.timeline.now
        self._excuses = Excuses(world)
        self.scaling = ScalingWatch(world)
        self.steps = StepWatch(world)
        self.steps_of: dict[int, int] = {}  # generation -> the step that it resumes at
        self.commits: Counter[int] = Counter()  # how many ranks have committed a step in the present line of history
        self._resumed_generation = 0
        self._decisions_seen: dict[int, int] = {}
        self._finished: set[int] = set()
        self._before: dict[int, tuple[int, RankState]] = {}  # which process held each rank, in which state
        self._taken: list[tuple[Rung, float]] = []
        self._charged: list[tuple[Rung, float]] = []  # those that --max-restarts does not pay for
        self._attempt: set[Rung] = set()
        self.seen: Counter[tuple[Phase, str, Phase]] = Counter()  # (phase, event, phase it led to)

    # --- one generation, same step ----------------------------------------------------------------------------------

    def computing(self, process: "Process") -> None:
        """One generation: no two ranks compute in different generations at once."""
        generation = process.session.generation
        self._resumed_generation = max(self._resumed_generation, generation)
        if generation < self._resumed_generation and not self._excuses.computing(process):
            newer = self._resumed_generation
            self._world.fail(
                Invariant.ONE_GENERATION, f"rank {process.rank} computes in generation {generation} after {newer}"
            )
        memory = process.memory
        if not memory.is_of(process.standing.count):
            what = f"rank {process.rank} computes step {process.standing.count} with {memory.shards}, own {memory.own}"
            self._world.fail(Invariant.SAME_NUMBERS, what)

    def resumed(self, process: "Process", order: Resume) -> None:
        """Same step: all ranks resume at one step, and all stand there."""
        step = self.steps_of.setdefault(order.generation, order.step)
        if step != order.step or process.standing.count != step:
            stands = process.standing.count
            self._world.fail(
                Invariant.SAME_STEP, f"rank {process.rank} resumes at {stands}, ordered {order.step}, others {step}"
            )
        for other in self._world.living():
            other_stage = other.session.stage
            if other.incarnation != self._holder(other.rank).incarnation:
                continue
            if other.session.generation == order.generation and other_stage in {
                SessionStage.PARKED,
                SessionStage.REJOINING,
            }:
                self._world.fail(
                    Invariant.SAME_STEP, f"rank {process.rank} resumes while rank {other.rank} is {other_stage}"
                )

    def committed(self, process: "Process") -> None:
        """A rank has applied an update."""
        if self._is_current(process):  # a world that was given up unheard may train on for a while
            self.commits[process.standing.count] += 1
        if process.memory.stands != process.standing.count:
            what = f"rank {process.rank} says {process.standing.count} updates, and holds {process.memory.shards}"
            self._world.fail(Invariant.SAME_NUMBERS, what)
        if process.session.generation < self._resumed_generation and not self._excuses.computing(process):
            self._world.fail(Invariant.ONE_GENERATION, f"rank {process.rank} commits in a generation that is over")

    def finished(self, process: "Process") -> None:
        """A train function has returned."""
        if process.memory.is_of(self._world.setting.total_steps):
            self._finished.add(process.rank)

    def finished_plainly(self, process: "Process") -> None:
        """A script without midstep has ended well."""
        self._finished.add(process.rank)

    def ready(self, process: "Process", order: Rejoin) -> None:
        """Same numbers: whoever is ready holds everything as of the target, and nothing else."""
        target = order.part.target_step
        memory = process.memory
        if process.standing.count != target or not memory.is_of(target):
            what = (
                f"rank {process.rank} is ready for step {target} with {memory.shards}, rank-local state of {memory.own}"
            )
            self._world.fail(Invariant.SAME_NUMBERS, what)

    # --- what the machine does --------------------------------------------------------------------------------------

    def recorded(self, event: Event) -> None:
        """An event is in the journal; whether this controller lives to handle it is another matter."""
        self._excuses.recorded(event)

    def handled(self, event: Event, before: Phase, actions: list[Action]) -> None:
        """Check what can be seen after each event."""
        self.seen[before, type(event).__name__, self._world.controller.machine.phase] += 1
        for what in contradictions(self._world.controller.machine.state):
            self._world.fail(Invariant.CONSISTENT, what)
        self._who_waits_has_a_deadline()
        if self._reasons_are_given(before):
            self._budgets_hold()
        orders = [action.body for action in actions if isinstance(action, Send)]
        self._nobody_is_killed_for_nothing(orders)
        self._excuses.handled(actions)
        self.scaling.handled(event, before, actions)
        hardware_watch.check(self._world)
        holders = self._world.controller.machine.state.world.holders
        self._before = {holder.rank: (holder.incarnation, holder.state) for holder in holders}
        self._all_are_ready([order for order in orders if isinstance(order, Resume)])
        rejoins = [order for order in orders if isinstance(order, Rejoin)]
        if rejoins and self._world.controller.machine.phase is Phase.REJOINING:
            self._nothing_is_lost(rejoins)

    def _all_are_ready(self, resumes: list[Resume]) -> None:
        """Same step: nobody is told to resume before everybody has come back."""
        world = self._world
        if not resumes or world.controller.machine.phase is not Phase.RESUMING or len(resumes) < world.size:
            return  # after a restart those that may not have heard are told again
        for process in world.living():
            there = (
                process.session.generation >= resumes[0].generation
                and process.session.stage is not SessionStage.REJOINING
            )
            if self._is_current(process) and not there and process.seat.agent.is_heard:
                stage = f"{process.session.stage} in generation {process.session.generation}"
                world.fail(Invariant.SAME_STEP, f"all resume while rank {process.rank} is {stage}")

    def _nothing_is_lost(self, rejoins: list[Rejoin]) -> None:
        """Nothing lost: with a clean copy of every shard and local state alive, the newest committed step is kept."""
        world, target = self._world, rejoins[0].part.target_step
        everywhere = max((step for step, count in self.commits.items() if count >= world.size), default=0)
        holding = {
            process: process.memory.stands
            for process in world.living()
            if self._is_current(process) and process.memory.stands is not None
        }
        newest = max(holding.values(), default=0)
        current = [process for process, step in holding.items() if step == newest]
        finishing = [process for process in holding if process.memory.gradients == newest]
        shards = {shard for process in current + finishing for shard in process.memory.left}
        needed = {shard for rank in range(world.size) for shard in world.shards(rank, world.size)}
        behind = set(range(world.size)) - {process.rank for process in current + finishing}
        own = {
            (copy.rank, copy.step)
            for process in world.living()
            if self._is_current(process)
            for copy in process.seat.copies()
        }
        whole = needed <= shards and all((rank, newest) in own for rank in behind)
        if whole and target < newest and RestoreSource.REPLICA in world.policy.restore:
            world.fail(
                Invariant.NOTHING_LOST,
                f"all goes back to step {target}, and step {newest} is alive on {[p.rank for p in current]}",
            )
        if rejoins[0].part.restore is RestoreSource.REPLICA and newest > 0 and target < everywhere:
            world.fail(
                Invariant.NOTHING_LOST, f"all goes back to step {target}, and everybody has committed {everywhere}"
            )
        if target < newest:
            world.log(f"steps lost: {newest} -> {target}; shards whole: {needed <= shards}, own copies {sorted(own)}")
        for step in [step for step in self.commits if step > target]:
            del self.commits[step]

    def _nobody_is_killed_for_nothing(self, orders: Sequence[object]) -> None:
        """Nobody is killed for nothing: who is healthy stays, where the rung keeps the healthy."""
        machine = self._world.controller.machine
        incident = machine.incidents[-1] if machine.incidents else None
        if incident is None or incident.rung not in KEEPING:
            return
        for order in orders:
            if not isinstance(order, StartProcess | StopProcess):
                continue
            if isinstance(order, StartProcess) and order.early:  # it takes nobody's place yet
                continue
            for process in self._world.living():
                if process.rank != order.rank or not self._was_current(process, order):
                    continue
                stays = machine.state.world.nodes[process.seat.agent.name].state is NodeState.ACTIVE
                held, state = self._before.get(order.rank, (0, RankState.ABSENT))
                trained = held == process.incarnation and state is not RankState.STARTING
                if stays and trained and not self._excuses.replacing(process, incident):
                    self._world.fail(
                        Invariant.NOBODY_KILLED_FOR_NOTHING,
                        f"rank {process.rank} pid {process.pid} is healthy and is replaced",
                    )

    def _who_waits_has_a_deadline(self) -> None:
        """Always ends: where somebody is waited for, time runs out one day."""
        machine = self._world.controller.machine
        if machine.phase in {Phase.RUNNING, Phase.ENDED} or machine.next_deadline() is not None:
            return
        if machine.phase is not Phase.STARTING or machine.state.ever_resilient:  # a plain script never joins
            self._world.fail(Invariant.ALWAYS_ENDS, f"{machine.phase} has no deadline")

    def _budgets_hold(self) -> None:
        """Budgets hold: no rung is taken more often than the policy allows, whatever the machine has counted."""
        for rung in self._world.policy.ladder:
            since_s = self._world.timeline.now - rung.budget.window_s if rung.budget.window_s else 0.0
            used = sum(taken is rung.rung and at_s > since_s for taken, at_s in self._charged)
            if rung.rung is not Rung.STOP and used > (rung.budget.per_job or used):
                what = f"{rung.rung} was taken {used} times, {rung.budget.per_job} are allowed"
                self._world.fail(Invariant.BUDGETS_HOLD, what)
        machine = self._world.controller.machine
        restarts = sum(taken in {Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB} for taken, _ in self._taken)
        if self._world.setting.plain and restarts > self._world.setting.max_restarts:
            limit = self._world.setting.max_restarts
            self._world.fail(Invariant.BUDGETS_HOLD, f"{restarts} restarts of a plain script, {limit} are allowed")
        for use in machine.state.ladder.budgets(tuple(machine.state.spent), self._world.timeline.now):
            if use.used > use.limit and len(self._charged) == len(self._taken):
                self._world.fail(Invariant.BUDGETS_HOLD, f"budget {use.name}: {use.used} of {use.limit}")

    def _count(self, decision: Decision, before: Phase) -> None:
        """Count an attempt of the job's ladder; a fault that comes while everybody is being stopped only widens it."""
        if before is not Phase.QUIESCING:
            self._attempt.clear()
        if decision.rung not in self._attempt and (not decision.roles or decision.rung in WORLD_RESTARTS):
            self._taken.append((decision.rung, self._world.timeline.now))
            if self._world.controller.machine.state.ever_resilient:
                self._charged.append((decision.rung, self._world.timeline.now))
        self._attempt.add(decision.rung)

    def _reasons_are_given(self, before: Phase) -> bool:
        """Every decision has a reason. Say whether there was one."""
        decided = len(self._taken)
        for incident in self._world.controller.machine.incidents[-1:]:
            known = self._decisions_seen.get(incident.number, 0)
            for decision in incident.decisions[known:]:
                self._count(decision, before)
                if not decision.reason or not all(skipped.reason for skipped in decision.skipped):
                    self._world.fail(Invariant.REASONS_GIVEN, f"a decision without a reason: {decision}")
            self._decisions_seen[incident.number] = len(incident.decisions)
            if incident.outcome is not Outcome.OPEN and not incident.ended_reason:
                self._world.fail(Invariant.REASONS_GIVEN, f"incident {incident.number} ended without a reason")
        return len(self._taken) > decided

    # --- the end ----------------------------------------------------------------------------------------------------

    def at_the_end(self) -> None:
        """Always ends; and nothing is left behind."""
        world = self._world
        machine = world.controller.machine
        if machine.phase is not Phase.ENDED or world.controller.finish is None:
            world.fail(
                Invariant.ALWAYS_ENDS, f"the job has not ended: {machine.phase}, deadline {machine.next_deadline()}"
            )
        for incident in machine.incidents:
            if incident.outcome is Outcome.OPEN:
                world.fail(Invariant.ALWAYS_ENDS, f"incident {incident.number} is open in the end")
            times = (self._began_s, incident.began_s, incident.resumed_s or world.timeline.now, world.timeline.now)
            if list(times) != sorted(times):
                world.fail(Invariant.TIMES_ARE_TRUE, f"incident {incident.number} was from {times[1]} to {times[2]}")
        world.controller.replay()
        given_back = {node.name for node in machine.state.world.nodes.values() if node.given_back}
        if given_back - world.platform.deleted:
            kept = given_back - world.platform.deleted
            world.fail(Invariant.NOTHING_LEFT, f"nodes {sorted(kept)} are given back, and the platform was not asked")
        left = [process.pid for process in world.living()]
        if left:
            world.fail(Invariant.NOTHING_LEFT, f"processes {left} are left behind")
        finish = world.controller.finish
        if finish is not None and finish.exit_code == 0 and not self._finished >= set(range(world.size)):
            world.fail(
                Invariant.ALWAYS_ENDS, f"the job ended well, and only ranks {self._finished} have done all steps"
            )

    def held(self, process: "Process") -> bool:
        """Whether a process held its rank before the event that is being handled."""
        return self._before.get(process.rank, (0, RankState.ABSENT))[0] == process.incarnation

    def given_up(self, process: "Process") -> bool:
        """Whether the job could only take a process for lost, with its node, and nothing has happened to it."""
        return self._excuses.given_up(process)

    def _holder(self, rank: int) -> Holder:
        """Return who holds a rank; nobody, where the world has no such rank any more."""
        return self._world.controller.machine.state.world.holder(rank) or Holder(rank)

    def _is_current(self, process: "Process") -> bool:
        holder = self._holder(process.rank)
        return holder.incarnation == process.incarnation and holder.node == process.seat.agent.name

    def _was_current(self, process: "Process", order: StartProcess | StopProcess) -> bool:
        if isinstance(order, StartProcess):
            return process.incarnation < order.incarnation
        return process.incarnation == order.incarnation
