"""The file of a job of several roles: what it means, and what is said of a wrong one."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.devices.kinds import CPU, FAKE
from midstep.policies.files import load_policy_or_roles, load_roles, parse_policy
from midstep.policies.schema import Budget, default_policy
from midstep.policies.scripted_roles import JobOfRoles, advice_on_roles, parse_roles
from midstep.protocol.errors import PolicyError
from midstep.protocol.types import Rung

FILE = """
checkpoint: {every_steps: 5, keep: 3}
ladder: [{rung: reschedule_job, budget: {per_job: 4, window_s: 0}}, {rung: stop}]
until: [trainer]
roles:
  trainer:
    script: trainer.py
    arguments: ["--steps", "100"]
    ranks: 4
    nnodes: 2
    spares: 1
    ladder: [{rung: recover_in_place}, {rung: recover}, {rung: stop}]
    policy: {checkpoint: {every_steps: 50}, device: fake, communicator: {name: fake}}
  rollout: {script: rollout.py, ranks: 2, env: {SEED: "7"}}
"""


def refused(text: str) -> str:
    """What is said of a wrong file."""
    with pytest.raises(PolicyError) as error:
        parse_roles(text, "rl.yaml")
    return str(error.value)


def role(text: str, **more: str) -> str:
    """A file with a role that has these keys."""
    rest = "".join(f"{key}: {value}\n" for key, value in more.items())
    return f"{rest}roles: {{a: {{script: a.py, ranks: 2{', ' if text else ''}{text}}}}}"


def test_each_role_has_its_shape_and_the_policy_of_all_with_what_it_says_itself() -> None:
    job = parse_roles(FILE, "rl.yaml")
    trainer, rollout = job.roles
    assert (trainer.name, trainer.given.ranks, trainer.ranks_per_node, trainer.given.spares) == ("trainer", 4, 2, 1)
    assert (trainer.policy.checkpoint.every_steps, trainer.policy.checkpoint.keep) == (50, 3)
    assert (trainer.policy.device, rollout.policy.device) == (FAKE, CPU)
    assert rollout.policy.checkpoint.every_steps == 5
    assert [entry.rung for entry in trainer.policy.ladder] == [Rung.RECOVER_IN_PLACE, Rung.RECOVER, Rung.STOP]


def test_a_role_without_a_ladder_stops_its_own_world_and_fails_over_with_the_job() -> None:
    job = parse_roles(FILE, "rl.yaml")
    assert [(each.name, each.with_job) for each in job.roles] == [("trainer", False), ("rollout", True)]
    assert [entry.rung for entry in job.roles[1].policy.ladder] == [Rung.STOP]


def test_reschedule_job_on_a_roles_ladder_is_about_all_roles_and_the_others_rungs_come_first() -> None:
    job = parse_roles(
        role("ladder: [{rung: recover}, {rung: reschedule_job, budget: {per_job: 1}}, {rung: stop}]"), "x"
    )
    assert job.roles[0].failover == Budget(per_job=1)
    assert [entry.rung for entry in job.roles[0].policy.ladder] == [Rung.RECOVER, Rung.STOP]
    assert parse_roles(role("ladder: [{rung: recover}, {rung: stop}]"), "x").roles[0].failover is None


def test_how_often_all_are_restarted_is_the_budget_of_reschedule_job_on_the_jobs_ladder() -> None:
    assert parse_roles(FILE, "rl.yaml").restarts == Budget(per_job=4, window_s=0)
    entry = default_policy().rung(Rung.RESCHEDULE_JOB)
    assert entry is not None
    assert parse_roles(role(""), "rl.yaml").restarts == entry.budget
    assert parse_roles(role("", ladder="[{rung: stop}]"), "rl.yaml").restarts is None


def test_the_job_is_over_when_the_roles_of_until_have_finished_or_else_all() -> None:
    assert parse_roles(FILE, "rl.yaml").until == ("trainer",)
    assert parse_roles(role(""), "rl.yaml").until == ("a",)


def test_scripts_and_code_tables_are_looked_for_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "codes.yaml").write_text("version: 1\ncodes: {'8C00000A': RestartBusiness}\n")
    (tmp_path / "rl.yaml").write_text(
        "roles:\n  a: {script: train/a.py, ranks: 1, policy: {faults: {codes_file: codes.yaml}}}\n"
        "  b: {script: my.module, module: true, ranks: 1}\n"
    )
    job = load_roles(tmp_path / "rl.yaml")
    assert [each.given.script for each in job.roles] == [str(tmp_path / "train" / "a.py"), "my.module"]
    assert "8C00000A" in job.roles[0].policy.faults.codes
    assert "8C00000A" not in job.roles[1].policy.faults.codes


def test_a_policy_with_roles_of_one_world_stays_a_policy(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("roles: {a: {ranks: 0-3}}")
    assert load_policy_or_roles(tmp_path / "one.yaml") == parse_policy("roles: {a: {ranks: 0-3}}", "one.yaml")
    (tmp_path / "many.yaml").write_text(FILE)
    assert isinstance(load_policy_or_roles(tmp_path / "many.yaml"), JobOfRoles)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            role("ranks: 3").replace("ranks: 2, ", "nnodes: 2, "),
            "roles.a.ranks: found 3; allowed: a multiple of nnodes",
        ),
        (role("").replace("ranks: 2", "ranks: 0-3"), "roles.a.ranks: found the text '0-3'; allowed: a whole number"),
        (role("").replace(", ranks: 2", ""), "roles.a.ranks: missing"),
        (role("nproc_per_node: 2"), "roles.a.nproc_per_node: unknown key; allowed: script, ranks, nnodes"),
        (role("lader: []"), "roles.a.lader: unknown key; allowed: script"),
        (role("lader: []"), "did you mean ladder?"),
        (role("ladder: [{rung: recover}]"), "roles.a.ladder[0].rung: the last rung must be stop"),
        (role("ladder: []"), "roles.a.ladder: empty; allowed: rungs"),
        (role("policy: {ladder: []}"), "roles.a.policy.ladder: not here; write it as the role's own `ladder`"),
        (role("policy: {roles: {}}"), "roles.a.policy.roles: not here"),
        (role("policy: {checkpoint: {kep: 3}}"), "roles.a.policy.checkpoint.kep: unknown key; allowed: directory"),
        (role("policy: [1]"), "roles.a.policy: found a list; allowed: a mapping"),
        (role("policy: {device: npu}"), "roles.a.policy.communicator.name: found gloo; allowed: hccl"),
        (role("", until="[b]"), "until[0]: found 'b'; allowed: the roles of this job: a"),
        (role("", deadlines="{quiesce_s: 0}"), "deadlines.quiesce_s: found 0"),
        (role("", deadlines="{quiesce_s: 0.1}"), "rl.yaml: deadlines.quiesce_s: found 0.1; allowed: above deadlines"),
        (role("module: true, no_python: true"), "roles.a.no_python: found with module"),
        (role("env: {'A B': x}"), "roles.a.env.A B: is not the name of a variable"),
        (role("env: {A: 1}"), "roles.a.env.A: found 1; allowed: a text"),
        (role("resources: {NPU: many}"), "roles.a.resources.NPU: found the text 'many'; allowed: a number"),
        (role("").replace("{a:", "{'a b':"), "roles.a b: is not the name of a role; allowed: letters, digits"),
        ("roles: {a: {script: a.py, ranks: 1}, b: {ranks: 0-3}}", "roles.b.script: missing; allowed: a text"),
        ("roles: {a: {script: a.py, ranks: 1}, b: 3}", "roles.b: found 3; allowed: a mapping with the keys script"),
        ("roles: {a: {ranks: 0-3}}", "rl.yaml: roles: no role has a script"),
        ("", "rl.yaml: roles: no role has a script"),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_what_is_allowed(text: str, words: str) -> None:
    said = refused(text)
    assert words in said
    assert said.startswith("rl.yaml: ")


def test_a_rule_that_all_roles_break_is_told_once() -> None:
    text = "deadlines: {quiesce_s: 0.1}\nroles: {a: {script: a.py, ranks: 1}, b: {script: b.py, ranks: 1}}"
    assert len(refused(text).splitlines()) == 1


def test_a_job_of_roles_given_as_a_policy_says_how_it_is_started() -> None:
    with pytest.raises(PolicyError, match=r"midstep run --roles rl\.yaml"):
        parse_policy(FILE, "rl.yaml")


def test_check_says_what_the_lack_of_a_ladder_means() -> None:
    assert "roles.rollout has no ladder: a fault of one of its ranks restarts all roles" in advice_on_roles(
        parse_roles(FILE, "rl.yaml")
    )
    without = parse_roles(FILE.replace("{rung: reschedule_job, budget: {per_job: 4, window_s: 0}}, ", ""), "rl.yaml")
    assert any("stops the job" in note for note in advice_on_roles(without))


def test_policy_check_and_show_understand_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rl.yaml"
    file.write_text(FILE)
    checked = CliRunner().invoke(main, ["policy", "check", str(file)])
    assert checked.exit_code == 0, checked.output
    assert (
        "trainer: trainer.py on 4 ranks, nodes: 2 and 1 to spare, recover_in_place -> recover -> stop" in checked.output
    )
    assert "rollout: rollout.py on 2 ranks, nodes: 1, fails over with the job" in checked.output
    shown = CliRunner().invoke(main, ["policy", "show", str(file), "--role", "trainer"])
    assert "every_steps: 50" in shown.output
    explained = CliRunner().invoke(
        main, ["policy", "explain", str(file), "--role", "trainer", "--fault", "kind=exit,rank=1"]
    )
    assert "recover_in_place: rank 1 ended" in explained.output
    unknown = CliRunner().invoke(main, ["policy", "show", str(file), "--role", "actor"])
    assert unknown.exit_code == 1
    assert "there is no role 'actor'; its roles: trainer, rollout" in unknown.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "2"], "--nnodes goes with one SCRIPT"),
        (["--policy", "p.yaml"], "--policy goes with one SCRIPT"),
        (["train.py"], "SCRIPT goes with one SCRIPT"),
        (["--platform", "kubernetes"], "--platform kubernetes needs --image"),
        (["--platform", "ray"], "needs --job-dir"),
        (["--job", "x" * 60], "names have at most 64 characters"),
        ([], "roles.trainer: there is no script"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_made(tmp_path: Path, arguments: list[str], words: str) -> None:
    file = tmp_path / "rl.yaml"
    file.write_text(FILE)
    environment = {"MIDSTEP_HOME": str(tmp_path / "jobs")}
    done = CliRunner().invoke(main, ["run", "--roles", str(file), *arguments], env=environment)
    assert done.exit_code == 1
    assert words in " ".join(done.output.split())
    assert not (tmp_path / "jobs").exists()
