"""The fake cluster of the tests: the real recovery machine, and what agents, processes and detectors say to it.

Here a test says itself what comes in. In `answering_cluster.py` agents and processes answer each command themselves.
Every transition is held against the table, and every state against itself.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from ..controller.recovery.events import Action, DeadlinePassed, Event, Finish, Send
from ..controller.recovery.machine import RecoveryMachine
from ..controller.recovery.state import Phase
from ..controller.recovery.world import RankState
from ..controller.time_account import TimeAccount
from ..policies.schema import Policy, default_policy
from ..protocol import messages as m
from ..protocol.types import (
    Activity,
    Assertion,
    FaultKind,
    FaultLevel,
    FaultReport,
    JobSettings,
    JobSpec,
    LocalStateCopy,
    RankProgress,
    RunningProcess,
    ShardHold,
    StepReport,
    StoreEndpoint,
)
from .invariants import contradictions
from .transitions import is_known

SHARD = "replicated"
HOLDS = (ShardHold(SHARD, 1000),)
EVENT_S = 0.001  # from one event to the next
STEP_S = 0.1
STEP = 7  # where the ranks are when their step clocks are read


def job(nodes: int = 2, ranks_per_node: int = 2, spares: int = 1, max_restarts: int = 0) -> JobSpec:
    """A job of a few ranks."""
    return JobSpec(
        job="test", command=("train.py",), is_module=False, no_python=False, environment={}, working_directory="/",
        job_directory="/", world_size=nodes * ranks_per_node, ranks_per_node=ranks_per_node, nodes=nodes,
        spare_nodes=spares, max_restarts=max_restarts, settings=JobSettings(),
    )  # fmt: skip


def only(bodies: list[Any], kind: type) -> list[Any]:
    """The commands of one kind."""
    return [body for body in bodies if isinstance(body, kind)]


class FakeCluster:
    """A machine, a clock, and everything that can be said to it. `checked`: hold the whole state against itself."""

    def __init__(
        self,
        spec: JobSpec | None = None,
        policy: Policy | None = None,
        *,
        creates: bool = False,
        checked: bool = True,
        rendezvous_key: bytes = b"",
    ) -> None:
        self.job = spec or job()
        self.policy, self.creates, self.checked = policy or default_policy(), creates, checked
        self.rendezvous_key = rendezvous_key
        self.machine = self.new_machine()
        self.times = TimeAccount()
        self.now = 1000.0
        self.journal: list[tuple[Event, float]] = []
        self.log: list[Action] = []

    def new_machine(self) -> RecoveryMachine:
        """Return a machine that knows nothing yet."""
        return RecoveryMachine(self.policy, self.job, can_create_nodes=self.creates, rendezvous_key=self.rendezvous_key)

    def feed(self, *events: Event) -> list[Any]:
        """Hand events to the machine and return the commands that it sends."""
        bodies: list[Any] = []
        for event in events:
            self.now += EVENT_S
            self.journal.append((event, self.now))
            before = self.machine.phase
            actions = self.machine.handle(event, self.now)
            after = self.machine.phase
            assert is_known(before, type(event), after), f"{before} -{type(event).__name__}-> {after}"
            assert not self.checked or contradictions(self.machine.state) == []
            self.log += actions
            self.times.follow(self.machine.state, event, self.now)
            self.handled(event, actions)
            bodies += [action.body for action in actions if isinstance(action, Send)]
        return bodies

    def handled(self, event: Event, actions: list[Action]) -> None:
        """Do what is to follow from an event, where agents and processes answer by themselves."""

    def overdue(self) -> list[Any]:
        """Let the next deadline pass."""
        due_s = self.machine.next_deadline()
        assert due_s is not None, "the machine waits for nothing"
        self.now = max(self.now, due_s)
        return self.feed(DeadlinePassed())

    # --- what it can be seen by -----------------------------------------------------------------------------------

    def holder(self, rank: int) -> Any:
        """The machine's view of a rank."""
        return self.machine.state.world.holders[rank]

    def expect(self, phase: Phase) -> None:
        """The machine is in a phase."""
        assert self.machine.phase is phase

    @property
    def finish(self) -> Finish | None:
        """How the job has ended, which it does once; None while it has not."""
        ends = [action for action in self.log if isinstance(action, Finish)]
        assert not any(each != ends[0] for each in ends)
        return ends[0] if ends else None

    # --- what is said to it ---------------------------------------------------------------------------------------

    def store(self, name: str) -> StoreEndpoint:
        """Where the rendezvous store of a node listens."""
        return StoreEndpoint(name, 29400)

    def node(self, name: str, *processes: RunningProcess) -> m.NodeJoined:
        """An agent that has come up, or greets a new controller."""
        return m.NodeJoined(name, name, self.store(name), processes)

    def joined(self, rank: int, *, fresh: bool = False, own: int | None = None) -> m.RankJoined:
        """A process that has reached its train function."""
        local_states = () if own is None else (LocalStateCopy(rank, own),)
        holds = HOLDS if fresh else ()
        report = StepReport(0, ready=False, clean=fresh, holds=holds, needs=(SHARD,), local_states=local_states)
        return m.RankJoined(rank, self.machine.generation, self.holder(rank).incarnation, 100 + rank, report, 0.1)

    def quiesced(self, rank: int, committed: int, *, ready: bool = False, peers: Iterable[int] = ()) -> m.RankQuiesced:
        """A survivor that has stopped; one that was ready has kept its rank-local state of the step to come, too.

        `peers`: the ranks of which it keeps copies.
        """
        steps = (committed, committed + 1) if ready else (committed,)
        own = tuple(LocalStateCopy(each, step) for each in (rank, *peers) for step in steps)
        report = StepReport(committed, ready=ready, clean=True, holds=HOLDS, needs=(SHARD,), local_states=own)
        return m.RankQuiesced(rank, self.machine.generation, self.holder(rank).incarnation, report, {"stop": 0.01})

    def ready(self, rank: int, step: int) -> m.RankReady:
        """A rank at barrier two."""
        return m.RankReady(rank, self.machine.generation, self.holder(rank).incarnation, step, {"rebuild": 0.02}, 0)

    def committed(self, rank: int, committed: int) -> m.StepCommitted:
        """A rank's first new step."""
        incarnation = self.holder(rank).incarnation
        return m.StepCommitted(rank, self.machine.generation, incarnation, committed, self.now, STEP_S)

    def saved(self, rank: int, step: int = 5, error: str = "") -> m.CheckpointSaved:
        """A rank has written its part of a checkpoint."""
        return m.CheckpointSaved(rank, self.machine.generation, step, "/ck", error)

    def started(self, rank: int) -> m.ProcessStarted:
        """The process of a rank was started by its agent."""
        holder = self.holder(rank)
        process = RunningProcess(rank, 100 + rank, holder.incarnation, self.machine.generation)
        return m.ProcessStarted(holder.node, process, warm=True)

    def exited(self, rank: int, status: int = -9) -> m.ProcessExited:
        """A process that is gone."""
        holder = self.holder(rank)
        process = RunningProcess(rank, holder.pid, holder.incarnation, self.machine.generation)
        return m.ProcessExited(holder.node, process, status, self.now, expected=False)

    def fault(self, rank: int | None, kind: FaultKind, **fields: Any) -> m.FaultReported:
        """A report about a rank, or about a machine."""
        report = FaultReport(kind, self.now, f"rank/{rank}" if rank is not None else "detector", "seen")
        if rank is not None:
            holder, generation = self.holder(rank), self.machine.generation
            numbers = {"node": holder.node, "generation": generation, "incarnation": holder.incarnation}
            report = msgspec.structs.replace(report, rank=rank, **numbers)
        return m.FaultReported(msgspec.structs.replace(report, **fields))

    def unwell(self, node: str = "node1", assertion: Assertion = Assertion.OCCUR) -> m.FaultReported:
        """A detector says that a node works and is not well, or is well again."""
        level, detail = FaultLevel.SUB_HEALTH, "slow fan"
        return self.fault(None, FaultKind.NODE, node=node, level=level, assertion=assertion, detail=detail)

    def waiting(self, rank: int, node: str = "node2") -> m.NewcomerWaiting:
        """The process that was started early for a rank has reached its train function."""
        return m.NewcomerWaiting(node, self.newcomer(rank))

    def newcomer(self, rank: int) -> RunningProcess:
        """The process that was started early for a rank."""
        return RunningProcess(rank, 200 + rank, self.machine.state.world.to_be(rank).given, self.machine.generation)

    def clocks(self, node: str, activity: Activity = Activity.COMPUTING, step: int = STEP) -> m.ProgressReported:
        """The step clocks of a node, all alike."""
        generation, holders = self.machine.generation, self.machine.state.world.on(node)
        read = tuple(
            RankProgress(each.rank, each.incarnation, generation, step, activity, 4, 0.0, 0.0, STEP_S)
            for each in holders
        )
        return m.ProgressReported(node, self.machine.state.clocks.probe, self.now, read)

    # --- whole stretches of a job ---------------------------------------------------------------------------------

    def start(self) -> "FakeCluster":
        """Bring the job to RUNNING."""
        self.join()
        self.pass_barrier_two(0)
        return self

    def join(self, *names: str) -> None:
        """Bring the job to where all are about to rejoin for the first time, on nodes of these names."""
        for name in names or (f"node{number}" for number in range(self.job.nodes + self.job.spare_nodes)):
            self.feed(self.node(name))
        ranks = range(self.job.world_size)
        for rank in ranks:
            holder = self.holder(rank)
            process = RunningProcess(rank, 100 + rank, holder.incarnation, 1)
            self.feed(m.ProcessStarted(holder.node, process, warm=True))
        self.feed(*(self.joined(rank, fresh=True, own=0) for rank in ranks))

    def recover(self, step: int) -> None:
        """All that are waited for at barrier one answer; survivors keep copies of all rank-local states."""
        ranks = range(self.job.world_size)
        states = {rank: self.holder(rank).state for rank in ranks}
        for rank in [rank for rank in ranks if states[rank] is RankState.QUIESCING]:
            self.feed(self.quiesced(rank, step, peers=[peer for peer in ranks if peer != rank]))
        together = self.machine.phase is Phase.STARTING
        for rank in [rank for rank in ranks if states[rank] is RankState.STARTING]:
            self.feed(self.joined(rank, fresh=together, own=step))
        self.pass_barrier_two(0 if together else step)

    def pass_barrier_two(self, step: int) -> None:
        """All ranks get ready, resume and commit one step."""
        ranks = range(self.job.world_size)
        self.feed(*(self.ready(rank, step) for rank in ranks))
        self.expect(Phase.RESUMING)
        self.feed(*(self.committed(rank, step + 1) for rank in ranks))
        self.expect(Phase.RUNNING)
