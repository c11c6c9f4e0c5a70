"""The commands of an operator on a job of several roles: what is found, shown, stopped and continued."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.controller.role_group import GroupPhase, GroupRestart, RoleEnded, begin, handle
from midstep.launch.directories import (
    GroupFounding,
    GroupRecord,
    find_job,
    find_job_or_group,
    found_group,
    jobs,
    role_directory,
    write_group,
)
from midstep.launch.reached_job import look_at_group
from midstep.launch.roles import new_group, start_of
from midstep.policies.scripted_roles import parse_roles
from midstep.protocol import environment as env
from midstep.protocol.errors import ConfigurationError

FILE = """
until: [actor]
roles:
  actor: {script: a.py, ranks: 4, nnodes: 2, ladder: [{rung: recover}, {rung: stop}], env: {A: own}}
  rollout: {script: b.py, ranks: 2, policy: {checkpoint: {directory: kept}}}
"""
FOUNDING = GroupFounding("rl", parse_roles(FILE, "rl.yaml"), {"A": "all", "B": "all"}, "/work", "local", True, "s")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of jobs with one of roles, in its second attempt, whose launcher has gone."""
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path))
    directory = tmp_path / "rl"
    found_group(directory, FOUNDING)
    group, _ = begin(FOUNDING.rules)
    for event in (RoleEnded("rollout", 1, 1, "rank 0 ended"), RoleEnded("actor", 1, 130, "stopped")):
        group, _ = handle(group, FOUNDING.rules, event, 1000.0)
    write_group(directory, GroupRecord(str(tmp_path / "run" / "rl"), group))
    return tmp_path


def run(*arguments: str) -> str:
    """What a command says, whatever its exit code."""
    return " ".join(CliRunner().invoke(main, arguments).output.split())


def test_a_role_is_found_by_the_name_of_the_job_and_its_own_in_its_present_attempt(base: Path) -> None:
    assert jobs() == [base / "rl"]
    assert find_job_or_group(None) == find_job_or_group("rl") == find_job_or_group("r") == base / "rl"
    assert find_job("rl/actor") == find_job(str(base / "rl" / "actor")) == role_directory(base / "rl", "actor", 2)
    with pytest.raises(
        ConfigurationError, match="rl is a job of several roles: name one of them: rl/actor, rl/rollout"
    ):
        find_job("rl")
    with pytest.raises(ConfigurationError, match="rl has no role 'critic'; its roles: actor, rollout"):
        find_job("rl/critic")


def test_status_has_a_line_for_each_role_and_says_that_the_launcher_has_gone(base: Path) -> None:
    said = run("status", "rl")
    assert "job rl, 2 roles, until actor: running; its `midstep run` has gone: `midstep resume rl` continues it" in said
    assert "all roles were restarted 1 time:" in said
    assert "role rollout: rank 0 ended" in said
    data = json.loads(CliRunner().invoke(main, ["status", "--json"]).output)
    assert [(each["role"], each["attempt"], each["state"]) for each in data["roles"]] == [
        ("actor", 2, "running"),
        ("rollout", 2, "running"),
    ]
    assert data["restarts"] == [msgspec.to_builtins(GroupRestart(1000.0, "rollout", "rank 0 ended"))]


def test_what_is_of_one_job_names_the_roles(base: Path) -> None:
    for words in (["report", "rl", "--json"], ["inject", "rl", "--rank", "0"], ["watch", "rl"]):
        assert "name one of them: rl/actor, rl/rollout" in run(*words)
    assert "job rl, 2 roles, until actor" in run("report", "rl")


def test_a_job_whose_launcher_has_gone_cannot_be_stopped_and_one_that_has_ended_does_not_continue(base: Path) -> None:
    assert "`midstep run` is not running it" in run("stop", "rl")
    group, _ = begin(FOUNDING.rules)
    ended = msgspec.structs.replace(group, phase=GroupPhase.ENDED, exit_code=0, reason="finished: actor")
    write_group(base / "rl", GroupRecord("/nowhere", ended))
    assert "rl has ended: finished: actor" in run("resume", "rl")
    assert look_at_group(base / "rl").exit_code == 0
    assert "ended with exit code 0: finished: actor" in run("status", "rl")


def test_a_damaged_file_is_named(base: Path) -> None:
    (base / "rl" / "group.json").write_text("{")
    for command in ("status", "stop", "resume"):
        assert "group.json: cannot be read" in run(command, "rl")


def test_no_second_job_is_made_in_the_same_directory(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "roles.yaml"
    file.write_text(FILE)
    with pytest.raises(ConfigurationError, match="holds a job already"):
        found_group(base / "rl", FOUNDING)
    (tmp_path / "a.py").touch()
    (tmp_path / "b.py").touch()
    with pytest.raises(ConfigurationError, match="holds a job already"):
        new_group(file, job="rl", job_directory=None, environment={}, platform="local")


def test_what_a_role_is_started_with(tmp_path: Path) -> None:
    """Its own variables before those of all; checkpoints where the other attempts have theirs."""
    actor, rollout = (start_of(FOUNDING, tmp_path, role, 3) for role in FOUNDING.plan.roles)
    assert (actor.job, actor.nodes, actor.ranks_per_node, actor.fixed_nodes) == ("rl.actor.3", 2, 2, True)
    assert actor.job_directory == tmp_path / "roles" / "actor.3"
    assert (actor.environment["A"], actor.environment["B"], rollout.environment["A"]) == ("own", "all", "all")
    assert actor.environment[env.ROLE] == "actor"
    assert json.loads(actor.environment[env.ROLES]) == {"actor": 4, "rollout": 2}
    assert actor.policy is not None
    assert rollout.policy is not None
    assert actor.policy.checkpoint.directory == str(tmp_path / "checkpoints" / "actor")
    assert rollout.policy.checkpoint.directory == str(tmp_path / "kept" / "rollout")


def test_of_a_role_in_pods_it_is_said_where_to_ask(tmp_path: Path) -> None:
    """Its journal is in no file of the job's directory; and its job is continued by no command that is typed here."""
    founding = msgspec.structs.replace(FOUNDING, platform="kubernetes")
    found_group(tmp_path / "rl", founding)
    group, _ = begin(founding.rules)
    write_group(tmp_path / "rl", GroupRecord("/nowhere", group))
    assert "deploy/midstep-rl-actor-1 -c controller" in look_at_group(tmp_path / "rl").roles[0].note
    assert "is continued by its Deployment" in run("resume", str(tmp_path / "rl"))
