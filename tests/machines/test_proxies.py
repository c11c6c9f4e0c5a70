"""Nodes that speak through a proxy on a machine of its own lose nothing when its cables are cut."""

import subprocess
import time
from pathlib import Path

import pytest

from ..chaos.comparing import assert_same_numbers
from ..chaos.jobs import Record
from .conftest import RANKS, STEPS, StartMachines
from .job import PATIENCE_S, Job

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

CONTROLLER, NODES, PROXY = 0, (1, 2), 3
PORT = 29_410
ALONE, CUT, APART = 30, 90, 150  # steps before which each begins
AWAY_S = 8.0  # longer than a node may be silent, and longer than its proxy may be


class ProxiedJob(Job):
    """A job whose nodes speak through a proxy on the last machine, while they can."""

    def start_controller(self) -> "subprocess.Popen[bytes]":
        """Start the controller, and the proxy, which waits for it."""
        where = ("--controller", self._controller(), "--listen", f"tcp://0.0.0.0:{PORT}")
        self._midstep(self.machines[PROXY], "proxy", "--job", self.name, *where)
        return super().start_controller()

    def start_agent(self, number: int) -> "subprocess.Popen[bytes]":
        """Start the agent of a machine."""
        ways = ("--proxy", f"{self.machines[PROXY].address}:{PORT}", "--controller", self._controller())
        return self._midstep(self.machines[number], "agent", *ways, "--log-dir", str(self.root))

    def behind_proxy(self) -> int:
        """Return how many nodes have a connection to the proxy."""
        said = [self.machines[node].run("ss", "-Htn", "state", "established", f"dport = :{PORT}") for node in NODES]
        return sum(bool(each.strip()) for each in said)

    def until_behind_proxy(self, count: int) -> None:
        """Wait until so many nodes have one."""
        deadline = time.monotonic() + PATIENCE_S
        while self.behind_proxy() != count:
            assert time.monotonic() < deadline, f"{self.behind_proxy()} nodes behind the proxy:\n{self.said()}"
            time.sleep(0.2)


def test_cut_cables_of_a_proxy_replace_nobody(
    start_machines: StartMachines, tmp_path: Path, undisturbed: Record
) -> None:
    """First all of its cables are cut, then only it and the controller no longer hear each other."""
    policy = {"controller": {"proxies": True}}
    gates = (ALONE, CUT, APART, STEPS - 1)
    job = ProxiedJob(start_machines(4), tmp_path, step_s=0.05, policy=policy, gates=gates, steps=STEPS, on=NODES)
    network = job.machines.network
    pids = {rank.rank: rank.pid for rank in job.held_at(ALONE).ranks}
    job.until_behind_proxy(2)

    job.open_gate(ALONE)
    job.until_steps(ALONE + 5)
    job.machines[PROXY].cut()
    job.until_behind_proxy(0)
    time.sleep(AWAY_S)
    job.machines[PROXY].heal()
    job.held_at(CUT)
    job.until_behind_proxy(2)

    job.open_gate(CUT)
    job.until_steps(CUT + 5)
    network.deafen(PROXY, CONTROLLER)
    network.deafen(CONTROLLER, PROXY)
    job.until_behind_proxy(0)
    time.sleep(AWAY_S)
    job.held_at(APART)
    network.undeafen(PROXY, CONTROLLER)
    network.undeafen(CONTROLLER, PROXY)
    job.open_gate(APART)

    status = job.held_at(STEPS - 1)
    assert {rank.rank: rank.pid for rank in status.ranks} == pids, status.incidents
    job.open_gate(STEPS - 1)
    assert [incident["replaced"] for incident in job.finish()["incidents"] if incident["replaced"]] == []
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
