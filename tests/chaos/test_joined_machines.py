"""Several machines run the same command and are one job: they join, are lost, leave, and are refused."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from midstep.protocol.connection import OTHER_KEYS
from midstep.protocol.exits import NOT_ADMITTED, RESTART_HERE
from midstep.protocol.front import REPLACED_KEY
from midstep.protocol.identities import Role
from midstep.protocol.keys import JobKeys
from midstep.protocol.token import FullToken, new_token, parse_token

from .comparing import assert_nobody_harmed, assert_same_numbers
from .jobs import GONE_S, PATIENCE_S, STEPS, Record
from .joined import MIDSTEP, JoinedJob, write_token

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]  # three times the imports of a job on one machine

KILLED_AT, LOST_AT = 10, 25
AFTER_LEAVING = 50
SPARE_S = 60.0
NEWER = Path(__file__).parent / "newer"  # what makes a process one of another release


@pytest.fixture
def job(tmp_path: Path) -> Iterator[JoinedJob]:
    """A job that nothing has been started of."""
    made = JoinedJob(tmp_path)
    try:
        yield made
    finally:
        made.close()


def assert_nothing_left(job: JoinedJob) -> None:
    """No process of the job is there any more."""
    deadline = time.monotonic() + GONE_S
    while (left := job.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, job.said()


@pytest.mark.soak  # on machines with networks of their own: `test_lost_machines.py` in tests/machines
def test_three_machines_lose_a_rank_and_then_one_of_them_and_compute_the_same_numbers(
    job: JoinedJob, undisturbed: Record
) -> None:
    """The third machine is a spare. A rank is killed, then a whole machine; no committed step is lost."""
    for step in (KILLED_AT, LOST_AT):
        job.gate(step).touch()
    for _ in range(3):
        job.start()
    ranks = job.held_at(KILLED_AT).ranks
    job.until(lambda status: len(status.nodes) == 3, "the spare machine")

    psutil.Process(ranks[1].pid).kill()
    job.gate(KILLED_AT).unlink()
    job.held_at(LOST_AT)
    used = {job.machine_of(0), job.machine_of(2)}
    lost = min(used - {job.controller()})
    harmed = {rank for rank in range(4) if job.machine_of(rank) == lost}
    job.kill(lost)
    job.gate(LOST_AT).unlink()

    assert [job.wait(number) for number in range(3) if number != lost] == [0, 0], job.said()
    assert_same_numbers(job.record(), undisturbed)
    first, *others = job.report()["incidents"]
    assert_nobody_harmed(first, {1})
    assert_nobody_harmed(others[-1], harmed)
    assert others[-1]["decisions"][-1]["rung"] == "recover"
    assert_nothing_left(job)


@pytest.mark.soak
def test_a_lost_machine_without_a_spare_is_replaced_by_the_one_that_a_command_brings(
    tmp_path: Path, undisturbed: Record
) -> None:
    """Ranks wait for it; the process of each healthy rank is kept, and no committed step is lost."""
    asked, hook = tmp_path / "asked", tmp_path / "bring.py"
    hook.write_text(
        "import pathlib, sys\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "place.with_suffix('.new').write_text(sys.stdin.read())\n"
        "place.with_suffix('.new').rename(place)\n"
        'print(\'{"nodes": ["brought"]}\')\n'
    )
    policy = {
        "on_node_relaunch": f"{sys.executable} {hook} {asked}",
        "node": {"relaunch_brings": True, "relaunch_s": PATIENCE_S},
    }
    job = JoinedJob(tmp_path, policy=policy)
    try:
        job.gate(LOST_AT).touch()
        for _ in range(2):
            job.start()
        job.held_at(LOST_AT)
        assert not asked.exists()  # machines that join at the beginning are nobody's to bring
        lost = 1 - job.controller()
        harmed = {rank for rank in range(4) if job.machine_of(rank) == lost}
        job.kill(lost)
        job.gate(LOST_AT).unlink()
        deadline = time.monotonic() + PATIENCE_S
        while not asked.exists():
            assert time.monotonic() < deadline, job.said()
            time.sleep(0.05)
        assert [each["state"] for each in json.loads(asked.read_text())["left"]] == ["lost"]
        brought = job.start("--node", "brought")

        assert [job.wait(1 - lost), job.wait(brought)] == [0, 0], job.said()
        assert_same_numbers(job.record(), undisturbed)
        incident = job.report()["incidents"][-1]
        assert_nobody_harmed(incident, harmed)
        assert "recover" in [decision["rung"] for decision in incident["decisions"]]
        assert incident["steps_lost"] == 0
        assert_nothing_left(job)
    finally:
        job.close()


@pytest.mark.soak
def test_who_has_no_right_to_join_is_told_why_and_disturbs_nobody(tmp_path: Path) -> None:
    job = JoinedJob(tmp_path, ranks_per_node=1, host="::1")  # IPv6, too
    try:
        _refuse_others(job)
    finally:
        job.close()


def _refuse_others(job: JoinedJob) -> None:
    job.gate(5).touch()
    job.start("--node", "a")
    job.start("--node", "b")
    job.held_at(5)

    wrong = job.start(token=write_token(job.root / "other.token", new_token()))
    used = job.start("--node", "b")
    newer = job.start(PYTHONPATH=str(NEWER))
    assert job.wait(wrong) == NOT_ADMITTED
    assert "the token is not that of job" in job.output(wrong).read_text()
    assert job.wait(used) == NOT_ADMITTED
    assert "choose another --node" in job.output(used).read_text()
    assert job.wait(newer) == NOT_ADMITTED
    assert "Install the same release of midstep on every node" in " ".join(job.output(newer).read_text().split())

    keys = job.run_directory() / "keys"
    terms = JobKeys.load_joining(keys)
    assert terms is not None
    JobKeys.open_for_joining(keys, msgspec.structs.replace(terms, expires_s=1))
    late = job.start()
    assert job.wait(late) == NOT_ADMITTED
    assert "the job's token expired" in job.output(late).read_text()

    status = job.until(lambda status: "enrolment: expired token" in status.refused, "the count of refusals")
    assert status.refused["enrolment: node name in use"] >= 1
    assert status.refused[OTHER_KEYS] >= 1
    assert {node.node for node in status.nodes} == {"a", "b"}
    assert not any("MIDSTEP_TOKEN" in psutil.Process(rank.pid).environ() for rank in status.ranks)
    whole = parse_token(job.token.read_text(), "its file")
    assert isinstance(whole, FullToken)
    tokens = {text for text in map(_token_in_environment, job.left()) if text is not None}
    assert {parse_token(text, "an environment") for text in tokens} == {whole.for_joining(job.name)}
    job.gate(5).unlink()
    assert [job.wait(0), job.wait(1)] == [0, 0], job.said()
    assert job.report()["incidents"] == []


def _token_in_environment(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("MIDSTEP_TOKEN")
    return None


@pytest.mark.soak
def test_the_token_is_replaced_while_the_job_runs(job: JoinedJob) -> None:
    """Who has joined stays, also through a controller's death; the next machine needs the new token."""
    job.gate(5).touch()
    job.start("--node", "a")
    job.start("--node", "b")
    before = {rank.rank: rank.pid for rank in job.held_at(5).ranks}
    old = parse_token(job.token.read_text(), "file")
    assert isinstance(old, FullToken)
    earlier = write_token(job.root / "earlier.token", old)
    viewer = write_token(job.root / "viewer.token", old.for_role(job.name, Role.VIEWER))
    new = old.renewed()
    write_token(job.root / "new", new).replace(job.token)
    keys = job.run_directory() / "keys"
    deadline = time.monotonic() + PATIENCE_S
    while getattr(JobKeys.load_joining(keys), "public", None) != new.invitation(job.name).join.public:
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.05)

    late = job.start("--node", "c", token=earlier)
    assert job.wait(late) == NOT_ADMITTED
    assert "takes this token no longer: it was replaced" in " ".join(job.output(late).read_text().split())
    asked = ("status", "--controller", job.endpoint, "--token-file", str(viewer), job.name)
    refused = subprocess.run((*MIDSTEP, *asked), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "takes this token no longer" in " ".join(refused.stderr.split())
    status = job.until(lambda status: status.refused.get(REPLACED_KEY, 0) >= 2, "the count of refusals")
    assert {node.node for node in status.nodes} == {"a", "b"}

    (controller,) = (each for each in job.left() if "controller" in each.cmdline() and "--job-dir" in each.cmdline())
    controller.kill()
    status = job.until(lambda status: status.term == 2 and len(status.nodes) == 2, "the next controller")
    job.start("--node", "c")
    status = job.until(lambda status: {node.node for node in status.nodes} == {"a", "b", "c"}, "the spare machine")
    assert {rank.rank: rank.pid for rank in status.ranks} == before
    job.gate(5).unlink()
    assert [job.wait(number) for number in (0, 1, 3)] == [0, 0, 0], job.said()
    assert job.report()["incidents"] == []


def machine_that_can_leave(job: JoinedJob, grace_s: str = "30") -> int:
    """Start two machines and a spare, hold their ranks in a step, and return a machine with ranks and no controller."""
    job.gate(5).touch()
    for _ in range(3):
        job.start(MIDSTEP_GRACE_S=grace_s)
    job.held_at(5)
    job.until(lambda status: len(status.nodes) == 3, "the spare machine")
    return min({job.machine_of(0), job.machine_of(2)} - {job.controller()})


def test_a_machine_that_receives_sigterm_leaves_in_order(job: JoinedJob) -> None:
    """Its ranks move to the spare between two steps: none is repeated, and no failure and no budget is counted."""
    leaving = machine_that_can_leave(job)
    job.machines[leaving].send_signal(signal.SIGTERM)
    job.until(lambda status: status.phase == "pausing", "the step boundary")
    job.gate(AFTER_LEAVING).touch()
    job.gate(5).unlink()

    assert job.wait(leaving) == 128 + signal.SIGTERM
    status = job.held_at(AFTER_LEAVING)
    assert [node.failures for node in status.nodes] == [0, 0, 0]
    assert not [budget for budget in status.budgets if budget.used]
    job.gate(AFTER_LEAVING).unlink()
    assert [job.wait(number) for number in range(3) if number != leaving] == [0, 0], job.said()
    (incident,) = job.report()["incidents"]
    (decision,) = incident["decisions"]
    assert decision["rung"] == "recover"
    assert "is going (its agent received SIGTERM" in decision["reason"]
    assert incident["committed_before"] == incident["resumed_step"] > 5
    for rank in range(4):
        lines = (job.records / f"steps.{rank}").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(STEPS))


@pytest.mark.soak
def test_a_machine_whose_ranks_have_not_moved_is_lost_before_its_time_is_over(job: JoinedJob) -> None:
    """All ranks are held in a step, so no boundary comes within the grace period; the loss is answered as any is."""
    leaving = machine_that_can_leave(job, "8")
    job.machines[leaving].send_signal(signal.SIGTERM)

    assert job.wait(leaving) == 128 + signal.SIGTERM
    job.gate(5).unlink()
    assert [job.wait(number) for number in range(3) if number != leaving] == [0, 0], job.said()
    incident = job.report()["incidents"][-1]
    assert "its ranks found no other place within" in incident["reports"][0]["detail"]
    assert incident["decisions"][-1]["rung"] == "recover"
    assert incident["steps_lost"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("because", ["agent.spare_s", "SIGUSR1"])
def test_a_spare_that_waits_for_too_long_or_is_asked_to_leaves_and_disturbs_nobody(
    tmp_path: Path, because: str
) -> None:
    """With exit code 0: its launcher has nothing more to do."""
    agent = {"spare_s": SPARE_S} if because == "agent.spare_s" else {}
    waiting = {"deadlines": {"nodes_s": SPARE_S - 1}, "agent": agent}
    job = JoinedJob(tmp_path, ranks_per_node=1, policy=waiting)
    try:
        job.gate(5).touch()
        job.start("--node", "a")
        job.start("--node", "b")
        pids = {rank.rank: rank.pid for rank in job.held_at(5).ranks}
        spare = job.start("--node", "c")
        job.until(lambda status: len(status.nodes) == 3, "the spare machine")
        if because == "SIGUSR1":
            for each in job.left():
                if {"midstep.cli.agent", "c"} <= {*each.cmdline()}:
                    each.send_signal(signal.SIGUSR1)
        assert job.wait(spare) == 0
        assert because in job.output(spare).read_text()
        status = job.until(lambda status: [node.state for node in status.nodes].count("lost") == 1, "its loss")
        assert {rank.rank: rank.pid for rank in status.ranks} == pids
        job.gate(5).unlink()
        assert [job.wait(0), job.wait(1)] == [0, 0], job.said()
        assert job.report()["incidents"] == []
    finally:
        job.close()


@pytest.mark.soak
def test_a_machine_that_reaches_no_controller_for_too_long_gives_the_job_up(tmp_path: Path) -> None:
    job = JoinedJob(tmp_path, ranks_per_node=1, leave_s=3.0)
    try:
        job.gate(5).touch()
        job.start()
        job.start()
        job.held_at(5)
        lost = job.controller()
        job.kill(lost)

        assert job.wait(1 - lost) == RESTART_HERE, job.said()
        assert "agent.leave_s" in job.output(1 - lost).read_text()
        assert_nothing_left(job)
    finally:
        job.close()
