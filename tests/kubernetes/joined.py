"""A job in pods that are not midstep's: `midstep run --rdzv-endpoint` is the command of a user's own containers.

The pods belong to two Jobs of Kubernetes behind one headless Service, as those of a JobSet do: `first`, whose pod runs
the controller, and `others`.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from midstep.protocol.token import new_token, token_text

from ..chaos.jobs import TRAINING, Record, read_record
from .cluster.cluster import PATIENCE_S, RESOURCE, Cluster
from .cluster.image import IMAGE

MIDSTEP = (sys.executable, "-m", "midstep.cli.main")
PORT = 29_400
FIRST = "first"  # the host name of the pod with the controller
SECRET_FOLDER = "/var/run/midstep"
HOME = "/tmp/jobs"  # of each container alone
_NEVER = 1_000_000  # failures after which a Job is given up
_STATUS_S = 60.0
_GRACE_S = 5


class JoinedJob:
    """A job of `nodes` nodes with `ranks_per_node` ranks each, in the first pod and `others`."""

    def __init__(
        self,
        cluster: Cluster,
        root: Path,
        name: str,
        *,
        nodes: int = 2,
        ranks_per_node: int = 2,
        others: int = 0,
        steps: int,
        step_s: float = 0.01,
        gates: Sequence[int] = (),
        policy: dict[str, Any] | None = None,
        npus: int = 8,
        shared_directory: bool = True,
    ) -> None:
        """Apply its documents. `gates`: steps in front of which all ranks are held. `npus`: of each pod.

        `shared_directory`: the job's directory is among what all see, and not in the first pod alone.
        """
        self.cluster = cluster
        self.root = root
        self.name = name
        self._npus = npus
        self._directory = ("--job-dir", str(self.job_directory())) if shared_directory else ()
        self.ranks = nodes * ranks_per_node
        self._records = root / "records"
        self._records.mkdir(parents=True)
        for step in gates:
            self._gate(step).touch()
        chosen = {"checkpoint": {"every_steps": 50, "directory": str(root / "checkpoints")}, **(policy or {})}
        chosen["stall"] = {"grace_s": PATIENCE_S}  # a gate is no stall
        (root / "policy.yaml").write_text(yaml.safe_dump(chosen))
        self._token = token_text(new_token(job=name))
        self.endpoint = f"{FIRST}.{name}:{PORT}"
        self._shape = ("--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node))
        self._training = (str(TRAINING), str(self._records), str(steps), str(step_s))
        cluster.apply(*self.documents(others))

    # --- its documents --------------------------------------------------------------------------------------------

    def documents(self, others: int) -> list[dict[str, Any]]:
        """Return all that it is made of. `others`: pods beside the first."""
        jobs = [self._job(FIRST, 1), *([self._job("others", others)] if others else [])]
        return [self.service(), self.secret(), *jobs]

    def service(self) -> dict[str, Any]:
        """Return the headless Service that gives the first pod a name."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "labels": {"job": self.name}},
            "spec": {"clusterIP": "None", "selector": {"job": self.name}, "publishNotReadyAddresses": True},
        }

    def secret(self) -> dict[str, Any]:
        """Return the Secret with the job's token."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self.name, "labels": {"job": self.name}},
            "stringData": {"token": self._token},
        }

    def pod(self, *command: str, hostname: str = "", restart: str = "OnFailure") -> dict[str, Any]:
        """Return the template of a pod with a command; `hostname` makes it known as HOSTNAME.NAME."""
        container = {
            "name": "train",
            "image": IMAGE,
            "command": list(command),
            "env": [{"name": "MIDSTEP_HOME", "value": HOME}, {"name": "OMP_NUM_THREADS", "value": "1"}],
            "resources": {"limits": {RESOURCE: self._npus}},
            "volumeMounts": [
                {"name": "token", "mountPath": SECRET_FOLDER, "readOnly": True},
                {"name": "shared", "mountPath": str(self.root)},
            ],
        }
        specification: dict[str, Any] = {
            "restartPolicy": restart,
            "terminationGracePeriodSeconds": _GRACE_S,
            "containers": [container],
            "volumes": [
                {"name": "token", "secret": {"secretName": self.name}},
                {"name": "shared", "hostPath": {"path": str(self.root)}},
            ],
        }
        if hostname:
            specification |= {"hostname": hostname, "subdomain": self.name}
        return {"metadata": {"labels": {"job": self.name}}, "spec": specification}

    def run_command(self, *, hosts: bool) -> tuple[str, ...]:
        """Return the words of `midstep run` in a pod; `hosts`: in the one that runs the controller."""
        meet = ("--rdzv-endpoint", self.endpoint, "--rdzv-conf", f"is_host={int(hosts)}")
        own = (*self._directory, "--policy", str(self.root / "policy.yaml")) if hosts else ()
        token = ("--token-file", f"{SECRET_FOLDER}/token")
        return (*MIDSTEP, "run", *self._shape, *meet, *token, *own, *self._training)

    def _job(self, part: str, pods: int) -> dict[str, Any]:
        hosts = part == FIRST
        template = self.pod(*self.run_command(hosts=hosts), hostname=FIRST if hosts else "")
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{self.name}-{part}", "labels": {"job": self.name}},
            "spec": {"parallelism": pods, "completions": pods, "backoffLimit": _NEVER, "template": template},
        }

    def start_agent(self, pod: str) -> None:
        """Start a pod whose container is a node's agent, and never a second time. It is called as the pod is."""
        words = ("--controller", self.endpoint, "--token-file", f"{SECRET_FOLDER}/token", "--node", pod)
        template = self.pod(*MIDSTEP, "agent", *words, restart="Never")
        template["metadata"]["name"] = pod
        self.cluster.apply({"apiVersion": "v1", "kind": "Pod", **template})

    # --- watching -------------------------------------------------------------------------------------------------

    def pods(self) -> list[dict[str, Any]]:
        """Return its pods that have not ended."""
        found: list[dict[str, Any]] = self.cluster.get("pods", "-l", f"job={self.name}")["items"]
        return [pod for pod in found if pod["status"]["phase"] in {"Pending", "Running"}]

    def is_first(self, pod: dict[str, Any]) -> bool:
        """Say whether a pod runs the controller."""
        return bool(pod["spec"].get("hostname") == FIRST)

    def first(self) -> str:
        """Return the name of the pod that runs the controller."""
        (pod,) = filter(self.is_first, self.pods())
        name: str = pod["metadata"]["name"]
        return name

    def execute(self, pod: str, *words: str, check: bool = True) -> str:
        """Run a command in a pod's container, as `kubectl exec` does."""
        return self.cluster.kubectl("exec", pod, "--", *words, check=check, limit_s=_STATUS_S)

    def status(self) -> dict[str, Any] | None:
        """Return what `midstep status --json` says in the first pod; None while it says nothing."""
        hosts = [pod["metadata"]["name"] for pod in self.pods() if self.is_first(pod)]
        said = self.execute(hosts[0], *MIDSTEP, "status", "--json", *self._directory[1:], check=False) if hosts else ""
        status: dict[str, Any] | None = json.loads(said) if said.startswith("{") else None
        return status

    def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Wait until the status is as wanted, and return it."""
        seen: list[dict[str, Any]] = []

        def as_wanted() -> bool:
            status = self.status()
            if status is not None:
                seen.append(status)
            return status is not None and holds(status)

        try:
            self.cluster.until(as_wanted, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(seen[-1:])}\n{self.said()}") from None
        return seen[-1]

    def held_at(self, step: int) -> dict[str, Any]:
        """Wait until all ranks stand at the gate of a step, with no incident open."""

        def held(status: dict[str, Any]) -> bool:
            return status["phase"] == "running" and all(rank["step"] == step for rank in status["ranks"])

        return self.until(held, f"all ranks at the gate of step {step}")

    def until_spare(self) -> None:
        """Wait until a pod is a spare."""
        self.until(lambda status: any(node["state"] == "spare" for node in status["nodes"]), "a spare")

    def pod_of(self, node: str) -> str:
        """Return the name of a node's pod: a node has its host's name, with a number where that was in use."""
        if node.startswith(FIRST):
            return self.first()
        (name,) = (each["metadata"]["name"] for each in self.pods() if node.startswith(each["metadata"]["name"]))
        return str(name)

    def _gate(self, step: int) -> Path:
        return self._records / f"gate.{step}"

    def open_gate(self, step: int) -> None:
        """Let the ranks go on into a step."""
        self._gate(step).unlink()

    def record(self) -> Record:
        """Return what the ranks wrote down."""
        return read_record(self._records)

    # --- hurting --------------------------------------------------------------------------------------------------

    def crash(self, pod: str) -> None:
        """Kill pid 1 of a pod's container from outside: from within, the kernel does not let it be killed."""
        identity = self.cluster.get("pod", pod)["status"]["containerStatuses"][0]["containerID"].removeprefix(
            "containerd://"
        )
        programs = (f"{name}={value}" for name, value in self.cluster.environment().items())
        socket = ("--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io")
        kill = ("ctr", *socket, "tasks", "kill", "--signal", "SIGKILL", identity)
        self.cluster.machine_of(pod).run("env", *programs, *kill)

    # --- its end --------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Wait for its end, and return what `midstep report --json` says."""
        self.until_complete()
        done = subprocess.run(
            [*MIDSTEP, "report", "--json", str(self.job_directory())],
            capture_output=True,
            check=True,
            timeout=PATIENCE_S,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def job_directory(self) -> Path:
        """Return where its controller keeps it."""
        return self.root / "job"

    def until_complete(self) -> None:
        """Wait until Kubernetes calls its Jobs complete."""

        def complete() -> bool:
            jobs = self.cluster.get("jobs", "-l", f"job={self.name}")["items"]
            return all(job["status"].get("succeeded") == job["spec"]["completions"] for job in jobs)

        try:
            self.cluster.until(complete, "the Jobs to be complete")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def said(self) -> str:
        """Return what its pods are and have printed."""
        chosen = ("-l", f"job={self.name}")
        return "\n".join(
            self.cluster.kubectl(*words, check=False)
            for words in (
                ("get", "pods", *chosen, "-o", "wide"),
                ("describe", "pods", *chosen),
                ("logs", *chosen, "--prefix", "--tail", "60"),
            )
        )

    def delete(self) -> None:
        """Delete all that it is made of, at once."""
        kinds = "jobs,pods,services,secrets"
        self.cluster.kubectl("delete", kinds, "-l", f"job={self.name}", "--grace-period=0", "--force", "--wait=false")
