"""Devices that one job isolates for the next ones: the folder, who reads and writes it, and what a job makes of it."""

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.controller import isolation
from midstep.controller.isolation import (
    MOST,
    SEEN_BY,
    Isolated,
    IsolationAcrossJobs,
    IsolationFolder,
    IsolationStore,
    Names,
    names_of,
    raised,
)
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState
from midstep.launch.directories import isolation_folder, jobs
from midstep.launch.meeting import host_name
from midstep.policies.schema import FaultPolicy, Policy, TooOften
from midstep.protocol.messages import FaultReported
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport
from midstep.testing.fake_cluster import FakeCluster, job

NOW_S = 2000.0
WAIT_S = 30.0
HOUR_S = 3600.0
POLICY = Policy(faults=FaultPolicy(too_often=(TooOften(codes=("C1",), times=3, window_s=100.0),)))
HERE = Names("m0")


class Clock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def document(node: str = "m0/node1", device: int | None = 1, at_s: float = NOW_S, **fields: Any) -> Isolated:
    given = Isolated(node, device, "C1", "first", at_s, at_s + HOUR_S, "3 times within 100 s, 3 are too often")
    return msgspec.structs.replace(given, **fields)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> IsolationStore:
    return IsolationStore(tmp_path / "home" / ".isolated", clock)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_document_is_a_file_of_its_owner_with_a_name_that_people_can_read(store: IsolationStore) -> None:
    store.add(document())
    store.add(document("worker-7", None))
    files = {path.name: path.stat().st_mode & 0o777 for path in store.folder.iterdir()}
    assert files == {"m0%2Fnode1+1.json": 0o600, "worker-7+node.json": 0o600}
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert store.read() == [document(), document("worker-7", None)]


def test_a_name_that_is_long_or_hidden_is_kept_all_the_same(store: IsolationStore) -> None:
    kept = [document("." * 100), document("ä" * 253), document("..", None)]
    for each in kept:
        store.add(each)
    assert sorted(store.read(), key=str) == sorted(kept, key=str)


def test_a_document_holds_until_its_time_is_over(store: IsolationStore, clock: Clock) -> None:
    store.add(document())
    clock.now_s += HOUR_S - 1
    assert store.read() == [document()]
    clock.now_s += 1
    assert store.read() == []
    store.add(document())
    assert store.read() == []


def test_what_comes_again_holds_from_then_on_and_what_is_older_changes_nothing(
    store: IsolationStore, clock: Clock
) -> None:
    store.add(document())
    clock.now_s += 60
    again = document(at_s=clock.now_s, job="second")
    store.add(again)
    store.add(document())
    assert store.read() == [again]


def test_a_write_that_fails_leaves_the_old_document(
    store: IsolationStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees the one before or the one after, as the file is replaced by one that is complete."""
    store.add(document())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.add(document(at_s=NOW_S + 1))
    assert store.read() == [document()]
    assert [path.name for path in store.folder.iterdir()] == ["m0%2Fnode1+1.json"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"node": "m0/node1", "dev', "Input data was truncated"),
        (b'{"node": 5}', r"Expected `str`, got `int` - at `\$.node`"),
        (b" " * 70_000, "it is larger than 65536 bytes"),
    ],
)
def test_a_damaged_document_is_named_and_stays_and_the_others_hold(
    store: IsolationStore, content: bytes, why: str
) -> None:
    store.add(document("m0/node2"))
    damaged = store.folder / "m0%2Fnode1+1.json"
    damaged.write_bytes(content)
    damaged.chmod(0o600)
    assert store.read() == [document("m0/node2")]
    ((path, said),) = store.problems.items()
    assert path == damaged
    assert re.search(why, said)
    assert damaged.read_bytes() == content


def test_a_document_that_others_may_have_written_isolates_nothing(store: IsolationStore) -> None:
    store.add(document())
    (store.folder / "m0%2Fnode1+1.json").chmod(0o666)
    assert store.read() == []
    assert "can be written by others" in next(iter(store.problems.values()))


def test_the_folder_is_bounded_and_what_holds_no_longer_goes_first(store: IsolationStore, clock: Clock) -> None:
    store.folder.mkdir(parents=True)
    for number in range(MOST):
        each = document(f"m0/node{number}", at_s=NOW_S - 1000 + number)
        each = msgspec.structs.replace(each, until_s=NOW_S - 1) if number == 500 else each
        (store.folder / each.file_name).write_bytes(msgspec.json.encode(each))
        (store.folder / each.file_name).chmod(0o600)
    store.add(document("m0/a"))
    assert len(list(store.folder.iterdir())) == MOST
    assert not (store.folder / document("m0/node500").file_name).exists()
    store.add(document("m0/b"))
    held = {each.node for each in store.read()}
    assert len(held) == MOST
    assert "m0/node0" not in held
    assert {"m0/a", "m0/b", "m0/node1"} <= held


def test_a_release_ends_the_device_or_all_of_the_node_and_a_controller_that_follows_does_not_undo_it(
    store: IsolationStore, clock: Clock
) -> None:
    for each in (document(), document(device=2), document("m1/node1"), document("worker-7")):
        store.add(each)
    clock.now_s += 1
    assert store.release("node1", 7, "m0") == []
    assert store.release("node1", 2, "m0") == [document(device=2)]
    store.add(document(device=2))
    assert store.read() == [document(), document("m1/node1"), document("worker-7")]
    assert store.release("m1/node1", None, "m0") == [document("m1/node1")]
    assert store.release("worker-7", None, "m0") == [document("worker-7")]
    assert store.release("node1", None, "m0") == [document()]
    assert store.read() == []
    store.add(document(at_s=clock.now_s))
    assert store.read() == [document(at_s=clock.now_s)]


def test_no_job_can_have_the_name_of_the_folder_and_it_is_listed_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path))
    isolation_folder().mkdir()
    assert isolation_folder() == tmp_path / ".isolated"
    assert jobs() == []


# --- what a job writes ------------------------------------------------------------------------------------------------


def seen(cluster: FakeCluster, node: str = "node1", assertion: Assertion = Assertion.OCCUR) -> FaultReported:
    """What a detector says, of a fault that asks for nothing."""
    level = FaultLevel.NOT_HANDLE
    return FaultReported(
        FaultReport(
            FaultKind.DEVICE, cluster.now, "detector/bmc", "", node=node, device=1, level=level, code="C1",
            assertion=assertion,
        )
    )  # fmt: skip


def strike(cluster: FakeCluster, node: str = "node1", times: int = 3) -> None:
    for number in range(times):
        cluster.feed(seen(cluster, node))
        if number < times - 1:
            cluster.feed(seen(cluster, node, Assertion.RECOVER))


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_what_a_job_has_raised_is_written_of_a_node_in_use_and_of_a_spare(node: str) -> None:
    cluster = FakeCluster(policy=POLICY).start()
    strike(cluster, node, times=2)
    assert list(raised(cluster.machine.state, HERE, HOUR_S)) == []
    cluster.feed(seen(cluster, node, Assertion.RECOVER))
    strike(cluster, node, times=1)
    (found,) = raised(cluster.machine.state, HERE, HOUR_S)
    assert (found.node, found.device, found.code, found.job) == (f"m0/{node}", 1, "C1", "test")
    assert found.at_s == pytest.approx(cluster.now)
    assert found.until_s == found.at_s + HOUR_S
    assert found.detail == "3 times within 100 s, 3 are too often"


def test_a_fault_that_is_over_within_a_look_is_known_by_its_incident() -> None:
    cluster = FakeCluster(policy=POLICY).start()
    strike(cluster)
    cluster.feed(seen(cluster, assertion=Assertion.RECOVER))
    assert cluster.machine.state.book.standing() == ()
    assert [each.place for each in raised(cluster.machine.state, HERE, HOUR_S)] == ["m0/node1, device 1"]


def test_a_device_that_others_call_separated_is_theirs_to_remember() -> None:
    """ClusterD's own isolation ends when ClusterD says so."""
    cluster = FakeCluster(policy=POLICY).start()
    level, code = FaultLevel.MANUALLY_SEPARATE_NPU, "C1"
    cluster.feed(cluster.fault(None, FaultKind.DEVICE, node="node1", device=1, level=level, code=code))
    assert list(raised(cluster.machine.state, HERE, HOUR_S)) == []


def test_nodes_are_known_by_their_machine_where_it_is_theirs_alone() -> None:
    cluster = FakeCluster().start()
    world = cluster.machine.state.world
    for node, machine in (("node0", "a"), ("node1", "b"), ("node2", "b")):
        world.nodes[node].failure_domain = machine
    joined = names_of(job(), "")
    assert joined.given(world) == {"node0": "a", "node1": "node1", "node2": "node2"}
    world.nodes["node2"].state = NodeState.LOST
    assert joined.given(world) == {"node0": "a", "node1": "b", "node2": "node2"}
    assert joined.to_come("worker-7") == ["worker-7"]
    assert joined.to_come("m0/node1") == []
    placed = names_of(job(), "", "kubernetes")
    assert placed.given(world) == {"node0": "a", "node1": "b", "node2": "b"}
    assert placed.to_come("worker-7") == []
    local = names_of(job(), "m0")
    assert local.given(world) == {"node0": "m0/node0", "node1": "m0/node1", "node2": "m0/node2"}
    assert local.to_come("m0/node9") == ["node9"]
    assert local.to_come("m1/node1") == local.to_come("m0") == []


def test_a_node_that_joins_is_meant_by_the_name_of_its_machine(store: IsolationStore) -> None:
    store.add(document("b", 1))
    watched = Watched(store, FakeCluster(), names_of(job(), ""))
    watched.look()
    for node, machine in (("node0", "a"), ("node1", "b")):
        watched.cluster.feed(msgspec.structs.replace(watched.cluster.node(node), failure_domain=machine))
    watched.look()
    assert watched.nodes == {"node0": "spare", "node1": "unfit"}
    assert [(each.node, each.assertion) for each in watched.told] == [
        ("b", Assertion.OCCUR),
        ("node1", Assertion.OCCUR),
        ("b", Assertion.RECOVER),
    ]


def test_the_only_node_of_a_job_is_its_machine() -> None:
    cluster = FakeCluster(job(nodes=1, spares=0))
    world = cluster.machine.state.world
    alone = names_of(cluster.job, "m0")
    assert alone.to_come("m0") == ["node0"]
    assert alone.to_come("m0/node0") == []
    cluster.feed(cluster.node("node0"))
    assert alone.given(world) == {"node0": "m0"}


# --- what a job reads -------------------------------------------------------------------------------------------------


class Watched:
    """A job beside the folder, without threads: what `isolation` hands over is done at once."""

    def __init__(self, store: IsolationStore, cluster: FakeCluster, names: Names = HERE) -> None:
        self.store, self.cluster = store, cluster
        folder: Any = SimpleNamespace(write=store.add, latest=None, whole=True)
        self.folder = folder
        self.isolating = IsolationAcrossJobs(folder, names, HOUR_S, self.observe, self.report)
        self.told: list[FaultReport] = []

    def observe(self) -> Any:
        return SimpleNamespace(at_s=self.cluster.now, state=self.cluster.machine.state)

    def report(self, report: FaultReport, answer: object) -> None:
        self.told.append(report)
        self.cluster.feed(FaultReported(report))

    def look(self) -> None:
        self.folder.latest, self.folder.whole = self.store.read(), not self.store.problems
        self.isolating.look()

    @property
    def nodes(self) -> dict[str, str]:
        return {node.node: node.state for node in self.cluster.machine.status(self.cluster.now).nodes}


def come(cluster: FakeCluster, nodes: int = 3) -> None:
    cluster.feed(*(cluster.node(f"node{number}") for number in range(nodes)))


def test_the_next_job_does_not_choose_the_node_and_says_why(store: IsolationStore) -> None:
    first = Watched(store, FakeCluster(policy=POLICY).start())
    strike(first.cluster)
    first.look()
    assert [each.place for each in store.read()] == ["m0/node1, device 1"]

    second = Watched(store, FakeCluster(policy=POLICY))
    second.look()
    come(second.cluster)
    while second.cluster.machine.phase is Phase.WAITING:
        second.cluster.overdue()
    assert second.nodes == {"node0": "active", "node1": "unfit", "node2": "active"}
    (fault,) = second.cluster.machine.status(0.0).faults
    assert (fault.report.seen_by, fault.report.level) == (SEEN_BY, FaultLevel.MANUALLY_SEPARATE_NPU)
    assert "isolated by job test at 1970-01-01 00:16:40 UTC: C1 3 times within 100 s" in fault.report.detail
    second.look()
    assert len(second.told) == 1


def test_a_job_that_needs_the_node_says_at_its_end_why_it_was_not_used(store: IsolationStore) -> None:
    store.add(document())
    watched = Watched(store, FakeCluster(job(spares=0)))
    watched.look()
    come(watched.cluster, 2)
    while watched.cluster.finish is None:
        watched.cluster.overdue()
    reason = watched.cluster.finish.reason
    assert reason.startswith("too few nodes came within 270 s; node1 is not used: ManuallySeparateNPU isolated by job")
    assert reason.endswith("(`midstep isolated`)")


def test_a_release_and_the_end_of_its_time_reach_a_job_that_runs(store: IsolationStore, clock: Clock) -> None:
    for each in (document("m0/node2"), document("m0/node1", until_s=NOW_S + 10)):
        store.add(each)
    watched = Watched(store, FakeCluster(job(nodes=1, spares=2)))
    watched.look()
    come(watched.cluster)
    while watched.cluster.machine.phase is Phase.WAITING:
        watched.cluster.overdue()
    assert watched.nodes == {"node0": "active", "node1": "unfit", "node2": "unfit"}
    clock.now_s += 10
    watched.look()
    assert watched.nodes == {"node0": "active", "node1": "spare", "node2": "unfit"}
    store.release("node2", None, "m0")
    watched.look()
    assert watched.nodes == {"node0": "active", "node1": "spare", "node2": "spare"}


def test_ranks_that_train_are_left_alone_and_a_spare_is_not_used(store: IsolationStore) -> None:
    watched = Watched(store, FakeCluster().start())
    for node in ("node1", "node2"):
        store.add(document(node=f"{HERE.machine}/{node}"))
    watched.look()
    assert [report.node for report in watched.told] == ["node2"]
    assert watched.nodes == {"node0": "active", "node1": "active", "node2": "unfit"}


def test_the_detector_of_the_job_that_isolated_a_spare_has_the_last_word(store: IsolationStore) -> None:
    watched = Watched(store, FakeCluster().start())
    store.add(document(node=f"{HERE.machine}/node2", job=watched.cluster.job.job))
    watched.look()
    assert watched.told == []


def test_a_detector_of_that_name_keeps_its_own_faults(store: IsolationStore) -> None:
    watched = Watched(store, FakeCluster().start())
    watched.cluster.feed(
        watched.cluster.fault(
            None,
            FaultKind.NODE,
            node="node2",
            seen_by=SEEN_BY,
            fault_id="fan",
            level=FaultLevel.SEPARATE_NPU,
            assertion=Assertion.OCCUR,
        )
    )
    watched.look()
    assert watched.told == []


def test_what_cannot_be_read_releases_nothing(store: IsolationStore) -> None:
    store.add(document())
    watched = Watched(store, FakeCluster())
    watched.look()
    come(watched.cluster)
    (store.folder / document().file_name).write_bytes(b"{")
    watched.look()
    assert watched.nodes["node1"] == "unfit"


# --- the thread -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is read again at once."""
    monkeypatch.setattr(isolation, "READ_S", 0.01)


@pytest.fixture
def folder(store: IsolationStore, quick: None) -> Iterator[IsolationFolder]:
    opened = IsolationFolder(store)
    opened.start(wait=True)
    yield opened
    opened.close()


def test_a_folder_that_is_not_there_isolates_nothing_and_what_is_raised_is_written_at_the_latest_at_the_end(
    folder: IsolationFolder, store: IsolationStore
) -> None:
    assert folder.latest == []
    assert folder.whole
    assert not store.folder.exists()
    folder.write(document())
    folder.close()
    assert store.read() == [document()]


def test_what_cannot_be_written_is_said_once_and_is_written_when_there_is_room(
    folder: IsolationFolder, store: IsolationStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A file where the folder belongs stands for a disk that takes nothing."""
    store.folder.parent.mkdir()
    store.folder.write_text("")
    folder.write(document())
    wait_until(lambda: any("do not learn of" in record.getMessage() for record in caplog.records))
    store.folder.unlink()
    wait_until(lambda: bool(folder.latest))
    assert store.read() == [document()]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said)) <= 2


def test_a_damaged_document_is_named_in_the_log_once(
    store: IsolationStore, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    store.add(document())
    damaged = store.folder / document().file_name
    damaged.write_bytes(b"{")
    opened = IsolationFolder(store)
    opened.start(wait=True)
    wait_until(lambda: opened.latest == [])
    wait_until(lambda: bool(caplog.records))
    opened.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"{damaged}: is skipped: ")
    assert not opened.whole


def test_what_is_raised_in_the_last_moment_of_a_job_is_written(store: IsolationStore) -> None:
    cluster = FakeCluster(policy=POLICY).start()

    async def play() -> None:
        folder = IsolationFolder(store)
        job = IsolationAcrossJobs(folder, HERE, HOUR_S, Watched(store, cluster).observe, lambda report, answer: None)
        running = asyncio.create_task(job.run())
        await asyncio.sleep(0.05)
        strike(cluster)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(play())
    assert [each.place for each in store.read()] == ["m0/node1, device 1"]


def test_a_folder_that_hangs_holds_up_neither_a_start_for_long_nor_an_end(
    store: IsolationStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "FIRST_READ_S", 0.05)
    monkeypatch.setattr(isolation, "LAST_WRITE_S", 0.05)
    back = threading.Event()

    def read() -> list[Isolated]:
        back.wait(WAIT_S)
        return []

    monkeypatch.setattr(store, "read", read)
    folder = IsolationFolder(store)
    folder.start(wait=True)
    folder.write(document())
    folder.close()
    assert folder.latest is None
    assert "isolated devices are known later" in caplog.text
    back.set()
    wait_until(lambda: bool(IsolationStore.read(store)))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IsolationStore:
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path))
    return IsolationStore(isolation_folder())


def isolated(*options: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["isolated", *options])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_lists_releases_and_says_what_is_isolated_when_the_name_is_wrong(home: IsolationStore) -> None:
    assert isolated() == f"nothing is isolated in {home.folder}\n"
    assert isolated("--release", "node1", code=1).endswith(
        f"node1 is not isolated in {home.folder}. Isolated there: nothing.\n"
    )
    here, at_s = host_name(), 1e9
    for device in (1, 2):
        home.add(document(f"{here}/node1", device, at_s, until_s=4e9))
    home.add(document("worker-7", None, at_s, until_s=4e9))
    why = "C1 in job first, 2001-09-09 01:46:40 UTC: 3 times within 100 s, 3 are too often"
    until = "until 2096-10-02 07:06:40 UTC"
    listed = [f"{here}/node1, device 1: {until}; {why}", f"{here}/node1, device 2: {until}; {why}"]
    assert sorted(isolated().splitlines()) == sorted([*listed, f"worker-7: {until}; {why}"])
    wrong = isolated("--release", "node1", "--device", "3", code=1)
    places = "; ".join(each.place for each in home.read())
    assert wrong.endswith(f"node1, device 3 is not isolated in {home.folder}. Isolated there: {places}.\n")
    assert isolated("--release", "node1", "--device", "1") == f"released {here}/node1, device 1: {why}\n"
    assert isolated("--release", f"{here}/node1") == f"released {here}/node1, device 2: {why}\n"
    assert isolated() == f"worker-7: {until}; {why}\n"


def test_the_command_names_a_damaged_document_and_takes_no_device_without_a_node(home: IsolationStore) -> None:
    home.folder.mkdir()
    damaged = home.folder / "node1+1.json"
    damaged.touch(mode=0o600)
    assert f"{damaged} is skipped: " in isolated()
    assert "--device goes with --release NODE." in isolated("--device", "1", code=2)
