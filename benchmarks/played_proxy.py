"""A proxy of a job as its controller sees it: one real connection, and nodes in the same process behind it.

What leaves when is decided as in `midstep proxy` (`launch/proxy.py`), and the keys of nodes are listed to it. The nodes
have no connections to it, which would be other machines' work: what they say is handed over.
"""

import asyncio
import contextlib
from typing import cast

from midstep.launch.proxy import GatheredFrames
from midstep.protocol.errors import WireError
from midstep.protocol.identities import PROXY_FAMILY
from midstep.protocol.keys import ClientKeys
from midstep.protocol.nonblocking import Callback
from midstep.protocol.proxied import SIGN_EVERY_S, FromProxy, Parcel, ToProxy, frame_of, is_proxied, said_in
from midstep.protocol.transport import OUTBOX_LIMIT, DealerSocket, Received

CONNECT_S = 0.02  # between two looks whether there is a connection


class PlayedConnection:
    """A node's connection to a played proxy: as much of a DealerSocket as a link needs that is led nowhere else."""

    endpoint = "inproc://proxy"

    def __init__(self, proxy: "PlayedProxy", identity: str) -> None:
        self.waiting: list[bytes] = []  # until the proxy serves
        self._proxy, self._identity = proxy, identity
        self._callback: Callback | None = None

    @property
    def connected(self) -> bool:
        """True once the proxy lets nodes in."""
        return self._proxy.serves

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callback) -> None:
        """Call `callback` with what arrives."""
        self._callback = callback

    def send(self, data: bytes) -> bool:
        """Hand a frame to the proxy, or keep it until that serves."""
        if self._proxy.serves:
            self._proxy.heard(Parcel(self._identity, data))
        else:
            self.waiting = [*self.waiting[1 - OUTBOX_LIMIT :], data]
        return True

    def receive(self, data: bytes) -> None:
        """Take in a frame of the controller."""
        if self._callback is not None:
            self._callback([Received("", None, data)])

    def close(self) -> None:
        """Be gone. Idempotent."""
        self._callback = None
        self._proxy.left(self._identity)


class PlayedProxy:
    """Carries frames between the controller and played nodes. Belongs to the running loop."""

    def __init__(self, name: str, endpoint: str, keys: ClientKeys) -> None:
        """`keys`: those of proxies."""
        self.serves = False
        self._socket = DealerSocket(endpoint, identity=PROXY_FAMILY + name, curve=keys)
        self._known = False  # to the controller
        self._nodes: dict[str, PlayedConnection] = {}
        self._gathering = GatheredFrames(self._say)
        loop = asyncio.get_running_loop()
        self._socket.attach(loop, self._received)
        self._beating = loop.create_task(self._beat())

    def connection(self, identity: str) -> DealerSocket:
        """Return the connection of a new node."""
        made = self._nodes[identity] = PlayedConnection(self, identity)
        if self.serves:
            self.heard(Parcel(identity, b""))
        return cast(DealerSocket, made)

    def heard(self, parcel: Parcel) -> None:
        """Take in what a node says."""
        self._gathering.add((parcel,))

    def left(self, identity: str) -> None:
        """Let a node go: the controller learns of it when it has something for that node."""
        self._nodes.pop(identity, None)

    def close(self) -> None:
        """Leave, and let all nodes go. Idempotent."""
        self._beating.cancel()
        self._gathering.clear()
        self._socket.close()

    async def _beat(self) -> None:
        while True:
            if not self._socket.connected:
                self._known = False
            elif not self._known:
                self._known = self._socket.send(frame_of(FromProxy(begins=True)))
                self._gathering.begin(self._nodes if self.serves else ())
            self._gathering.leave()
            await asyncio.sleep(SIGN_EVERY_S if self._known else CONNECT_S)

    def _say(self, said: FromProxy) -> bool:
        return self._known and self._socket.send(frame_of(said))

    def _received(self, batch: list[Received]) -> None:
        for received in batch:
            with contextlib.suppress(WireError):
                if is_proxied(received.data):
                    self._take(said_in(received.data, ToProxy))

    def _take(self, said: ToProxy) -> None:
        if said.serves and not self.serves:
            self.serves = True
            for identity, node in self._nodes.items():
                self._gathering.add([Parcel(identity, data) for data in (b"", *node.waiting)])
                node.waiting.clear()
        for parcel in said.parcels:
            node_of_it = self._nodes.get(parcel.node)
            if node_of_it is None:
                self._gathering.lost(parcel.node)
            else:
                node_of_it.receive(parcel.data)
