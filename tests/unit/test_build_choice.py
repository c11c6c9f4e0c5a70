"""With `standby.depth: auto` a node builds where there is room and time, and where two processes do not meet."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from midstep.agent.build_choice import (
    LOOK_AGAIN_S,
    TRAINED,
    BuildChoice,
    Memory,
    TrainingProcess,
    node_memory,
    what_it_holds,
)
from midstep.agent.channel import RunProgram

GB = 10**9
PROGRAM = RunProgram(("train.py",), False, False, {}, "/")
START_S = 2.0
NOW_S = 100.0


class Node:
    """A node with one rank, whose process began START_S ago and trains now."""

    def __init__(self, *, free: int = 50 * GB, own: int = GB, held: str = "") -> None:
        self.free, self.own, self.held, self.now = free, own, held, NOW_S
        self.pid, self.started_s = 7, NOW_S - START_S
        self.choice = BuildChoice(
            memory=lambda: Memory(100 * GB, self.free), holds=self._holds, own_bytes=lambda pid: self.own
        )

    def _holds(self, pid: int, ours: Collection[str]) -> str:
        assert pid == self.pid
        return self.held

    def builds(self, after_s: float = 0.0, *, built: Collection[int] = ()) -> bool:
        """Return whether the next process of the rank is to be there `after_s` later."""
        self.now += after_s
        training = {0: TrainingProcess(PROGRAM, self.pid, self.started_s)}
        return self.choice.chosen(training, built, self.now) == {0: PROGRAM}


def test_nothing_is_built_before_a_rank_has_trained_for_long_against_its_start() -> None:
    node = Node()
    assert not node.builds()
    assert not node.builds(TRAINED * START_S - 0.1)
    assert node.builds(0.1)


def test_the_process_that_took_a_rank_over_has_to_train_as_long_as_the_first_one() -> None:
    """It may have started at once, as it was built: building it took as long."""
    node = Node()
    node.builds()
    node.builds(TRAINED * START_S)
    node.pid, node.started_s = 8, node.now
    assert not node.builds(0.1)
    assert not node.builds(TRAINED * START_S - 0.1)
    assert node.builds(0.1)


@pytest.mark.parametrize(("free", "builds"), [(26 * GB, True), (25 * GB, False)])
def test_a_quarter_of_the_memory_stays_free_beside_what_is_built(free: int, builds: bool) -> None:
    node = Node(free=free)
    node.builds()
    assert node.builds(TRAINED * START_S) is builds
    assert ("would leave less than 25% of the memory free" in node.choice.why) is not builds


def test_what_speaks_against_it_is_said_and_looked_at_again_after_a_minute() -> None:
    node = Node(held="the script writes /data/loss.csv, which two processes would do")
    node.builds()
    assert not node.builds(TRAINED * START_S)
    assert node.choice.why == "rank 0: the script writes /data/loss.csv, which two processes would do"
    node.held = ""
    assert not node.builds(LOOK_AGAIN_S - 1)
    assert node.builds(1.0)


def test_what_is_built_stays_while_memory_is_not_short_and_is_given_back_when_it_is() -> None:
    """For a minute nothing is built then, however much is free."""
    node = Node()
    node.builds()
    node.builds(TRAINED * START_S)
    node.free = 11 * GB
    assert node.builds(1.0, built={0})
    assert not node.choice.gives_back
    node.free = 9 * GB
    assert not node.builds(1.0, built={0})
    assert node.choice.gives_back
    assert node.choice.why == "less than 10% of the memory is free"
    node.free = 50 * GB
    assert not node.builds(LOOK_AGAIN_S - 1)
    assert node.builds(1.0)
    assert not node.choice.gives_back


# --- readings ---------------------------------------------------------------------------------------------------------

HOLDS = """
import socket, subprocess, sys
what, path = sys.argv[1:]
if what == "file":
    held = open(path, "a")
elif what == "read":
    held = open(path)
elif what == "port":
    held = socket.create_server(("127.0.0.1", int(path)))
elif what == "program":
    held = subprocess.Popen(["sleep", "60"])
print("ready", flush=True)
sys.stdin.read()
if what == "program":
    held.kill()
    held.wait()
"""


def own_port() -> int:
    """Return a free port that the system would not choose."""
    for port in range(20_000, 20_400):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("file", "the script writes {}, which two processes would do"),
        ("read", ""),
        ("port", "the script listens on port {}, which two processes cannot"),
        ("program", "the script has started "),
        ("nothing", ""),
    ],
)
def test_a_process_that_holds_what_only_one_can_have_is_known_by_that(what: str, says: str, tmp_path: Path) -> None:
    """Its output goes to a file, which does not count."""
    path = str(tmp_path / "loss.csv")
    Path(path).touch()
    argument = str(own_port()) if what == "port" else path
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", HOLDS, what, argument], stdin=subprocess.PIPE, stdout=log)
    try:
        while b"ready" not in (tmp_path / "log").read_bytes():
            assert process.poll() is None
            time.sleep(0.01)
        found = what_it_holds(process.pid)
        assert found.startswith(says.format(argument)), found
        assert bool(found) is bool(says)
        assert what != "file" or what_it_holds(process.pid, [str(tmp_path)]) == ""
    finally:
        process.communicate()


def test_a_port_that_the_system_chose_is_none_of_the_script() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert "port" not in what_it_holds(os.getpid())


def test_of_a_process_that_has_ended_nothing_can_be_seen() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert what_it_holds(ended.pid).startswith("it cannot be seen what its process holds")


GROUPS = {
    "0::/job/ranks": {
        "job/memory.max": "1000",
        "job/memory.current": "700",
        "job/memory.stat": "anon 500\ninactive_file 100",
        "job/ranks/memory.max": "max",
        "job/ranks/memory.current": "700",
        "job/ranks/memory.stat": "inactive_file 100",
    },
    "3:cpu,memory:/job": {
        "memory/job/memory.limit_in_bytes": "1000",
        "memory/job/memory.usage_in_bytes": "700",
        "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 100",
    },
    "0::/not/mounted/here": {"memory.max": "1000", "memory.current": "700", "memory.stat": "inactive_file 100"},
}


@pytest.mark.parametrize("group", GROUPS)
def test_a_container_has_the_memory_of_its_cgroup(group: str, tmp_path: Path) -> None:
    """The limit may be that of a group further up; files that were read are not in the way."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"{group}\n")
    for name, text in GROUPS[group].items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert node_memory(cgroups=tmp_path / "groups", proc=tmp_path) == Memory(1000, 400)


def test_without_a_limit_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    memory = node_memory(cgroups=tmp_path, proc=tmp_path)
    assert 0 < memory.free_bytes <= memory.total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
