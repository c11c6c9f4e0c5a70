"""MindCluster in a cluster of the tests: its ascend-operator, and Volcano with the NPU plugin, played.

Both are Go programs that need a cluster of their own release and NPUs. What is played is what their sources of
2026-08-21 do to the pods of a job, as far as a job of midstep can notice it:

- the operator makes PodGroup, Service and pods of an AscendJob, with their labels, annotations and variables; makes a
  pod again that is gone, with its number; and fails the job at a pod that has failed, unless `fault-retry-times` says
  otherwise (`operator`)
- Volcano puts a group of pods on nodes together or not at all, writes down which NPUs each has, and with
  `fault-scheduling` deletes pods that have failed or whose node is not ready (`volcano`)
- connections to a Service's own address reach its pod, as with a kube-proxy (`services`)

Not played: the escalation to the whole job after 12 sessions without a place (`huawei.com/recover_policy_path: pod`
rules that out, and the examples have it), affinity between NPUs, super-pods, queues, ClusterD.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..cluster.cluster import Cluster
from ..cluster.control_plane import API_ADDRESS, TOKEN
from ..cluster.image import REPOSITORY

_PROGRAM = "tests.kubernetes.mindcluster"
_MAP_OF_AMOUNTS = {
    "type": "object",
    "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True},
}
_POD_GROUP = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "properties": {
                "minMember": {"type": "integer"},
                "minTaskMember": {"type": "object", "additionalProperties": {"type": "integer"}},
                "minResources": _MAP_OF_AMOUNTS,
                "priorityClassName": {"type": "string"},
                "queue": {"type": "string", "default": "default"},
            },
        },
        "status": {"type": "object", "properties": {"phase": {"type": "string"}}},
    },
}
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_ASCEND_JOB = {"type": "object", "properties": {"spec": _ANYTHING, "status": _ANYTHING}}


def kinds() -> tuple[dict[str, Any], ...]:
    """Return the definitions of AscendJob and PodGroup, with the fields of theirs that are used here."""
    return (
        _kind("mindxdl.gitee.com", "v1", "AscendJob", _ASCEND_JOB),
        _kind("scheduling.volcano.sh", "v1beta1", "PodGroup", _POD_GROUP),
    )


def _kind(group: str, version: str, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{**served, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def make_kinds_known(cluster: Cluster) -> None:
    """Have the API server know AscendJobs and PodGroups."""
    cluster.apply(*kinds())
    names = (f"crd/{each['metadata']['name']}" for each in kinds())
    cluster.kubectl("wait", "--for=condition=Established", *names)


@contextmanager
def playing(cluster: Cluster) -> Iterator[None]:
    """Have operator and Volcano run on m0 for a while."""
    make_kinds_known(cluster)
    machine = cluster.machines[0]
    words = (sys.executable, "-m", _PROGRAM, f"https://{API_ADDRESS}", TOKEN)
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    played = machine.start(words, environment=environment, output=cluster.state / "logs" / "mindcluster.log")
    try:
        yield
        assert played.poll() is None, cluster.said()
    finally:
        machine.run("pkill", "-f", "--", f"-m {_PROGRAM} ", check=False)
        played.wait()
