"""A process that the kernel killed for lack of memory is told from others that ended by SIGKILL."""

from pathlib import Path

import pytest

from midstep.agent.ranks import REMEMBERED_S, KillCounter, MemoryKills, parse_count

EVENTS = "low 0\nhigh 0\nmax 27\noom 4\noom_kill 3\noom_group_kill 0\n"  # version 2
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"  # version 1
VMSTAT = "nr_free_pages 12\noom_kill 7\nunevictable_pgs_culled 0\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> KillCounter:
    """A counter on a machine that has these files."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return KillCounter(cgroups=root / "cgroup", proc=root / "proc")


@pytest.mark.parametrize(
    ("text", "count"),
    [(EVENTS, 3), (OOM_CONTROL, 5), (VMSTAT, 7), ("", None), ("oom 4\n", None), ("oom_kill x\n", None), ("\0", None)],
)
def test_the_count_is_read_from_each_kind_of_file(text: str, count: int | None) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        ("0::/job/node0\n", {"cgroup/job/node0/memory.events": EVENTS, "proc/vmstat": VMSTAT}, 3),
        ("0::/outside/of/the/container\n", {"cgroup/memory.events": EVENTS, "proc/vmstat": VMSTAT}, 3),
        ("4:memory:/job\n0::/\n", {"cgroup/memory/job/memory.oom_control": OOM_CONTROL, "proc/vmstat": VMSTAT}, 5),
        ("4:cpu,memory:/hidden\n", {"cgroup/memory/memory.oom_control": OOM_CONTROL}, 5),
        ("4:memoryless:/job\n", {"cgroup/memory/job/memory.oom_control": OOM_CONTROL, "proc/vmstat": VMSTAT}, 7),
        ("0::/\n", {"proc/vmstat": VMSTAT}, 7),
        ("0::/../..\nnonsense\n\n", {"proc/vmstat": VMSTAT}, 7),
        ("0::/\n", {}, None),
    ],
)
def test_the_closest_count_is_taken(tmp_path: Path, cgroup: str, files: dict[str, str], count: int | None) -> None:
    assert machine(tmp_path, cgroup, files).read() == count


def test_a_count_that_is_gone_is_not_known(tmp_path: Path) -> None:
    counter = machine(tmp_path, "0::/job\n", {"cgroup/job/memory.events": EVENTS})
    (tmp_path / "cgroup/job/memory.events").unlink()

    assert counter.read() is None


def test_a_kill_explains_one_end() -> None:
    kills = MemoryKills()
    kills.observe(3, 0.0)
    assert not kills.claim(0.1)  # what was before the agent
    kills.observe(4, 1.0)

    assert kills.claim(1.1)
    assert not kills.claim(1.2)


def test_several_kills_between_two_looks_explain_as_many_ends() -> None:
    kills = MemoryKills()
    kills.observe(0, 0.0)
    kills.observe(2, 1.0)

    assert [kills.claim(1.1) for _ in range(3)] == [True, True, False]


def test_a_kill_long_ago_explains_nothing() -> None:
    """It was of another process: one of the ranks' own workers, say."""
    kills = MemoryKills()
    kills.observe(0, 0.0)
    kills.observe(1, 1.0)

    assert not kills.claim(1.1 + REMEMBERED_S)


def test_a_count_that_is_not_known_or_goes_back_explains_nothing() -> None:
    kills = MemoryKills()
    kills.observe(None, 0.0)
    kills.observe(5, 0.5)
    kills.observe(None, 1.0)
    kills.observe(1, 1.5)
    assert not kills.claim(2.0)

    kills.observe(2, 3.0)
    assert kills.claim(3.1)
