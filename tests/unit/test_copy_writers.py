"""An agent has copies written to disk by other processes, and says in the copy when that is over, however it ends."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from midstep.agent import channel, copy_writers
from midstep.agent.copy_writers import CopyWriters
from midstep.protocol.errors import AgentError
from midstep.protocol.host_copies import CopyFile, CopyHeader, Disk, create_copy_files, note_disk, read_disk
from midstep.protocol.types import JobSettings

SETTINGS = JobSettings(checkpoint_directory="/d", checkpoint_asynchronous=True, save_s=60.0)


@pytest.fixture
def fds() -> Iterator[tuple[int, ...]]:
    made = create_copy_files(3)
    want(made[0], step=10)
    yield made
    for fd in made:
        os.close(fd)


def want(fd: int, *, step: int) -> None:
    """Have rank 3 mark a copy in a file."""
    file = CopyFile(fd)
    file.reserve(1, 1)
    file.begin(CopyHeader(3, 4, step, 1, 1, 1), b"i", Disk.WANTED)[:] = b"b"
    file.finish()


class Pool:
    """Gives out processes that do with their channel what a test says."""

    def __init__(self, does: Callable[[Any], None]) -> None:
        self.orders: list[channel.WriteCheckpoint] = []
        self._does = does

    async def take(self) -> Any:
        return self

    def assign(self, order: channel.WriteCheckpoint, fds: tuple[int, ...], _: object) -> Any:
        self.orders.append(order)
        self._does(fds[0])
        return SimpleNamespace(kill=lambda: None)


def written(does: Callable[[Any], None], fds: tuple[int, ...], settings: JobSettings = SETTINGS) -> int:
    """Look at the copies of rank 3, twice, and wait; return how many were begun to be written."""
    pool = Pool(does)

    async def look() -> None:
        writers, job = CopyWriters(pool), SimpleNamespace(job="gpt", settings=settings)  # type: ignore[arg-type]
        for _ in range(2):
            writers.look(job, 3, fds)  # type: ignore[arg-type]
            await asyncio.sleep(0)
        await writers.close(5.0)

    asyncio.run(look())
    return len(pool.orders)


def answers(error: str) -> Callable[[int], None]:
    """Return what a process does that answers."""

    def answer(end: int) -> None:
        with socket.socket(fileno=os.dup(end)) as theirs:
            channel.send(theirs, channel.CheckpointWritten(error))

    return answer


def test_a_copy_that_is_marked_is_written_once(fds: tuple[int, ...]) -> None:
    """Then it is over, and its file may be used again."""
    assert written(answers(""), fds) == 1
    assert read_disk(fds[0])[0] is Disk.OVER
    assert written(answers(""), fds) == 0


def test_of_two_copies_that_are_marked_the_older_one_is_written_first(fds: tuple[int, ...]) -> None:
    """In whichever file it lies: where a newer checkpoint is complete, the parts of an older one are removed."""
    want(fds[1], step=9)
    assert written(answers(""), fds) == 1
    assert [read_disk(fd)[0] for fd in fds[:2]] == [Disk.WANTED, Disk.OVER]


@pytest.mark.parametrize("disk", [Disk.NO, Disk.PLANNED, Disk.OVER])
def test_no_other_copy_is_written(fds: tuple[int, ...], disk: Disk) -> None:
    """Nor any where the policy does not ask for it."""
    note_disk(fds[0], disk)
    assert written(answers(""), fds) == 0
    note_disk(fds[0], Disk.WANTED)
    assert written(answers(""), fds, JobSettings(checkpoint_directory="/d")) == 0


def fails_to_start(_: int) -> None:
    """Refuse the assignment."""
    raise AgentError("idle process 7 ended with status -9")


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (answers("No space left on device"), "No space left on device"),
        (lambda _: None, "the process that was writing it has ended"),
        (fails_to_start, "idle process 7 ended"),
    ],
)
def test_what_goes_wrong_is_said_and_the_copy_is_free_again(
    fds: tuple[int, ...], caplog: pytest.LogCaptureFixture, does: Callable[[int], None], says: str
) -> None:
    """The next one is written as ever."""
    with caplog.at_level(logging.ERROR):
        written(does, fds)
    assert f"no checkpoint of step 10 from the copy of rank 3: {says}" in caplog.text
    assert read_disk(fds[0])[0] is Disk.OVER


def test_a_process_that_does_not_answer_is_not_waited_for_for_ever(
    fds: tuple[int, ...], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs costs the checkpoint."""
    monkeypatch.setattr(copy_writers, "SPARE_S", 0.01)
    kept: list[int] = []
    hurried = msgspec.structs.replace(SETTINGS, save_s=0.01)
    with caplog.at_level(logging.ERROR):
        written(lambda end: kept.append(os.dup(end)), fds, hurried)
    os.close(kept[0])
    assert "it was not written within 0.01 s (deadlines.save_s)" in caplog.text
    assert read_disk(fds[0])[0] is Disk.OVER
