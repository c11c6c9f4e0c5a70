"""A month of a job before it is started: the real machine and ladder, and a fleet that is played cheaply.

Between two faults nothing happens but steps, so they are counted and not played. Every fault takes its whole way:
report, decision, quiesce, rejoin, resume, for each rank of the job.
"""

import bisect
import math
import random
from collections.abc import Callable, Iterable

import msgspec

from ..controller.recovery.events import Action, Event, Send
from ..controller.recovery.machine import RecoveryMachine
from ..controller.recovery.state import Phase
from ..controller.recovery.world import NodeState
from ..controller.time_account import TimeAccount
from ..policies.fault_codes import TREATMENTS, Treatment
from ..policies.schema import Policy
from ..processor.ballot import VOTES_OF_A_STEP
from ..protocol import types as t
from ..protocol.incidents import Outcome
from ..protocol.messages import FaultReported, NodeJoined, NodeLost, ProcessExited, StartProcess
from .fault_trace import FaultTrace, Kind, TimedFault, faults_of
from .fleet import Fleet
from .outlook import JobStop, Loss, Outlook, Took

HOUR_S = 3600.0
LEAST_MAJORITY = 3  # copies, of which one can be odd
KEEPING = frozenset({t.Rung.RETRY_STEP, t.Rung.RECOVER_IN_PLACE, t.Rung.RECOVER})


class Cluster(msgspec.Struct, frozen=True):
    """The nodes of a job. `spares` stand by at the start, `more_nodes` can be made by the platform."""

    nodes: int
    ranks_per_node: int
    spares: int = 2
    more_nodes: int = 0

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node


class Forecast:
    """One job over so many hours. A job that stops is submitted again, with its checkpoint and new budgets."""

    def __init__(self, policy: Policy, cluster: Cluster, trace: FaultTrace, *, hours: float, seed: int) -> None:
        self._policy, self._cluster, self._trace = policy, cluster, trace
        self._model = trace.model
        self._chance = random.Random(seed)
        self._end_s = hours * HOUR_S
        self.outlook = Outlook(seed=seed, hours=hours, ranks=cluster.ranks)
        self._seen_decisions = 0
        self._trained_from_s = 0.0
        self._part_s = 0.0  # of a step, trained when the last fault came
        self._reached = 0  # the most steps before the last fault
        self._times = TimeAccount()
        self._wrong_until_s = 0.0  # a person sees it then, and the job goes back to before it
        self._machines = Machines(cluster.nodes + cluster.spares + cluster.more_nodes, self._model.node_repair_s)
        self._begin(0.0, 0)

    def run(self, heard: Callable[[float], None] = lambda hours: None) -> Outlook:
        """Play it. `heard` gets how many hours have been played."""
        for fault in faults_of(self._trace, self.outlook.hours, self._cluster.ranks, self._chance):
            at_s = fault.at_h * HOUR_S
            if self._fleet.finish is None:
                self._fleet.run_until(at_s)
            self._after_stop(at_s)
            if self._fleet.finish is None and self._fleet.now <= at_s:
                self._inject(fault)
            else:  # nothing ran that it could have hit
                self.outlook.faults[fault.kind] += 1
                self.outlook.faults_missed += 1
            heard(fault.at_h)
        if self._fleet.finish is None:
            self._fleet.run_until(self._end_s)
        self._after_stop(self._end_s)
        self._train()
        heard(self.outlook.hours)
        self._conclude()
        return self.outlook

    # --- the job ------------------------------------------------------------------------------------------------

    def _begin(self, at_s: float, checkpoint: int) -> None:
        self.outlook.counted(self._times.until(at_s))
        self._times = TimeAccount()
        cluster = self._cluster
        job = t.JobSpec(
            job="forecast", command=("train.py",), is_module=False, no_python=False, environment={},
            working_directory="/", job_directory="/", world_size=cluster.ranks,
            ranks_per_node=cluster.ranks_per_node, nodes=cluster.nodes, spare_nodes=cluster.spares,
            max_restarts=0, settings=t.JobSettings(),
        )  # fmt: skip
        self._machine = RecoveryMachine(self._policy, job, can_create_nodes=cluster.more_nodes > 0)
        whole = self._machines.whole(at_s)
        names = [f"node{number}" for number in range(min(cluster.nodes + cluster.spares, whole))]
        more = min(cluster.more_nodes, whole - len(names))
        self._fleet = Fleet(self._machine, self._model, nodes_to_come=more, handled=self._handled)
        self._fleet.now = at_s
        self._fleet.checkpoint = checkpoint
        self._incidents_closed = self._seen_decisions = 0
        self._broken = 0
        self._running = self._training = False
        fleet = self._fleet
        fleet.after(0.0, lambda: [fleet.join(name) for name in names])
        for repaired_s in self._machines.to_come(at_s):
            fleet.after(repaired_s - at_s, lambda: (self._repaired(),))

    def _after_stop(self, at_s: float) -> None:
        """Where the job has stopped, count the time until it is started again."""
        while self._fleet.finish is not None and self._fleet.now < at_s:
            stopped_s, finish = self._fleet.now, self._fleet.finish
            self._close_incidents()
            again_s = self._machines.enough_at(self._cluster.nodes, stopped_s + self._model.resubmit_s)
            again_s = min(again_s, self._end_s)
            self.outlook.stops.append(JobStop(stopped_s / HOUR_S, finish.reason))
            self.outlook.lost_s[Loss.STOPPED] += again_s - stopped_s
            if again_s > at_s:
                self._fleet.now = again_s
            self._begin(again_s, self._fleet.checkpoint)
            self._fleet.run_until(max(at_s, again_s))

    def _handled(self, event: Event, actions: list[Action]) -> None:
        """Look on: when training begins and ends, what was decided, and whether all is as it should be."""
        machine = self._machine
        self._times.follow(machine.state, event, self._fleet.now)
        running = machine.phase is Phase.RUNNING
        if running and not self._running:
            self._close_incidents()
            self._trained_from_s, self._part_s, self._training = self._fleet.now, 0.0, True
            self.outlook.steps_done += 1  # the one after the resume
        elif self._running and not running:
            self._train()
        self._running = running
        if actions:
            self._check(actions)

    def _train(self) -> None:
        """Count the steps since training began, and the checkpoints among them."""
        if not self._training:
            return
        self._training = False
        every, model = self._policy.checkpoint.every_steps, self._model
        fleet, trained_s = self._fleet, self._fleet.now - self._trained_from_s
        step_s = self._step_s
        steps = int(trained_s / step_s)
        self._part_s = max(0.0, trained_s - steps * step_s)
        missing = 1 - fleet.size / self._cluster.ranks
        self.outlook.lost_s[Loss.FEWER] += missing * steps * model.step_s
        self.outlook.smaller_hours += trained_s / HOUR_S if missing else 0.0
        fleet.step += steps
        self.outlook.steps_done += steps
        self.outlook.lost_s[Loss.CHECKPOINT] += steps * self._pause_s
        self.outlook.lost_s[Loss.VOTES] += steps * self._vote_s
        if every:
            beside = self._policy.checkpoint.asynchronous  # such a one is complete some steps later
            late = math.ceil(model.checkpoint_s / model.step_s) if beside else 0
            fleet.checkpoint = max(fleet.checkpoint, (fleet.step - late) // every * every)
        self._reached = fleet.step

    @property
    def _step_s(self) -> float:
        """How long a step takes, with its share of what is done in some of them."""
        return self._model.step_s + self._pause_s + self._vote_s

    @property
    def _votes_apart(self) -> int:
        """How many steps are from one vote to the next; 0: none is held."""
        every, model = self._policy.integrity.every_steps, self._model
        return max(1, math.ceil(model.vote_s / (VOTES_OF_A_STEP * model.step_s))) if every == "auto" else every

    @property
    def _vote_s(self) -> float:
        """The share of a step in a vote, in which what ranks hold is hashed."""
        return self._model.vote_s / self._votes_apart if self._votes_apart else 0.0

    @property
    def _pause_s(self) -> float:
        """The share of a step in a checkpoint for which training stands still."""
        checkpoint = self._policy.checkpoint
        stands = checkpoint.every_steps and not checkpoint.asynchronous
        return self._model.checkpoint_s / checkpoint.every_steps if stands else 0.0

    # --- faults -------------------------------------------------------------------------------------------------

    def _inject(self, fault: TimedFault) -> None:
        fleet, model, world = self._fleet, self._model, self._machine.state.world
        rank, now = fault.rank or 0, fleet.now
        holder = world.holder(rank)
        self.outlook.faults[fault.kind] += 1
        if holder is None or not holder.pid:
            self.outlook.faults_missed += 1
            return
        if fault.kind is Kind.CORRUPTION:
            self._corrupt(rank, holder.incarnation)
            return
        if fault.kind is not Kind.DEVICE:  # from now on all ranks wait; a device may still do its work
            self._train()
        incarnation, node, generation = holder.incarnation, holder.node, self._machine.generation

        def report(kind: t.FaultKind, detail: str) -> FaultReported:
            seen_by = t.rank_address(rank) if kind is t.FaultKind.EXCEPTION else t.node_address(node)
            level = fault.level if kind is t.FaultKind.DEVICE and fault.level else t.FaultReport(kind, 0, "", "").level
            return FaultReported(
                t.FaultReport(kind, now, seen_by, detail, rank, node, generation, incarnation, level=level)
            )

        def exited() -> Iterable[Event]:
            process = t.RunningProcess(rank, holder.pid, incarnation, generation)
            yield ProcessExited(node, process, -9, now, expected=False)

        def hung() -> Iterable[Event]:
            current = holder.incarnation == incarnation and self._machine.phase is Phase.RUNNING
            return (report(t.FaultKind.STALL, "no step for too long"),) if current else ()

        stall_s = self._policy.stall.factor * model.step_s + self._policy.stall.grace_s
        heartbeat = self._policy.heartbeat
        if fault.kind is Kind.PROCESS:
            fleet.after(model.exit_seen_s, exited)
        elif fault.kind is Kind.EXCEPTION:
            fleet.after(0.02, lambda: (report(t.FaultKind.EXCEPTION, "RuntimeError"),))
        elif fault.kind is Kind.STALL:
            fleet.hung[rank] = incarnation
            fleet.after(stall_s, hung)
        elif fault.kind is Kind.LINK:
            fleet.after(0.02, lambda: (report(t.FaultKind.COMMUNICATION, "a collective failed"),))
        elif fault.kind is Kind.DEVICE:
            fleet.after(model.device_seen_s, lambda: (report(t.FaultKind.DEVICE, "seen by a detector"),))
            if fault.level is not None and TREATMENTS[fault.level] is Treatment.LEAVE:
                self._machines.break_one(now)
            self._repair_later(node)
        else:
            fleet.gone.add(node)
            self._machines.break_one(now)
            silent_s = heartbeat.interval_s * heartbeat.missed
            fleet.after(silent_s, lambda: (NodeLost(node, f"no word for {silent_s:g} s", now),))
            self._repair_later(node)

    def _corrupt(self, rank: int, incarnation: int) -> None:
        """Have what a rank holds be wrong: the next vote finds it, or a person some day.

        It is as the ranks conclude: of three copies the odd one is mended, of two none can be blamed, and one is not
        checked. A piece with a buddy has two.
        """
        fleet, model, every = self._fleet, self._model, self._votes_apart
        has_buddy = self._machine.state.policy.replica == "buddy"
        copies = 2 if model.replicas == 1 and has_buddy else model.replicas
        if not every or copies == 1:
            until_s = min(self._end_s, fleet.now + model.silent_seen_h * HOUR_S)
            self.outlook.lost_s[Loss.WRONG] += max(0.0, until_s - max(fleet.now, self._wrong_until_s))
            self._wrong_until_s = max(self._wrong_until_s, until_s)
            return
        step_s, trained_s = self._step_s, fleet.now - self._trained_from_s if self._training else 0.0
        done = fleet.step + int(trained_s / step_s)
        passed, undecided = done // every * every, copies == LEAST_MAJORITY - 1
        kind = t.FaultKind.COPIES_DIFFER if undecided else t.FaultKind.ODD_COPY

        def found() -> Iterable[Event]:
            holder, generation = self._machine.state.world.holder(rank), self._machine.generation
            if holder is None or holder.incarnation != incarnation or self._machine.phase is not Phase.RUNNING:
                return
            exact = every == 1 and not undecided
            trusted = None if exact else max(passed - (every == 1), fleet.checkpoint)
            yield FaultReported(
                t.FaultReport(
                    kind, fleet.now, t.rank_address(rank), "holds something else than others",
                    rank, holder.node, generation, incarnation, mendable=True, trusted_step=trusted,
                )
            )  # fmt: skip

        fleet.after((passed + every - done - 0.5) * step_s, found)  # the checkpoint of that state is not complete yet

    def _repair_later(self, name: str) -> None:
        """A broken node comes back as a new one, if the job has left it; one given back, if it is short of nodes."""
        fleet, world = self._fleet, self._machine.state.world

        def repaired() -> Iterable[Event]:
            node = world.nodes[name]
            wanted = not node.given_back or world.size < self._cluster.ranks
            if node.state in {NodeState.LOST, NodeState.ISOLATED} and wanted:
                yield self._repaired()

        fleet.after(self._model.node_repair_s, repaired)

    def _repaired(self) -> NodeJoined:
        """A machine that was broken is back."""
        self._broken += 1
        return self._fleet.join(f"repaired{self._broken}")

    # --- the count ----------------------------------------------------------------------------------------------

    def _close_incidents(self) -> None:
        """Add what has ended since to the outlook."""
        model, outlook = self._model, self.outlook
        incidents = self._machine.incidents
        first = incidents[0].number if incidents else 0
        for incident in incidents[max(0, self._incidents_closed - first + 1) :]:
            if incident.outcome is Outcome.OPEN:
                break
            self._incidents_closed = incident.number
            if incident.outcome is Outcome.DISMISSED or incident.rung is None:
                outlook.dismissed += 1
                continue
            outlook.incidents += 1
            ended_s = incident.resumed_s if incident.resumed_s is not None else self._fleet.now
            reported_s = min((phase.began_s for phase in incident.phases), default=ended_s)
            stands = self._fleet.checkpoint if incident.resumed_step is None else incident.resumed_step
            steps_lost = max(0, self._reached - stands)
            again_s = steps_lost * model.step_s + self._part_s
            self._part_s = 0.0
            detection_s = max(0.0, reported_s - incident.began_s)
            recovery_s = max(0.0, ended_s - reported_s - (model.step_s if incident.resumed_s is not None else 0.0))
            outlook.lost_s[Loss.DETECTION] += detection_s
            outlook.lost_s[Loss.RECOVERY] += recovery_s
            outlook.lost_s[Loss.REPEATED] += again_s
            outlook.steps_lost += steps_lost
            outlook.taken(Took(incident.began_s / HOUR_S, incident.rung, detection_s + recovery_s + again_s,
                               len(incident.decisions), incident.decisions[-1].reason))  # fmt: skip
            for decision in incident.decisions:
                for skipped in decision.skipped:
                    outlook.spent += "budget" in skipped.reason

    def _check(self, actions: list[Action]) -> None:
        """The invariants that can be seen from here."""
        machine, outlook = self._machine, self.outlook
        if machine.phase not in {Phase.RUNNING, Phase.ENDED, Phase.STARTING} and machine.next_deadline() is None:
            outlook.violations.append(f"always ends: {machine.phase} has no deadline")
        incident = machine.incidents[-1] if machine.incidents else None
        if incident is None or incident.outcome is not Outcome.OPEN:
            return
        if any(not decision.reason for decision in incident.decisions):
            outlook.violations.append(f"every decision has a reason: incident {incident.number} has none")
        if incident.rung in KEEPING:
            meant = set(incident.replaced)
            for action in actions:
                if isinstance(action, Send) and isinstance(action.body, StartProcess) and action.body.rank not in meant:
                    what = f"rank {action.body.rank} is replaced by {incident.rung}, and was not meant to be"
                    outlook.violations.append(f"nobody is killed for nothing: {what}")
        for use in machine.state.ladder.budgets(tuple(machine.state.spent), self._fleet.now):
            if use.used > use.limit:
                outlook.violations.append(f"budgets hold: {use.name}: {use.used} of {use.limit}")

    def _conclude(self) -> None:
        self._close_incidents()
        self.outlook.counted(self._times.until(self._end_s))
        outlook = self.outlook
        useful_s = (outlook.steps_done - outlook.steps_lost) * self._model.step_s - outlook.lost_s[Loss.FEWER]
        useful_s -= outlook.lost_s[Loss.WRONG]
        outlook.goodput = min(1.0, max(0.0, useful_s / self._end_s)) if self._end_s else 1.0


class Machines:
    """All machines that a job could have. Times are seconds since the start of the forecast."""

    def __init__(self, count: int, repair_s: float) -> None:
        self._count = count
        self._repair_s = repair_s
        self._repaired_s: list[float] = []  # when each that broke is whole again, in order

    def break_one(self, now: float) -> None:
        """A machine has broken, and is on its way to be repaired."""
        bisect.insort(self._repaired_s, now + self._repair_s)

    def whole(self, now: float) -> int:
        """Return how many can be used."""
        return self._count - len(self.to_come(now))

    def to_come(self, now: float) -> list[float]:
        """Return when each of those that are broken now will be whole again."""
        return [at_s for at_s in self._repaired_s if at_s > now][: self._count]

    def enough_at(self, needed: int, now: float) -> float:
        """Return when so many can be used: now, or when the last of them is repaired."""
        missing = needed - self.whole(now)
        return self.to_come(now)[missing - 1] if missing > 0 else now
