"""A Ray cluster on machines made of namespaces: the head on machine 0, a raylet on each of the others.

Only there: Ray asks an address of the internet which of its own addresses it has.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ..machines.machines import Machine, Machines

PORT = 6379
CPUS = 2
MEMORY_BYTES = 80_000_000  # for objects, which these jobs do not have
UP_S = 120.0
CONTROLLER = "controller"  # a resource of the last machines, on one of which the controller is to be
HOLDERS = 2
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else what Ray starts, training as well, gives way to all else on the machine
    # A machine that is off is seen in seconds, as in a cluster that is set up for recovery.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_gcs_server_request_timeout_seconds": "60",
}
_BIN = Path(sys.executable).parent


class RayCluster:
    """The cluster. Closing the machines ends it."""

    takes_jobs = False  # as `ray job submit` brings them, which needs Ray's dashboard

    def __init__(self, machines: Machines) -> None:
        """Start the head and then one raylet after the other: together they give up on a busy computer."""
        self.machines = machines
        self._holders = range(len(machines) - HOLDERS, len(machines))
        self.address = f"{machines[0].address}:{PORT}"
        self.start_head()
        for number in range(1, len(machines)):
            self.join(machines[number])

    def start_head(self, *options: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the head, which has no room for nodes, with more options and settings."""
        head = ["--head", f"--port={PORT}", "--num-cpus=0", "--disable-usage-stats"]
        head.append(f"--include-dashboard={str(self.takes_jobs).lower()}")
        self._start(self.machines[0], *head, *options, environment=environment)

    def join(self, machine: Machine) -> None:
        """Start the raylet of a machine."""
        options = [f"--address={self.address}", f"--num-cpus={CPUS}"]
        if machine.number in self._holders:
            options.append(f"--resources={json.dumps({CONTROLLER: 1})}")
        self._start(machine, *options)

    def mend(self) -> None:
        """Boot the machines that are off, and start the raylets that have ended."""
        for machine in self.machines:
            if not machine.is_on:
                machine.power_on()
                self.join(machine)
            elif "raylet" not in machine.run("ps", "-A", "-o", "comm="):
                self.join(machine)

    def drain(self, machine: Machine) -> None:
        """Tell Ray that a machine will be taken away, as the agent of a cloud does that hears of a preemption."""
        self.ask(
            "from ray._raylet import GcsClient\n"
            f"node = next(each for each in ray.nodes() if each['NodeManagerAddress'] == '{machine.address}')\n"
            "client = GcsClient(address=ray.get_runtime_context().gcs_address)\n"
            "import time; at_ms = int(1000 * (time.time() + 600))\n"
            "print(client.drain_node(node['NodeID'], 2, 'preemption', at_ms))"  # 2: DRAIN_NODE_REASON_PREEMPTION
        )

    def clear(self) -> None:
        """End what a job has left in Ray: for tests that failed."""
        self.ask(
            "from ray._raylet import PlacementGroupID\n"
            "from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group\n"
            "for each in ray.util.list_named_actors(all_namespaces=True):\n"
            "    ray.kill(ray.get_actor(each['name'], each['namespace']))\n"
            "for identity in placement_group_table():\n"
            "    remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(identity))))\n"
        )

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that is to find the cluster."""
        path = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
        return {**SETTINGS, "RAY_ADDRESS": self.address, "PATH": path}

    def ask(self, code: str, machine: int = 0) -> str:
        """Run a few lines of Python that know `ray`, connected to the cluster, and return what they print."""
        begin = "import ray, logging; ray.init(address='auto', logging_level=logging.ERROR, log_to_driver=False)\n"
        return self.machines[machine].run(
            "env",
            *(f"{name}={value}" for name, value in self.environment().items()),
            sys.executable,
            "-c",
            begin + code,
            limit_s=UP_S,
        )

    def _start(self, machine: Machine, *options: str, environment: Mapping[str, str] | None = None) -> None:
        words = [str(_BIN / "ray"), "start", f"--node-ip-address={machine.address}", *options]
        words += [f"--object-store-memory={MEMORY_BYTES}"]
        log = Path(f"/proc/{machine.space.pid}/root/tmp/ray-start.log")
        settings = {**SETTINGS, "PATH": self.environment()["PATH"], **(environment or {})}
        started = machine.start(words, environment=settings, output=log)
        try:
            assert started.wait(UP_S) == 0, log.read_text()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"Ray does not start on {machine.name}: {log.read_text()}") from None
