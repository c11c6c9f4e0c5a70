"""A proxy that a benchmark plays is to the controller what a real one is."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from midstep.benchmarks.played_proxy import PlayedProxy
from midstep.controller.endpoints.proxied_router import ProxiedRouter
from midstep.protocol.identities import PROXY_FAMILY
from midstep.protocol.keys import JobKeys
from midstep.protocol.transport import Received, RouterSocket
from midstep.protocol.types import node_address

LIMIT_S = 30.0
NODE, OTHER = node_address("node0"), node_address("node1")


def test_its_nodes_and_the_controller_hear_each_other(tmp_path: Path) -> None:
    """What a node says before the proxy serves comes as well; one that has left is gone to the controller, too."""
    JobKeys.create(tmp_path / "keys", [PROXY_FAMILY, NODE])
    keys = JobKeys.load_server(tmp_path / "keys")
    router = RouterSocket("tcp://127.0.0.1:0", curve=keys)
    controller, came, heard = ProxiedRouter(router, keys), list[Received](), list[Received]()

    async def until(holds: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < give_up_s
            came.extend(controller.receive())
            controller.flush()
            await asyncio.sleep(0.01)

    async def talk() -> None:
        loop = asyncio.get_running_loop()
        proxy = PlayedProxy("p", router.endpoint, JobKeys.load_client(tmp_path / "keys", PROXY_FAMILY))
        node = proxy.connection(NODE)
        node.attach(loop, heard.extend)
        node.send(b"early")
        await until(lambda: bool(came))
        later = proxy.connection(OTHER)
        later.attach(loop, heard.extend)
        await until(lambda: controller.knows(OTHER))
        later.send(b"late")
        await until(lambda: len(came) > 1)
        assert controller.send(NODE, b"answer")
        await until(lambda: bool(heard))
        node.close()
        assert controller.send(NODE, b"answer")
        await until(lambda: not controller.knows(NODE))
        proxy.close()

    try:
        asyncio.run(talk())
    finally:
        router.close()
    assert came == [Received(NODE, NODE, b"early"), Received(OTHER, OTHER, b"late")]
    assert heard == [Received("", None, b"answer")]
