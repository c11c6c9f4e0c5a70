"""The platform of Ray takes orders when it knows which nodes it has, and not before."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstep.platforms.ray import platform
from midstep.platforms.ray.cluster import Bundle, InBundle, Place
from midstep.platforms.ray.platform import BookKeeper, RayOptions, RayPlatform
from midstep.protocol.discovery import ENDPOINT_NAME
from midstep.protocol.keys import JobKeys
from midstep.protocol.messages import CreateNode, NodeRefused
from midstep.protocol.types import PLATFORM, node_address

LIMIT_S = 20.0
RESERVING_S = 0.1


class SlowCluster:
    """A Ray that takes its time for the places of a job, and has one actor for each name."""

    def __init__(self, job: str, resources: dict[str, float]) -> None:
        self.started: list[str] = []

    def reserve(self, nodes: int) -> None:
        time.sleep(RESERVING_S)

    def existing(self) -> dict[str, Any]:
        return {}

    def bundles(self, busy: set[int]) -> list[Bundle]:
        return [Bundle(index, f"m{index}", index in busy) for index in (0, 1)]

    def alive(self) -> set[str]:
        return {"m0", "m1"}

    def draining(self) -> dict[str, float]:
        return {}

    def start(self, order: Any, place: Place) -> Any:
        assert isinstance(place, InBundle)
        if order.node in self.started:
            raise ValueError(f"the name {order.node} is already taken")
        self.started.append(order.node)
        return SimpleNamespace(start=SimpleNamespace(remote=lambda *_: asyncio.Event().wait()))


class OrderingPeer:
    """Carries an order as soon as anybody listens, as a controller that has asked the platform before."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.posted: list[Any] = []

    def serve(self, served: RayPlatform) -> None:
        asyncio.get_running_loop().call_soon(served.create_node, CreateNode("node0"))

    def post(self, body: Any) -> None:
        self.posted.append(body)

    def introduce(self) -> None:
        pass


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], RayPlatform]:
    """Make the platform of a job that has no node yet, without Ray."""
    JobKeys.create(tmp_path / "keys", [PLATFORM, node_address("node0"), node_address("node1")])
    (tmp_path / ENDPOINT_NAME).write_text("tcp://127.0.0.1:1\n")
    BookKeeper(tmp_path).found(())
    monkeypatch.setattr(platform, "RayClient", SlowCluster)
    monkeypatch.setattr(platform, "PlatformPeer", OrderingPeer)
    monkeypatch.setattr(
        platform, "library", lambda: SimpleNamespace(exceptions=SimpleNamespace(ActorUnavailableError=OSError))
    )
    root = str(tmp_path)
    options = RayOptions("job", f"{root}/keys", root, root, 2, {"CPU": 1.0}, {}, 1.0)
    return lambda: RayPlatform(options, on_end=lambda _: None)


def test_an_order_that_comes_while_it_opens_makes_one_node(opened: Callable[[], RayPlatform]) -> None:
    """Made twice, the second is refused for its name, and the place of the first counts as free."""

    async def scenario() -> None:
        ray = opened()
        await ray.open()
        cluster, peer = ray._cluster, ray._peer
        assert isinstance(cluster, SlowCluster)
        assert isinstance(peer, OrderingPeer)
        give_up_s = time.monotonic() + LIMIT_S
        ray.create_node(CreateNode("node1"))
        while len(cluster.started) < 2:
            assert time.monotonic() < give_up_s, peer.posted
            await asyncio.sleep(0.01)
        assert sorted(cluster.started) == ["node0", "node1"]
        assert not [report for report in peer.posted if isinstance(report, NodeRefused)]
        assert sorted(BookKeeper(Path(ray._options.job_directory)).books.nodes) == ["node0", "node1"]

    asyncio.run(scenario())
