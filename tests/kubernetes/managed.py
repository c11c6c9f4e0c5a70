"""A job that `midstep run --platform kubernetes` starts, typed on the machine of the control plane, and follows."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from midstep.platforms.kubernetes.pods import laid_over

from ..chaos.jobs import TRAINING, Record, read_record
from ..machines.machines import Machine
from .cluster.cluster import PATIENCE_S, RESOURCE, Cluster
from .cluster.image import IMAGE

MIDSTEP = (sys.executable, "-m", "midstep.cli.main")
NEEDED: dict[str, Any] = {"checkpoint": {"every_steps": 50}, "stall": {"grace_s": PATIENCE_S}}
FIRST = ("check", "submit")
KINDS = "deployments,pods,services,secrets,configmaps,serviceaccounts,roles,rolebindings,leases,poddisruptionbudgets"
_ASK_S = 60.0


class ManagedJob:
    """A job of `nodes` pods with `ranks_per_node` ranks each, and `spares` more pods."""

    def __init__(
        self,
        cluster: Cluster,
        root: Path,
        name: str,
        *,
        nodes: int = 2,
        ranks_per_node: int = 2,
        spares: int = 0,
        steps: int,
        step_s: float = 0.01,
        gates: Sequence[int] = (),
        options: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
        npus: int = 8,
        agent: Mapping[str, Any] | None = None,
    ) -> None:
        """Type the command. `gates`: steps in front of which all ranks are held. `policy`: but for what tests need.

        `npus`: of each pod. `agent`: what its template has beside what tests need.
        """
        self.cluster, self.root, self.name = cluster, root, name
        self.ranks = nodes * ranks_per_node
        self._runtime: tuple[Machine, str] | None = None  # of the controller's container: asked in place of the API
        self.records = root / "records"
        self.records.mkdir(parents=True)
        self.directory = root / f"midstep-{name}"
        for step in gates:
            self._gate(step).touch()
        policy_file = root / "policy.yaml"
        policy_file.write_text(yaml.safe_dump({**(policy or {}), **NEEDED}))
        detector = ("detector",) if "--config-maps" in options else ()
        shape = ("--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node), "--spares", str(spares))
        words: tuple[str, ...] = (
            *shape,
            "--platform",
            "kubernetes",
            "--image",
            IMAGE,
            "--job",
            name,
            "--resource",
            f"{RESOURCE}={npus}",
        )
        words += ("--volume", f"{root}:{root}", "--policy", str(policy_file))
        words += ("--pod-template", template(root, "agent", over=agent))
        words += ("--controller-template", template(root, "controller", "platform", *detector, first=FIRST), *options)
        training = (str(TRAINING), str(self.records), str(steps), str(step_s))
        self.output = root / "output.txt"
        environment_of_it = {**cluster.environment(), "HOME": "/tmp"}
        self.process = cluster.machines[0].start(
            (*MIDSTEP, "run", *words, *training), environment=environment_of_it, output=self.output
        )

    # --- watching -------------------------------------------------------------------------------------------------

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods of its agents that have not ended."""
        chosen = f"midstep.io/job={self.name},midstep.io/role=agent"
        found: list[dict[str, Any]] = self.cluster.get("pods", "-l", chosen)["items"]
        return [pod for pod in found if pod["status"]["phase"] in {"Pending", "Running"}]

    def status(self) -> dict[str, Any] | None:
        """Return what `midstep status --json` says beside its controller; None while it says nothing."""
        said = self.in_controller(*MIDSTEP, "status", "--json")
        status: dict[str, Any] | None = json.loads(said) if said.startswith("{") else None
        return status

    def ask_through_runtime(self) -> None:
        """Ask the controller that leads through the container runtime from now on, which takes no API server."""
        pod = self.leading_pod()
        (container,) = (each for each in pod["status"]["containerStatuses"] if each["name"] == "controller")
        self._runtime = (self.cluster.machine_of(pod["metadata"]["name"]), container["containerID"].split("//")[1])

    def ask_through_api(self) -> None:
        """Ask with `kubectl exec` again."""
        self._runtime = None

    def in_controller(self, *words: str) -> str:
        """Run a command beside a controller, and return what it prints; nothing if that cannot be done."""
        if self._runtime is not None:
            return self.cluster.execute_in(*self._runtime, *words)
        for pod in self.controller_pods():
            where = ("exec", pod["metadata"]["name"], "-c", "controller", "--")
            said = self.cluster.kubectl(*where, *words, check=False, limit_s=_ASK_S)
            if said:
                return said
        return ""

    def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Wait until the status is as wanted, and return it."""
        seen: list[dict[str, Any]] = []

        def as_wanted() -> bool:
            assert self.process.poll() is None, f"midstep run has ended:\n{self.output.read_text()[-3000:]}"
            status = self.status()
            if status is not None:
                seen.append(status)
            return status is not None and holds(status)

        try:
            self.cluster.until(as_wanted, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(seen[-1:])}\n{self.said()}") from None
        return seen[-1]

    def current(self) -> dict[str, Any]:
        """Return the status, as soon as there is one."""
        return self.until(lambda status: True, "a controller to answer")

    def held_at(self, step: int) -> dict[str, Any]:
        """Wait until all ranks stand at the gate of a step, with no incident open."""

        def held(status: dict[str, Any]) -> bool:
            return status["phase"] == "running" and all(rank["step"] == step for rank in status["ranks"])

        return self.until(held, f"all ranks at the gate of step {step}")

    def until_spare(self) -> None:
        """Wait until a node is a spare."""
        self.until(lambda status: any(node["state"] == "spare" for node in status["nodes"]), "a spare")

    def until_pausing(self) -> None:
        """Wait until the ranks, which are held, were told at which step to stop: not one behind the next gate."""
        self.until(lambda status: status["phase"] == "pausing", "a boundary")

    def pod_of(self, node: str) -> str:
        """Return the name of a node's pod."""
        return f"midstep-{self.name}-{node}"

    def events(self) -> set[tuple[str, str]]:
        """Return what Events of midstep's are about, by kind and name, and their reasons."""
        found = self.cluster.get("events")["items"]
        return {
            ("/".join((each["involvedObject"]["kind"], each["involvedObject"]["name"])), each["reason"])
            for each in found
            if each["source"].get("component") == "midstep" and f"midstep-{self.name}" in each["involvedObject"]["name"]
        }

    def controller_pods(self) -> list[dict[str, Any]]:
        """Return the pods of its controllers that run, on machines that do."""
        chosen = f"midstep.io/job={self.name},midstep.io/role=controller"
        found: list[dict[str, Any]] = self.cluster.get("pods", "-l", chosen)["items"]
        return [
            pod for pod in found if pod["status"]["phase"] == "Running" and self.cluster.is_on(pod["spec"]["nodeName"])
        ]

    def controller_host(self) -> str:
        """Return the name of the machine on which the controller that leads is."""
        return str(self.leading_pod()["spec"]["nodeName"])

    def leading_pod(self) -> dict[str, Any]:
        """Return the pod of the controller that leads."""
        pods = {pod["metadata"]["name"]: pod for pod in self.controller_pods()}
        if len(pods) > 1:
            status = self.until(
                lambda status: any(each["phase"] == "hot" for each in status["controllers"]), "a leader"
            )
            pods = {each["name"]: pods[each["name"]] for each in status["controllers"] if each["phase"] == "hot"}
        (pod,) = pods.values()
        return pod

    def report_of_controller(self) -> dict[str, Any]:
        """Return what `midstep report --json` says beside a controller."""
        said = self.in_controller(*MIDSTEP, "report", "--json")
        report: dict[str, Any] = json.loads(said)
        return report

    def report(self) -> dict[str, Any]:
        """Return what `midstep report --json` says of its journal."""
        done = subprocess.run(
            [*MIDSTEP, "report", "--json", str(self.directory)], capture_output=True, check=True, timeout=PATIENCE_S
        )
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def record(self) -> Record:
        """Return what the ranks wrote down."""
        return read_record(self.records)

    def said(self) -> str:
        """Return what it is and has printed."""
        chosen = ("-l", f"midstep.io/job={self.name}")
        pieces = [self.output.read_text(errors="replace")[-4000:] if self.output.exists() else ""]
        pieces += [
            self.cluster.kubectl(*words, check=False)
            for words in (
                ("get", "pods", *chosen, "-o", "wide"),
                ("describe", "pods", *chosen),
                ("logs", *chosen, "--all-containers", "--prefix", "--tail", "40"),
            )
        ]
        return "\n".join(pieces)

    # --- acting ---------------------------------------------------------------------------------------------------

    def _gate(self, step: int) -> Path:
        return self.records / f"gate.{step}"

    def open_gate(self, step: int) -> None:
        """Let the ranks go on into a step."""
        self._gate(step).unlink()

    def execute(self, node: str, *words: str) -> str:
        """Run a command in the pod of a node."""
        return self.cluster.kubectl("exec", self.pod_of(node), "--", *words, limit_s=_ASK_S)

    def finish(self) -> dict[str, Any]:
        """Wait until `midstep run` has ended well, and return the report."""
        self.end_well()
        return self.report()

    def end_well(self) -> None:
        """Wait until `midstep run` has ended well."""
        self.cluster.until(lambda: self.process.poll() is not None, "midstep run to end")
        assert self.process.returncode == 0, self.said()

    def left(self) -> list[str]:
        """Return the names of all objects of the job that are there."""
        return self.cluster.kubectl("get", KINDS, "-l", f"midstep.io/job={self.name}", "-o", "name").split()

    def delete(self) -> None:
        """Delete what owns all that it is made of."""
        self.cluster.kubectl("delete", "deployment", f"midstep-{self.name}", "--ignore-not-found", "--wait=false")


def template(root: Path, *containers: str, first: Sequence[str] = (), over: Mapping[str, Any] | None = None) -> str:
    """Write a template with what containers in the image of the tests need, and with `over`; return its path."""
    path = {"name": "PATH", "value": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
    environment = [path, {"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "HOME", "value": "/tmp"}]
    kinds = {"containers": containers, "initContainers": first}
    spec = {kind: [{"name": name, "env": environment} for name in names] for kind, names in kinds.items()}
    file = root / f"{containers[0]}.yaml"
    whole = laid_over({"spec": spec}, dict(over or {}))
    file.write_text(yaml.safe_dump(json.loads(json.dumps(whole))))  # without aliases
    return str(file)


def victim(job: ManagedJob, status: dict[str, Any]) -> tuple[str, set[int]]:
    """Return a node that has ranks, away from the controller, and its ranks."""
    away = job.controller_host()
    hosts = {pod["metadata"]["labels"]["midstep.io/node"]: pod["spec"].get("nodeName") for pod in job.pods()}
    node = next(rank["node"] for rank in status["ranks"] if hosts.get(rank["node"]) not in {None, away})
    return node, {rank["rank"] for rank in status["ranks"] if rank["node"] == node}


def pid_on(machine: Machine, pid: int) -> str:
    """Return what a process of a machine's only pod is called outside of that: `kubectl exec` takes a kubelet."""
    (found,) = machine.run(
        "sh", "-c", f"awk '/^NSpid/ && NF > 2 && $NF == {pid} {{print $2}}' /proc/[0-9]*/status 2>/dev/null"
    ).split()
    return found
