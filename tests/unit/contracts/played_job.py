"""A job around the real recovery machine, with agents, processors and platform played in memory.

Everybody answers a command at once and as it should be, unless the test says otherwise (`deaf`, `mute`, `never_joins`,
`refuses_nodes`).
Every transition is held against the table, and the events are kept as the journal keeps them, so that a controller can
die and another one take over at any moment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from midstep.controller.actions import Action, Finish, Send
from midstep.controller.events import ControllerStarted, DeadlinePassed, Event, StopRequested
from midstep.controller.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.table import TABLE
from midstep.policies.files import parse_policy
from midstep.protocol import messages as m
from midstep.protocol.incidents import Incident
from midstep.protocol.types import (
    Activity,
    FaultKind,
    FaultLevel,
    FaultReport,
    JobSettings,
    JobSpec,
    LocalStateCopy,
    RankProgress,
    Rung,
    RunningProcess,
    ShardHold,
    StepReport,
    StoreEndpoint,
)

MOST_EVENTS = 10_000  # a job that goes on for longer is going round in circles
HOLDS = (ShardHold("replicated", 1000),)
STEP_S = 0.1


@dataclass
class Process:
    """A training process: whose rank it holds, where, and what it has."""

    rank: int
    node: str
    incarnation: int
    generation: int
    pid: int
    committed: int = 0
    clean: bool = True
    connected: bool = True
    activity: Activity = Activity.STARTING
    suspended: bool = False


@dataclass
class PlayedJob:
    """A job of `nodes` x `ranks_per_node` ranks with `spares`; `policy` is YAML text."""

    policy: str = ""
    nodes: int = 2
    ranks_per_node: int = 2
    spares: int = 1
    creates_nodes: bool = False
    max_restarts: int = 0
    resilient: bool = True  # False: a script that knows nothing of midstep, and never joins
    now: float = 1000.0
    journal: list[tuple[Event, float]] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    finish: Finish | None = None
    processes: dict[int, Process] = field(default_factory=dict)
    newcomers: dict[int, Process] = field(default_factory=dict)  # beside those whose ranks they will hold
    alive_nodes: set[str] = field(default_factory=set)
    black_boxes: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # node, rank -> step of the rank-local state there
    checkpoints: tuple[int, ...] = ()
    refuses_nodes: str = ""  # why the platform creates none
    deaf: set[int] = field(default_factory=set)  # ranks whose present processes answer nothing
    never_joins: set[int] = field(default_factory=set)  # ranks whose next processes never reach the train function
    clock_changes: dict[str, Any] = field(default_factory=dict)  # what every step clock says instead
    mute: Callable[[Any], bool] = lambda body: False  # commands that nobody answers

    def __post_init__(self) -> None:
        self.pids = 100
        self._done = 0  # of what was sent, carried out
        self._answers: dict[type, Callable[[Any], None]] = {
            m.CreateNode: self._create_node,
            m.DeleteNode: self._delete_node,
            m.StartProcess: self._start_process,
            m.StopProcess: self._stop_process,
            m.Quiesce: self._quiesce,
            m.Rejoin: self._rejoin,
            m.Resume: self._resume,
            m.Release: self._release,
            m.SaveCheckpoint: self._save_checkpoint,
            m.ProbeProgress: self._probe_progress,
        }
        self.spec = JobSpec(
            job="played",
            command=("train.py",),
            is_module=False,
            no_python=False,
            environment={},
            working_directory="/",
            job_directory="/",
            world_size=self.nodes * self.ranks_per_node,
            ranks_per_node=self.ranks_per_node,
            nodes=self.nodes,
            spare_nodes=self.spares,
            max_restarts=self.max_restarts,
            settings=JobSettings(),
        )
        self.machine = self._new_machine()

    def _new_machine(self) -> RecoveryMachine:
        policy = parse_policy(self.policy, "contract")
        return RecoveryMachine(policy, self.spec, can_create_nodes=self.creates_nodes)

    # --- what happens -------------------------------------------------------------------------------------------------

    def start(self) -> "PlayedJob":
        """Bring the job to RUNNING, a few steps on."""
        for number in range(self.nodes + self.spares):
            self.node_joins(f"node{number}")
        self.settle()
        self.train(5)
        return self

    def train(self, steps: int) -> None:
        """All processes commit as many steps more."""
        for process in self.processes.values():
            process.committed += steps
            self._keep_local_state(process)
        self.now += steps * STEP_S

    def _keep_local_state(self, process: Process) -> None:
        """A rank's local state lies in its black box, and in its buddy's."""
        for keeper in (process.rank, self._buddy(process.rank)):
            holder = self.processes.get(keeper)
            if holder is not None:
                self.black_boxes[holder.node, process.rank] = process.committed

    def node_joins(self, name: str) -> None:
        """An agent comes up."""
        self.alive_nodes.add(name)
        here = [each for _, each in sorted(self.processes.items()) if each.node == name]
        running = tuple(RunningProcess(each.rank, each.pid, each.incarnation, each.generation) for each in here)
        self.feed(m.NodeJoined(name, name, self.store(name), running))

    @staticmethod
    def store(node: str) -> StoreEndpoint:
        """Where the rendezvous store of a node listens."""
        return StoreEndpoint(node, 29500)

    def kill(self, rank: int, status: int = -9) -> None:
        """The process of a rank ends, and its agent says so."""
        process = self.processes.pop(rank)
        self.feed(self.exited(process, status))
        self.settle()

    def exited(self, process: Process, status: int = -9, *, expected: bool = False) -> m.ProcessExited:
        """An agent's report of an end."""
        running = RunningProcess(process.rank, process.pid, process.incarnation, process.generation)
        return m.ProcessExited(process.node, running, status, self.now, expected=expected)

    def lose_node(self, name: str) -> None:
        """A node goes away with everything on it."""
        self.drop_node(name)
        self.feed(m.NodeLost(name, "its agent is gone", self.now))
        self.settle()

    def report(self, kind: FaultKind, rank: int | None = None, **more: Any) -> None:
        """Somebody reports a fault, of the present process of `rank` unless told otherwise; nobody answers yet."""
        fields: dict[str, Any] = {"generation": self.machine.generation}
        if rank is not None:
            holder = self.machine.state.world.holders[rank]
            fields |= {"rank": rank, "node": holder.node, "incarnation": holder.incarnation}
        self.feed(m.FaultReported(FaultReport(kind, self.now, "played", "seen", **(fields | more))))

    def fault(self, kind: FaultKind, rank: int | None = None, **more: Any) -> None:
        """Likewise, and everybody does what follows."""
        self.report(kind, rank, **more)
        self.settle()

    def device_fault(self, rank: int, level: FaultLevel) -> None:
        """A detector reports the device of a rank."""
        self.fault(FaultKind.DEVICE, rank, level=level, code="80E01801")

    def stop(self, reason: str = "Ctrl-C") -> None:
        """An operator ends the job."""
        self.feed(StopRequested(reason))
        self.settle()

    def complete(self) -> None:
        """Every train function returns."""
        for rank, process in sorted(self.processes.items()):
            self.rank_finishes(rank, process)
        self.settle()

    def rank_finishes(self, rank: int, process: Process | None = None) -> None:
        """The train function of one rank returns; nobody answers yet."""
        process = process or self.processes[rank]
        self.feed(m.RankFinished(rank, self.machine.generation, process.incarnation, process.committed))

    def restart_controller(self) -> None:
        """The controller dies; the next one has the journal alone, and knows what this one knew."""
        before = msgspec.structs.replace(self.machine.status(self.now), term=0)
        term = self.machine.state.term + 1
        self.machine = self._new_machine()
        for event, at_s in self.journal:
            self.machine.handle(event, at_s)
        assert msgspec.structs.replace(self.machine.status(self.now), term=0) == before
        self.feed(ControllerStarted(term))

    def wait(self) -> None:
        """Nobody says anything until the next deadline has passed."""
        due = self.machine.next_deadline()
        assert due is not None, "nobody is waited for"
        self.now = max(self.now, due)
        self.feed(DeadlinePassed())
        self.settle()

    def wait_until(self, phase: Phase) -> None:
        """Let deadline after deadline pass until the machine stands in `phase`."""
        for _ in range(50):
            if self.phase is phase:
                return
            self.wait()
        raise AssertionError(f"never {phase}, but {self.phase}")

    # --- the machinery ------------------------------------------------------------------------------------------------

    def feed(self, *events: Event) -> None:
        """Journal events and hand them to the machine; what it sends is kept for `settle`."""
        for event in events:
            assert len(self.journal) < MOST_EVENTS, "the job goes round in circles"
            self.now += 0.001
            self.journal.append((event, self.now))
            before = self.machine.phase
            actions = self.machine.handle(event, self.now)
            after = self.machine.phase
            if after is not before:
                assert after in TABLE[before, type(event)].to, f"{before} -{type(event).__name__}-> {after}"
            self._take(actions)

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Finish):
                assert self.finish in (None, action), "a job ends once"
                self.finish = action
            elif isinstance(action, Send):
                self.sent.append(action.body)

    def settle(self) -> None:
        """Everybody carries out what they were sent, and answers, until nothing is left to do."""
        while self._done < len(self.sent):
            body = self.sent[self._done]
            self._done += 1
            if self._reaches(body):
                answer = self._answers.get(type(body))
                if answer is not None:
                    answer(body)

    def _reaches(self, body: Any) -> bool:
        rank = getattr(body, "rank", None)
        if rank in self.deaf and not isinstance(body, m.StartProcess | m.StopProcess):
            return False
        return not self.mute(body)

    def _buddy(self, rank: int) -> int:
        return (rank + self.ranks_per_node) % self.spec.world_size

    def drop_node(self, name: str) -> None:
        """A node goes away, and nobody has noticed yet."""
        self.alive_nodes.discard(name)
        self.processes = {rank: each for rank, each in self.processes.items() if each.node != name}
        self.black_boxes = {key: step for key, step in self.black_boxes.items() if key[0] != name}

    def _create_node(self, body: m.CreateNode) -> None:
        if self.refuses_nodes:
            self.feed(m.NodeRefused(body.node, self.refuses_nodes))
        else:
            self.node_joins(body.node)

    def _delete_node(self, body: m.DeleteNode) -> None:
        self.drop_node(body.node)

    def _start_process(self, body: m.StartProcess) -> None:
        if body.early:
            self._start_newcomer(body)
            return
        holder = self.machine.state.world.holders[body.rank]
        if holder.incarnation != body.incarnation or holder.node not in self.alive_nodes:
            return
        present = self.processes.get(body.rank)
        if present is not None and present.incarnation == body.incarnation:
            return  # asked twice
        self.pids += 1
        self.deaf.discard(body.rank)
        process = Process(
            body.rank, holder.node, body.incarnation, body.generation, self.pids, connected=body.connected
        )
        process.clean = body.connected
        self.processes[body.rank] = process
        running = RunningProcess(body.rank, process.pid, body.incarnation, body.generation)
        self.feed(m.ProcessStarted(holder.node, running, warm=True))
        if self.resilient and body.rank not in self.never_joins:
            self.feed(
                m.RankJoined(body.rank, body.generation, body.incarnation, process.pid, self._report(process), 0.1)
            )

    def _start_newcomer(self, body: m.StartProcess) -> None:
        """A process gets ready on the spare node, while another one keeps its rank."""
        plan = self.machine.state.plans.current
        assert plan is not None
        self.pids += 1
        process = Process(
            body.rank, plan.spare, body.incarnation, body.generation, self.pids, connected=False, clean=False
        )
        self.newcomers[body.rank] = process
        running = RunningProcess(body.rank, process.pid, body.incarnation, body.generation)
        self.feed(m.ProcessStarted(plan.spare, running, warm=True), m.NewcomerWaiting(plan.spare, running))

    def _stop_process(self, body: m.StopProcess) -> None:
        process = self.processes.get(body.rank)
        if process is not None and process.incarnation == body.incarnation:
            del self.processes[body.rank]
            self.feed(self.exited(process, expected=True))

    def _quiesce(self, body: m.Quiesce) -> None:
        newcomer = self.newcomers.get(body.rank)
        holder = self.machine.state.world.holders[body.rank]
        if newcomer is not None and newcomer.incarnation == holder.incarnation:
            self.processes[body.rank] = self.newcomers.pop(body.rank)
            numbers = (body.rank, body.generation, newcomer.incarnation, newcomer.pid)
            self.feed(m.RankJoined(*numbers, self._report(newcomer), 0.1))
            return
        process = self.processes.get(body.rank)
        if process is not None:
            if body.after_step is not None:
                self.train(max(0, body.after_step - process.committed))  # all go on to the boundary together
            process.activity = Activity.RECOVERING
            report = self._report(process)
            self.feed(m.RankQuiesced(body.rank, body.generation, process.incarnation, report, {"stop": 0.01}))

    def _rejoin(self, body: m.Rejoin) -> None:
        process = self.processes.get(body.rank)
        if process is not None:
            process.committed, process.clean = body.part.target_step, True
            received = sum(each.length_bytes for each in body.part.transfers if each.destination == body.rank)
            phases_s = {"rebuild": 0.01, "repair": 0.01}
            step = body.part.target_step
            self.feed(m.RankReady(body.rank, body.generation, process.incarnation, step, phases_s, received))

    def _resume(self, body: m.Resume) -> None:
        process = self.processes.get(body.rank)
        if process is not None:
            process.committed = body.step + 1
            process.activity = Activity.COMPUTING
            self._keep_local_state(process)
            committed = process.committed
            self.feed(m.StepCommitted(body.rank, body.generation, process.incarnation, committed, self.now, STEP_S))

    def _release(self, body: m.Release) -> None:
        process = self.processes.pop(body.rank, None)
        if process is not None:
            self.feed(self.exited(process, 0))

    def _save_checkpoint(self, body: m.SaveCheckpoint) -> None:
        if body.rank in self.processes:
            self.feed(m.CheckpointSaved(body.rank, body.generation, body.step, "/checkpoints/emergency"))

    def _probe_progress(self, body: m.ProbeProgress) -> None:
        state = self.machine.state
        for node in sorted(state.clocks.awaited & self.alive_nodes):
            clocks = tuple(self._clock(each) for each in self.processes.values() if each.node == node)
            self.feed(m.ProgressReported(node, body.probe, self.now, clocks))

    def _clock(self, process: Process) -> RankProgress:
        """A rank that is not stuck waits for the others in a collective."""
        stuck = process.suspended or process.rank in self.deaf
        activity = Activity.COMPUTING if stuck else Activity.COLLECTIVE
        collectives = 4 if stuck else 5
        numbers = (process.rank, process.incarnation, self.machine.generation, process.committed)
        clock = RankProgress(*numbers, activity, collectives, 30.0, 30.0, STEP_S, process.suspended)
        return msgspec.structs.replace(clock, **self.clock_changes)

    def _report(self, process: Process) -> StepReport:
        kept = ((rank, self.black_boxes.get((process.node, rank))) for rank in self._kept_by(process.rank))
        own = tuple(LocalStateCopy(rank, step) for rank, step in kept if step is not None)
        if process.connected and process.committed == 0:
            own = (LocalStateCopy(process.rank, 0),)
        holds = HOLDS if process.clean else ()
        return StepReport(
            process.committed if process.clean else 0,
            ready=False,
            clean=process.clean,
            holds=holds,
            needs=("replicated",),
            local_states=own,
            checkpoints=self.checkpoints,
        )

    def _kept_by(self, rank: int) -> tuple[int, int]:
        return rank, (rank - self.ranks_per_node) % self.spec.world_size

    # --- what is seen -------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the machine stands."""
        return self.machine.phase

    def expect(self, phase: Phase) -> None:
        """The machine stands in `phase` now, and may go on from there."""
        assert self.machine.phase is phase

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All incidents so far."""
        return self.machine.incidents

    @property
    def rungs(self) -> list[Rung]:
        """The rungs of the last incident, in the order in which they were taken."""
        return [decision.rung for decision in self.incidents[-1].decisions]

    @property
    def outcome(self) -> Finish:
        """How the job ended."""
        assert self.finish is not None, f"the job has not ended, it is {self.phase}"
        return self.finish

    def pids_now(self) -> dict[int, int]:
        """Who holds which rank."""
        return {rank: process.pid for rank, process in sorted(self.processes.items())}

    def replaced_since(self, before: dict[int, int]) -> set[int]:
        """The ranks that have another process than in `before`."""
        now = self.pids_now()
        return {rank for rank in before if now.get(rank) != before[rank]}

    def commands(self, kind: type, since: int = 0) -> list[Any]:
        """The commands of one kind, from the `since`th command on."""
        return [body for body in self.sent[since:] if isinstance(body, kind)]

    def skipped(self, rung: Rung) -> str:
        """Why the last decision did not take a cheaper rung."""
        decision = self.incidents[-1].decisions[-1]
        return next(each.reason for each in decision.skipped if each.rung is rung)
