"""The connections between midstep's parts, over cables that are cut: neither side trusts one that has fallen silent."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import StartMachines
from .machines import Machine, Machines

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]

PEER = Path(__file__).with_name("peer.py")
PORT = 7071
PATIENCE_S = 30.0
ESTABLISHED, ASKING = "established", "syn-sent"


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that has to happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.05)


def connections(machine: Machine, state: str) -> set[str]:
    """The connections of a machine that are in a state, by their ends."""
    lines = machine.run("ss", "-tnH", "state", state).splitlines()
    return {" ".join(line.split()[2:4]) for line in lines}


class Peers:
    """A router on one machine, and a dealer on another that sends numbers."""

    def __init__(self, machines: Machines, root: Path, dealer: str = "deal") -> None:
        self.router, self.dealer = machines[0], machines[1]
        self._said = root / "said"
        keys = str(root / "keys")
        self._start(self.router, "keys", keys).wait(PATIENCE_S)
        self._start(self.router, "route", keys, f"tcp://{self.router.address}:{PORT}", output=self._said)
        self._start(self.dealer, dealer, keys, f"tcp://{self.router.address}:{PORT}")
        until(lambda: self.heard() > 0, "the first number")

    def heard(self) -> int:
        """How many numbers have arrived."""
        return len(self._said.read_text().split())

    def _start(self, machine: Machine, *words: str, output: Path | None = None) -> "subprocess.Popen[bytes]":
        return machine.start([sys.executable, str(PEER), *words], output=output or self._said.with_name("errors"))


@pytest.fixture
def peers(start_machines: StartMachines, tmp_path: Path) -> Peers:
    """Two machines with a connection between them."""
    return Peers(start_machines(2), tmp_path)


def test_a_cut_connection_is_given_up_and_tried_until_there_is_an_answer(peers: Peers) -> None:
    """TCP alone would keep it for a quarter of an hour, and ask at ever longer intervals."""
    (before,) = connections(peers.dealer, ESTABLISHED)
    peers.dealer.cut()
    until(lambda: before not in connections(peers.dealer, ESTABLISHED), "the connection to be given up")
    asked: set[str] = set()

    def asked_often() -> bool:
        asked.update(connections(peers.dealer, ASKING))
        return len(asked) >= 3

    until(asked_often, "the third attempt to connect")
    heard = peers.heard()
    peers.dealer.heal()
    until(lambda: peers.heard() > heard, "a number after the cut")


def test_a_cut_is_noticed_without_pings_by_what_is_not_acknowledged(
    start_machines: StartMachines, tmp_path: Path
) -> None:
    """An agent reports twice a second, so data is underway most of the time."""
    peers = Peers(start_machines(2), tmp_path, dealer="deal-without-pings")
    (before,) = connections(peers.dealer, ESTABLISHED)
    peers.dealer.cut()
    until(lambda: before not in connections(peers.dealer, ESTABLISHED), "the connection to be given up")


def test_the_connection_of_a_machine_without_power_is_dropped(peers: Peers) -> None:
    """Although data is underway to it, which is when keepalive does not act."""
    assert connections(peers.router, ESTABLISHED)
    peers.dealer.power_off()
    until(lambda: not connections(peers.router, ESTABLISHED), "the end of the connection")


def test_a_short_cut_keeps_the_connection(peers: Peers) -> None:
    """Which is what TCP is for."""
    before = connections(peers.dealer, ESTABLISHED)
    peers.dealer.cut()
    time.sleep(0.5)
    heard = peers.heard()
    peers.dealer.heal()
    until(lambda: peers.heard() > heard, "a number after the cut")
    assert connections(peers.dealer, ESTABLISHED) == before
