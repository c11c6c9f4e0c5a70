"""A real proxy between real sockets: who gets in, what comes through, and what it does without a controller."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstep.controller.endpoints.proxied_router import ProxiedRouter
from midstep.launch import proxy as launch_proxy
from midstep.launch.job import let_nodes_join
from midstep.launch.proxy import Proxy, ProxyOptions
from midstep.protocol.identities import PROXY_FAMILY
from midstep.protocol.keys import ClientKeys, JobKeys
from midstep.protocol.link import first_listening
from midstep.protocol.proxied import SIGN_OF_LIFE, FromProxy, Parcel, frame_of
from midstep.protocol.token import KeyPair, new_token, random_pair
from midstep.protocol.transport import DealerSocket, Received, RouterSocket

PATIENCE_S = 20.0
A, B = "node/a", "node/b"


class Rig:
    """A controller's router, a proxy before it, and nodes."""

    def __init__(self, root: Path) -> None:
        self.root, self.keys = root, root / "keys"
        self.token = new_token()
        let_nodes_join(self.keys, self.token, "j")
        self.pairs: dict[str, KeyPair] = {}
        self.admit(A)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.listen = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.endpoint = "tcp://127.0.0.1:*"
        self.heard: list[Received] = []
        self.nodes: list[DealerSocket] = []
        self.got: dict[str, list[bytes]] = {}
        self.below, self.router = self._opened()

    def admit(self, node: str) -> None:
        """Make keys of a node; the controller lists them."""
        pair = self.pairs.setdefault(node, random_pair())
        JobKeys.admit(self.keys, node, pair.public)

    def open(self) -> None:
        """Have a controller listen, where the last one did."""
        self.below, self.router = self._opened()

    def _opened(self) -> tuple[RouterSocket, ProxiedRouter]:
        server = JobKeys.load_server(self.keys)
        below = RouterSocket(self.endpoint, curve=server)
        self.endpoint = below.endpoint
        return below, ProxiedRouter(below, server)

    def close(self) -> None:
        """End the controller."""
        self.below.close()

    def node(self, name: str, pair: KeyPair | None = None) -> DealerSocket:
        """Connect a node to the proxy."""
        pair = pair or self.pairs[name]
        keys = ClientKeys(name, pair.public, pair.secret, self.token.controller_keys("j").public)
        made = DealerSocket(self.listen, identity=name, curve=keys)
        made.attach(asyncio.get_running_loop(), lambda batch: self._got(name, batch))
        self.nodes.append(made)
        return made

    def _got(self, name: str, batch: list[Received]) -> None:
        self.got.setdefault(name, []).extend(each.data for each in batch if each.data != SIGN_OF_LIFE)
        if any(each.data == SIGN_OF_LIFE for each in batch):
            self.got.setdefault(f"signs of {name}", []).append(b"")

    async def until(self, holds: Callable[[], bool]) -> None:
        """Be the controller until something holds."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < give_up_s, (self.heard, self.got)
            self.turn()
            await asyncio.sleep(0.01)

    def turn(self) -> None:
        """One turn of the controller's loop."""
        if not self.below.raw.closed:
            self.heard += self.router.receive()
            self.router.flush()

    def has_heard(self, node: str, data: bytes) -> bool:
        return any(each.identity == node and each.data == data for each in self.heard)

    @property
    def serves(self) -> bool:
        """Whether anything listens where the proxy does."""
        return first_listening([self.listen]) is not None


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send nodes away soon after a controller has gone."""
    monkeypatch.setattr(launch_proxy, "AWAY_S", 0.3)


@asynccontextmanager
async def running(root: Path) -> AsyncIterator[Rig]:
    rig, leaving = Rig(root), asyncio.Event()
    options = ProxyOptions("j", "east", rig.listen, (rig.endpoint,), rig.token, root / "own", 3600.0)
    task = asyncio.create_task(Proxy(options).run(leaving))
    try:
        await rig.until(lambda: rig.serves)
        yield rig
        leaving.set()
        assert await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for node in rig.nodes:
            node.close()
        rig.close()


def test_words_go_through_a_proxy_in_both_directions_and_it_gives_signs_of_life(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.admit(B)
            first = rig.node(A)
            first.send(b"hello")
            await rig.until(lambda: rig.has_heard(A, b"hello"))
            assert rig.router.send(A, b"welcome")
            await rig.until(lambda: rig.got.get(A) == [b"welcome"])
            await rig.until(lambda: len(rig.got.get(f"signs of {A}", [])) > 1)
            assert not rig.router.knows(B)
            rig.node(B)
            await rig.until(lambda: rig.router.knows(B))  # before it has said anything

    asyncio.run(scenario())


def test_a_node_whose_key_is_not_listed_gets_in_when_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.pairs[B] = random_pair()
            node = rig.node(B)
            for _ in range(30):
                rig.turn()
                await asyncio.sleep(0.01)
            assert not node.connected
            rig.admit(B)
            await rig.until(lambda: any(text == B for text in _listed(tmp_path / "own")))
            node.connect_again()
            await rig.until(lambda: node.connected)
            JobKeys.withdraw(rig.keys, rig.pairs[B].public)
            await rig.until(lambda: not any(text == B for text in _listed(tmp_path / "own")))

    asyncio.run(scenario())


def test_nodes_are_sent_away_while_there_is_no_controller_and_may_come_to_the_next_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            node = rig.node(A)
            node.send(b"1")
            await rig.until(lambda: rig.has_heard(A, b"1"))
            rig.close()
            await rig.until(lambda: not rig.serves)
            await rig.until(lambda: not node.connected)
            JobKeys.withdraw(rig.keys, rig.pairs[A].public)
            rig.admit(B)
            rig.open()
            await rig.until(lambda: rig.serves)
            assert set(_listed(tmp_path / "own")) & {A, B} == {B}, "what went while nobody spoke is not admitted"
            other = rig.node(B)
            other.send(b"2")
            await rig.until(lambda: rig.has_heard(B, b"2"))

    asyncio.run(scenario())


def test_a_controller_that_follows_at_once_is_told_who_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_proxy, "AWAY_S", 3600.0)

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            node = rig.node(A)
            node.send(b"1")
            await rig.until(lambda: rig.has_heard(A, b"1"))
            rig.close()
            await asyncio.sleep(0.5)
            rig.open()
            await rig.until(lambda: rig.router.knows(A))
            rig.router.send(A, b"2")
            await rig.until(lambda: rig.got.get(A) == [b"2"])
            assert node.connected

    asyncio.run(scenario())


def test_a_node_that_left_is_not_connected_any_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            node = rig.node(A)
            await rig.until(lambda: rig.router.knows(A))
            node.close()
            await rig.until(lambda: not rig.router.knows(A))

    asyncio.run(scenario())


def test_a_node_speaks_neither_for_another_one_nor_as_a_proxy(tmp_path: Path) -> None:
    """Not at the proxy, and not at the controller."""

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            rig.admit(B)
            await rig.until(lambda: B in _listed(tmp_path / "own"))
            rig.node(B, rig.pairs[A]).send(b"I am b")
            rig.node(A).send(b"I am a")
            keys = rig.pairs[A]
            server = rig.token.controller_keys("j").public
            name = PROXY_FAMILY + "evil"
            forger = DealerSocket(rig.endpoint, identity=name, curve=ClientKeys(name, keys.public, keys.secret, server))
            rig.nodes.append(forger)
            forger.attach(asyncio.get_running_loop(), lambda batch: None)
            forger.send(frame_of(FromProxy((Parcel(B, b"I am b"),))))
            await rig.until(lambda: rig.router.refused["identity does not match key"] > 0)
            await rig.until(lambda: rig.has_heard(A, b"I am a"))
            assert not rig.router.knows(B)

    asyncio.run(scenario())


def test_a_proxy_whose_disk_takes_no_keys_ends_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        options = ProxyOptions("j", "east", rig.listen, (rig.endpoint,), rig.token, tmp_path / "own", 3600.0)
        proxy = Proxy(options)
        clients = tmp_path / "own" / "server" / "clients"
        clients.rmdir()
        clients.write_text("no folder")
        task = asyncio.create_task(proxy.run(asyncio.Event()))
        try:
            await rig.until(task.done)
            assert isinstance(task.exception(), OSError)
            assert not rig.serves
        finally:
            rig.close()

    asyncio.run(scenario())


def test_a_proxy_of_another_token_hears_nothing_and_serves_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            with socket.create_server(("127.0.0.1", 0)) as free:
                listen = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            leaving = asyncio.Event()
            options = ProxyOptions("j", "west", listen, (rig.endpoint,), new_token(), tmp_path / "other", 0.5)
            task = asyncio.create_task(Proxy(options).run(leaving))
            await rig.until(task.done)
            assert await task is False, "it ends when no controller was there for leave_s"
            assert first_listening([listen]) is None

    asyncio.run(scenario())


def _listed(keys: Path) -> list[str]:
    return [path.read_text() for path in (keys / "server" / "clients").glob("[0-9a-f]*")]
