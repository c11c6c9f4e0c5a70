"""`midstep platform --standby`, `midstep detect --standby`: one beside each controller serves while that one leads."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from midstep.cli.standing_by import LEFT
from midstep.controller.endpoints.discovery_files import write_endpoint
from midstep.controller.endpoints.standing_by import StandingBy
from midstep.platforms.peer import PlatformPeer, keys_from
from midstep.protocol.compat import within
from midstep.protocol.keys import JobKeys
from midstep.protocol.token import TOKEN_VARIABLE, FullToken, new_token, token_text

from ..driver.conftest import Rig
from ..driver.test_remote_operators import begun_with

LONG_S = 60.0
QUIET_S = 1.0


def free_port() -> int:
    """Return a port where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PLATFORM = ("platform", "kubernetes", "--job", "demo")
DETECTOR = ("detect", "demo", "--config-maps", "default")


@contextmanager
def waiting(
    port: int, command: tuple[str, ...] = PLATFORM, token: FullToken | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run what waits for the controller at a port. A platform would end at once then: it lacks its settings."""
    words = [*command, "--standby", "--controller", f"127.0.0.1:{port}"]
    environment = {**os.environ, TOKEN_VARIABLE: token_text(token or new_token(job="demo"))}
    platform = subprocess.Popen(
        [sys.executable, "-m", "midstep.cli.main", *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert platform.stderr is not None
        assert "waits until a controller leads" in platform.stderr.readline()
        yield platform
    finally:
        platform.kill()
        platform.communicate()


def test_it_begins_when_its_controller_leads_and_not_while_that_stands_by() -> None:
    """Which says so, and is asked again."""
    token, port, rig = new_token(job="demo"), free_port(), Rig()

    async def scenario(platform: subprocess.Popen[str]) -> str:
        standing_by = StandingBy(f"tcp://127.0.0.1:{port}", JobKeys.load_server(rig.keys), "demo")
        until_s = time.monotonic() + QUIET_S
        while time.monotonic() < until_s:
            standing_by.answer("b", [])
            await asyncio.sleep(0.05)
        standing_by.close()
        assert platform.poll() is None
        write_endpoint(rig.run_directory, f"tcp://127.0.0.1:{port}")
        async with rig.controller():
            _, said = await asyncio.to_thread(platform.communicate, timeout=LONG_S)
        return said

    try:
        begun_with(rig, token)
        with waiting(port, PLATFORM, token) as platform:
            assert "the platform kubernetes takes --option settings=FILE" in asyncio.run(scenario(platform))
    finally:
        rig.close()


@pytest.mark.parametrize("command", [PLATFORM, DETECTOR], ids=lambda command: command[0])
def test_it_leaves_when_it_is_told_to_while_it_waits(command: tuple[str, ...]) -> None:
    with waiting(free_port(), command) as platform:
        platform.terminate()
        assert platform.wait(LONG_S) == LEFT


def test_a_peer_says_when_there_was_no_controller_for_so_long() -> None:
    async def run() -> None:
        endpoints = [f"tcp://127.0.0.1:{free_port()}"]
        peer = PlatformPeer("demo", endpoints, keys_from(new_token(job="demo"), "demo"), leave_s=0.1)
        try:
            await within(LONG_S, peer.absent.wait())
        finally:
            peer.disconnect()

    asyncio.run(run())
