"""A link to the controller follows it to where it listens, and is not led astray."""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from midstep.protocol import link as link_module
from midstep.protocol.codec import envelopes_of
from midstep.protocol.discovery import Lookup
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.link import ControllerLink
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import NodeRefused
from midstep.protocol.transport import DealerSocket, RouterSocket

PATIENCE_S = 30.0
WORD = NodeRefused("node9", "none left")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "LOOKUP_S", 0.05)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: unix sockets allow no long ones."""
    path = Path(tempfile.mkdtemp(prefix="ms-"))
    yield path
    shutil.rmtree(path)


def router(folder: Path, name: str) -> RouterSocket:
    return RouterSocket(f"ipc://{folder}/{name}.sock", curve=None)


def linked(endpoint: str, lookup: Lookup) -> ControllerLink:
    return ControllerLink(
        Mailbox(job="j", address="platform", session=1, retry_s=0.05, retry_max_s=0.2),
        DealerSocket(endpoint, identity="platform", curve=None),
        on_command=lambda _: None,
        on_new_controller=lambda: None,
        lookup=lookup,
    )


async def hears(router: RouterSocket) -> bool:
    """Wait for the word at a router."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if any(each.body == WORD for received in router.receive() for each in envelopes_of(received.data)):
            return True
        await asyncio.sleep(0.01)
    return False


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_what_was_said_before_the_controller_moved_is_heard_at_the_new_place(folder: Path) -> None:
    async def scenario() -> None:
        first, second = router(folder, "a"), router(folder, "b")
        place = first.endpoint
        link = linked(first.endpoint, lambda: place)
        try:
            link.post(WORD)
            assert await hears(first)
            place = second.endpoint
            assert await hears(second)
            assert link.endpoint == second.endpoint
        finally:
            for each in (link, first, second):
                each.close()

    run(scenario)


@pytest.mark.parametrize("place", ["http://x", "", "tcp://127.0.0.1:1", "ipc://relative", "ipc:///" + "x" * 200])
def test_an_endpoint_that_cannot_be_used_changes_nothing(folder: Path, place: str) -> None:
    """Not even TCP without keys, where anybody could listen."""

    async def scenario() -> None:
        only = router(folder, "a")
        link = linked(only.endpoint, lambda: place)
        try:
            await asyncio.sleep(0.2)
            link.post(WORD)
            assert await hears(only)
            assert link.endpoint == only.endpoint
        finally:
            link.close()
            only.close()

    run(scenario)


def test_a_lookup_that_fails_is_told_of_once_and_asked_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    def lookup() -> str | None:
        nonlocal asked
        asked += 1
        raise ConfigurationError("the file cannot be read")

    async def scenario() -> None:
        only = router(folder, "a")
        link = linked(only.endpoint, lookup)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while asked < 4:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        finally:
            link.close()
            only.close()

    caplog.set_level(logging.WARNING)
    run(scenario)
    assert caplog.text.count("the file cannot be read") == 1
