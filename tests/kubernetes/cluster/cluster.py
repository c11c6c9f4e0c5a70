"""A cluster: its machines, what runs on them, and how it is asked, hurt and taken down."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import psutil

from ...machines.machines import Machine, Machines
from .cgroups import Groups, remove_stale
from .control_plane import NAMES_ADDRESS, STORE_PORT, TOKEN, ControlPlane
from .image import IMAGE, REPOSITORY, add_folders, write_image
from .programs import require_programs

_TEMPORARY = Path("/tmp")
LOCK = _TEMPORARY / "midstep-kubernetes.lock"
PATIENCE_S = 240.0  # for anything that Kubernetes has to do; the computer may be busy
LOCKED_S = 900.0  # for another cluster of this computer to be gone
NPUS = 8
RESOURCE = "huawei.com/Ascend910"
_COMMAND_S = 60.0
_POLL_S = 0.2
_PREFIX = "midstep-kubernetes-"  # of what a cluster makes on this computer: folders and cgroups
_NODE = Path(__file__).with_name("node.sh")
_END_OF_LOG = 3000  # characters


class Cluster:
    """Machine m0 with the control plane, and a node on each of the others. Raises NoKubernetes, CannotMakeMachines."""

    def __init__(self, nodes: int, shared: Sequence[Path] = (), *, state: Path | None = None) -> None:
        """Bring it up. `shared`: folders that all machines see. `state`: one for its own files."""
        self._programs = require_programs()
        self._lock = _lock()
        self._groups: dict[int, Groups] = {}
        self._made: list[Groups] = []
        self._kubelets: dict[int, subprocess.Popen[bytes]] = {}
        self._machines: Machines | None = None
        self.state = _empty(state)
        try:
            self._bring_up(nodes, shared)
        except BaseException:
            self.close()
            raise

    def _bring_up(self, nodes: int, shared: Sequence[Path]) -> None:
        (self.state / "logs").mkdir()
        write_image(self.state / "image.tar", self._programs.busybox)
        self._write_specification()
        self._machines = Machines(nodes + 1, (REPOSITORY, self.state, *shared), user=False)
        self.control_plane = ControlPlane(self.machines[0], self.state, self._programs)
        self.until(self._is_api_ready, "the API server")
        self.control_plane.start_controllers()
        for number in range(1, nodes + 1):
            self.start_node(number)
        self.until(lambda: self._ready_nodes() == nodes, "the nodes")
        # A pod is admitted only when its namespace has an account for it.
        self.until(lambda: bool(self.kubectl("get", "serviceaccount", "default", check=False)), "the first account")

    @property
    def machines(self) -> Machines:
        """Its machines: m0 has the control plane."""
        assert self._machines is not None
        return self._machines

    @property
    def kubeconfig(self) -> Path:
        """The file with which one is the administrator, from any of the machines."""
        return self.control_plane.kubeconfig

    @property
    def store(self) -> str:
        """Where controllers of jobs can keep these, on m0: its etcd."""
        return f"etcd://{self.machines[0].address}:{STORE_PORT}/of-jobs"

    # --- asking it ------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return what a program needs in its environment to ask the cluster."""
        return {"KUBECONFIG": str(self.kubeconfig), "PATH": f"{self._programs.path}:/usr/sbin:/usr/bin:/sbin:/bin"}

    def kubectl(self, *words: str, check: bool = True, limit_s: float = _COMMAND_S) -> str:
        """Run kubectl on m0 and return what it prints. Raises AssertionError when it fails and `check` is set."""
        said = (f"{name}={value}" for name, value in self.environment().items())
        return self.machines[0].run("env", *said, "kubectl", *words, limit_s=limit_s, check=check)

    def get(self, *words: str) -> dict[str, Any]:
        """Return what `kubectl get` knows: an object, or a list of them in `items`."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def apply(self, *documents: dict[str, Any], options: Sequence[str] = ()) -> str:
        """Apply documents, as `kubectl apply` does."""
        with tempfile.NamedTemporaryFile("w", dir=self.state, suffix=".json") as file:
            json.dump({"apiVersion": "v1", "kind": "List", "items": documents}, file)
            file.flush()
            return self.kubectl("apply", "-f", file.name, *options)

    def until(self, holds: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
        """Wait for something that has to happen. Raises AssertionError, with the ends of all logs."""
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{self.said()}"
            time.sleep(_POLL_S)

    def said(self) -> str:
        """Return the ends of all logs."""
        logs = sorted((self.state / "logs").glob("*"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-_END_OF_LOG:]}" for log in logs)

    # --- its nodes ------------------------------------------------------------------------------------------------

    def start_node(self, number: int) -> None:
        """Start containerd and a kubelet on a machine that has just booted."""
        groups = self._groups[number] = Groups(f"{_PREFIX}{os.getpid()}-m{number}")
        self._made.append(groups)
        machine = self.machines[number]
        join = "".join(f"echo 0 > {folder}/cgroup.procs\n" for folder in groups.folders)
        where = (str(number), machine.address, str(self.state), str(self._programs.network_plugins))
        self._kubelets[number] = machine.start(
            ("sh", "-ec", f'{join}exec unshare --cgroup "$@"', "sh", str(_NODE), *where, *groups.hierarchies),
            environment={**self.environment(), "IMAGE": IMAGE, "NAMES": NAMES_ADDRESS},
            output=self.state / "logs" / f"kubelet-m{number}.log",
        )

    def stop_kubelet(self, number: int) -> None:
        """Have a node's kubelet stand still; its containers run on."""
        self.machines[number].run("pkill", "-STOP", "-x", "kubelet")

    def continue_kubelet(self, number: int) -> None:
        """Have it run again."""
        self.machines[number].run("pkill", "-CONT", "-x", "kubelet")
        os.kill(self._kubelets[number].pid, signal.SIGCONT)  # nsenter stops with the process that it has started

    def power_off(self, number: int) -> None:
        """Take the power of a node's machine."""
        self.machines[number].power_off()
        self._groups.pop(number).remove()

    def power_on(self, number: int) -> None:
        """Boot a machine that was powered off, and start its node."""
        self.machines[number].power_on()
        self.start_node(number)

    def stop_api(self) -> None:
        """Kill the API server. Kubelets and containers run on."""
        self.control_plane.stop_api()

    def start_api(self) -> None:
        """Start it again, and wait until it answers."""
        self.control_plane.start_api()
        self.until(self._is_api_ready, "the API server to be back")

    def execute_in(self, machine: Machine, container: str, *words: str, limit_s: float = _COMMAND_S) -> str:
        """Run a command in a container through the runtime of its machine, and return what it prints; or nothing."""
        where = ("--namespace", "k8s.io", "tasks", "exec", "--exec-id", f"test{time.monotonic_ns()}", container)
        path = f"PATH={self.environment()['PATH']}"
        return machine.run("env", path, "ctr", *where, *words, limit_s=limit_s, check=False)

    def machine_of(self, pod: str) -> Machine:
        """Return the machine on which a pod is."""
        return self.machines[int(self.get("pod", pod)["spec"]["nodeName"].removeprefix("m"))]

    def is_on(self, host: str) -> bool:
        """Say whether the machine of a node has power."""
        return int(host.removeprefix("m")) in self._groups

    def _is_api_ready(self) -> bool:
        return self.kubectl("get", "--raw", "/readyz", check=False) == "ok"

    def _ready_nodes(self) -> int:
        """Count the nodes that are ready, and give each that has just come its NPUs, as a device plugin does."""
        ready = 0
        for node in self.get("nodes")["items"]:
            if RESOURCE not in node["status"]["capacity"]:
                self._give_npus(node["metadata"]["name"])
            else:
                conditions = {each["type"]: each["status"] for each in node["status"]["conditions"]}
                ready += conditions["Ready"] == "True" and RESOURCE in node["status"]["allocatable"]
        return ready

    def _give_npus(self, node: str) -> None:
        path = f"/status/capacity/{RESOURCE.replace('/', '~1')}"
        self._patch_status(node, [{"op": "add", "path": path, "value": str(NPUS)}], "json")

    def set_condition(self, node: str, kind: str, *, holds: bool) -> None:
        """Say of a node that it has a condition, or not any more, as node-problem-detector does."""
        said = {"type": kind, "status": str(holds), "reason": "Test", "message": "of the test"}
        self._patch_status(node, {"status": {"conditions": [said]}}, "strategic-merge")

    def _patch_status(self, node: str, patch: Any, how: str) -> None:
        """Patch what kubectl of this version cannot."""
        token = f"Authorization: Bearer {TOKEN}"
        url = f"https://{self.machines[0].address}/api/v1/nodes/{node}/status"
        kind = f"Content-Type: application/{how}-patch+json"
        self.machines[0].run("curl", "-skf", "-X", "PATCH", "-H", token, "-H", kind, url, "-d", json.dumps(patch))

    def _write_specification(self) -> None:
        done = subprocess.run(
            ["ctr", "oci", "spec"],
            env={"PATH": self._programs.path},
            capture_output=True,
            check=True,
            timeout=_COMMAND_S,
        )
        specification = json.loads(done.stdout)
        add_folders(specification)
        (self.state / "specification.json").write_text(json.dumps(specification))

    # --- its end --------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Cluster":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it down."""
        self.close()

    def leftovers(self) -> list[str]:
        """Return what is left of it on this computer: folders, cgroups, processes."""
        folders = [self.state, *(folder for groups in self._made for folder in groups.folders)]
        left = [str(folder) for folder in folders if folder.exists()]
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            left += [words] if str(self.state) in words else []
        return left

    def close(self) -> None:
        """End everything, and leave nothing. Idempotent."""
        if self._machines is not None:
            self._machines.close()
        while self._groups:
            self._groups.popitem()[1].remove()
        shutil.rmtree(self.state, ignore_errors=True)
        self._lock.close()


def _lock() -> TextIO:
    """Take the one lock of this computer's clusters, which is free when it is closed; tidy up after the last one."""
    lock = LOCK.open("a")
    deadline = time.monotonic() + LOCKED_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert time.monotonic() < deadline, f"another cluster of this computer holds {LOCK}"
            time.sleep(_POLL_S)
        else:
            break
    try:
        _remove_stale()
    except BaseException:
        lock.close()
        raise
    return lock


def _empty(state: Path | None) -> Path:
    """Return an empty folder, which is removed when the cluster is down."""
    if state is None:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_TEMPORARY))
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir()
    return state


def _remove_stale() -> None:
    """Remove what a cluster has left whose process was killed: its machines have ended with it."""
    remove_stale(_PREFIX)
    for folder in _TEMPORARY.glob(f"{_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)
