"""Checks what the controller decides and orders after every event of a simulated job, and how the job ends.

Worlds that start again lose nothing, and a world of another size fits its nodes (`scaling_watch.py`). A
process without a fault may be replaced, or compute where its rank is not any more, if nobody could have known better
when it was decided (`AllowedDeviations`). A controller that dies over a decision that it has recorded leaves it to
the next one, which acts when the network may be good again; so an excuse for a missed deadline is remembered from the
moment at which it passed.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...controller.liveness import QUIET_INTERVALS
from ...controller.recovery.events import Action, DeadlinePassed, Event, Send
from ...controller.recovery.nodes import NODE_GOING
from ...controller.recovery.state import Phase
from ...controller.recovery.world import REACHABLE, NodeState, RankState
from ...policies.budgets import WORLD_RESTARTS
from ...policies.fault_codes import Treatment
from ...processor.session import SessionStage
from ...protocol.incidents import Incident, Outcome
from ...protocol.messages import NodeLost, ProbeProgress, ProgressReported, Rejoin, Resume, StartProcess, StopProcess
from ...protocol.types import CONTROLLER, Decision, FaultKind, RestoreSource, Rung, node_address
from ..invariants import KEEPING, Invariant, contradictions
from .host_copies import check_target
from .network import RESENDS_S
from .scaling_watch import ScalingWatch

if TYPE_CHECKING:
    from ...protocol.incidents import Incident
    from .node import SimulatedAgent
    from .process import Process
    from .world import SimulatedWorld


_TO_BE_LEFT = frozenset({Treatment.LEAVE})
RESENT_S = 5.0  # what a node did not hear has come again by then


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
        """Return whether a process held its rank before the event that is being handled."""
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
        clean = [each for each in current if not each.integrity.all_marks]  # bits have flipped in the others
        holding = {each: each.memory.stands for each in clean if each.memory.stands is not None}
        newest = max(holding.values(), default=0)
        newest_on = [process for process, step in holding.items() if step == newest]
        sources = newest_on + [process for process in holding if process.memory.gradients == newest]
        shards = {shard for process in sources for shard in process.memory.left}
        needed = {shard for rank in range(world.size) for shard in world.shards(rank, world.size)}
        behind = set(range(world.size)) - {process.rank for process in sources}
        own = {(copy.rank, copy.step) for process in current for copy in process.place.copies()}
        whole = needed <= shards and all((rank, newest) in own for rank in behind)
        if whole and target < newest <= self.scaling.trusted and RestoreSource.REPLICA in world.policy.restore:
            what = f"all goes back to step {target}, and step {newest} is alive on {[p.rank for p in newest_on]}"
            world.fail(Invariant.NOTHING_LOST, what)
        if rejoin.part.restore is RestoreSource.REPLICA and newest > 0 and target < everywhere <= self.scaling.trusted:
            what = f"all goes back to step {target}, and every rank has committed {everywhere}"
            world.fail(Invariant.NOTHING_LOST, what)
        check_target(world, target)
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

        `free`: the platform takes a node away, or brings one, and no budget is asked.
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
    """Say whether an incident began with a planned change, for a node that the platform takes away, or brings."""
    first = incident.reports[0] if incident.reports else None
    return first is not None and (first.code == NODE_GOING or first.kind is FaultKind.NODE_JOINED)


class AllowedDeviations:
    """Knows which processes are faulty, which could not be reached, and when."""

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self._unheard: dict[float, frozenset[int]] = {}  # pids out of reach, by when a deadline passed
        self._probed: dict[str, int] = {}  # agents that owe an answer to a probe of the step clocks
        self._silent: dict[float, frozenset[str]] = {}  # agents that owed one, by when a deadline passed
        self._left: dict[str, float] = {}  # nodes that strays were first seen on after the job had left them
        self._given_up: set[int] = set()  # pids on nodes that the controller alone could not hear

    def recorded(self, event: Event) -> None:
        """The controller has recorded an event, and may die before it acts on it."""
        if isinstance(event, DeadlinePassed):
            unheard = frozenset(each.pid for each in self._world.living() if self._out_of_reach(each))
            self._unheard[self._world.timeline.now] = unheard
            self._silent[self._world.timeline.now] = frozenset(self._probed)
        elif isinstance(event, ProgressReported) and self._probed.get(node_address(event.node)) == event.probe:
            del self._probed[node_address(event.node)]
        elif isinstance(event, NodeLost) and self._is_for_silence(event.node):
            self._given_up |= {process.pid for process in self._world.agents[event.node].processes()}

    def handled(self, actions: Sequence[Action]) -> None:
        """The controller has handled an event; what it sends may not arrive."""
        for action in actions:
            if isinstance(action, Send) and isinstance(action.body, ProbeProgress):
                self._probed[action.receiver] = action.body.probe

    def replacing(self, process: "Process", incident: "Incident") -> bool:
        """Return whether there is a reason to replace this process, as far as the world can know."""
        if process.faulty or process.agent.faulty or self._out_of_reach(process):
            return True
        return any(
            (report.seen_by == CONTROLLER and self._owed_an_answer(process, incident))
            or (
                report.kind is FaultKind.UNRESPONSIVE
                and report.incarnation == process.incarnation
                and process.pid in self._unheard.get(report.at_s, ())
            )
            or report.kind is FaultKind.COPIES_DIFFER  # it has spoken for those of which none could be blamed, again
            for report in incident.reports
            if report.rank == process.rank
        )

    def given_up(self, process: "Process") -> bool:
        """Return whether a process was given up, rightly, although only the controller was cut off from it.

        With its node, or because its agent did not say in time, by the deadline that passes now, what its ranks do.
        """
        silent = self._silent.get(self._world.timeline.now, frozenset())
        return process.pid in self._given_up or node_address(process.agent.name) in silent

    def _is_for_silence(self, name: str) -> bool:
        """Return whether the controller is cut off from a node, and not from so many that it holds their silence."""
        now, agents = self._world.timeline.now, self._world.agents
        known = self._world.machine.state.world.nodes.values()
        nodes = [node.name for node in known if node.state in REACHABLE and not node.given_back]
        silent = [node for node in nodes if self._is_missed(agents[node])]
        share = self._world.policy.heartbeat.hold_share
        return name in silent and agents[name].isolated_until_s > now and len(silent) <= share * len(nodes)

    def _is_missed(self, agent: "SimulatedAgent") -> bool:
        """Return whether the controller has not heard a node for long enough to notice it."""
        now, interval_s = self._world.timeline.now, self._world.policy.heartbeat.interval_s
        silent_lately = agent.isolated_until_s <= now and now - agent.silent_since_s < QUIET_INTERVALS * interval_s
        return not agent.is_heard and not silent_lately

    def _owed_an_answer(self, process: "Process", incident: "Incident") -> bool:
        """Return whether the agent of a process did not say in time, in this incident, what its ranks are doing."""
        agent = node_address(process.agent.name)
        return any(at_s >= incident.began_s and agent in silent for at_s, silent in self._silent.items())

    def computing(self, process: "Process") -> bool:
        """Return whether a process cannot hear that it is not needed: its node counts as lost, or was left just now."""
        agent = process.agent
        state = self._world.machine.state.world.nodes[agent.name].state
        now = self._world.timeline.now
        told = now > max(agent.deaf_until_s, agent.isolated_until_s, self._left.setdefault(agent.name, now)) + RESENT_S
        if state is NodeState.ACTIVE:
            del self._left[agent.name]
        return state is NodeState.LOST or (state is not NodeState.ACTIVE and not told)

    def _out_of_reach(self, process: "Process") -> bool:
        """Return whether what was said to this process, or by it, may not have arrived by now."""
        agent, now = process.agent, self._world.timeline.now
        cut_off = now < max(agent.deaf_until_s, agent.mute_until_s) + RESENT_S
        return cut_off or self._lost_again(process) or not self._world.network.has_delivered

    def _lost_again(self, process: "Process") -> bool:
        """Return whether what it said while the controller was cut off has not come: resends were lost, too."""
        lately = self._world.timeline.now < process.agent.isolated_until_s + RESENDS_S
        return lately and self._world.setting.loss > 0 and not process.endpoint.quiet
