"""A job of several roles in Kubernetes: its objects, what those of a role take from it, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from midstep.cli import run
from midstep.cli.submit import command as submit
from midstep.launch.directories import found_group, read_founding
from midstep.launch.kubernetes.role import settings_of_role
from midstep.launch.roles import LaunchedRole, new_group, start_of
from midstep.platforms.kubernetes import rules
from midstep.platforms.kubernetes.objects import Submission, manifests
from midstep.platforms.kubernetes.settings import Settings, Volume
from midstep.protocol.token import new_token

VOLUME = ("--volume", "shared:/shared")
POD_GROUP = Path(__file__).parents[3] / "examples" / "kubernetes" / "managed" / "npu-pod-group.yaml"
FILE = """
until: [actor]
roles:
  actor: {script: /scripts/a.py, ranks: 4, nnodes: 2, resources: {"huawei.com/Ascend910": 8}, env: {A: own}}
  roll_out: {script: /scripts/b.py, ranks: 1}
"""
WHOLE = Settings("rl", "registry/rl:1", {"cpu": "2"}, (Volume("shared", "/shared"),), {"B": "all"}, has_roles=True)


def typed(tmp_path: Path, text: str = FILE, *words: str) -> Any:
    """Return what the command says of a file of roles."""
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    command = ["--platform", "kubernetes", "--roles", str(file), "--image", "registry/rl:1", "--job", "rl", "--dry-run"]
    return CliRunner().invoke(run.command, [*command, *words])


def launched(tmp_path: Path, role: str) -> LaunchedRole:
    """Return a role as its launcher in the pod gets it."""
    file = tmp_path / "roles.yaml"
    for script in ("a.py", "b.py"):
        (tmp_path / script).touch()
    file.write_text(FILE.replace("/scripts", str(tmp_path)))
    directory = tmp_path / "job"
    if not directory.exists():
        new = new_group(file, job="rl", job_directory=directory, environment={}, platform="kubernetes")
        found_group(directory, new.founding)
    founding = read_founding(directory)
    planned = founding.plan.role(role)
    assert planned is not None
    return LaunchedRole(start_of(founding, directory, planned, 2), planned, 2, quiet=False, stop=False)


def test_the_launcher_continues_from_the_volume_with_an_account_that_can_make_no_accounts(tmp_path: Path) -> None:
    result = typed(tmp_path, FILE, *VOLUME)
    assert result.exit_code == 0, result.output
    deployment, *others = yaml.safe_load_all(result.stdout)
    pod = deployment["spec"]["template"]["spec"]
    (launcher,) = pod["containers"]
    assert launcher["command"][-3:] == ["midstep", "resume", "/shared/midstep-rl"]
    assert [each["name"] for each in pod["initContainers"]] == ["check", "submit"]
    assert deployment["spec"]["replicas"] == 1
    kinds = {each["kind"]: each for each in others}
    assert kinds["ConfigMap"]["data"]["roles.yaml"] == FILE
    asked = {
        (resource, verb) for rule in kinds["Role"]["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    assert asked == {(right.resource, right.verb) for right in rules.own_rights(WHOLE)}
    assert not {resource for resource, _ in asked} & {"*", "roles", "rolebindings", "serviceaccounts"}


def test_the_job_of_a_role_has_its_own_pods_and_the_account_of_the_whole(tmp_path: Path) -> None:
    settings = settings_of_role(WHOLE, launched(tmp_path, "roll_out"))
    assert settings.job == "rl-roll-out-2"
    assert (settings.resources, settings.environment["B"]) == ({"cpu": "2"}, "all")
    assert settings.environment["MIDSTEP_ROLE"] == "roll_out"
    own = settings_of_role(WHOLE, launched(tmp_path, "actor"))
    assert own.resources == {"cpu": "2", "huawei.com/Ascend910": "8"}
    assert own.environment["A"] == "own"

    made = manifests(settings, Submission(("b.py",), 1, 0, "/x"), new_token(job=settings.job), "default")
    kinds = {each["kind"] for each in made}
    assert not kinds & {"ServiceAccount", "Role", "RoleBinding"}
    assert "Lease" in kinds
    assert made[0]["spec"]["template"]["spec"]["serviceAccountName"] == "midstep-rl"


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (FILE, (), "needs --volume CLAIM:/PATH"),
        (FILE.replace("/scripts/a.py", "a.py"), VOLUME, "roles.actor.script: found 'a.py'; allowed on Kubernetes"),
        (FILE.replace("actor:", "roll-out:").replace("[actor]", "[roll-out]"), VOLUME, "cannot both name objects"),
        (FILE.replace("roll_out", "r" * 40), VOLUME, "cannot name pods"),
        (FILE, (*VOLUME, "--store", "etcd://e:2379"), "--store and --acjob are for one SCRIPT"),
        (FILE, (*VOLUME, "--pod-group", str(POD_GROUP)), "--pod-group is for one SCRIPT"),
        (FILE, (*VOLUME, "--fixed-nodes"), "--fixed-nodes are for nodes on this machine"),
        (FILE, (*VOLUME, "--nnodes", "2"), "--nnodes goes with one SCRIPT"),
    ],
)
def test_what_cannot_run_in_pods_is_refused_where_it_is_typed(
    tmp_path: Path, text: str, words: tuple[str, ...], said: str
) -> None:
    result = typed(tmp_path, text, *words)
    assert result.exit_code == 1
    assert said in result.output


def test_only_a_pod_submits_roles_and_once(tmp_path: Path) -> None:
    launched(tmp_path, "actor")
    words = ["--roles", str(tmp_path / "roles.yaml"), "--job", "rl", "--job-dir", str(tmp_path / "job")]
    assert "with --platform kubernetes" in CliRunner().invoke(submit, words).output
    again = CliRunner().invoke(submit, [*words, "--platform", "kubernetes", "--if-absent"])
    assert (again.exit_code, again.output) == (0, f"rl: is already at {tmp_path / 'job'}\n")
    assert "holds a job already" in CliRunner().invoke(submit, [*words, "--platform", "kubernetes"]).output
