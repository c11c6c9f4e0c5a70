"""The objects of a job in Kubernetes: what `kubectl apply` gets, and what the pods of nodes are like."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner
from lightkube import codecs

from midstep.cli import run
from midstep.controller.journal.volume_place import folder_in, parse_volume_place
from midstep.launch.job import Start
from midstep.launch.kubernetes.job import submission_of
from midstep.platforms.kubernetes import rules
from midstep.platforms.kubernetes.objects import Submission, default_directory, manifests, times
from midstep.platforms.kubernetes.pods import agent_pod, laid_over
from midstep.platforms.kubernetes.settings import (
    Settings,
    Volume,
    checked_job,
    encode,
    parse_resource,
    parse_volume,
    read_settings,
)
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.token import FullToken, JoinToken, new_token, parse_token

NPUS = {"huawei.com/Ascend910": "8"}
SETTINGS = Settings("demo", "registry/midstep:1", NPUS, (Volume("claim", "/checkpoints"),), {"A": "1"})
CONTROLLERS = ("10.0.0.1:29400", "midstep-demo.default.svc:29400")
TYPED = ("--platform", "kubernetes", "--image", "registry/midstep:0.1.0", "--job", "demo")


def objects(settings: Settings = SETTINGS, *, nodes: int = 2, spares: int = 1) -> dict[str, dict[str, Any]]:
    """Return the objects of a job by their kinds."""
    submission = Submission(("--nnodes", str(nodes), "train.py"), nodes, spares, "/checkpoints/midstep-demo", "a: 1\n")
    return {each["kind"]: each for each in manifests(settings, submission, new_token(job="demo"), "default")}


def printed(*words: str) -> list[dict[str, Any]]:
    """Return what a dry run prints."""
    result = CliRunner().invoke(run.command, [*TYPED, "--dry-run", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return list(yaml.safe_load_all(result.stdout))


def agent(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the container of a pod."""
    (container,) = pod["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_a_pod_is_alone_on_its_host_and_nothing_but_midstep_brings_it_back() -> None:
    pod = agent_pod(SETTINGS, "node3", CONTROLLERS)

    assert pod["metadata"]["name"] == "midstep-demo-node3"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert {each["key"] for each in pod["spec"]["tolerations"]} == {
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    }
    assert "tolerationSeconds" not in pod["spec"]["tolerations"][0]
    (apart,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert "nodeAffinity" not in pod["spec"]["affinity"]
    assert agent(pod)["resources"] == {"limits": NPUS}


def test_a_pod_keeps_away_from_hosts_that_are_to_be_avoided() -> None:
    pod = agent_pod(SETTINGS, "node3", CONTROLLERS, avoid=("m2", "m1", "m2"))
    (term,) = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]

    assert term["matchExpressions"] == [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["m1", "m2"]}]


def test_an_agent_has_a_token_with_which_it_can_only_join() -> None:
    secret = objects()["Secret"]["stringData"]
    volume = agent_pod(SETTINGS, "node0", CONTROLLERS)["spec"]["volumes"][0]["secret"]

    assert isinstance(parse_token(secret["token"], "it"), FullToken)
    assert isinstance(parse_token(secret["join"], "it"), JoinToken)
    assert [item["key"] for item in volume["items"]] == ["join"]
    assert secret["token"] not in str(agent_pod(SETTINGS, "node0", CONTROLLERS))


def test_a_template_is_laid_over_a_pod_by_the_names_of_its_parts() -> None:
    template = {
        "metadata": {"labels": {"queue": "a"}, "annotations": {"why": "b"}},
        "spec": {
            "schedulerName": "volcano",
            "priorityClassName": "high",
            "nodeSelector": {"accelerator": "910b"},
            "tolerations": [{"key": "npu", "operator": "Exists"}],
            "containers": [{"name": "agent", "env": [{"name": "A", "value": "2"}], "command": ["other"]}],
            "volumes": [{"name": "driver", "hostPath": {"path": "/usr/local/Ascend"}}],
        },
    }
    plain = agent_pod(SETTINGS, "node0", CONTROLLERS)
    pod = agent_pod(Settings("demo", "image", agent=template, environment={"A": "1"}), "node0", CONTROLLERS)

    assert pod["metadata"]["labels"].items() > plain["metadata"]["labels"].items()
    assert pod["spec"]["schedulerName"] == "volcano"
    assert len(pod["spec"]["tolerations"]) == 3
    assert {"name": "A", "value": "2"} in agent(pod)["env"]
    assert {"name": "A", "value": "1"} not in agent(pod)["env"]
    assert agent(pod)["image"] == "image"
    assert agent(pod)["command"] == ["other"]
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["midstep-token", "shm", "driver"]


@pytest.mark.parametrize(
    ("base", "over", "result"),
    [
        ({"a": 1, "b": 2}, {"b": None}, {"a": 1}),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"x": [1]}, {"x": [1, 2]}, {"x": [1, 2]}),
        ({"args": ["a"]}, {"args": ["b"]}, {"args": ["b"]}),
        ({"a": {"b": 1}}, {"a": 3}, {"a": 3}),
    ],
)
def test_what_is_laid_over_changes_what_it_says_and_nothing_else(base: Any, over: Any, result: Any) -> None:
    assert laid_over(base, over) == result


def test_volcano_places_as_many_pods_together_as_the_job_needs() -> None:
    """The group has their number and what they ask for, and what the user says of it; spares are not waited for."""
    over = {"metadata": {"annotations": {"huawei.com/schedule_policy": "chip8-node8"}}, "spec": {"queue": "training"}}
    settings = msgspec.structs.replace(SETTINGS, pod_group=over)
    group = objects(settings, nodes=3, spares=2)["PodGroup"]
    pod = agent_pod(settings, "node0", CONTROLLERS)

    assert group["spec"] == {"minMember": 3, "minResources": {"huawei.com/Ascend910": "24"}, "queue": "training"}
    assert group["metadata"]["annotations"] == {"huawei.com/schedule_policy": "chip8-node8"}
    assert codecs.from_dict(group).metadata.name == "midstep-demo"  # type: ignore[union-attr]
    assert pod["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": "midstep-demo"}
    assert pod["spec"]["schedulerName"] == "volcano"
    assert "PodGroup" not in objects()
    assert "schedulerName" not in agent_pod(SETTINGS, "node0", CONTROLLERS)["spec"]


@pytest.mark.parametrize(
    ("quantity", "thrice"), [("8", "24"), ("1.5Gi", "4.5Gi"), ("500m", "1500m"), ("1e3", "3e3"), ("?", "?")]
)
def test_a_quantity_is_taken_so_many_times(quantity: str, thrice: str) -> None:
    assert times(quantity, 3) == thrice


def test_a_right_is_one_verb_of_one_kind_and_none_is_all() -> None:
    role = objects()["Role"]

    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {(right.group, right.resource, right.verb) for right in rules.RIGHTS}
    assert not any("*" in each for right in granted for each in right)
    assert all(
        rule.get("resourceNames") == ["midstep-demo"] for rule in role["rules"] if "deployments" in rule["resources"]
    )


def test_hosts_are_looked_at_only_with_a_right_that_was_asked_for() -> None:
    assert "ClusterRole" not in objects()
    watching = objects(Settings("demo", "image", watch_nodes=True))

    assert watching["ClusterRole"]["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]
    assert watching["ClusterRoleBinding"]["subjects"][0]["namespace"] == "default"


def test_config_maps_are_watched_beside_the_controller_with_rights_in_their_namespaces_alone() -> None:
    settings = Settings("demo", "image", config_maps=("kube-system", "mindx-dl"))
    made = manifests(settings, Submission(("train.py",), 1, 0, "/c"), new_token(job="demo"), "default")
    (deployment,) = (each for each in made if each["kind"] == "Deployment")
    detector = deployment["spec"]["template"]["spec"]["containers"][-1]
    roles = {each["metadata"]["namespace"]: each for each in made if each["kind"] == "Role"}
    bindings = {each["metadata"]["namespace"]: each for each in made if each["kind"] == "RoleBinding"}

    assert detector["name"] == "detector"
    assert detector["command"][-4:] == ["--config-maps", "kube-system", "--config-maps", "mindx-dl"]
    assert set(roles) == set(bindings) == {"default", "kube-system", "mindx-dl"}
    for namespace in settings.config_maps:
        assert roles[namespace]["metadata"]["name"] == "midstep-demo.default"
        assert roles[namespace]["rules"] == [
            {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "watch"]}
        ]
        assert bindings[namespace]["roleRef"]["name"] == "midstep-demo.default"
        assert bindings[namespace]["subjects"] == [
            {"kind": "ServiceAccount", "name": "midstep-demo", "namespace": "default"}
        ]
    assert "detector" not in str(objects()["Deployment"])


def test_the_detector_of_a_job_gets_the_names_of_nodes_that_the_policy_gives(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("faults: {node_names: {worker-7: demo-1}, node_serials: {'2102': demo-0}}\n")
    settings = Settings("demo", "image", config_maps=("kube-system",))
    submission = submission_of(Start(command=("train.py",), policy_file=tmp_path / "policy.yaml"), settings)
    deployment = manifests(settings, submission, new_token(job="demo"), "default")[0]
    detector = deployment["spec"]["template"]["spec"]["containers"][-1]

    assert detector["command"][-4:] == ["--node-name", "2102=demo-0", "--node-name", "worker-7=demo-1"]


@pytest.mark.parametrize(("spares", "watch_nodes", "least"), [(1, False, 2), (0, False, 1), (0, True, 2)])
def test_evictions_leave_as_many_pods_as_the_job_can_do_without(spares: int, watch_nodes: bool, least: int) -> None:
    budget = objects(Settings("demo", "image", watch_nodes=watch_nodes), spares=spares)["PodDisruptionBudget"]

    assert budget["spec"]["minAvailable"] == least


def test_one_controller_runs_at_a_time_and_a_termination_of_its_pod_does_not_stop_the_job() -> None:
    deployment = objects()["Deployment"]
    containers = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["containers"]}

    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert set(containers) == {"controller", "platform"}
    assert "kill -9" in containers["controller"]["command"][2]


def test_journal_and_checkpoints_are_on_the_first_volume() -> None:
    assert default_directory(SETTINGS) == "/checkpoints/midstep-demo"
    assert default_directory(Settings("demo", "image")).startswith("/var/lib/midstep")


def test_a_dry_run_prints_what_lightkube_and_kubectl_can_read() -> None:
    found = printed(
        "--nnodes", "2", "--nproc-per-node", "8", "--spares", "1", "--volume", "c:/c", "train.py", "--lr", "1"
    )

    assert [each["kind"] for each in found] == [
        "Deployment",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "Secret",
        "ConfigMap",
        "Service",
        "PodDisruptionBudget",
    ]
    assert all(codecs.from_dict(each).metadata.name == "midstep-demo" for each in found)  # type: ignore[union-attr]
    submit = found[0]["spec"]["template"]["spec"]["initContainers"][1]["command"]
    assert submit[-3:] == ["train.py", "--lr", "1"]
    assert "--spares" in submit


def test_the_policy_goes_with_the_job(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("ladder: [{rung: recover}, {rung: stop}]\n")
    found = printed("--policy", str(policy), "train.py")

    assert found[5]["data"]["policy.yaml"] == policy.read_text()
    assert "/etc/midstep/policy.yaml" in found[0]["spec"]["template"]["spec"]["initContainers"][1]["command"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--platform", "kubernetes", "train.py"), "needs --image"),
        ((*TYPED, "--volume", "claim", "train.py"), "write CLAIM:/PATH"),
        ((*TYPED, "--resource", "npu", "train.py"), "write NAME=QUANTITY"),
        (("--image", "i", "train.py"), "are for --platform kubernetes"),
        ((*TYPED, "--job", "Too_Big", "train.py"), "cannot name pods"),
        ((*TYPED, "--fixed-nodes", "train.py"), "for nodes on this machine"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_made(words: Sequence[str], said: str) -> None:
    result = CliRunner().invoke(run.command, [*words])

    assert result.exit_code == 1
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["a", "a-1", "20261123-0722-ab", "x" * 40])
def test_names_of_jobs_that_can_name_pods(name: str) -> None:
    assert checked_job(name) == name


@pytest.mark.parametrize("name", ["", "A", "a_b", "a.b", "-a", "a-", "x" * 41])
def test_names_of_jobs_that_cannot(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name pods"):
        checked_job(name)


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(encode(SETTINGS))

    assert read_settings(file) == SETTINGS
    assert parse_volume("/folder:/path").is_host_path
    assert parse_resource("npu=8") == ("npu", "8")


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="what the job's pods are like"):
        read_settings(tmp_path / "none")


@pytest.mark.parametrize("controllers", [1, 2])
def test_controllers_whose_job_is_in_an_etcd_are_replaced_one_after_the_other(controllers: int) -> None:
    """The next one stands by until the last one is gone; the Deployment of one such controller is no exception."""
    deployment = objects(Settings("demo", "image", controllers=controllers, store="etcd://s/place"))["Deployment"]
    controller, platform = deployment["spec"]["template"]["spec"]["containers"]

    assert deployment["spec"]["strategy"] == {"type": "RollingUpdate"}
    assert "--standby" in controller["command"]
    assert "--standby" in platform["command"]


def place_in(manifests: list[dict[str, Any]]) -> str:
    """Return where in the etcd a printed job is kept."""
    deployment = next(each for each in manifests if each["kind"] == "Deployment")
    command: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    return command[command.index("--store") + 1]


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ((), "the job's journal and its checkpoints are lost"),
        (("--store", "etcd://s"), "the job's checkpoints are lost"),
        (("--volume", "checkpoints:/checkpoints"), ""),
        (("--job-dir", "/job"), ""),
    ],
)
def test_what_is_lost_without_a_volume_is_said(
    words: tuple[str, ...], lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    printed(*words, "t.py")

    assert lost in caplog.text
    assert bool(lost) == ("--volume" in caplog.text)


def test_several_controllers_keep_the_job_in_an_etcd_and_serve_it_in_turn() -> None:
    store = ("--controllers", "3", "--store", "etcd://s:2379", "--volume", "checkpoints:/checkpoints", "train.py")
    found = printed(*store)
    deployment = next(each for each in found if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    controller, platform = pod["containers"]
    place = place_in(found)

    assert deployment["spec"]["replicas"] == 3
    assert place.startswith("etcd://s:2379/midstep/")
    assert place in pod["initContainers"][1]["command"]
    assert "/checkpoints/midstep-demo" in pod["initContainers"][1]["command"]
    assert {"--standby", "$(POD_NAME)"} < set(controller["command"])
    assert "/checkpoints/midstep-demo" not in controller["command"]
    assert platform["command"][-1] == "--standby"
    (apart,) = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert apart["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    budgets = [each["metadata"]["name"] for each in found if each["kind"] == "PodDisruptionBudget"]
    assert budgets == ["midstep-demo", "midstep-demo-controllers"]


def test_several_controllers_without_an_etcd_are_elected_by_a_lease_and_keep_the_job_on_the_volume() -> None:
    found = printed("--controllers", "2", "--volume", "checkpoints:/checkpoints", "train.py")
    kinds = {each["kind"]: each for each in found if each["kind"] != "PodDisruptionBudget"}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]

    assert kinds["Lease"] == {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {**kinds["Service"]["metadata"]},
        "spec": {},
    }
    place = "kubernetes:///midstep-demo?journal=/checkpoints/midstep-demo/journal"
    assert place_in(found) == place
    assert place in pod["initContainers"][1]["command"]
    assert kinds["Deployment"]["spec"]["strategy"] == {"type": "RollingUpdate"}
    (rule,) = (rule for rule in kinds["Role"]["rules"] if rule["resources"] == ["leases"])
    assert (rule["verbs"], rule["resourceNames"]) == (["get", "update"], ["midstep-demo"])
    assert parse_volume_place(place).folder == folder_in(Path("/checkpoints/midstep-demo"))
    alone = printed("--volume", "checkpoints:/checkpoints", "train.py")
    assert not any(each["kind"] == "Lease" for each in alone)
    assert not any(rule["resources"] == ["leases"] for each in alone for rule in each.get("rules", []))


def test_two_runs_of_a_job_have_places_of_their_own_in_the_etcd() -> None:
    """So that neither the end of the last one nor a job of that name in another namespace is taken for this one's."""
    first, second = (place_in(printed("--store", "etcd://s", "t.py")) for _ in range(2))

    assert first != second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--controllers", "2"), "--controllers 2 needs --volume"),
        (("--controllers", "2", "--store", "kubernetes:///a?journal=/b"), "is what --controllers chooses"),
        (("--store", "http://s"), "not the address of an etcd"),
        (("--node-condition", "Ready"), "is True of every host that is well"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(run.command, [*TYPED, "--dry-run", *words, "t.py"])

    assert result.exit_code == 1
    assert said in result.output


MANAGED = Path(__file__).resolve().parents[3] / "examples" / "kubernetes" / "managed"
OF_THE_EXAMPLE = (
    *("--nnodes", "2", "--nproc-per-node", "8", "--spares", "1", "--resource", "huawei.com/Ascend910=8"),
    *("--volume", "checkpoints:/checkpoints", "/train.py"),
)


def example() -> str:
    """Return what examples/kubernetes/managed/job.yaml has: a dry run without the secret."""
    return yaml.safe_dump_all((each for each in printed(*OF_THE_EXAMPLE) if each["kind"] != "Secret"), sort_keys=False)


def test_the_example_is_what_a_dry_run_prints_without_its_secret() -> None:
    """Run as a script, this file writes it."""
    assert (MANAGED / "job.yaml").read_text() == example()


def test_the_kustomization_has_the_job_and_makes_the_secret_that_it_mounts() -> None:
    kustomization = yaml.safe_load((MANAGED / "kustomization.yaml").read_text())

    assert kustomization["resources"] == ["job.yaml"]
    assert kustomization["secretGenerator"] == [{"name": "midstep-demo", "files": ["token", "join"]}]
    assert kustomization["generatorOptions"] == {"disableNameSuffixHash": True}


def test_the_template_of_the_example_fits_a_pod() -> None:
    template = yaml.safe_load((MANAGED / "agent.yaml").read_text())
    pod = agent_pod(Settings("demo", "image", agent=template), "node0", CONTROLLERS)

    assert codecs.from_dict(pod).metadata.name == "midstep-demo-node0"  # type: ignore[union-attr]
    assert {mount["name"] for mount in agent(pod)["volumeMounts"]} == {"midstep-token", "shm", "driver"}


def test_the_template_and_the_group_for_npus_fit_each_other() -> None:
    """The pod reads what the plugin writes for the resource that it asks for."""
    template, over = (yaml.safe_load((MANAGED / f"npu-{each}.yaml").read_text()) for each in ("agent", "pod-group"))
    settings = msgspec.structs.replace(SETTINGS, agent=template, pod_group=over)
    pod = agent_pod(settings, "node0", CONTROLLERS)

    (devices,) = (each for each in agent(pod)["env"] if each["name"] == "ASCEND_VISIBLE_DEVICES")
    assert devices["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.annotations['{next(iter(NPUS))}']"
    assert pod["metadata"]["labels"].items() > over["metadata"]["labels"].items()
    assert codecs.from_dict(objects(settings)["PodGroup"]).metadata.annotations == over["metadata"]["annotations"]  # type: ignore[union-attr]


def test_the_dockerfile_names_a_version_of_its_base() -> None:
    lines = (MANAGED / "Dockerfile").read_text().splitlines()

    (base,) = (line.partition("=")[2] for line in lines if line.startswith("ARG BASE="))
    assert base.partition(":")[2].count(".") == 2


def test_the_docs_give_a_reason_for_each_right() -> None:
    page = (MANAGED.parents[2] / "docs" / "kubernetes-managed.md").read_text()

    for right in (*rules.RIGHTS, *rules.LEASE_RIGHTS, *rules.CLUSTER_RIGHTS):
        assert f"| `{right.resource}` | `{right.verb}` | {right.why} |" in page


if __name__ == "__main__":
    (MANAGED / "job.yaml").write_text(example())
