"""An AscendJob as ClusterD sees it: its objects, as the operator, Volcano, the device plugin and users make them.

Nothing runs in its pods, which a test says to be running: the job's processes are on this computer, started by
`midstep run`. Pod 0 has the first ranks.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..kubernetes.mindcluster import operator
from ..kubernetes.mindcluster.api import GROUPS, JOBS, NODES, PODS, Api, Thing

RESOURCE = "huawei.com/Ascend910"
_DEVICE_INFO = "/api/v1/namespaces/kube-system/configmaps"
_CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
_MASTER, _WORKER = "Master", "Worker"
PASSING, LASTING = "80C98002", "80E3A201"
"""Fault codes, of the levels RestartRequest and SeparateNPU in MindCluster's faultCode.json."""
_LEVELS = {PASSING: "RestartRequest", LASTING: "SeparateNPU"}


class AscendJob:
    """A job of two pods, each on its node, with some devices. `strategies`: those that ClusterD may choose.

    Without any, the job has no label by which ClusterD would lead it.
    """

    def __init__(
        self,
        api: Api,
        name: str,
        strategies: Sequence[str],
        *,
        devices: int = 2,
        annotations: Mapping[str, str] | None = None,
        has_reset_info: bool = True,
    ) -> None:
        self.name = name
        self._api = api
        self._devices = devices
        self._nodes: dict[int, str] = {}  # of the pods
        self._made = 0
        labels = {"framework": "pytorch"}
        marked = {**({"recover-strategy": ",".join(strategies)} if strategies else {}), **(annotations or {})}
        metadata = {"name": name, "labels": labels, "annotations": marked}
        resources = {"requests": {RESOURCE: str(devices)}, "limits": {RESOURCE: str(devices)}}
        container = {"name": operator.CONTAINER, "image": "none", "resources": resources}
        template = {"spec": {"containers": [container]}}
        replicas = {
            kind: {"replicas": 1, "restartPolicy": "Never", "template": template} for kind in (_MASTER, _WORKER)
        }
        thing = {
            "apiVersion": "mindxdl.gitee.com/v1",
            "kind": "AscendJob",
            "metadata": metadata,
            "spec": {"runPolicy": {"schedulingPolicy": {"queue": "default"}}, "replicaSpecs": replicas},
        }
        made = api.send("POST", JOBS, thing)
        assert made is not None, f"there is a job {name} already"
        self._job: Thing = {**made, "apiVersion": thing["apiVersion"], "kind": thing["kind"]}
        self.uid = str(made["metadata"]["uid"])
        if has_reset_info:
            self._write(_CONFIG_MAPS, f"reset-config-{name}", {"reset.json": '{"RankList":[]}', "checkCode": ""}, {})
        self.group = f"{GROUPS}/{operator.group_name(self._job)}"
        api.send("POST", GROUPS, operator.pod_group(self._job))
        self._say_group("Running")
        for index in (0, 1):
            self.make_pod(index)

    def annotate(self, annotations: Mapping[str, str | None]) -> None:
        """Change annotations of the PodGroup."""
        self._api.change(self.group, {"metadata": {"annotations": dict(annotations)}})

    def annotation(self, key: str) -> str | None:
        """Return an annotation of the PodGroup."""
        found = self._api.send("GET", self.group)
        assert found is not None
        value: str | None = found["metadata"]["annotations"].get(key)
        return value

    # --- pods -------------------------------------------------------------------------------------------------------

    def make_pod(self, index: int) -> None:
        """Make a pod, on a node of its own, and say that it runs."""
        node = f"{self.name}-node-{self._made}"
        self._made += 1
        self._nodes[index] = node
        self._make_node(node)
        kind = _WORKER if index else _MASTER
        made = operator.pod(self._job, kind, max(0, index - 1), _service(self._job), 0)
        numbers = ",".join(f"Ascend910-{each}" for each in range(self._devices))
        listed = [{"device_id": str(each), "device_ip": f"10.0.{index}.{each + 1}"} for each in range(self._devices)]
        of_plugin = {
            "pod_name": made["metadata"]["name"],
            "server_id": f"10.1.0.{self._made}",
            "host_ip": f"10.1.0.{self._made}",
            "devices": listed,
            "super_pod_id": -2,
        }
        made["metadata"]["annotations"] |= {
            RESOURCE: numbers,
            "huawei.com/AscendReal": numbers,
            "ascend.kubectl.kubernetes.io/ascend-910-configuration": json.dumps(of_plugin),
        }
        made["spec"]["nodeName"] = node
        sent = self._api.send("POST", PODS, made)
        assert sent is not None, made
        self._api.change(f"{PODS}/{made['metadata']['name']}/status", {"status": {"phase": "Running"}})

    def replace_pod(self, index: int) -> None:
        """Delete a pod and make the next one, as Volcano and the operator do with one on a node with a fault."""
        name = f"{self.name}-worker-{index - 1}" if index else f"{self.name}-master-0"
        self._say_group("Inqueue")
        self._api.delete(f"{PODS}/{name}", 0)
        self.make_pod(index)
        self._say_group("Running")

    def node_of(self, index: int) -> str:
        """Return the node of a pod."""
        return self._nodes[index]

    def _say_group(self, phase: str) -> None:
        self._api.change(self.group, {"status": {"phase": phase, "running": 2 if phase == "Running" else 1}})

    def _make_node(self, name: str) -> None:
        self._api.send("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "of the tests"}
        self._api.change(f"{NODES}/{name}/status", {"status": {"conditions": [ready]}})
        self._write_devices(name, {})

    # --- devices ----------------------------------------------------------------------------------------------------

    def hurt(self, rank: int, code: str) -> None:
        """Give the device of a rank a fault, as its device plugin writes it."""
        self._write_devices(self._nodes[rank // self._devices], {rank % self._devices: code})

    def heal(self, rank: int) -> None:
        """Take the faults of a rank's node back."""
        self._write_devices(self._nodes[rank // self._devices], {})

    def _write_devices(self, node: str, codes: Mapping[int, str]) -> None:
        now_ms = int(time.time() * 1000)
        faults = [_fault(f"Ascend910-{number}", code, now_ms) for number, code in codes.items()]
        well = [f"Ascend910-{each}" for each in range(self._devices) if each not in codes]
        listed = {
            RESOURCE: ",".join(well),
            f"{RESOURCE}-Fault": json.dumps(faults),
            f"{RESOURCE}-NetworkUnhealthy": "",
            f"{RESOURCE}-Recovering": "",
            f"{RESOURCE}-Unhealthy": ",".join(f"Ascend910-{each}" for each in codes),
        }
        info = {"DeviceList": listed, "UpdateTime": now_ms // 1000}
        checked = hashlib.sha256(json.dumps(info, separators=(",", ":")).encode()).hexdigest()
        whole = {"DeviceInfo": info, "SuperPodID": 0, "RackID": -2, "ServerIndex": 0, "CheckCode": checked}
        name = f"mindx-dl-deviceinfo-{node}"
        self._write(_DEVICE_INFO, name, {"DeviceInfoCfg": json.dumps(whole)}, {"mx-consumer-cim": "true"})

    def _write(self, path: str, name: str, data: dict[str, str], labels: dict[str, str]) -> None:
        thing: dict[str, Any] = {"metadata": {"name": name, "labels": labels}, "data": data}
        if self._api.send("POST", path, {"apiVersion": "v1", "kind": "ConfigMap", **thing}) is None:
            self._api.change(f"{path}/{name}", {"data": data})


def _fault(device: str, code: str, now_ms: int) -> Thing:
    level = _LEVELS[code]
    return {
        "fault_type": "CardUnhealthy",
        "npu_name": device,
        "large_model_fault_level": level,
        "fault_level": level,
        "fault_handling": level,
        "fault_code": code,
        "fault_time_and_level_map": {code: {"fault_time": now_ms, "fault_level": level}},
    }


def _service(job: Thing) -> Thing:
    """Return the master's Service, which leads nowhere."""
    made = operator.service(job)
    return {**made, "spec": {**made["spec"], "clusterIP": "198.18.250.99"}}
