"""A driver gives its launcher signs of life whatever happens, and takes a stop once."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import SqliteStore, open_sqlite
from midstep.controller.keepalive import SERVING, STARTING, KeepAlive
from midstep.protocol.messages import NodeJoined
from midstep.protocol.types import StoreEndpoint

from .conftest import StubMachine

if TYPE_CHECKING:
    from .conftest import Rig


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, writing
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def beats(reading: int) -> bytes:
    """What has been written since the last look."""
    try:
        return os.read(reading, 65_536)
    except BlockingIOError:
        return b""


def test_a_driver_that_waits_for_its_disk_still_shows_that_it_lives(rig: "Rig", pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    rig.alive = KeepAlive(writing)

    async def scenario() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        async with rig.controller() as (driver, _):
            agent = rig.peer("node/a")
            await rig.until(lambda: SERVING in beats(reading))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
            try:
                agent.say(NodeJoined("a", "a", StoreEndpoint("h", 1)))
                await rig.until(lambda: "journal cannot be written" in driver.status().reason)
                for _ in range(3):
                    beats(reading)
                    await rig.until(lambda: SERVING in beats(reading))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    asyncio.run(scenario())


def test_a_stop_is_asked_for_once_however_many_controllers_are_started_for_it(rig: "Rig") -> None:
    """A second request would not wait for the checkpoint."""
    rig.stop = "enough"

    async def scenario() -> None:
        for started in range(1, 4):
            async with rig.controller(StubMachine(journal_path(rig.job_directory))):
                await rig.until(lambda: rig.machine.kinds().count("ControllerStarted") == started)  # noqa: B023
                await rig.until(lambda: "StopRequested" in rig.machine.kinds())
        assert rig.journaled().count("StopRequested") == 1

    asyncio.run(scenario())


def test_a_controller_that_waits_for_the_journal_shows_that_it_lives(rig: "Rig", pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    alive = KeepAlive(writing)
    with open_sqlite(journal_path(rig.job_directory)), pytest.raises(Exception, match="another controller"):
        open_sqlite(journal_path(rig.job_directory), wait_s=0.2, beat=alive.beat)
    assert STARTING in beats(reading)


def test_a_journal_beats_while_sqlite_works(rig: "Rig") -> None:
    calls = []
    with open_sqlite(journal_path(rig.job_directory), beat=lambda: calls.append(1)) as journal:
        assert isinstance(journal._store, SqliteStore)
        journal._store._connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) SELECT count(*) FROM n"
        ).fetchone()
    assert calls


def test_a_pipe_that_is_not_read_or_that_is_broken_holds_nothing_up(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 65_536)
    KeepAlive(writing).serve()
    os.close(reading)
    KeepAlive(writing).serve()


def test_beats_are_not_written_more_often_than_needed(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    alive = KeepAlive(writing)
    for _ in range(1000):
        alive.beat()
    alive.serve()
    alive.serve()
    written = beats(reading)
    assert written.endswith(SERVING)
    assert len(written) < 100
