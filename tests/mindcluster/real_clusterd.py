"""ClusterD's own program, as in its pod: its places are folders of the test, its rights those of its manifest."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import yaml

from .api_server import CLUSTERD_TOKEN, ApiServer

ADDRESS, PORT = "127.0.0.1", 8899  # the port is fixed there
_READY_S = 60.0
_END_S = 30.0
_COVERED = {"log": "/var/log", "home": "/home", "run": "/run"}
_START = " && ".join(f'mount --bind "$0/{name}" {place}' for name, place in _COVERED.items()) + " && exec /run/clusterd"
_MANIFESTS = {
    "component/clusterd/build/clusterd.yaml": ("ConfigMap", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"),
    "component/ascend-operator/build/ascend-operator.yaml": ("CustomResourceDefinition",),
    "component/ascend-for-volcano/build/volcano-v1.9.0.yaml": ("CustomResourceDefinition",),
}
_KINDS = (
    "mindxdl.gitee.com/v1/ascendjobs",
    "scheduling.volcano.sh/v1beta1/podgroups",
    "batch.volcano.sh/v1alpha1/jobs",
)
_DEFINED = frozenset({"ascendjobs.mindxdl.gitee.com", "podgroups.scheduling.volcano.sh", "jobs.batch.volcano.sh"})


def install(server: ApiServer, checkout: Path) -> None:
    """Make what an installation of MindCluster makes: definitions, namespaces, ClusterD's account and configuration."""
    for namespace in ("mindx-dl", "cluster-system"):
        server.make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for manifest, kinds in _MANIFESTS.items():
        for thing in yaml.load_all((checkout / manifest).read_text(), yaml.CSafeLoader):
            if not thing or thing["kind"] not in kinds:
                continue
            if thing["kind"] != "CustomResourceDefinition" or thing["metadata"]["name"] in _DEFINED:
                thing.pop("status", None)
                server.make(thing)
    server.until(
        lambda: all(server.api.send("GET", f"/apis/{each}") is not None for each in _KINDS), "MindCluster's kinds"
    )


class RealClusterd:
    """One ClusterD, which can be killed and started again."""

    def __init__(self, folder: Path, program: Path, checkout: Path, server: ApiServer) -> None:
        self._folder = folder
        self.server = server
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        for name in (*_COVERED, "log/mindx-dl/clusterd/grpc", "home/hwMindX"):
            (folder / name).mkdir(parents=True)
        (folder / "log/mindx-dl/clusterd").chmod(0o750)
        for each in (checkout / "component/clusterd/build").iterdir():
            if each.suffix == ".json" or each.name == "fdConfig.yaml":
                shutil.copyfile(each, folder / "home/hwMindX" / each.name)
        shutil.copy(program, folder / "run/clusterd")
        account = folder / "run/secrets/kubernetes.io/serviceaccount"
        account.mkdir(parents=True)
        (account / "token").write_text(CLUSTERD_TOKEN)
        shutil.copyfile(server.certificate, account / "ca.crt")

    def start(self) -> "RealClusterd":
        """Start it, and wait until it serves."""
        environment = {
            "PATH": os.environ["PATH"],
            "POD_IP": ADDRESS,
            "KUBERNETES_SERVICE_HOST": ADDRESS,
            "KUBERNETES_SERVICE_PORT": str(self.server.port),
        }
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _START, str(self._folder)]
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self._starts += 1
        deadline = time.monotonic() + _READY_S
        while self.said().count("clusterd starts to serve") < self._starts or not _listens():
            assert self._process.poll() is None, f"ClusterD has ended:\n{(self._folder / 'output').read_text()}"
            assert time.monotonic() < deadline, f"ClusterD does not serve:\n{self.said()}"
            time.sleep(0.2)
        return self

    def kill(self) -> None:
        """Kill it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
            self._process = None

    def until_subscribed(self, task: str, times: int = 1) -> None:
        """Wait until it has had the subscription of a job so often."""
        asked = f"receive Subscribe signal request, taskId={task}"
        self.server.until(lambda: self.said().count(asked) >= times, f"the subscription of {task}")

    def said(self) -> str:
        """Return its log; what it writes to it, it prints as well."""
        log = self._folder / "log/mindx-dl/clusterd/clusterd.log"
        return log.read_text(errors="replace") if log.exists() else ""


def _listens() -> bool:
    with socket.socket() as asking:
        asking.settimeout(1.0)
        return asking.connect_ex((ADDRESS, PORT)) == 0
