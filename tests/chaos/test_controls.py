"""An operator makes a real job stand still, save, change a process or pass a rung over; no bit changes."""

import time
from pathlib import Path

import psutil
import pytest
import yaml
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import Rung

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import ONE_NODE, ROOMY, Job, Record
from .test_draining import STEP_S, assert_no_step_repeated

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

FIRST, SECOND = 8, 40  # gates
STILL_S = 1.0
LEAVES_S = 50.0  # a process that stands still and hears no controller for so long ends
SHORT = {"quiesce_s": 5.0, "nodes_s": 20.0, "device_s": 2.0, "start_s": 20.0, "save_s": 4.0, "orders_s": LEAVES_S}
IMPATIENT = {**ROOMY, "deadlines": {**ROOMY["deadlines"], **SHORT}}
WHY = "the file server is restarted"


def midstep(job: Job, *words: str) -> str:
    """Give a command, as an operator does."""
    done = CliRunner().invoke(main, [*words, str(job.directory), "--why", WHY], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def steps(status: JobStatus | None) -> set[int]:
    """The steps at which the ranks are."""
    return set() if status is None else {rank.step for rank in status.ranks}


def test_a_job_stands_still_and_trains_on_with_the_same_processes_and_bits(
    start_job: StartJob, undisturbed: Record
) -> None:
    """Also when its controller dies meanwhile. Then a rank is restarted, and no step is repeated for either."""
    job = start_job(step_s=STEP_S, gates=[FIRST], **ONE_NODE)
    before = {rank.pid for rank in job.held_at(FIRST).ranks}
    assert "all ranks stop at the next step boundary" in midstep(job, "pause", "--for", "10m")
    job.open_gate(FIRST)
    held = job.until(lambda status: status.held, "the pause")
    psutil.Process(job.controller_pid()).kill()
    again = job.until(lambda status: status.term == 2 and status.held, "the next controller")
    time.sleep(STILL_S)
    still = job.status()
    assert len(steps(still)) == 1
    assert steps(held) == steps(again) == steps(still)
    shown = CliRunner().invoke(main, ["status", str(job.directory)], catch_exceptions=False).output
    assert f"(owner): {WHY}" in " ".join(shown.split())
    midstep(job, "pause", "--end")
    midstep(job, "restart", "2")
    report = finish(job)
    pause, restart = report["incidents"]
    assert_nobody_harmed({**pause, "restore": "replica"}, set())
    assert {int(pid) for pid in pause["pids_after"].values()} == before
    assert_nobody_harmed(restart, {2})
    assert [each["what"] for each in report["controls"]] == ["pause for up to 600 s", "train on", "restart rank 2"]
    assert all(each["asked"]["role"] == "owner" for each in report["controls"])
    assert_no_step_repeated(job)
    assert_same_numbers(job.record(), undisturbed)


def test_a_checkpoint_is_written_and_a_rung_that_is_forbidden_is_not_taken(
    start_job: StartJob, undisturbed: Record
) -> None:
    """The record says who had it passed over; the node that was left for it is used again when it is released."""
    policy = {**ROOMY, "checkpoint": {"every_steps": 1000}}  # by which none is written
    job = start_job(policy=policy, spares=1, step_s=STEP_S, gates=[FIRST, SECOND])
    job.held_at(FIRST)
    midstep(job, "save")
    job.open_gate(FIRST)
    saved = job.held_at(SECOND).controls.records[0].outcome
    step = int(saved.removeprefix("a checkpoint of step ").removesuffix(" was written"))
    assert any(path.name.endswith(str(step)) for path in (job.directory / "checkpoints").iterdir())
    midstep(job, "rungs", "--forbid", Rung.RECOVER_IN_PLACE.value)
    job.rank_process(3).kill()
    job.until(lambda status: len(status.incidents) == 2 and status.incidents[1].rung is not None, "the decision")
    job.open_gate(SECOND)
    midstep(job, "release", "node1")
    report = finish(job)
    incident, user = report["incidents"][1], report["controls"][0]["asked"]["by"]
    (decision,) = incident["decisions"]
    assert decision["rung"] == "recover"
    forbidden = f"an operator forbids it, {user} (owner): {WHY}"
    assert forbidden in [each["reason"] for each in decision["skipped"]]
    assert_same_numbers(job.record(), undisturbed)


SMALL = {
    **ROOMY,
    "allow_inject": False,
    "ladder": [
        {"rung": "retry_step", "attempts": 3, "budget": {"per_job": 1000, "window_s": 0.0}},
        {"rung": "recover_in_place", "attempts": 3, "budget": {"per_job": 1, "window_s": 0.0}},
        {"rung": "stop"},
    ],
}


def test_a_budget_is_raised_while_the_job_runs_and_the_next_controller_goes_by_it(
    start_job: StartJob, undisturbed: Record, tmp_path: Path
) -> None:
    """The second kill is one too many for the first policy, which has no other rung left but the stop.

    Another key is changed by a whole file, made of the one in force.

    What the policy forbids stays forbidden: a fault on purpose is refused, and so is the change that would allow it.
    """
    job = start_job(policy=SMALL, step_s=STEP_S, gates=[FIRST, SECOND], **ONE_NODE)
    job.held_at(FIRST)
    victim = job.rank_process(3)
    job.open_gate(FIRST)
    victim.kill()
    held = job.held_at(SECOND)
    assert {(use.used, use.limit) for use in held.budgets if "recover_in_place" in use.name} == {(1, 1)}
    raise_it = ["policy", "set", str(job.directory), "ladder.recover_in_place.budget.per_job=5", "--why", WHY]
    shown = CliRunner().invoke(main, raise_it, input="y\n", catch_exceptions=False)
    assert "ladder.recover_in_place.budget.per_job: 1 -> 5" in shown.output
    assert "in force from the next decision" in shown.output
    fixed = CliRunner().invoke(main, ["policy", "set", str(job.directory), "stall.factor=9", "--why", WHY, "--yes"])
    assert "stall.factor cannot change while the job runs" in fixed.output
    file = tmp_path / "policy.yaml"
    tree = yaml.safe_load(CliRunner().invoke(main, ["policy", "in-force", str(job.directory)]).output)
    tree["incident"]["max_attempts"] = 7
    file.write_text(yaml.safe_dump(tree))
    apply_it = ["policy", "apply", str(job.directory), str(file), "--why", WHY, "--yes"]
    assert "incident.max_attempts: 20 -> 7" in CliRunner().invoke(main, apply_it, catch_exceptions=False).output
    psutil.Process(job.controller_pid()).kill()
    job.until(lambda status: status.term == 2 and status.policy_changes == 2, "the next controller")
    for words in (["--rank", "1"], ["--rank", "1", "--why", WHY], ["--node", "node0"]):
        refused = CliRunner().invoke(main, ["inject", str(job.directory), *words])
        assert refused.exit_code != 0
        assert "allows no faults on purpose (allow_inject: false)" in " ".join(refused.output.split())
    lifted = CliRunner().invoke(main, ["policy", "set", str(job.directory), "allow_inject=true", "--why", WHY, "--yes"])
    assert "allow_inject cannot change while the job runs" in lifted.output
    victim = job.rank_process(2)
    job.open_gate(SECOND)
    victim.kill()
    report = finish(job)
    assert [each["rung"] for each in report["incidents"]] == ["recover_in_place"] * 2
    assert [each["what"] for each in report["controls"]] == [
        "change the policy: ladder.recover_in_place.budget.per_job: 1 -> 5",
        "change the policy: incident.max_attempts: 20 -> 7",
    ]
    assert all(each["asked"]["why"] == WHY for each in report["controls"])
    assert_same_numbers(job.record(), undisturbed)


@pytest.mark.soak
def test_a_pause_may_last_longer_than_a_process_waits_for_a_controller(start_job: StartJob) -> None:
    """Held ranks hear again and again that they are held; the processes stay."""
    job = start_job(policy=IMPATIENT, step_s=STEP_S, gates=[FIRST], **ONE_NODE)
    before = {rank.pid for rank in job.held_at(FIRST).ranks}
    midstep(job, "pause", "--for", "10m")
    job.open_gate(FIRST)
    job.until(lambda status: status.held, "the pause")
    time.sleep(LEAVES_S + STILL_S)
    midstep(job, "pause", "--end")
    (pause,) = finish(job)["incidents"]
    assert {int(pid) for pid in pause["pids_after"].values()} == before


def test_the_other_controls_are_commands_too(start_job: StartJob) -> None:
    """An acknowledgement, a rung that is forced, a node that is drained and one that is isolated, and the stop."""
    job = start_job(ranks_per_node=1, spares=2, step_s=STEP_S, steps=100_000)
    before = job.until(lambda status: status.phase == "running" and status.committed > 0, "training", 200.0)
    midstep(job, "acknowledge")
    job.until(lambda status: len(status.controls.records) == 1, "the acknowledgement")

    midstep(job, "rungs", "--force", Rung.RECOVER.value, "--for", "1h")
    place = before.ranks[1].node
    job.rank_process(1).kill()
    job.until(lambda status: status.phase == "running" and status.ranks[1].node != place, "another node")
    midstep(job, "rungs", "--allow")
    midstep(job, "release", place)
    job.until(lambda status: {each.node: each.state for each in status.nodes}[place] == "spare", "the release", 200.0)

    drained = before.ranks[0].node
    midstep(job, "drain", drained)
    job.until(lambda status: status.phase == "running" and status.ranks[0].node != drained, "the drain")
    now = job.until(lambda status: status.phase == "running", "training")
    isolated = now.ranks[1].node
    midstep(job, "isolate", isolated)
    job.until(lambda status: status.phase == "running" and status.ranks[1].node != isolated, "the isolation")

    midstep(job, "stop")
    assert job.wait() != 0
    report = job.report()
    assert "emergency checkpoint of step" in report["reason"]
    assert [each["decisions"][-1]["rung"] for each in report["incidents"]][:3] == ["recover"] * 3
    assert [each["steps_lost"] for each in report["incidents"][:2]] == [0, 0]
    assert [each["what"] for each in report["controls"]] == [
        "acknowledge",
        "begin at recover for 3600 s",
        "allow all rungs",
        f"release node {place}",
    ]
    for incident, node in zip(report["incidents"][1:], (drained, isolated), strict=False):
        assert WHY in str(incident["reports"]), f"{node} is left because of a fault that the operator reports"
    assert all(each["asked"]["why"] == WHY for each in report["controls"])
