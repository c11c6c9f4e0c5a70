"""The manifests of examples/kubernetes have only fields that their kinds have, fit together, and start midstep rightly.

The fields are those of the kinds' public documentation, as far as the examples use them. What a real API server knows
is tried on one, too (`make test SUITE=kubernetes`).
"""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from midstep.cli.run import command as run_command
from midstep.policies.files import parse_policy
from midstep.protocol.exits import ANOTHER_NODE, NOT_ADMITTED, RESTART_HERE

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
ANY = None  # whatever is written there
_OF_SCHEMAS: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_METADATA = {"name": ANY, "labels": ANY, "annotations": ANY}
_CONTAINER = {
    "name": ANY,
    "image": ANY,
    "command": ANY,
    "args": ANY,
    "env": ANY,
    "resources": {"limits": ANY, "requests": ANY},
    "volumeMounts": [{"name": ANY, "mountPath": ANY, "readOnly": ANY}],
    "restartPolicy": ANY,
    "restartPolicyRules": [{"action": ANY, "exitCodes": {"operator": ANY, "values": ANY}}],
}
_VOLUME = {
    "name": ANY,
    "secret": {"secretName": ANY, "defaultMode": ANY},
    "configMap": {"name": ANY},
    "persistentVolumeClaim": {"claimName": ANY},
    "emptyDir": {"medium": ANY},
    "hostPath": {"path": ANY},
}
_TEMPLATE = {
    "metadata": _METADATA,
    "spec": {
        "subdomain": ANY,
        "restartPolicy": ANY,
        "terminationGracePeriodSeconds": ANY,
        "automountServiceAccountToken": ANY,
        "schedulerName": ANY,
        "nodeSelector": ANY,
        "affinity": ANY,
        "containers": [_CONTAINER],
        "volumes": [_VOLUME],
    },
}
_JOB = {
    "completionMode": ANY,
    "completions": ANY,
    "parallelism": ANY,
    "suspend": ANY,
    "backoffLimit": ANY,
    "podReplacementPolicy": ANY,
    "podFailurePolicy": {
        "rules": [
            {
                "action": ANY,
                "onExitCodes": {"containerName": ANY, "operator": ANY, "values": ANY},
                "onPodConditions": [{"type": ANY}],
            }
        ]
    },
    "successPolicy": {"rules": [{"succeededIndexes": ANY}]},
    "template": _TEMPLATE,
}
_JOBSET = {
    "network": {"enableDNSHostnames": ANY, "publishNotReadyAddresses": ANY, "subdomain": ANY},
    "failurePolicy": {"maxRestarts": ANY},
    "replicatedJobs": [{"name": ANY, "replicas": ANY, "template": {"metadata": _METADATA, "spec": _JOB}}],
}
_REPLICAS = {"replicas": ANY, "restartPolicy": ANY, "template": _TEMPLATE}
_SCHEDULING = {"minAvailable": ANY, "queue": ANY}
_OF_KINDS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "Service"): {"spec": {"clusterIP": ANY, "publishNotReadyAddresses": ANY, "selector": ANY}},
    ("v1", "ConfigMap"): {"data": ANY},
    ("batch/v1", "Job"): {"spec": _JOB},
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {"spec": _JOBSET},
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): {
        "spec": {"mlPolicy": {"numNodes": ANY, "torch": {}}, "template": {"metadata": _METADATA, "spec": _JOBSET}}
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "spec": {
            "runtimeRef": {"apiGroup": ANY, "kind": ANY, "name": ANY},
            "trainer": {
                "numNodes": ANY,
                "numProcPerNode": ANY,
                "command": ANY,
                "args": ANY,
                "resourcesPerNode": {"limits": ANY},
            },
        }
    },
    ("kubeflow.org/v1", "PyTorchJob"): {
        "spec": {
            "runPolicy": {"cleanPodPolicy": ANY},
            "pytorchReplicaSpecs": {"Master": _REPLICAS, "Worker": _REPLICAS},
        }
    },
    ("mindxdl.gitee.com/v1", "AscendJob"): {
        "spec": {
            "schedulerName": ANY,
            "runPolicy": {"schedulingPolicy": _SCHEDULING},
            "replicaSpecs": {"Master": _REPLICAS, "Worker": _REPLICAS},
        }
    },
    ("scheduling.volcano.sh/v1beta1", "PodGroup"): {"spec": {"minMember": ANY, "queue": ANY, "minResources": ANY}},
}
_IN_DOWNWARD = {"NODE_RANK": "1", "RANK": "1", "MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "29500"}


def documents(file: Path) -> list[dict[str, Any]]:
    """Return the documents of a file."""
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def unknown(found: Any, known: Any, where: str) -> Iterator[str]:
    """Yield each field that its kind does not have."""
    if known is ANY:
        return
    if isinstance(known, list):
        for number, each in enumerate(found):
            yield from unknown(each, known[0], f"{where}[{number}]")
        return
    for name, value in found.items():
        if name not in known:
            yield f"{where}.{name}"
        else:
            yield from unknown(value, known[name], f"{where}.{name}")


def within(found: Any, name: str) -> Iterator[Any]:
    """Yield what stands under a name, wherever that is."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key == name:
                yield value
            yield from within(value, name)
    elif isinstance(found, list):
        for each in found:
            yield from within(each, name)


def commands(document: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the words with which containers start, as a shell would make them."""
    holders = [*within(document, "containers"), *([each] for each in within(document, "trainer"))]
    for holder in (each for containers in holders for each in containers):
        words = [str(word) for word in (*holder.get("command", ()), *holder.get("args", ()))]
        if words[:2] == ["sh", "-c"]:
            words = shlex.split(words[2])[1:]
        for name, value in _IN_DOWNWARD.items():
            words = [word.replace(f"$({name})", value).replace(f"${name}", value) for word in words]
        if words:
            yield words


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_field_is_one_of_its_kind(file: Path) -> None:
    """A field that Kubernetes does not know is dropped there without a word, or refused."""
    for document in documents(file):
        kind = (document.pop("apiVersion"), document.pop("kind"))
        assert not list(unknown(document, {"metadata": _METADATA, **_OF_KINDS[kind]}, kind[1]))


def misfits(found: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Yield each field that an API server with this schema would drop or refuse."""
    if schema.get("x-kubernetes-int-or-string"):
        return
    if not isinstance(found, _OF_SCHEMAS.get(schema.get("type", ""), object)):
        yield f"{where}: {found!r} is no {schema['type']}"
    elif isinstance(found, list):
        for number, each in enumerate(found):
            yield from misfits(each, schema.get("items", {}), f"{where}[{number}]")
    elif isinstance(found, dict):
        yield from (f"{where}: no {name}" for name in schema.get("required", ()) if name not in found)
        others = schema.get("additionalProperties", schema.get("x-kubernetes-preserve-unknown-fields"))
        for name, value in found.items():
            known = schema.get("properties", {}).get(name, others)
            if isinstance(known, dict):
                yield from misfits(value, known, f"{where}.{name}")
            elif not known:
                yield f"{where}.{name}"


@pytest.mark.skipif("MIDSTEP_MINDCLUSTER" not in os.environ, reason="MIDSTEP_MINDCLUSTER names no checkout")
@pytest.mark.parametrize("file", ["acjob.yaml", "kubernetes/acjob.yaml"])
def test_an_acjob_fits_mindclusters_own_definition(file: str) -> None:
    """No field of it is dropped or refused."""
    operator = Path(os.environ["MIDSTEP_MINDCLUSTER"], "component/ascend-operator/build/ascend-operator.yaml")
    definitions = [each for each in documents(operator) if each["kind"] == "CustomResourceDefinition"]
    (version,) = definitions[0]["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    jobs = [each for each in documents(FOLDER.parent / file) if each["kind"] == "AscendJob"]
    assert jobs
    for job in jobs:
        assert list(misfits({**job, "metadata": {}}, schema, "")) == []
        assert list(misfits({**job, "metadata": {}, "unknown": 1}, schema, "")) == [".unknown"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_mounted_is_a_volume_and_rules_name_a_container(file: Path) -> None:
    """In each pod."""
    for document in documents(file):
        for template in (each for each in within(document, "template") if "containers" in each.get("spec", {})):
            specification = template["spec"]
            (container,) = specification["containers"]
            volumes = {volume["name"] for volume in specification["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            named = set(within(document, "containerName"))
            assert named <= {container["name"]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_its_command_is_one_of_midstep_run(file: Path) -> None:
    """All options are known, and have values that they take."""
    found = [words for document in documents(file) for words in commands(document)]
    assert found
    for words in found:
        assert words[:2] == ["midstep", "run"]
        context = run_command.make_context("run", words[2:])
        assert isinstance(context, click.Context)
        assert context.params["token_file"] == Path("/var/run/midstep/token")
        assert context.params["nodes"].most == 2


def test_rules_treat_every_code_that_asks_for_a_new_start() -> None:
    """Those with which an agent says that it may come back are no failures; the one that never helps ends the Job."""
    policies = [each for file in FILES for document in documents(file) for each in within(document, "podFailurePolicy")]
    rules = [rule for policy in policies for rule in policy["rules"]]
    by_codes = {(rule["action"], tuple(rule["onExitCodes"]["values"])) for rule in rules if "onExitCodes" in rule}
    assert by_codes == {("FailJob", (NOT_ADMITTED,)), ("Ignore", (RESTART_HERE, ANOTHER_NODE))}


def test_the_command_of_the_ascend_job_says_that_the_node_that_is_wanted_comes() -> None:
    """As the controller runs it: without a shell, with the name in its environment."""
    (config,) = (each for each in documents(FOLDER / "acjob.yaml") if each["kind"] == "ConfigMap")
    policy = parse_policy(config["data"]["policy.yaml"], "the ConfigMap")
    assert policy.on_node_relaunch is not None
    environment = {"PATH": "/usr/bin:/bin", "MIDSTEP_WANTED": "node2"}
    answer = subprocess.run(shlex.split(policy.on_node_relaunch), env=environment, capture_output=True, check=True)
    assert json.loads(answer.stdout) == {"nodes": ["node2"]}
    assert policy.node.relaunch_brings


def test_its_policy_is_a_policy() -> None:
    """That of the ConfigMap."""
    texts = [text for file in FILES for document in documents(file) for text in within(document, "policy.yaml")]
    assert texts
    for text in texts:
        assert parse_policy(text, "the ConfigMap").checkpoint.directory == "/checkpoints/gpt"
