"""A job on a Ray cluster of namespaced machines: what is done to it, and what is seen of it."""

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from midstep.protocol import environment as names
from midstep.protocol.types import ArmedFault

from ..chaos.jobs import TRAINING
from ..machines.engine_job import ROOMY, EngineJob
from ..machines.job import PATIENCE_S
from ..machines.machines import Machine
from .cluster import CONTROLLER, RayCluster

DRIVER = Path(__file__).with_name("driver.py")
OF_RAY_TRAIN = "AutoscalingCoordinator"
_POLL_S = 0.05


class RayJob(EngineJob):
    """A job whose driver is on machine 0. Its nodes are where Ray places them."""

    def __init__(
        self,
        cluster: RayCluster,
        root: Path,
        *,
        nodes: int = 2,
        spares: int = 1,
        steps: int = 60,
        step_s: float = 0.01,
        policy: dict[str, Any] | None = None,
        gates: Sequence[int] = (),
        faults: tuple[ArmedFault, ...] = (),
    ) -> None:
        """`root`: a directory that all machines see. `faults`: armed in every process that starts."""
        self.cluster, self.machines, self.root = cluster, cluster.machines, root
        self.name = f"ray-{secrets.token_hex(4)}"
        self.ranks = nodes
        self.records = root / "records"
        self.records.mkdir(parents=True)
        for step in gates:
            self.gate(step).touch()
        chosen = {**ROOMY, **(policy or {})}
        (root / "policy.yaml").write_text(yaml.safe_dump(chosen))
        options: dict[str, Any] = {
            "command": [str(TRAINING), str(self.records), str(steps), str(step_s)],
            "nnodes": nodes,
            "ranks_per_node": 1,
            "spares": spares,
            "storage_path": str(root),
            "job": self.name,
            "policy": str(root / "policy.yaml"),
            "env": {names.FAULTS: msgspec.json.encode(faults).decode()},
            "controller_resources": {CONTROLLER: 1},
        }
        self.controller = self.machines[0].start(
            self.driver(options), environment=cluster.environment(), output=root / "driver.log"
        )

    def driver(self, options: dict[str, Any]) -> Sequence[str]:
        """Return the command that runs the job, whose options these are, to its end."""
        return sys.executable, str(DRIVER), json.dumps(options)

    def resume(self) -> None:
        """Continue it with `midstep resume`, typed on machine 0."""
        self.controller = self.machines[0].start(
            (sys.executable, "-m", "midstep.cli.main", "resume", str(self.directory)),
            environment=self.cluster.environment(),
            output=self.root / "driver.log",
        )

    @property
    def directory(self) -> Path:
        """The job directory."""
        return self.root / self.name

    def said(self) -> str:
        """Return everything that was printed, for messages of failed tests."""
        logs = [self.root / "driver.log", *sorted(self.directory.glob("logs/*"))]
        workers = [
            log
            for machine in self.machines
            if machine.is_on
            for log in Path(f"/proc/{machine.space.pid}/root/tmp/ray/session_latest/logs").glob("worker*.err")
        ]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in (*logs, *workers))

    # --- where things are -------------------------------------------------------------------------------------------

    def machine_named(self, node: str) -> Machine:
        """Return the machine of a node: agents on Ray call their machine their failure domain."""
        status = self.answer()
        domain = next(each.failure_domain for each in status.nodes if each.node == node)
        return next(machine for machine in self.machines if machine.name == domain)

    def machine_of_controller(self) -> Machine:
        """Return the machine on which the controller runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [each for each in self.machines if each.is_on and self._controller_pids(each)]):
            assert time.monotonic() < deadline, self.said()
            time.sleep(_POLL_S)
        return found[0]

    def pids(self, machine: Machine, *words: str) -> list[int]:
        """Return the processes of a machine whose command lines have all these words, by its own pids."""
        found = []
        for line in machine.run("ps", "-A", "-o", "pid=,args=", "-ww").splitlines():
            pid, _, command = line.strip().partition(" ")
            if all(word in command for word in words) and "ps -A" not in command:
                found.append(int(pid))
        return found

    def _actor_of(self, machine: Machine, node: str) -> int:
        return _parent(machine, self.pids(machine, "midstep.cli.agent", f"--node {node} ", self.name)[0])

    def _controller_pids(self, machine: Machine) -> list[int]:
        return self.pids(machine, "midstep.cli.main controller", self.name)

    def until_there_is_a_spare(self) -> None:
        """Wait until a spare is there."""
        self.until(lambda status: any(node.state == "spare" for node in status.nodes), "a spare")

    # --- what is done to it -----------------------------------------------------------------------------------------

    def until_said(self, words: str) -> None:
        """Wait until the program that waits for the job has printed this."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in (self.root / "driver.log").read_text():
            assert time.monotonic() < deadline, self.said()
            time.sleep(_POLL_S)

    def until_incidents(self, count: int) -> None:
        """Wait until so many faults have been noticed and answered."""
        self.until(lambda status: len(status.incidents) >= count, f"incident {count}")

    def kill_actor_of(self, node: str) -> None:
        """Kill the process of the actor in which a node's agent was started."""
        machine = self.machine_named(node)
        machine.run("kill", "-9", str(self._actor_of(machine, node)))

    def kill_raylet_below(self, node: str) -> None:
        """Kill the raylet that has started a node's actor, on a machine that may have others."""
        machine = self.machine_named(node)
        machine.run("kill", "-9", str(_parent(machine, self._actor_of(machine, node))))

    def kill_raylet_of(self, node: str) -> Machine:
        """Kill the raylet of a node's machine, and return the machine."""
        machine = self.machine_named(node)
        machine.run("kill", "-9", *map(str, self.pids(machine, "raylet/raylet ")))
        return machine

    def kill_controller_actor(self) -> None:
        """Kill the process of the controller's actor; Ray starts it again."""
        machine = self.machine_of_controller()
        controller = self._controller_pids(machine)[0]
        machine.run("kill", "-9", str(_parent(machine, controller)))

    def end_driver(self, number: str = "TERM") -> None:
        """Send the program that waits for the job a signal to end."""
        self.machines[0].run("kill", f"-{number}", *map(str, self.pids(self.machines[0], "driver.py")))

    # --- the end ----------------------------------------------------------------------------------------------------

    def assert_nothing_left(self) -> None:
        """No actor, no placement group and no process has outlived the job."""
        assert not self.left_in_ray()
        for machine in self.machines:
            if machine.is_on:
                assert not self.pids(machine, self.name), machine.run("ps", "-A", "-o", "args=", "-ww")

    def left_in_ray(self) -> list[str]:
        """Return the actors and the placement groups that are there, but for one actor that Ray Train leaves."""
        left: list[str] = json.loads(
            self.cluster.ask(
                "import json\n"
                "actors = ray.util.list_named_actors(all_namespaces=True)\n"
                "groups = ray.util.placement_group_table().values()\n"
                "left = [group['name'] for group in groups if group['state'] != 'REMOVED']\n"
                f"print(json.dumps(left + [each['name'] for each in actors if each['namespace'] != '{OF_RAY_TRAIN}']))"
            )
        )
        return left

    def close(self) -> None:
        """End a job whose test failed: its driver, and what is in Ray."""
        if self.controller.poll() is None:
            os.killpg(self.controller.pid, signal.SIGKILL)
            self.cluster.clear()


def _parent(machine: Machine, pid: int) -> int:
    return int(machine.run("ps", "-o", "ppid=", "-p", str(pid)))
