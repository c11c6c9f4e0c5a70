"""Strangers without a key at the controller's sockets"""

import asyncio
import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from midstep.controller.endpoints import local_sockets as control_socket
from midstep.controller.endpoints.control_requests import Accepted, Request, StopJobRequest
from midstep.controller.endpoints.local_sockets import DETECTORS_SOCKET, MAX_CONNECTIONS, LineServer
from midstep.protocol.compat import within

from .attack import attack
from .served import DESCRIPTORS, PATIENCE_S, REFUSED, A, B, Served, descriptors_here, served

STRANGERS = 5000
OTHERS = 500  # descriptors of this process for everything else
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)


def strangers(router: Served, count: int, says: bytes = b"") -> list[socket.socket]:
    """Connect, say something that is no handshake, and stay."""
    made = []
    for _ in range(count):
        stranger = socket.create_connection(("127.0.0.1", router.port), timeout=20)
        made.append(stranger)
        with contextlib.suppress(OSError):  # closed already
            stranger.sendall(says)
    return made


@attack(
    "a stranger opens 5,000 connections to the controller's port and leaves them idle",
    holds="the job's agents keep talking, a new one gets in within seconds, descriptors are left for the journal",
    reads="refused: too many connections without a handshake from one address",
)
def test_idle_strangers_keep_no_agent_away(tmp_path: Path) -> None:
    """An agent is answered before, during and after; another one connects while all strangers are there."""
    with served(tmp_path) as router, descriptors_here(STRANGERS + OTHERS) as most, contextlib.ExitStack() as crowd:
        count = min(STRANGERS, most - OTHERS)
        first = router.client(A)
        assert first.ask()
        for stranger in strangers(router, count):
            crowd.enter_context(stranger)
        assert first.ask()
        second = router.client(B)
        began = time.monotonic()
        assert second.ask()
        assert router.lives
        assert time.monotonic() - began < 20.0  # on a busy machine; mostly it is 0.1
        counted = json.loads(first.ask(REFUSED) or b"{}")
        assert counted["too many connections without a handshake from one address"] > count / 2


@attack(
    "all agents of a cluster connect at once from one address, as after a restart of the controller, among strangers",
    holds="connections that ask to be let in are not closed for others, so all get in",
)
def test_many_agents_behind_one_address_get_in_at_once(tmp_path: Path) -> None:
    """Thirty agents connect while strangers keep all places for handshakes taken, of which there are half as many."""
    names = [f"node/n{number}" for number in range(30)]
    with served(tmp_path, DESCRIPTORS, names) as router, contextlib.ExitStack() as crowd:
        for stranger in strangers(router, 50):
            crowd.enter_context(stranger)
        agents = [router.client(name) for name in names]
        for stranger in strangers(router, 50):
            crowd.enter_context(stranger)
        assert all(agent.ask() for agent in agents)


@attack(
    "strangers begin a handshake and never finish it",
    holds="a handshake that takes longer than 5 s is closed, and one that is none is closed at once",
    reads="refused: no handshake in time",
)
def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """A greeting without anything after it, silence, and an HTTP request: all three are closed."""
    with served(tmp_path) as router, contextlib.ExitStack() as crowd:
        began, silent, browser = (
            crowd.enter_context(strangers(router, 1, says)[0]) for says in (GREETING, b"", b"GET / HTTP/1.0\r\n\r\n")
        )
        for stranger in (browser, silent, began):
            stranger.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass
        counted = json.loads(router.client(A).ask(REFUSED) or b"{}")
        assert (counted["no handshake in time"], counted["no handshake"]) == (2, 1)


@attack(
    "somebody with a key connects again and again without leaving",
    holds="a key has two connections at most; the oldest goes",
    reads="refused: connection was replaced by a newer one",
)
def test_one_key_has_few_connections(tmp_path: Path) -> None:
    """Of twelve connections of one key the newest is heard, and another agent gets in, whatever the older ones do."""
    with served(tmp_path) as router:
        for _ in range(12):
            assert router.client(A).ask()
        assert router.client(B).ask()
        counted = json.loads(router.clients[-1].ask(REFUSED) or b"{}")
        assert counted["connection was replaced by a newer one"] > 8


@attack(
    "local programs take up all connections of the detectors' socket and say nothing",
    holds="the one that has been silent the longest is closed for each that comes",
    reads="a warning in the controller's log",
)
def test_idle_local_connections_do_not_keep_detectors_away(tmp_path: Path) -> None:
    """A line is answered while more idle connections were opened than the socket takes; a busy one stays."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)

    async def scenario() -> None:
        server = LineServer(folder, lambda report, answer: answer(Accepted(f"noted: {report.code}")))
        await server.open()
        crowd = []
        try:
            for _ in range(MAX_CONNECTIONS):
                crowd.append(await asyncio.open_unix_connection(str(folder / DETECTORS_SOCKET)))
            assert b"C0" in await said(*crowd[0], "C0")
            for _ in range(10):
                crowd.append(await asyncio.open_unix_connection(str(folder / DETECTORS_SOCKET)))
            assert b"C1" in await said(*crowd[-1], "C1")
            assert b"C2" in await said(*crowd[0], "C2")
        finally:
            for _, writer in crowd:
                writer.close()
            await server.close()

    asyncio.run(scenario())


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, code: str) -> bytes:
    """Report a fault by one line and return the answer."""
    writer.write(json.dumps({"code": code, "node": "a"}).encode() + b"\n")
    return await within(PATIENCE_S, reader.readline())


@attack(
    "a hundred local programs connect to the control socket and say nothing",
    holds="the one that has been silent the longest makes room, so the command line is answered",
    reads="refused: control socket: too many connections",
)
def test_idle_local_connections_do_not_keep_the_command_line_away(tmp_path: Path) -> None:
    """A request is answered while more idle connections were opened than the control socket takes."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    server = control_socket.ControlServer(folder)
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    try:
        for stranger in crowd:
            stranger.connect(str(control_socket.socket_path(folder)))
        asked: Request | None = None
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(control_socket.ask, folder, StopJobRequest("enough"), 20.0)
            until_s = time.monotonic() + 20
            while asked is None and time.monotonic() < until_s:
                for asker, request in server.requests():
                    asked = request
                    server.answer(asker, Accepted("yes"))
                time.sleep(0.01)
        assert asked == StopJobRequest("enough")
        assert answer.result() == Accepted("yes")
        assert server.refused["control socket: too many connections"] >= len(crowd) - control_socket.LIMITS.connections
    finally:
        for stranger in crowd:
            stranger.close()
        server.close()
