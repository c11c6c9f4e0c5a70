"""Machines that speak through a proxy recover as without one; and a proxy that dies, or freezes, costs no node."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from .comparing import assert_nobody_harmed, assert_same_numbers
from .jobs import MARK, Record
from .joined import MIDSTEP, JoinedJob

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

KILLED_AT, FOLLOWED_AT = 10, 25


class ProxiedJob(JoinedJob):
    """A job whose machines all know one proxy."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, policy={"controller": {"proxies": True}})
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.proxy = self.start_proxy()

    def start_proxy(self) -> "subprocess.Popen[bytes]":
        """Start `midstep proxy`."""
        where = ("--controller", self.endpoint, "--listen", f"tcp://127.0.0.1:{self.port}", "--name", "east")
        command = (*MIDSTEP, "proxy", "--job", self.name, *where, "--token-file", str(self.token))
        with (self.root / "machine.proxy.txt").open("ab") as output:
            return subprocess.Popen(
                command, env={**os.environ, MARK: self.name}, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def start_machines(self, count: int) -> None:
        """Start machines that go through the proxy."""
        for _ in range(count):
            self.start("--proxy", f"127.0.0.1:{self.port}")

    def through_proxy(self) -> int:
        """Return how many connections of others the proxy has."""
        found = psutil.Process(self.proxy.pid).net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == self.port for each in found)

    def at_controller(self) -> set[int]:
        """Return the processes that are connected to the controller, but for the proxy."""
        port = int(self.endpoint.rpartition(":")[2])
        return {
            process.pid
            for process in self.left()
            if process.pid != self.proxy.pid
            and any(each.raddr and each.raddr.port == port for each in process.net_connections("tcp"))
        }


@contextmanager
def proxied(root: Path) -> Iterator[ProxiedJob]:
    made = ProxiedJob(root)
    try:
        yield made
    finally:
        made.close()
        made.proxy.wait(10)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ProxiedJob]:
    with proxied(tmp_path) as made:
        yield made


def test_a_rank_recovers_through_a_proxy_and_another_one_when_that_was_killed(
    job: ProxiedJob, undisturbed: Record
) -> None:
    """No node is lost for the proxy. When it is there again, its nodes come back."""
    for step in (KILLED_AT, FOLLOWED_AT):
        job.gate(step).touch()
    job.start_machines(2)
    status = job.held_at(KILLED_AT)
    assert [(each.name, each.nodes) for each in status.proxies] == [("east", 2)]
    ranks = status.ranks
    assert job.through_proxy() == 2, "an agent has not found the proxy"
    assert not job.at_controller()
    psutil.Process(ranks[1].pid).kill()
    job.gate(KILLED_AT).unlink()
    ranks = job.held_at(FOLLOWED_AT).ranks

    job.proxy.kill()
    job.proxy.wait(10)
    job.until(lambda status: len(job.at_controller()) == 2, "the nodes at the controller itself")
    psutil.Process(ranks[2].pid).kill()
    job.gate(FOLLOWED_AT).unlink()
    assert [job.wait(number) for number in range(2)] == [0, 0], job.said()

    assert_same_numbers(job.record(), undisturbed)
    first, second = job.report()["incidents"]
    assert_nobody_harmed(first, {1})
    assert_nobody_harmed(second, {2})


@pytest.mark.soak
def test_a_proxy_that_freezes_costs_no_node_and_gets_its_nodes_back(job: ProxiedJob, undisturbed: Record) -> None:
    for step in (KILLED_AT, FOLLOWED_AT):
        job.gate(step).touch()
    job.start_machines(2)
    ranks = job.held_at(KILLED_AT).ranks
    assert job.through_proxy() == 2
    job.proxy.send_signal(signal.SIGSTOP)
    job.until(lambda status: len(job.at_controller()) == 2, "the nodes at the controller itself")
    psutil.Process(ranks[2].pid).kill()
    job.gate(KILLED_AT).unlink()
    ranks = job.held_at(FOLLOWED_AT).ranks
    job.proxy.send_signal(signal.SIGCONT)
    job.until(lambda status: not job.at_controller(), "the nodes at the proxy")
    psutil.Process(ranks[0].pid).kill()
    job.gate(FOLLOWED_AT).unlink()
    assert [job.wait(number) for number in range(2)] == [0, 0], job.said()

    assert_same_numbers(job.record(), undisturbed)
    first, second = job.report()["incidents"]
    assert_nobody_harmed(first, {2})
    assert_nobody_harmed(second, {0})


@pytest.mark.soak
def test_the_next_controller_finds_nodes_behind_a_proxy(job: ProxiedJob, undisturbed: Record) -> None:
    """A controller is killed in the midst of a recovery; a rank is killed while there is none."""
    job.gate(FOLLOWED_AT).touch()
    job.start_machines(2)
    # A proxy that is silent for a second on busy cores is left, and comes into use again when it listens.
    job.until(lambda status: job.through_proxy() == 2 and not job.at_controller(), "the nodes at the proxy")
    status = job.held_at(FOLLOWED_AT)
    controller = next(each for each in job.left() if {"controller", "--job-dir"} <= {*each.cmdline()})
    psutil.Process(status.ranks[1].pid).kill()
    controller.kill()
    psutil.Process(status.ranks[3].pid).kill()
    job.gate(FOLLOWED_AT).unlink()
    assert [job.wait(number) for number in range(2)] == [0, 0], job.said()

    assert_same_numbers(job.record(), undisturbed)
    incidents = job.report()["incidents"]
    assert {rank for incident in incidents for rank in incident["replaced"]} == {1, 3}
    assert all(incident["healthy_pids_kept"] and not incident["steps_lost"] for incident in incidents)
