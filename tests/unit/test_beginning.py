"""Training begins at its first step where there has never been a checkpoint, or where the policy says so."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.repair import why_not_begin
from midstep.controller.recovery.state import Phase
from midstep.devices.base import Damage
from midstep.policies.schema import CheckpointPolicy, Policy
from midstep.processor.checkpoints import archive, entries
from midstep.processor.checkpoints.entries import LATEST, set_aside, survey
from midstep.processor.checkpoints.files import remove_checkpoint
from midstep.processor.checkpoints.writer import Fence
from midstep.processor.recovery_phases import RecoveryPhases
from midstep.processor.step_order import StepState
from midstep.protocol.messages import Rejoin
from midstep.protocol.types import (
    CheckpointTrace,
    InjectionPoint,
    JobSettings,
    Rendezvous,
    RepairPart,
    RestoreSource,
    StepReport,
)
from midstep.testing.fake_cluster import FakeCluster

BOTH = (RestoreSource.REPLICA, RestoreSource.CHECKPOINT)
DAMAGED = CheckpointTrace("/data/gpt", unusable="step-00000110: its manifest is damaged")
UNLISTED = CheckpointTrace("/data/gpt", unlisted="cannot look for checkpoints in /data/gpt: Stale file handle")
UNMARKED = CheckpointTrace("/data/gpt", unmarked=True)
EMPTY = CheckpointTrace("/data/gpt")


def report(trace: CheckpointTrace = EMPTY, *checkpoints: int) -> StepReport:
    """A process that has just joined."""
    return StepReport(0, ready=False, clean=True, checkpoints=checkpoints, trace=trace)


def refusal(*reports: StepReport, **changes: Any) -> str:
    """Return why a world of these ranks must not begin."""
    facts = {"restore": BOTH, "trusted_step": None, "begin_again": False, "marked_before": False, **changes}
    return why_not_begin(dict(enumerate(reports)), **facts)


def test_where_nothing_was_ever_complete_training_begins() -> None:
    assert not refusal(report(), report())
    assert not refusal(report(UNMARKED), report(UNMARKED))


def test_damaged_checkpoints_are_named_with_their_directory_and_what_to_set() -> None:
    said = refusal(report(), report(DAMAGED))
    for part in ("/data/gpt", "rank 1", "step-00000110", "damaged", "checkpoint.begin_again: true"):
        assert part in said


def test_the_policy_can_allow_it() -> None:
    assert not refusal(report(DAMAGED), begin_again=True)
    assert not refusal(report(EMPTY, 10), restore=(RestoreSource.REPLICA,), begin_again=True)


@pytest.mark.parametrize("begin_again", [True, False])
def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(begin_again: bool) -> None:
    said = refusal(report(), report(UNLISTED), report(UNLISTED), begin_again=begin_again)
    assert "rank 1 (and 1 more) does not know" in said
    assert "Stale file handle" in said


def test_a_checkpoint_that_only_some_can_read_is_there() -> None:
    said = refusal(report(EMPTY, 10, 20), report(), report())
    assert "rank 0 can read the checkpoint of step 20" in said
    assert "rank 1 (and 1 more) none" in said


def test_restore_without_checkpoint_does_not_throw_checkpoints_away() -> None:
    said = refusal(report(EMPTY, 10, 20), restore=(RestoreSource.REPLICA,))
    assert "restore is without checkpoint" in said


def test_checkpoints_that_cannot_be_trusted_are_no_reason_to_begin_again() -> None:
    assert "more than 5 updates can be trusted" in refusal(report(EMPTY, 10, 20), trusted_step=5)


def test_a_job_that_finds_its_mark_nowhere_has_lost_its_directory() -> None:
    assert "not mounted" in refusal(report(UNMARKED), report(UNMARKED), marked_before=True)
    assert not refusal(report(UNMARKED), report(EMPTY), marked_before=True)


def joined(cluster: FakeCluster, trace: CheckpointTrace) -> list[Any]:
    """All ranks of a world that starts together join; return what they are told then."""
    told: list[Any] = []
    for rank in range(cluster.job.world_size):
        event = cluster.joined(rank, fresh=True, own=0)
        told += cluster.feed(msgspec.structs.replace(event, report=msgspec.structs.replace(event.report, trace=trace)))
    return told


@pytest.mark.parametrize("begin_again", [True, False])
def test_a_job_ends_with_that_reason_unless_the_policy_says_otherwise(begin_again: bool) -> None:
    """No rung can mend it, so none is tried: no node is given back for it."""
    cluster = FakeCluster(policy=Policy(checkpoint=CheckpointPolicy(begin_again=begin_again)))
    for number in range(3):
        cluster.feed(cluster.node(f"node{number}"))
    told = joined(cluster, DAMAGED)
    if begin_again:
        assert {order.part.target_step for order in told if isinstance(order, Rejoin)} == {0}
        return
    cluster.expect(Phase.ENDED)
    result = cluster.machine.state.result
    assert result is not None
    assert result.exit_code == 1
    assert "/data/gpt" in result.reason
    assert not [order for order in told if isinstance(order, Rejoin)]


# --- what a rank finds -----------------------------------------------------------------------------------------------


def save(directory: Path, step: int) -> Path:
    """Write a complete checkpoint of one rank whose shard is empty."""
    archive.save_local(directory, step, 0, b"own")
    archive._save(directory, step, archive.ATTEMPT, "all.safetensors", lambda file: None)
    return archive.publish(directory, step, world_size=1)


def test_a_directory_that_comes_back_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits grow, and end when the patience does."""
    save(tmp_path, 10)
    real, failures, slept = os.listdir, [3], [0.0]

    def stale(path: Any = ".") -> list[str]:
        if path == str(tmp_path) and failures[0]:
            failures[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path)

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    monkeypatch.setattr(os, "listdir", stale)
    steps, trace = survey(str(tmp_path), 10.0, clock=lambda: slept[0], sleep=sleep)
    assert (steps, trace.unlisted) == ((10,), "")
    failures[0] = 10**6
    slept[0] = 0.0
    steps, trace = survey(str(tmp_path), 10.0, clock=lambda: slept[0], sleep=sleep)
    assert steps == ()
    assert "Stale file handle" in trace.unlisted
    assert slept[0] <= 10.0
    assert 10**6 - failures[0] < 20


def test_what_cannot_be_used_is_told_in_few_words(tmp_path: Path) -> None:
    """However many checkpoints there are."""
    for step in range(1, 9):
        (save(tmp_path, step) / "manifest.json").write_text("{" * 5000)
    steps, trace = survey(str(tmp_path), 0.0)
    assert steps == ()
    assert "step-00000008: " in trace.unusable
    assert "and 5 more" in trace.unusable
    assert len(trace.unusable) < 1500


def test_only_the_newest_checkpoints_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is one message."""
    monkeypatch.setattr(entries, "MOST_REPORTED", 2)
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert survey(str(tmp_path), 0.0)[0] == (2, 3)


def test_the_mark_and_the_note_of_the_latest_checkpoint_are_traces(tmp_path: Path) -> None:
    """Of checkpoints that somebody has removed, and of a directory that is another one."""
    assert survey(str(tmp_path), 0.0)[1].unmarked
    Fence(tmp_path).take("gpt", 1, "node0")
    assert survey(str(tmp_path), 0.0) == ((), CheckpointTrace(str(tmp_path)))
    remove_checkpoint(save(tmp_path, 10))
    assert "step 10 was complete by latest.json" in survey(str(tmp_path), 0.0)[1].unusable
    (tmp_path / LATEST).write_text("?")
    assert "latest.json cannot be read" in survey(str(tmp_path), 0.0)[1].unusable


def test_where_training_begins_again_older_checkpoints_are_kept_aside(tmp_path: Path) -> None:
    """None is taken for one of the new training later, none is removed, and what is not midstep's stays."""
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "step-00000020" / "manifest.json").write_text("{")
    (tmp_path / "step-00000030").symlink_to(tmp_path / "step-00000010")
    (tmp_path / "step-00000040").mkdir()
    set_aside(tmp_path, "gpt-g1")
    assert survey(str(tmp_path), 0.0)[1].unusable == ""
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000010.aside-gpt-g1",
        "step-00000020.aside-gpt-g1",
        "step-00000030.aside-gpt-g1",
        "step-00000040",
    }
    save(tmp_path, 5)
    assert archive.prune(tmp_path, keep=1, written=5) == ()
    assert (tmp_path / "step-00000010.aside-gpt-g1" / "own-0.bin").read_bytes() == b"own"


def test_what_cannot_be_removed_stops_neither_pruning_nor_going_back(tmp_path: Path) -> None:
    """Its manifest is gone, so it does not count any more; the others are removed."""
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    for step in (1, 4):
        (tmp_path / f"step-{step:08d}" / "mine").mkdir()
    assert archive.prune(tmp_path, keep=3) == (2,)
    (tmp_path / "step-00000005" / "manifest.json").write_text("{")
    archive.forget_after(tmp_path, 3, "gpt-g2")
    assert archive.complete_steps(tmp_path) == (3,)
    left = {path.name for path in tmp_path.glob("step-*")}
    assert left == {"step-00000001", "step-00000003", "step-00000004", "step-00000005.aside-gpt-g2"}


class Played:
    """A rank, as far as a way back to the first step needs it; it keeps the local state it was given."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank, self.job, self.settings = rank, "gpt", JobSettings(checkpoint_directory=str(directory))
        self.device = self.framework = self.callbacks = self.step_clock = self.local_states = self.communicator = self
        self.injection_points = self

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def sent(self, shards: Any) -> Any:
        """No bit flips."""
        return shards

    def clean(self) -> Damage:
        """Nothing is corrupted."""
        return Damage.NONE

    def run(self, phase: InjectionPoint, generation: int, default: Callable[[], None], step: int) -> None:
        """There are no callbacks of the user's."""
        default()


@pytest.mark.parametrize(("rank", "moved"), [(0, True), (1, False)])
def test_rank_0_leaves_an_earlier_training_behind_where_training_begins(tmp_path: Path, rank: int, moved: bool) -> None:
    """Before it is said to be ready."""
    save(tmp_path, 10)
    played: Any = Played(tmp_path, rank)
    rejoining = RecoveryPhases(played, played, played, StepState(clean=True), played)
    part = RepairPart(0, RestoreSource.REPLICA)
    rejoining.repair(Rejoin(rank, 1, Rendezvous("127.0.0.1", 1, "secret"), connected=True, part=part))
    assert (tmp_path / "step-00000010.aside-gpt-g1").exists() is moved
    assert (tmp_path / "step-00000010").exists() is not moved
