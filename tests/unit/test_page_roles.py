"""A role of a job of several on the page: found again where it begins again, and not blamed for another one's end."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from midstep.cli.page import command, jobs
from midstep.cli.page.jobs import JobList, meant_role, named_job
from midstep.cli.page.sections import Looked, SectionWriter
from midstep.cli.page.sentence import Mood, WholeJob, is_over, sentence
from midstep.controller.role_group import GroupPhase, RoleEnded, RoleGroup, begin, handle
from midstep.launch.directories import GroupFounding, GroupRecord, find_job, found_group, role_directory, write_group
from midstep.launch.reached_job import GroupLook, HereJob, ReachedJob, RoleLook
from midstep.policies.scripted_roles import parse_roles
from midstep.protocol.incidents import JobStatus, Outcome

from .test_page_sentence import killed, status

FILE = "{until: [actor], roles: {actor: {script: a.py, ranks: 4}, rollout: {script: b.py, ranks: 2}}}"
FOUNDING = GroupFounding("rl", parse_roles(FILE, "rl.yaml"), {}, "/work", "local", True, "s")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory of jobs with one of roles, which has begun."""
    found_group(tmp_path / "rl", FOUNDING)
    write(tmp_path, begin(FOUNDING.rules)[0])
    return tmp_path


def write(base: Path, group: RoleGroup) -> None:
    """Have the roles stand so."""
    write_group(base / "rl", GroupRecord(str(base / "run"), group))


def after(*events: RoleEnded) -> RoleGroup:
    """How the roles stand after some of them have ended."""
    group, _ = begin(FOUNDING.rules)
    for event in events:
        group, _ = handle(group, FOUNDING.rules, event, 1000.0)
    return group


def test_a_page_of_a_role_follows_it_when_all_begin_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at, asked and read is the role as it stands, and each attempt shows how the whole stands."""

    def looker(target: ReachedJob) -> Callable[[], Looked]:
        assert isinstance(target, HereJob)
        return lambda: Looked(status(job=target.directory.name))

    monkeypatch.setattr(command, "looker", looker)
    target = named_job("rl/actor", base)
    access = command.access_to(target, meant_role("rl/actor", target))
    assert access.look().status.job == "actor.1"
    write(base, after(RoleEnded("rollout", 1, 1, "rank 0 ended")))
    looked = access.look()
    assert (looked.status.job, looked.whole) == (
        "actor.1",
        WholeJob(GroupPhase.RESTARTING, None, "role rollout: rank 0 ended"),
    )
    write(base, after(RoleEnded("rollout", 1, 1, "rank 0 ended"), RoleEnded("actor", 1, 130, "stopped")))
    looked = access.look()
    assert (looked.status.job, looked.whole) == ("actor.2", WholeJob(GroupPhase.RUNNING))
    assert access.log is not None
    log = role_directory(base / "rl", "actor", 2) / "logs" / "rank-0.1.log"
    log.parent.mkdir(parents=True)
    log.write_text("from the second attempt\n")
    assert "second attempt" in access.log(0, 1)


def test_one_attempt_that_is_named_by_its_path_stays_that_one(base: Path) -> None:
    place = role_directory(base / "rl", "actor", 1)
    place.mkdir(parents=True)
    (place / "job.json").write_text("{}")
    assert meant_role(str(place), HereJob(find_job(str(place), base))) is None
    assert meant_role("rl/actor", HereJob(place)) is not None
    assert meant_role(None, HereJob(place)) is None


@pytest.mark.parametrize(
    ("whole", "mood", "headline"),
    [
        (None, Mood.FAILED, "Ended with exit code 130: stopped by SIGTERM"),
        (WholeJob(GroupPhase.RUNNING), Mood.FAILED, "Ended with exit code 130: stopped by SIGTERM"),
        (
            WholeJob(GroupPhase.RESTARTING, None, "role rollout: rank 0 ended"),
            Mood.RECOVERING,
            "All roles begin again from their checkpoints: role rollout: rank 0 ended",
        ),
        (WholeJob(GroupPhase.ENDED, 0, "finished: actor"), Mood.ENDED, "Ended well, with the job: finished: actor"),
        (
            WholeJob(GroupPhase.ENDING, 1, "role actor failed"),
            Mood.FAILED,
            "Ended with the job, exit code 1: role actor failed",
        ),
    ],
)
def test_a_role_that_was_stopped_for_another_one_says_so(whole: WholeJob | None, mood: Mood, headline: str) -> None:
    ended = status(phase="ended", exit_code=130, reason="stopped by SIGTERM")
    said = sentence(ended, "it has ended", whole)
    assert (said.mood, said.headline) == (mood, headline)
    restarts = whole is not None and whole.phase is GroupPhase.RESTARTING
    assert is_over(ended, whole) is not restarts


def lines(monkeypatch: pytest.MonkeyPatch, base: Path, group: GroupLook) -> list[tuple[str, str, str, bool]]:
    """Name, mood, headline and whether it has ended, of each role in the list."""
    monkeypatch.setattr(jobs, "look_at_group", lambda directory: group)
    return [(each["name"], each["mood"], each["headline"], each["ended"]) for each in JobList(base)()]


def look(told: JobStatus | None, note: str = "") -> tuple[RoleLook, ...]:
    """An actor that stands so."""
    return (RoleLook("actor", 1, "running", None, "", "/nowhere", told, note),)


def test_the_list_says_of_each_role_how_it_stands(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not begun asks for nothing, unless the launcher of the job has gone."""
    running = GroupLook("rl", True, "running", None, "", ("actor",), (), look(status()))
    name = "rl/actor"
    assert lines(monkeypatch, base, running) == [(name, "training", "Training, nothing is asked of you", False)]
    begins = msgspec.structs.replace(running, roles=look(None, "its job has not begun"))
    assert lines(monkeypatch, base, begins) == [(name, "starting", "its job has not begun", False)]
    gone = msgspec.structs.replace(begins, live=False)
    assert lines(monkeypatch, base, gone) == [(name, "asks", "its job has not begun", False)]
    stopped = look(status(phase="ended", exit_code=130, reason="stopped"), "the job has ended")
    over = msgspec.structs.replace(running, phase="ended", exit_code=0, reason="finished: rollout", roles=stopped)
    assert lines(monkeypatch, base, over) == [(name, "ended", "Ended well, with the job: finished: rollout", True)]
    again = msgspec.structs.replace(running, phase="restarting", roles=stopped)
    ((_, mood, _, ended),) = lines(monkeypatch, base, again)
    assert (mood, ended) == ("recovering", False)


def test_incidents_of_another_attempt_are_told_themselves() -> None:
    """They have the numbers of those before."""
    writer = SectionWriter()
    first = msgspec.structs.replace(killed(), outcome=Outcome.STOPPED)
    second = msgspec.structs.replace(first, began_s=first.began_s + 50.0)
    told = [
        msgspec.json.decode(writer.write(Looked(status(incidents=(each,))))["incidents"])["ended"][0]["began_s"]
        for each in (first, second)
    ]
    assert told == [first.began_s, second.began_s]
