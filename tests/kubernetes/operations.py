"""Drains, taints and faults as operators, device plugins and Kubernetes bring them, and what is waited for then."""

import json
from typing import Any

from .cluster.cluster import Cluster
from .managed import ManagedJob

DEVICE_INFO = "kube-system"  # the namespace of the documents of MindCluster's device plugin
DEVICE = 1


def separated(device: int) -> dict[str, str]:
    """Return the fault of a device that is to be left for good."""
    return {"npu_name": f"npu-{device}", "fault_code": "80818C00", "fault_level": "SeparateNPU"}


SEPARATED = separated(DEVICE)


def leader(job: ManagedJob, *terms: int) -> str:
    """Wait until a controller leads in one of the terms and the other stands by; return its name: its pod's."""

    def both(status: dict[str, Any]) -> bool:
        phases = sorted(each["phase"] for each in status["controllers"])
        return status["term"] in terms and phases == ["cold", "hot"]

    status = job.until(both, f"a leader in term {terms}, and one that stands by")
    return str(next(each["name"] for each in status["controllers"] if each["phase"] == "hot"))


def left(job: ManagedJob, node: str) -> None:
    """Wait until no rank is on a node."""
    job.until(lambda status: all(rank["node"] != node for rank in status["ranks"]), f"the ranks to leave {node}")


def drain(job: ManagedJob, node: str) -> str:
    """Have Kubernetes drain the host of a node of this job, and return its name."""
    host = job.cluster.machine_of(job.pod_of(node)).name
    chosen = ("--pod-selector", f"midstep.io/job={job.name}", "--ignore-daemonsets", "--delete-emptydir-data")
    job.cluster.kubectl("drain", host, *chosen, "--force", "--timeout=1s", check=False)
    return host


def write(cluster: Cluster, host: str, *faults: dict[str, str]) -> None:
    """Say which faults the devices of a host have, as its device plugin does."""
    document = {"DeviceInfo": {"DeviceList": {"huawei.com/npu-Fault": json.dumps(faults)}, "UpdateTime": 0}}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"mindx-dl-deviceinfo-{host}", "namespace": DEVICE_INFO},
            "data": {"DeviceInfoCfg": json.dumps(document)},
        }
    )
