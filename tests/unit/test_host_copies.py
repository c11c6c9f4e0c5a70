"""A rank's copies in host memory: what is written comes back, and what is not whole is never taken for a copy."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midstep.processor.host_copies import HostCopies
from midstep.protocol.errors import HostCopyError, RecoveryError
from midstep.protocol.host_copies import CopyFile, create_copy_files, read_header
from midstep.protocol.types import Activity, JobSettings, RepairPart, RestoreSource, ShardHold, StepReport


class Held:
    """A framework with two shards."""

    changes_in_updates_alone = True

    def __init__(self, *, size: int = 1000) -> None:
        self.tensors = {name: [torch.rand(size), torch.arange(7), torch.empty(0)] for name in ("one", "other")}
        self.adopted: list[str] = []

    def shards(self) -> tuple[ShardHold, ...]:
        return tuple(ShardHold(name, 1) for name in self.tensors)

    def open_shard(self, shard_id: str) -> Any:
        return SimpleNamespace(header=shard_id.encode(), tensors=self.tensors[shard_id])

    def accept_shard(self, shard_id: str, header: bytes) -> Any:
        assert header == shard_id.encode()
        return self.open_shard(shard_id)

    def adopt_shard(self, shard_id: str, shard: Any) -> None:
        self.adopted.append(shard_id)

    def content(self) -> list[Any]:
        return [tensor.tolist() for tensors in self.tensors.values() for tensor in tensors]

    def change(self) -> None:
        """Do an update."""
        for tensors in self.tensors.values():
            tensors[0] += 1


class Clock:
    """A step clock."""

    activity = Activity.COMPUTING

    def doing(self, activity: Activity) -> None:
        self.activity = activity


@pytest.fixture
def fds() -> Iterator[tuple[int, ...]]:
    made = create_copy_files(3)
    yield made
    for fd in made:
        os.close(fd)


def process_of(fds: tuple[int, ...], framework: Held, *, world_size: int = 4, **settings: Any) -> HostCopies:
    """Return the copies as one process of the rank sees them."""
    runtime: Any = SimpleNamespace(
        rank=3,
        world_size=world_size,
        ranks_per_node=2,
        generation=1,
        host_copy_fds=fds,
        settings=JobSettings(host_copies=True, host_copy_every_steps=1, **settings),
        step_clock=Clock(),
        injection_points=SimpleNamespace(reached=lambda *_: None),
        local_states=SimpleNamespace(read=lambda rank, step: b"local state of %d at %d" % (rank, step)),
    )
    return HostCopies(runtime, framework)  # type: ignore[arg-type]


def train(copies: HostCopies, framework: Held, steps: range) -> None:
    """Do some steps; the other ranks are for a copy whenever this one is."""
    for step in steps:
        copies.agreed(by_all=copies.agrees(step, 0.1))
        framework.change()
        copies.take(step)


def test_the_next_process_finds_the_last_two_copies_and_loads_one(fds: tuple[int, ...]) -> None:
    """With the rank-local state of that step."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 6))
    copies.settle()
    saved = framework.content()
    newcomer = Held()
    after = process_of(fds, newcomer)
    assert after.steps() == (4, 5)
    assert after.load(5) == b"local state of 3 at 5"
    assert newcomer.content() == saved
    assert newcomer.adopted == ["one", "other"]


def test_a_process_that_ends_in_the_middle_of_a_copy_leaves_the_one_before_it(fds: tuple[int, ...]) -> None:
    """The file that it was writing holds none."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 4))
    copies.settle()
    header = read_header(fds[0])
    assert header is not None
    CopyFile(fds[0]).begin(header, b"")
    assert process_of(fds, Held()).steps() == (2,)


def flip(fd: int, at: int) -> None:
    """Flip a bit of a file."""
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 1]), at)


@pytest.mark.parametrize("at", [40, 140, 1200, -1])
def test_a_damaged_copy_is_refused_before_anything_is_overwritten_and_is_then_no_copy_any_more(
    fds: tuple[int, ...], at: int
) -> None:
    """In its header, its index, the middle or the end of its tensors."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 3))
    copies.settle()
    (newest,) = [fd for fd in fds if (read_header(fd) or [0] * 3)[2] == 2]
    header = read_header(newest)
    assert header is not None
    flip(newest, at if at >= 0 else header.size_bytes - 1)
    newcomer = Held()
    before, after = newcomer.content(), process_of(fds, newcomer)
    assert after.steps() == ((1,) if at == 40 else (1, 2))  # the rest is looked at when it is needed
    with pytest.raises(HostCopyError):
        after.load(2)
    assert newcomer.content() == before
    assert after.steps() == (1,)


def test_a_truncated_copy_is_none(fds: tuple[int, ...]) -> None:
    """Its file is shorter than its header says."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 3))
    copies.settle()
    for fd in fds:
        os.ftruncate(fd, os.fstat(fd).st_size - 1)
    assert process_of(fds, Held()).steps() == ()


def test_a_copy_of_a_world_of_another_size_is_none(fds: tuple[int, ...]) -> None:
    """Its pieces are cut otherwise."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 3))
    copies.settle()
    assert process_of(fds, Held(), world_size=2).steps() == ()


def test_a_copy_of_other_shards_is_refused(fds: tuple[int, ...]) -> None:
    """The script has been changed, say."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 2))
    copies.settle()
    other = Held()
    other.tensors["third"] = []
    with pytest.raises(RecoveryError, match="of other shards"):
        process_of(fds, other).load(1)


def test_after_a_recovery_the_copy_that_all_have_stays_and_any_other_goes(fds: tuple[int, ...]) -> None:
    """The next copy does not overwrite it."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 6))
    copies.settle()
    copies.resumed(SimpleNamespace(part=RepairPart(4, RestoreSource.REPLICA, host_copy=4)))  # type: ignore[arg-type]
    assert copies.steps() == (4,)
    train(copies, framework, range(5, 6))
    copies.settle()
    assert copies.steps() == (4, 5)


def test_what_was_copied_after_the_last_state_that_is_right_is_in_no_report(fds: tuple[int, ...]) -> None:
    """A vote was lost on the state of step 5: some rank has copied something wrong."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 6))
    copies._votes = SimpleNamespace(sound=4, agreed=4, is_on=True)  # type: ignore[assignment]
    report = StepReport(5, ready=False, clean=True)
    assert copies.reported(report).host_copies == (4,)


def test_where_ranks_go_back_after_a_lost_vote_an_older_copy_stays_until_the_next_vote(fds: tuple[int, ...]) -> None:
    """The common copy has passed none yet. The next copy is written over the older one if that vote was passed."""
    framework = Held()
    copies = process_of(fds, framework, integrity_every_steps=10)
    votes = SimpleNamespace(sound=None, agreed=4, is_on=True)
    copies._votes = votes  # type: ignore[assignment]
    train(copies, framework, range(1, 6))
    copies.settle()
    assert copies.steps() == (4, 5)
    copies.resumed(SimpleNamespace(part=RepairPart(5, RestoreSource.REPLICA, host_copy=5)))  # type: ignore[arg-type]
    assert copies.steps() == (4, 5)
    votes.agreed = 5
    train(copies, framework, range(6, 7))
    copies.settle()
    assert copies.steps() == (5, 6)


def test_copies_that_need_more_memory_than_is_allowed_are_not_made_and_training_goes_on(
    fds: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning that has the numbers; this rank is for no further copy."""
    framework = Held(size=300_000)
    copies = process_of(fds, framework, host_copy_bytes=4_000_000)
    train(copies, framework, range(1, 6))
    assert copies.steps() == ()
    (warning,) = caplog.messages
    assert "2.4 MB" in warning
    assert "1.0 MB are allowed" in warning
    assert "raise host_copy.memory_bytes" in warning


def test_a_machine_without_memory_is_a_warning(
    fds: tuple[int, ...], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal is found in the thread, and no process is lost."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 4))
    assert copies.steps() == ()
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.text


def test_a_copy_grows_with_what_is_copied(fds: tuple[int, ...]) -> None:
    """An optimizer has state from its first step on."""
    framework = Held()
    copies = process_of(fds, framework)
    train(copies, framework, range(1, 3))
    framework.tensors["one"].append(torch.rand(100_000))
    train(copies, framework, range(3, 5))
    copies.settle()
    saved = framework.content()
    newcomer = Held()
    newcomer.tensors["one"].append(torch.rand(100_000))
    process_of(fds, newcomer).load(4)
    assert newcomer.content() == saved
