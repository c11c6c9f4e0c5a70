"""Jobs of several roles: what happens to one is its own affair, or that of all, as the file says."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

import midstep
from midstep.controller.endpoints.control_requests import Accepted, ReportFaultRequest
from midstep.controller.role_group import EXIT_STOPPED, GroupPhase
from midstep.launch.directories import store_file
from midstep.processor.role import RoleStore
from midstep.protocol import environment as names
from midstep.protocol.incidents import Outcome
from midstep.protocol.types import FaultAction, FaultKind, FaultLevel, FaultReport, InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers
from .grouped import RANKS_OF_A_ROLE, ROLES_PATIENCE_S, RolesJob, training_role
from .jobs import ROOMY, STEPS, Record, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

StartRoles = Callable[..., RolesJob]
ENDLESS = 100_000
STEPS_MEANWHILE = 5
EARLY, LATE = 15, 40  # gates behind checkpoints
BEFORE_THE_KILLS = 4
LADDER = ROOMY["ladder"]
# In the order of one job: each of them hits rank 1 in the life that the one before has given it.
MOMENTS = (
    (InjectionPoint.FORWARD, 8),
    (InjectionPoint.COLLECTIVE, 16),
    (InjectionPoint.BARRIER, 24),
    (InjectionPoint.UPDATE, 32),
    (InjectionPoint.BACKWARD, 40),
)


@pytest.fixture
def start_roles(tmp_path: Path) -> Iterator[StartRoles]:
    """Start jobs of roles, and kill what is left of them when the test is over."""
    jobs: list[RolesJob] = []

    def start(roles: dict[str, dict[str, Any]], **more: Any) -> RolesJob:
        root = tmp_path / str(len(jobs))
        made = {name: training_role(root / f"records-{name}", **more_of) for name, more_of in roles.items()}
        jobs.append(RolesJob(root, made, **more))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def assert_first_steps_are_the_same(record: Record, undisturbed: Record) -> None:
    """As far as the undisturbed run went, every step gave its bits."""
    for rank, steps in record.steps.items():
        other = [index for index, bits in steps.items() if index < STEPS and bits != undisturbed.steps[rank][index]]
        assert not other, f"rank {rank} computed something else in steps {other}"


@pytest.mark.soak
def test_a_role_recovers_at_every_moment_while_the_other_makes_steps(
    start_roles: StartRoles, undisturbed_pair: Record
) -> None:
    """Each recovery of the one is held in its middle until the other has made steps; the last has a second kill."""
    kills = [inject(1, point, step, life=life) for life, (point, step) in enumerate(MOMENTS, start=1)]
    again = inject(1, InjectionPoint.REBUILD, None, life=len(MOMENTS) + 1)
    holds = [inject(0, InjectionPoint.CLEAN, None, action=FaultAction.STOP)] * len(MOMENTS)
    job = start_roles(
        {
            "actor": {"faults": [*kills, again, *holds], "ladder": LADDER},
            "rollout": {"steps": ENDLESS, "ladder": LADDER},
        },
        until=["actor"],
        gates={"actor": (BEFORE_THE_KILLS,)},
        deadlines={"quiesce_s": ROLES_PATIENCE_S, "orders_s": 1200.0},
    )
    actor, rollout = job.role("actor"), job.role("rollout")
    survivor = psutil.Process(actor.held_at(BEFORE_THE_KILLS).ranks[0].pid)
    others = rollout.pids()
    actor.open_gate(BEFORE_THE_KILLS)
    for point, _ in MOMENTS:
        job.wait_until(lambda: survivor.status() == psutil.STATUS_STOPPED, f"the recovery after a kill at {point}")
        before = actor.steps_done()
        rollout.until_steps_done(rollout.steps_done() + STEPS_MEANWHILE)
        assert (survivor.status(), actor.steps_done()) == (psutil.STATUS_STOPPED, before)
        survivor.resume()
    assert rollout.pids() == others
    assert job.wait() == 0, job.said()
    job.assert_nothing_left()

    incidents = actor.report()["incidents"]
    assert len(incidents) == len(MOMENTS)
    for incident in incidents:
        assert_nobody_harmed(incident, {1}, ranks=RANKS_OF_A_ROLE)
    assert rollout.report()["incidents"] == []
    assert_same_numbers(job.record("actor"), undisturbed_pair, ranks=RANKS_OF_A_ROLE)
    assert_first_steps_are_the_same(job.record("rollout"), undisturbed_pair)


def test_a_controller_and_a_launcher_of_a_role_that_die_are_replaced_and_the_other_role_does_not_notice(
    start_roles: StartRoles, undisturbed_pair: Record
) -> None:
    """The controller is killed together with a rank: only that rank gets another process. Then the role's launcher is
    killed, with all that it has started: the role continues from its journal and its newest checkpoint.
    """
    job = start_roles(
        {"actor": {"ladder": LADDER}, "rollout": {"steps": ENDLESS, "ladder": LADDER}},
        until=["actor"],
        gates={"actor": (EARLY, LATE)},
    )
    actor, rollout = job.role("actor"), job.role("rollout")
    others = rollout.pids()
    before = [rank.pid for rank in actor.held_at(EARLY).ranks]
    os.kill(actor.controller_pid(), signal.SIGKILL)
    os.kill(before[1], signal.SIGKILL)
    actor.open_gate(EARLY)
    status = actor.held_at(LATE)
    after = [rank.pid for rank in status.ranks]
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert status.term == 2
    assert rollout.pids() == others

    job.launcher_of("actor").kill()
    actor.open_gate(LATE)
    assert job.wait() == 0, job.said()
    assert rollout.report()["incidents"] == []
    assert job.group().of("actor").attempt == 1
    job.assert_nothing_left()
    incidents = actor.report()["incidents"]
    assert_nobody_harmed(incidents[0], {1}, ranks=RANKS_OF_A_ROLE)
    assert len(incidents) == 2
    assert_same_numbers(job.record("actor"), undisturbed_pair, ranks=RANKS_OF_A_ROLE)
    assert_first_steps_are_the_same(job.record("rollout"), undisturbed_pair)


def test_a_machine_that_one_role_leaves_for_a_fault_is_left_by_the_other_between_two_steps(
    start_roles: StartRoles, undisturbed_pair: Record
) -> None:
    """The other role loses no step and pays no budget for it. Here nodes of one name stand for one machine."""
    job = start_roles(
        {"actor": {"ladder": LADDER, "spares": 1}, "rollout": {"steps": ENDLESS, "ladder": LADDER}},
        until=["actor"],
        gates={"actor": (EARLY, LATE)},
    )
    actor, rollout = job.role("actor"), job.role("rollout")
    actor.held_at(EARLY)
    rollout.until_steps_done(STEPS_MEANWHILE)
    before = rollout.pids()
    fault = FaultReport(FaultKind.NODE, 0.0, "operator", "its fans stand still", node="node0", level=FaultLevel.NODE)
    assert isinstance(actor.ask(ReportFaultRequest(fault)), Accepted)
    actor.open_gate(EARLY)
    actor.held_at(LATE)
    what = "the ranks of the other role to move"
    status = rollout.until(lambda status: {rank.node for rank in status.ranks} == {"node1"}, what, ROLES_PATIENCE_S)
    assert rollout.pids() != before
    rollout.until_steps_done(rollout.steps_done() + STEPS_MEANWHILE)
    actor.open_gate(LATE)
    assert job.wait() == 0, job.said()
    job.assert_nothing_left()

    (moved,) = [incident for incident in rollout.report()["incidents"] if incident["outcome"] != Outcome.DISMISSED]
    assert "role actor has left machine node0: its fans stand still" in str(moved["decisions"])
    assert moved["steps_lost"] == 0
    assert not any(budget.used for budget in status.budgets)
    assert_same_numbers(job.record("actor"), undisturbed_pair, ranks=RANKS_OF_A_ROLE)
    assert_first_steps_are_the_same(job.record("rollout"), undisturbed_pair)


@pytest.mark.soak
def test_a_role_without_a_ladder_takes_all_roles_back_to_their_checkpoints(
    start_roles: StartRoles, undisturbed_pair: Record
) -> None:
    """The others are stopped with a checkpoint, so that they repeat no step; a second time the budget is spent."""
    once = [{"rung": "reschedule_job", "budget": {"per_job": 1, "window_s": 0}}, {"rung": "stop"}]
    job = start_roles(
        {"actor": {"ladder": LADDER}, "rollout": {"steps": ENDLESS}},
        until=["actor"],
        ladder=once,
        gates={"actor": (EARLY, LATE)},
    )
    actor, rollout = job.role("actor"), job.role("rollout")
    first = rollout.pids()
    actor.held_at(EARLY)
    rollout.until_steps_done(STEPS_MEANWHILE)
    os.kill(first[1], signal.SIGKILL)
    job.wait_until(lambda: job.group().phase is GroupPhase.RESTARTING, "all roles to be restarted")
    actor.open_gate(EARLY)  # who waits there follows no order
    job.wait_until(lambda: job.group().of("actor").attempt == 2, "all roles to begin again")
    actor.held_at(LATE)
    assert rollout.pids() != first
    rollout.until_steps_done(rollout.steps_done() + STEPS_MEANWHILE)
    actor.open_gate(LATE)
    assert [restart.role for restart in job.group().restarts] == ["rollout"]
    assert job.wait() == 0, job.said()
    job.assert_nothing_left()
    assert actor.report()["incidents"] == []
    record = job.record("actor")
    assert all(len((job.records("actor") / f"steps.{rank}").read_text().splitlines()) == STEPS for rank in record.steps)
    assert_same_numbers(record, undisturbed_pair, ranks=RANKS_OF_A_ROLE)
    assert_first_steps_are_the_same(job.record("rollout"), undisturbed_pair)


@pytest.mark.soak
def test_what_all_roles_may_be_restarted_is_spent_across_launchers_and_then_the_job_stops(
    start_roles: StartRoles,
) -> None:
    """The first launcher restarts all roles and is killed; the next one knows that the budget is spent."""
    once = [{"rung": "reschedule_job", "budget": {"per_job": 1, "window_s": 0}}, {"rung": "stop"}]
    job = start_roles({"rollout": {"steps": ENDLESS}}, ladder=once)
    os.kill(job.role("rollout").pids()[0], signal.SIGKILL)
    job.wait_until(lambda: job.group().of("rollout").attempt == 2, "all roles to begin again")
    job.role("rollout").pids()
    job.launcher.kill()
    job.assert_no_process_left()
    job.launcher.wait()
    job.resume()  # without a ladder, the loss of its processes is a failure of the role
    assert job.wait() == 1, job.said()
    assert "budget per_job of reschedule_job is spent: 1 of 1 in the whole job" in job.group().reason
    job.assert_nothing_left()


def test_a_launcher_that_is_killed_leaves_no_process_and_the_job_continues_where_it_was(
    start_roles: StartRoles, undisturbed_pair: Record
) -> None:
    """Each role from its newest checkpoint, with what it has spent; what was in the store is there again."""
    job = start_roles(
        {"actor": {"ladder": LADDER}, "rollout": {"steps": ENDLESS, "ladder": LADDER}},
        until=["actor"],
        gates={"actor": (EARLY,)},
    )
    job.role("rollout").pids()
    job.role("actor").held_at(EARLY)
    store = RoleStore(store_file(job.directory), 1)
    store.set("weights/1", b"of the launcher that is killed")
    job.launcher.kill()
    job.assert_no_process_left()
    job.launcher.wait()
    job.role("actor").open_gate(EARLY)
    job.resume()
    assert store.get("weights/1", ROLES_PATIENCE_S) == b"of the launcher that is killed"
    assert job.wait() == 0, job.said()
    assert job.group().phase is GroupPhase.ENDED
    job.assert_nothing_left()
    assert_same_numbers(job.record("actor"), undisturbed_pair, ranks=RANKS_OF_A_ROLE)


@pytest.mark.soak
def test_a_signal_stops_all_roles_with_checkpoints(start_roles: StartRoles) -> None:
    """The exit code is that of a stop, and nothing is left."""
    job = start_roles({role: {"steps": ENDLESS, "ladder": LADDER} for role in ("actor", "rollout")})
    for role in ("actor", "rollout"):
        job.role(role).until_steps_done(3)
    job.launcher.terminate()  # Ctrl-C does the same, and is ignored by what a shell starts with &
    assert job.wait() == EXIT_STOPPED, job.said()
    job.assert_nothing_left()
    for role in ("actor", "rollout"):
        assert list((job.directory / "checkpoints" / role).glob("step-*")), job.said()


@pytest.mark.soak
def test_the_loop_of_reinforcement_learning_learns_the_same_whoever_is_killed(tmp_path: Path) -> None:
    """Ranks of both roles of the example are killed: what the trainer has learned has the bits of a quiet run."""
    example = Path(midstep.__file__).parent / "examples" / "rl"
    roles = yaml.safe_load((example / "roles.yaml").read_text())["roles"]
    faults = {
        "trainer": [inject(0, InjectionPoint.UPDATE, 60), inject(1, InjectionPoint.FORWARD, 120)],
        "rollout": [inject(1, InjectionPoint.BARRIER, 90), inject(0, InjectionPoint.UPDATE, 150)],
    }
    learned = []
    for disturbed in (False, True):
        armed = {
            name: {
                **role,
                "script": str(example / role["script"]),
                "env": {names.FAULTS: msgspec.json.encode(faults[name] if disturbed else []).decode()},
            }
            for name, role in roles.items()
        }
        job = RolesJob(tmp_path / str(disturbed), armed, until=["trainer"])
        try:
            assert job.wait() == 0, job.said()
            job.assert_nothing_left()
            incidents = [job.role(name).report()["incidents"] for name in roles]
            assert [len(each) for each in incidents] == ([2, 2] if disturbed else [0, 0]), job.said()
        finally:
            job.close()
        (line,) = [line for line in job.output.read_text().splitlines() if " learned " in line]
        learned.append(line)
    assert learned[0] == learned[1]
