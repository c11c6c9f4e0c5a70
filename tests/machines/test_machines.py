"""Machines are what they claim to be, and each fault of their network does what it says."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .availability import SKIPPED, require_machines, summary
from .conftest import REPOSITORY, StartMachines
from .machines import Machine, Machines
from .namespaces import CannotMakeMachines, require_programs
from .network import Quality

PROBE = Path(__file__).with_name("probe.py")
PATIENCE_S = 20.0


def python(*words: object) -> list[str]:
    """A command that runs the probe."""
    return [sys.executable, "-IS", str(PROBE), *map(str, words)]


def ask(asker: Machine, answerer: Machine, count: int = 5) -> dict[str, Any]:
    """Send datagrams to and fro; how many were answered, and how quickly at best."""
    said: dict[str, Any] = json.loads(asker.run(*python("ask", answerer.address, count)))
    return said


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that has to happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.02)


class Pair:
    """Two machines of some; the first one answers probes."""

    def __init__(self, machines: Machines, said: Path) -> None:
        self.machines = machines
        self.answerer, self.asker = machines[0], machines[1]
        self._said = said
        self.answerer.start(python("answer"), output=said)
        until(lambda: "ready" in said.read_text(), "the probe")

    def heard(self) -> int:
        """How many datagrams the first machine has heard."""
        return self._said.read_text().count("heard")

    def ask(self, count: int = 5) -> dict[str, Any]:
        """Ask from the second machine."""
        return ask(self.asker, self.answerer, count)


@pytest.fixture
def pair(start_machines: StartMachines, tmp_path: Path) -> Pair:
    """Two machines that reach each other."""
    return Pair(start_machines(2), tmp_path / "said")


@pytest.mark.parametrize("user", [False, True], ids=["root", "user namespace"])
def test_each_machine_is_one_of_its_own(start_machines: StartMachines, tmp_path: Path, user: bool) -> None:
    """Name, folders, processes and uptime are its own; the test's folder is shared; they reach each other by name."""
    if not user and os.geteuid() != 0:
        pytest.skip("this process is not root's; the other half of the test is for it")
    machines = start_machines(2, user=user)
    first, second = machines[0], machines[1]
    assert [machine.run("hostname").strip() for machine in (first, second)] == ["m0", "m1"]
    for folder in ("/tmp", "/run", "/dev/shm"):
        first.run("touch", f"{folder}/mine")
        assert "mine" not in second.run("ls", folder)
        assert not (Path(folder) / "mine").exists()
    first.run("touch", str(tmp_path / "ours"))
    assert "ours" in second.run("ls", str(tmp_path))
    assert len(second.run("ps", "-A", "-o", "pid=").splitlines()) == 2, "pid 1, and the command itself"
    clock = (sys.executable, "-ISc", "import time; print(time.monotonic())")
    assert abs(float(first.run(*clock)) - float(second.run(*clock))) > 1000
    pair = Pair(machines, tmp_path / "said")
    resolved = second.run("getent", "hosts", "m0").split()[0]
    assert resolved == first.address
    assert pair.ask()["answers"] == 5


@pytest.mark.machines
def test_a_cut_cable_carries_nothing_until_it_is_healed(pair: Pair) -> None:
    """Neither way; and a machine whose cable is cut still reaches itself."""
    pair.asker.cut()
    assert pair.ask(2)["answers"] == 0
    assert pair.heard() == 0
    assert ask(pair.answerer, pair.answerer)["answers"] == 5
    pair.asker.heal()
    until(lambda: pair.ask(1)["answers"] == 1, "an answer")  # who has the address is asked for once a second
    assert pair.ask()["answers"] == 5


@pytest.mark.machines
def test_a_connection_outlives_a_short_cut(pair: Pair, tmp_path: Path) -> None:
    """As TCP does: what was sent meanwhile arrives later, in order."""
    said = tmp_path / "talk"
    talk = pair.asker.start(python("talk", pair.answerer.address, 10, 0.02), output=said)
    until(lambda: "0" in said.read_text(), "the first number")
    pair.answerer.cut()
    time.sleep(0.5)
    assert talk.poll() is None
    pair.answerer.heal()
    assert talk.wait(PATIENCE_S) == 0
    assert said.read_text().split() == [str(number) for number in range(10)]


@pytest.mark.machines
def test_deafness_is_in_one_direction(pair: Pair) -> None:
    """The deaf machine is heard, and hears no answer."""
    pair.machines.network.deafen(pair.asker.number, pair.answerer.number)
    assert pair.ask(3)["answers"] == 0
    assert pair.heard() == 3
    pair.machines.network.undeafen(pair.asker.number, pair.answerer.number)
    assert pair.ask()["answers"] == 5


@pytest.mark.machines
def test_deafness_is_to_one_machine(start_machines: StartMachines, tmp_path: Path) -> None:
    """Others are heard."""
    machines = start_machines(3)
    Pair(machines, tmp_path / "said")
    machines.network.deafen(1, 2)
    assert ask(machines[1], machines[0])["answers"] == 5
    assert ask(machines[2], machines[0])["answers"] == 5


@pytest.mark.machines
def test_a_delay_is_added_both_ways_and_can_be_taken_away(pair: Pair) -> None:
    """Whoever asks; a cut works on such a cable, too."""
    pair.machines.network.worsen(pair.asker.number, Quality(delay_s=0.03))
    said = pair.ask()
    assert said["answers"] == 5
    assert said["fastest_s"] >= 0.06
    pair.asker.cut()
    assert pair.ask(1)["answers"] == 0
    pair.asker.heal()
    until(lambda: pair.ask(1)["answers"] == 1, "an answer")
    pair.machines.network.clear(pair.asker.number)
    assert pair.ask()["fastest_s"] < 0.06


@pytest.mark.machines
def test_a_share_of_the_frames_is_lost(pair: Pair) -> None:
    """And what goes over a connection arrives all the same."""
    pair.machines.network.worsen(pair.asker.number, Quality(loss=0.3, seed=3))
    seen: set[int] = set()

    def some_lost_and_some_not() -> bool:
        seen.add(
            pair.ask(1)["answers"]
        )  # a lost "who has this address" costs a second's questions, so they may be many
        return seen == {0, 1}

    until(some_lost_and_some_not, "a lost question and an answered one")
    assert pair.asker.run(*python("talk", pair.answerer.address, 4, 0)).split() == ["0", "1", "2", "3"]


@pytest.mark.machines
def test_a_low_rate_slows_what_is_big(pair: Pair) -> None:
    """A megabyte at 20 Mbit/s takes its 0.4 s."""
    pair.machines.network.worsen(pair.asker.number, Quality(rate_bits=20e6))
    poured = json.loads(pair.asker.run(*python("pour", pair.answerer.address, 1_000_000)))
    assert poured["took_s"] >= 0.4


@pytest.mark.machines
def test_what_was_on_a_machine_ends_with_its_power(pair: Pair, tmp_path: Path) -> None:
    """Without a word to others: a connection to it stays open there. It boots empty, at the same address."""
    said = tmp_path / "talk"
    talk = pair.asker.start(python("talk", pair.answerer.address, 1000, 0.02), output=said)
    until(lambda: "0" in said.read_text(), "the first number")
    pair.answerer.run("touch", "/tmp/mine")
    inside = psutil.Process(pair.answerer.space.pid)
    pair.answerer.power_off()
    assert not inside.is_running()
    time.sleep(0.3)
    assert talk.poll() is None, said.read_text()
    assert pair.ask(1)["answers"] == 0
    pair.answerer.power_on()
    assert "mine" not in pair.answerer.run("ls", "/tmp")
    pair.answerer.start(python("answer"), output=tmp_path / "again")
    until(lambda: pair.ask(1)["answers"] == 1, "an answer from the machine that is on again")


@pytest.mark.parametrize("quality", [None, Quality(delay_s=0.05)], ids=["", "delay"])
def test_a_cable_that_the_kernel_takes_first_is_no_matter(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, quality: Quality | None
) -> None:
    """The end of a machine takes its end of the cable with it, on a busy computer before it is unplugged."""
    machine, switch = pair.asker, pair.machines.network.switch
    if quality is not None:
        pair.machines.network.worsen(machine.number, quality)
    end = machine.space.end

    def end_with_its_cable() -> None:
        end()
        until(lambda: f" p{machine.number}@" not in switch.run(["ip", "link"], kinds=("net",)), "the cable to be gone")

    monkeypatch.setattr(machine.space, "end", end_with_its_cable)
    machine.power_off()
    machine.power_on()
    assert pair.ask(1)["answers"] == 1


@pytest.mark.machines
def test_nothing_is_left_of_machines_whose_test_was_killed(reason_against: str) -> None:
    """The processes on them end, and with them the namespaces."""
    require_machines(reason_against)
    code = (
        "import sys\nfrom tests.machines.machines import Machines\nfrom tests.machines.network import Quality\n"
        "made = Machines(2)\nmade.network.worsen(0, Quality(delay_s=0.01))\n"
        "started = [made[0].start(['sleep', '1000']), made[1].start(['sh', '-c', 'sleep 1000 & sleep 1000'])]\n"
        "print('up', flush=True)\nsys.stdin.read()"
    )
    test = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert test.stdout is not None
    assert test.stdin is not None
    assert test.stdout.readline() == b"up\n"
    below = psutil.Process(test.pid).children(recursive=True)
    assert len(below) > 8, below
    test.send_signal(signal.SIGKILL)
    test.wait(PATIENCE_S)
    gone, alive = psutil.wait_procs(below, PATIENCE_S)
    assert not alive, alive
    assert gone
    test.stdin.close()
    test.stdout.close()


@pytest.mark.machines
def test_a_command_on_a_machine_signals_nothing_of_this_computer(reason_against: str) -> None:
    """Not even `kill 0`, which reaches the whole process group, whatever namespaces its members are in."""
    require_machines(reason_against)
    code = (
        "from tests.machines.machines import Machines\n"
        "with Machines(1) as made:\n"
        "    made[0].run('kill', '-9', '0', check=False)\n"
        "    print('alive')"
    )
    command = [sys.executable, "-c", code]
    test = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False, start_new_session=True, timeout=60)
    assert test.stdout == b"alive\n", test


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the packages that have it."""
    monkeypatch.setattr("shutil.which", lambda name, path: None if name == "ip" else name)
    with pytest.raises(CannotMakeMachines, match="there is no ip: install iproute2"):
        require_programs()


def test_what_did_not_run_is_said_at_the_end() -> None:
    """How many, and why; nothing where all others were skipped."""
    assert summary([f"Skipped: {SKIPPED}no ip", "Skipped: no torch", f"Skipped: {SKIPPED}no ip"]) == (
        "2 tests of several machines did not run here: no ip"
    )
    assert summary(["Skipped: no torch"]) == ""


def test_a_python_below_tmp_is_there_on_every_machine(
    reason_against: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine has a /tmp of its own, in which a checkout of midstep or its environment would be missing."""
    require_machines(reason_against)
    folder = Path("/tmp") / tmp_path.name
    monkeypatch.setattr(sys, "prefix", str(folder))
    folder.mkdir()
    try:
        (folder / "python").write_text("here")
        with Machines(1) as machines:
            assert machines[0].run("cat", str(folder / "python")) == "here"
    finally:
        shutil.rmtree(folder)
