"""The recovery machine, fed by hand: events in, actions out."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from midstep.controller.actions import Action, Finish, Send
from midstep.controller.events import ControllerStarted, DeadlinePassed, Event, StopRequested
from midstep.controller.machine import RecoveryMachine
from midstep.controller.rank_states import RankState
from midstep.controller.recovery.check import contradictions
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.table import TABLE
from midstep.policies.schema import Policy, default_policy
from midstep.protocol.incidents import Outcome
from midstep.protocol.messages import (
    CheckpointSaved,
    CreateNode,
    EndJob,
    FaultReported,
    NodeJoined,
    NodeLost,
    ProbeProgress,
    ProcessExited,
    ProcessStarted,
    ProgressReported,
    Quiesce,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    Rejoin,
    Release,
    Resume,
    SaveCheckpoint,
    StartProcess,
    StepCommitted,
    StopProcess,
)
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

HOLDS = (ShardHold("replicated", 1000),)


def job(nodes: int = 2, ranks_per_node: int = 2, spares: int = 1) -> JobSpec:
    """A job of a few ranks."""
    return JobSpec(
        job="test",
        command=("train.py",),
        is_module=False,
        no_python=False,
        environment={},
        working_directory="/",
        job_directory="/",
        world_size=nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        nodes=nodes,
        spare_nodes=spares,
        max_restarts=0,
        settings=JobSettings(),
    )


class Cluster:
    """A machine with everybody around it played by hand; every transition is held against the table."""

    checked = True  # whether the state contradicts itself, after every event

    def __init__(self, spec: JobSpec | None = None, policy: Policy | None = None, *, creates: bool = False) -> None:
        self.job = spec or job()
        self.machine = RecoveryMachine(policy or default_policy(), self.job, can_create_nodes=creates)
        self.now = 1000.0
        self.log: list[Action] = []

    def feed(self, *events: Event) -> list[Any]:
        """Hand events to the machine and return the commands that it sends."""
        bodies: list[Any] = []
        for event in events:
            self.now += 0.001
            before = self.machine.phase
            actions = self.machine.handle(event, self.now)
            after = self.machine.phase
            if after is not before:
                assert after in TABLE[before, type(event)].to, f"{before} -{type(event).__name__}-> {after}"
            assert not self.checked or contradictions(self.machine.state) == []
            self.log += actions
            bodies += [action.body for action in actions if isinstance(action, Send)]
        return bodies

    def node(self, name: str) -> NodeJoined:
        """An agent that has come up."""
        return NodeJoined(name, name, StoreEndpoint("127.0.0.1", 1))

    def holder(self, rank: int) -> Any:
        """The machine's view of a rank."""
        return self.machine.state.world.holders[rank]

    def joined(self, rank: int, *, fresh: bool = False, own: int | None = None) -> RankJoined:
        """A process that has reached its train function."""
        local_states = () if own is None else (LocalStateCopy(rank, own),)
        holds = HOLDS if fresh else ()
        report = StepReport(0, ready=False, clean=fresh, holds=holds, needs=("replicated",), local_states=local_states)
        holder = self.holder(rank)
        return RankJoined(rank, self.machine.generation, holder.incarnation, 100 + rank, report, 0.1)

    def quiesced(self, rank: int, committed: int, *, ready: bool = False, wards: Iterable[int] = ()) -> RankQuiesced:
        """A survivor that has stopped; one that was ready has kept its local state of the step to come, too."""
        steps = (committed, committed + 1) if ready else (committed,)
        own = tuple(LocalStateCopy(each, step) for each in (rank, *wards) for step in steps)
        report = StepReport(committed, ready=ready, clean=True, holds=HOLDS, needs=("replicated",), local_states=own)
        return RankQuiesced(rank, self.machine.generation, self.holder(rank).incarnation, report, {"stop": 0.01})

    def ready(self, rank: int, step: int) -> RankReady:
        """A rank at barrier two."""
        return RankReady(rank, self.machine.generation, self.holder(rank).incarnation, step, {"rebuild": 0.02}, 0)

    def committed(self, rank: int, committed: int) -> StepCommitted:
        """A rank's first new step."""
        return StepCommitted(rank, self.machine.generation, self.holder(rank).incarnation, committed, self.now, 0.1)

    def exited(self, rank: int, status: int = -9) -> ProcessExited:
        """A process that is gone."""
        holder = self.holder(rank)
        process = RunningProcess(rank, holder.pid, holder.incarnation, self.machine.generation)
        return ProcessExited(holder.node, process, status, self.now, expected=False)

    def fault(self, rank: int, kind: FaultKind) -> FaultReported:
        """A report about a rank."""
        return FaultReported(
            FaultReport(
                kind,
                self.now,
                f"rank/{rank}",
                "seen",
                rank,
                self.holder(rank).node,
                self.machine.generation,
                self.holder(rank).incarnation,
            )
        )

    def start(self) -> None:
        """Bring the job to RUNNING at step 0."""
        self.join()
        self.pass_barrier_two(0)

    def join(self) -> None:
        """Bring the job to where all are about to rejoin for the first time."""
        for number in range(self.job.nodes + self.job.spare_nodes):
            self.feed(self.node(f"node{number}"))
        ranks = range(self.job.world_size)
        for rank in ranks:
            holder = self.holder(rank)
            process = RunningProcess(rank, 100 + rank, holder.incarnation, 1)
            self.feed(ProcessStarted(holder.node, process, warm=True))
        self.feed(*(self.joined(rank, fresh=True, own=0) for rank in ranks))

    def recover(self, step: int) -> None:
        """Everybody who is waited for at barrier one answers; survivors keep copies of all rank-local states."""
        ranks = range(self.job.world_size)
        states = {rank: self.holder(rank).state for rank in ranks}
        for rank in [rank for rank in ranks if states[rank] is RankState.QUIESCING]:
            self.feed(self.quiesced(rank, step, wards=[ward for ward in ranks if ward != rank]))
        connected = self.machine.phase is Phase.STARTING
        for rank in [rank for rank in ranks if states[rank] is RankState.STARTING]:
            self.feed(self.joined(rank, fresh=connected, own=step))
        self.pass_barrier_two(0 if connected else step)

    def pass_barrier_two(self, step: int) -> None:
        """All ranks get ready, resume and commit one step."""
        ranks = range(self.job.world_size)
        self.feed(*(self.ready(rank, step) for rank in ranks))
        self.expect(Phase.RESUMING)
        self.feed(*(self.committed(rank, step + 1) for rank in ranks))
        self.expect(Phase.RUNNING)

    def expect(self, phase: Phase) -> None:
        """The machine is in a phase."""
        assert self.machine.phase is phase


@pytest.fixture
def cluster() -> Cluster:
    """A running job on two nodes of two ranks, with a spare node."""
    running = Cluster()
    running.start()
    return running


def only(bodies: list[Any], kind: type) -> list[Any]:
    """The commands of one kind."""
    return [body for body in bodies if isinstance(body, kind)]


def test_a_job_starts_when_its_nodes_and_spares_are_there() -> None:
    """Four seated processes are started, two on each of the first two nodes."""
    fresh = Cluster()
    assert only(fresh.feed(fresh.node("node0"), fresh.node("node2")), StartProcess) == []
    starts = only(fresh.feed(fresh.node("node1")), StartProcess)
    assert [start.rank for start in starts] == [0, 1, 2, 3]
    assert all(start.connected for start in starts)
    assert [fresh.holder(rank).node for rank in range(4)] == ["node0", "node0", "node1", "node1"]


def test_a_killed_rank_comes_back_in_place_and_the_others_stay(cluster: Cluster) -> None:
    """Survivors are quiesced at once, only the dead rank is started, and the incident closes at the first new step."""
    bodies = cluster.feed(cluster.exited(1))
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 2, 3]
    assert [(body.rank, body.connected) for body in only(bodies, StartProcess)] == [(1, False)]
    cluster.feed(cluster.quiesced(0, 5), cluster.quiesced(2, 5), cluster.quiesced(3, 5, wards=[1]))
    bodies = cluster.feed(cluster.joined(1))
    parts = {body.rank: body.part for body in only(bodies, Rejoin)}
    assert parts[1].target_step == 5
    assert [transfer.destination for transfer in parts[1].transfers] == [1]
    assert parts[1].local_states[0].source == 3
    cluster.holder(1).pid = 999
    cluster.pass_barrier_two(5)
    (incident,) = cluster.machine.incidents
    assert incident.outcome is Outcome.RESUMED
    assert incident.rung is Rung.RECOVER_IN_PLACE
    assert incident.healthy_pids_kept
    assert incident.steps_lost == 0


def test_a_rank_with_final_gradients_finishes_its_update(cluster: Cluster) -> None:
    """When somebody has committed the step, a rank at the barrier is told to finish and not to reload."""
    cluster.feed(cluster.exited(1))
    cluster.feed(cluster.quiesced(0, 6, wards=[1]), cluster.quiesced(2, 5, ready=True), cluster.quiesced(3, 6))
    bodies = cluster.feed(cluster.joined(1))
    parts = {body.rank: body.part for body in only(bodies, Rejoin)}
    assert parts[2].target_step == 6
    assert parts[2].finish_update
    assert not any(transfer.destination == 2 for transfer in parts[2].transfers)


def test_collateral_reports_wait_for_the_culprit(cluster: Cluster) -> None:
    """A broken collective alone decides nothing; the exit that explains it does."""
    assert cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION)) == []
    assert cluster.machine.phase is Phase.SUSPECTING
    bodies = cluster.feed(cluster.exited(1))
    assert [body.rank for body in only(bodies, StartProcess)] == [1]


def test_a_link_fault_with_nobody_at_fault_repeats_the_step(cluster: Cluster) -> None:
    """After the grouping time everybody quiesces and nobody is replaced."""
    cluster.feed(cluster.fault(0, FaultKind.COMMUNICATION))
    cluster.now += 1
    bodies = cluster.feed(DeadlinePassed())
    assert len(only(bodies, Quiesce)) == 4
    assert only(bodies, StartProcess) == []
    assert cluster.machine.incidents[0].rung is Rung.RETRY_STEP


def test_a_stall_is_blamed_on_the_rank_that_the_others_wait_for(cluster: Cluster) -> None:
    """The step clocks of all nodes are read; the stopped rank is replaced."""
    bodies = cluster.feed(cluster.fault(0, FaultKind.STALL))
    assert len(only(bodies, ProbeProgress)) == 2

    def clock(rank: int, *, suspended: bool = False) -> RankProgress:
        return RankProgress(rank, 1, 1, 5, Activity.COLLECTIVE, 40, 2.0, 2.0, 0.1, suspended)

    probe = bodies[0].probe
    cluster.feed(ProgressReported("node0", probe, cluster.now, (clock(0), clock(1))))
    bodies = cluster.feed(ProgressReported("node1", probe, cluster.now, (clock(2), clock(3, suspended=True))))
    assert [body.rank for body in only(bodies, StartProcess)] == [3]


def test_a_lost_node_moves_its_ranks_to_the_spare(cluster: Cluster) -> None:
    """Both ranks of the node are started on the spare; the other node's ranks stay."""
    bodies = cluster.feed(NodeLost("node1", "its agent is gone", cluster.now))
    assert [body.rank for body in only(bodies, StartProcess)] == [2, 3]
    assert cluster.holder(2).node == cluster.holder(3).node == "node2"
    assert [body.rank for body in only(bodies, Quiesce)] == [0, 1]
    assert cluster.machine.incidents[0].rung is Rung.RECOVER


def test_a_second_kill_in_the_recovery_is_part_of_the_same_incident(cluster: Cluster) -> None:
    """The newcomer on its way is kept, the second victim is replaced too, parked survivors are not asked again."""
    cluster.feed(cluster.exited(1))
    cluster.feed(cluster.quiesced(0, 5))
    incarnation = cluster.holder(1).incarnation
    bodies = cluster.feed(cluster.exited(2))
    assert [body.rank for body in only(bodies, StartProcess)] == [2]
    assert cluster.holder(1).incarnation == incarnation
    assert [body.rank for body in only(bodies, Quiesce)] == [3]
    assert len(cluster.machine.incidents) == 1


def test_a_replacement_that_dies_again_and_again_hands_over_to_the_next_rung(cluster: Cluster) -> None:
    """Once may be a second fault and is tried again in place; after the second time the rank moves to the spare."""
    for _ in range(3):
        cluster.feed(cluster.exited(1))
    incident = cluster.machine.incidents[0]
    rungs = [decision.rung for decision in incident.decisions]
    assert rungs == [Rung.RECOVER_IN_PLACE, Rung.RECOVER_IN_PLACE, Rung.RECOVER]
    assert "failed before" in incident.decisions[2].skipped[-1].reason


def test_a_plain_script_that_always_fails_is_restarted_exactly_as_often_as_allowed() -> None:
    """With --max-restarts 3 there are four runs, then the job stops and names the budget."""
    plain = Cluster(msgspec.structs.replace(job(), max_restarts=3))
    for number in range(3):
        plain.feed(plain.node(f"node{number}"))
    runs = 1
    while not isinstance(plain.log[-1], Finish):
        runs += bool(only(plain.feed(plain.exited(0, 1)), StartProcess))
    assert runs == 4
    assert "max-restarts is spent: 3 of 3" in plain.log[-1].reason


def test_all_ranks_dead_starts_the_world_from_its_checkpoint(cluster: Cluster) -> None:
    """With every replica gone the whole world is restarted, seated."""
    for rank in range(3):
        cluster.feed(cluster.exited(rank))
    bodies = cluster.feed(cluster.exited(3))
    assert cluster.machine.phase is Phase.STARTING
    assert all(start.connected for start in only(bodies, StartProcess))


def test_a_finished_job_is_released_and_ends_well(cluster: Cluster) -> None:
    """All ranks finish, are released, exit with 0, and so does the job."""
    bodies = cluster.feed(*(RankFinished(rank, cluster.machine.generation, 1, 10) for rank in range(4)))
    assert len(only(bodies, Release)) == 4
    bodies = cluster.feed(*(cluster.exited(rank, 0) for rank in range(4)))
    assert only(bodies, EndJob)
    assert cluster.log[-1] == Finish(0, "all ranks have finished")


def test_a_stop_saves_an_emergency_checkpoint_first(cluster: Cluster) -> None:
    """Survivors park, all save their local state, the lowest publishes last."""
    cluster.feed(StopRequested("Ctrl-C"))
    bodies = cluster.feed(*(cluster.quiesced(rank, 7) for rank in range(4)))
    assert [(save.rank, save.publish) for save in only(bodies, SaveCheckpoint)] == [(1, False), (2, False), (3, False)]
    generation = cluster.machine.generation
    bodies = cluster.feed(*(CheckpointSaved(rank, generation, 7, "/ck") for rank in (1, 2, 3)))
    assert [(save.rank, save.publish) for save in only(bodies, SaveCheckpoint)] == [(0, True)]
    cluster.feed(CheckpointSaved(0, generation, 7, "/ck"))
    finish = cluster.log[-1]
    assert isinstance(finish, Finish)
    assert "emergency checkpoint of step 7 is at /ck" in finish.reason


def test_a_stop_between_two_commits_saves_the_own_state_of_those_that_were_about_to_commit(cluster: Cluster) -> None:
    """The shards come from who has committed; a checkpoint without everybody's local state would not be complete."""
    cluster.feed(StopRequested("Ctrl-C"))
    stopped = [cluster.quiesced(rank, 7 - rank % 2, ready=rank % 2 == 1) for rank in range(4)]
    bodies = cluster.feed(*stopped)
    assert [(save.rank, save.publish) for save in only(bodies, SaveCheckpoint)] == [(2, False), (1, False), (3, False)]
    generation = cluster.machine.generation
    bodies = cluster.feed(*(CheckpointSaved(rank, generation, 7, "/ck") for rank in (1, 2, 3)))
    assert [(save.rank, save.publish, save.step) for save in only(bodies, SaveCheckpoint)] == [(0, True, 7)]


def test_a_stop_saves_nothing_that_may_be_made_of_struck_memory(cluster: Cluster) -> None:
    """Whoever loads it one day could not know."""
    late = cluster.fault(1, FaultKind.MEMORY_MULTI_BIT).report
    cluster.feed(FaultReported(msgspec.structs.replace(late, trusted_step=3)))
    cluster.feed(StopRequested("Ctrl-C"))
    bodies = cluster.feed(*(cluster.quiesced(rank, 7) for rank in (0, 2, 3)))
    assert only(bodies, SaveCheckpoint) == []
    finish = cluster.log[-1]
    assert isinstance(finish, Finish)
    assert "nobody holds clean state that can be trusted" in finish.reason


def test_a_rank_that_lost_a_shard_writes_none_of_what_another_is_to_write(cluster: Cluster) -> None:
    """Who is asked to save, and who writes which shard, are found in the same way."""
    cluster.feed(StopRequested("Ctrl-C"))
    answers = [cluster.quiesced(rank, 7) for rank in range(4)]
    (hold,) = answers[0].report.holds
    both = (hold, msgspec.structs.replace(hold, shard_id="other"))
    needs = tuple(each.shard_id for each in both)
    reports = [msgspec.structs.replace(each.report, holds=both, needs=needs) for each in answers]
    reports[0] = msgspec.structs.replace(reports[0], holds=(hold,))
    bodies = cluster.feed(
        *(msgspec.structs.replace(each, report=report) for each, report in zip(answers, reports, strict=True))
    )
    saves = [*only(bodies, SaveCheckpoint)]
    generation = cluster.machine.generation
    saves += only(cluster.feed(*(CheckpointSaved(each.rank, generation, 7, "/ck") for each in saves)), SaveCheckpoint)
    written = [shard for save in saves for shard in save.shards]
    assert sorted(written) == sorted(needs)


@pytest.mark.parametrize("saving", [False, True])
def test_a_checkpoint_that_is_under_way_gets_its_time_anew_after_a_restart_of_the_controller(
    cluster: Cluster, saving: bool
) -> None:
    """Nobody could answer while no controller was there."""
    cluster.feed(StopRequested("Ctrl-C"))
    if saving:
        cluster.feed(*(cluster.quiesced(rank, 7) for rank in range(4)))
    cluster.now += 1000.0
    cluster.feed(ControllerStarted(term=2))
    due_s = cluster.machine.next_deadline()
    assert due_s is not None
    assert due_s > cluster.now


def test_a_plain_script_that_fails_ends_the_job_when_no_restart_is_allowed() -> None:
    """A rank that never joined cannot be kept; without --max-restarts the job stops and names the budget."""
    plain = Cluster()
    for number in range(3):
        plain.feed(plain.node(f"node{number}"))
    plain.feed(plain.exited(0, 1))
    finish = plain.log[-1]
    assert isinstance(finish, Finish)
    assert finish.exit_code == 1
    assert "max-restarts" in finish.reason


def test_a_restarted_controller_asks_again_for_what_is_outstanding(cluster: Cluster) -> None:
    """In QUIESCING, those who have not answered are asked again, and the newcomer is started again."""
    cluster.feed(cluster.exited(1))
    cluster.feed(cluster.quiesced(0, 5))
    bodies = cluster.feed(ControllerStarted(term=2))
    assert [body.rank for body in only(bodies, Quiesce)] == [2, 3]
    assert [body.rank for body in only(bodies, StartProcess)] == [1]


def test_a_restarted_controller_hears_of_strays_on_a_node_that_it_left(cluster: Cluster) -> None:
    """Its predecessor may have died before it told them to stop: the isolated node is asked what runs there."""
    report = cluster.fault(2, FaultKind.DEVICE).report
    cluster.feed(FaultReported(msgspec.structs.replace(report, level=FaultLevel.SEPARATE_NPU)))
    assert cluster.holder(2).node == "node2"
    cluster.feed(ControllerStarted(term=2))
    assert "node/node1" in [action.receiver for action in cluster.log if isinstance(action, Send)][-6:]
    stray = RunningProcess(2, 102, 1, 1)
    bodies = cluster.feed(NodeJoined("node1", "node1", StoreEndpoint("127.0.0.1", 1), (stray,)))
    assert [order.rank for order in only(bodies, StopProcess)] == [2]


def test_a_restarted_controller_asks_again_for_nodes() -> None:
    """Its predecessor may have died before it asked the platform."""
    cluster = Cluster(job(spares=0))
    cluster.machine.state.arrivals.can_be_created = True
    cluster.start()
    cluster.feed(NodeLost("node0", "gone", cluster.now))
    asked = only(cluster.feed(ControllerStarted(term=2)), CreateNode)
    assert [order.node for order in asked] == ["node2"]


def test_nothing_begins_anew_from_a_half_repaired_process(cluster: Cluster) -> None:
    """Its source died while it copied, and nobody else holds anything: all restart, from what their script makes."""
    cluster.feed(cluster.exited(1))
    cluster.feed(*(cluster.quiesced(rank, 5, wards=[1]) for rank in (0, 2, 3)), cluster.joined(1))
    assert cluster.machine.phase is Phase.REJOINING
    cluster.feed(*(cluster.exited(rank) for rank in (0, 2, 3)))
    answer = cluster.quiesced(1, 5)
    half = msgspec.structs.replace(answer.report, clean=False, holds=())
    bodies = cluster.feed(msgspec.structs.replace(answer, report=half), *(cluster.joined(rank) for rank in (0, 2, 3)))
    assert only(bodies, Rejoin) == []
    assert [order.rank for order in only(bodies, StartProcess)] == [0, 1, 2, 3]


def test_replaying_the_same_events_gives_the_same_actions() -> None:
    """Two machines fed alike do alike."""
    one, other = Cluster(), Cluster()
    for each in (one, other):
        each.start()
        each.feed(each.exited(1))
        each.feed(each.quiesced(0, 5), each.fault(2, FaultKind.COMMUNICATION))
    assert one.log == other.log


def test_reports_of_an_earlier_process_change_nothing(cluster: Cluster) -> None:
    """An exit that was overtaken by a restart is counted and dropped."""
    late = cluster.exited(1)
    cluster.feed(cluster.exited(1))
    generation = cluster.machine.generation
    assert cluster.feed(late) == []
    assert cluster.machine.generation == generation


def test_resume_goes_to_all_ranks_at_one_step(cluster: Cluster) -> None:
    """Barrier two closes with the same step for everybody."""
    cluster.feed(cluster.exited(1))
    cluster.feed(cluster.quiesced(0, 5, wards=[1]), cluster.quiesced(2, 5), cluster.quiesced(3, 5))
    cluster.feed(cluster.joined(1))
    bodies = cluster.feed(*(cluster.ready(rank, 5) for rank in range(4)))
    assert {(body.rank, body.step) for body in only(bodies, Resume)} == {(rank, 5) for rank in range(4)}


def test_a_rank_that_writes_a_checkpoint_holds_nobody_up(cluster: Cluster) -> None:
    """The others' stall is dismissed: nobody is quiesced, and the job goes on running."""
    bodies = cluster.feed(cluster.fault(1, FaultKind.STALL))
    probe = bodies[0].probe

    def clock(rank: int, activity: Activity) -> RankProgress:
        return RankProgress(rank, 1, 1, 5, activity, 40 if rank else 39, 2.0, 2.0, 0.1)

    first = (clock(0, Activity.CHECKPOINTING), clock(1, Activity.COLLECTIVE))
    second = (clock(2, Activity.COLLECTIVE), clock(3, Activity.COLLECTIVE))
    bodies = cluster.feed(ProgressReported("node0", probe, cluster.now, first))
    bodies += cluster.feed(ProgressReported("node1", probe, cluster.now, second))
    assert bodies == []
    assert cluster.machine.phase is Phase.RUNNING
    assert cluster.machine.incidents[0].outcome is Outcome.DISMISSED


def test_a_pause_of_all_ranks_together_is_nobodys_stall(cluster: Cluster) -> None:
    """Where nobody waits for anybody there is nothing to repair: the suspicion is dismissed."""
    bodies = cluster.feed(cluster.fault(1, FaultKind.STALL))
    probe = bodies[0].probe

    def clock(rank: int) -> RankProgress:
        return RankProgress(rank, 1, 1, 5, Activity.COMPUTING, 40, 9.0, 9.0, 0.1)

    cluster.feed(ProgressReported("node0", probe, cluster.now, (clock(0), clock(1))))
    assert cluster.feed(ProgressReported("node1", probe, cluster.now, (clock(2), clock(3)))) == []
    assert cluster.machine.phase is Phase.RUNNING
    assert cluster.machine.incidents[0].outcome is Outcome.DISMISSED


@pytest.mark.parametrize("exit_first", [True, False])
def test_a_process_that_ends_well_before_its_train_function_does_not_end_the_controller(exit_first: bool) -> None:
    """Where others wait for it, it is at fault, whichever came first; its script is started as often as is allowed."""
    starting = Cluster(job(nodes=1, spares=0))
    starting.feed(starting.node("node0"))
    came = (starting.exited(0, 0), starting.joined(1, fresh=True, own=0))
    bodies = starting.feed(*(came if exit_first else reversed(came)))
    assert [start.rank for start in only(bodies, StartProcess)] == [0]
    [incident] = starting.machine.incidents
    assert "rank 0 ended with status 0 before it reached its train function" in incident.reports[0].detail


def test_a_replacement_that_ends_well_before_its_train_function_is_replaced(cluster: Cluster) -> None:
    """The survivors wait for it, so its status does not matter."""
    cluster.feed(cluster.exited(1))
    assert [start.rank for start in only(cluster.feed(cluster.exited(1, 0)), StartProcess)] == [1]
    cluster.recover(5)
