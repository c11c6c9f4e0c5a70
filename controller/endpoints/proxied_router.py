"""The controller's router, with the nodes behind proxies as if they had connected by themselves.

What is above speaks of connections by the identity of a node, and need not know which way its words come. The last way
that a node was heard on is the one by which it is answered. A proxy knows which keys are admitted from here.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from ...protocol.errors import MalformedMessage
from ...protocol.identities import PROXY_FAMILY
from ...protocol.incidents import ProxyStatus
from ...protocol.keys import ServerKeys
from ...protocol.messages import JOINING_FAMILY
from ...protocol.nonblocking import RECEIVE_LIMIT, Received
from ...protocol.proxied import (
    GRACE_S,
    SIGN_OF_LIFE,
    SILENT_S,
    FromProxy,
    Parcel,
    ToProxy,
    frame_of,
    said_in,
    together,
)
from ...protocol.transport import MAX_OF_FAMILIES, RouterSocket
from ...protocol.types import node_address

MOST_PROXIES = 1024  # connections of one key (`protocol/connection.py`)
KEYS_AT_ONCE = 4096  # in one frame
SETTLED_S = 0.1  # after a change a folder is read once more
_OF_NODES = (node_address(""), JOINING_FAMILY)
_log = logging.getLogger(__name__)


class KnownProxy:
    """One proxy: what this turn has for it, which keys it knows, and when it was heard last."""

    __slots__ = ("heard_s", "keys", "leaving", "nodes", "serves")

    def __init__(self) -> None:
        self.leaving: list[Parcel] = []
        self.keys: dict[str, str] = {}
        self.nodes: set[str] = set()
        self.heard_s = 0.0
        self.serves = False


class ProxiedRouter:
    """Sends and receives as a RouterSocket does; what is sent to nodes behind a proxy leaves with `flush`."""

    def __init__(self, router: RouterSocket, keys: ServerKeys, clock: Callable[[], float] = time.monotonic) -> None:
        """`router` stays its creator's to close. `keys`: lists the public keys that are admitted."""
        self._router = router
        self._clock = clock
        self._listed = ListedKeys(Path(keys.clients), clock)
        self._proxies: dict[str, KnownProxy] = {}
        self._ways: dict[str, str] = {}  # a node's connection -> the proxy that it was heard through last
        self._joining: deque[str] = deque()  # those of them that ask to join, in the order in which they came
        self._refused: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        """True when something has arrived."""
        return self._router.pending

    @property
    def refused(self) -> Counter[str]:
        """The count of refused and dropped messages so far, by reason."""
        return self._router.refused + self._refused

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when something may have arrived."""
        return self._router.fileno()

    def knows(self, identity: str) -> bool:
        """Say whether a client of that identity has connected, here or at a proxy."""
        return self._ways.get(identity) in self._proxies or self._router.knows(identity)

    def proxies(self) -> tuple[ProxyStatus, ...]:
        """Return which proxies have spoken, but for those that went and have no node any more."""
        self._forget_silent()
        now = self._clock()
        return tuple(
            ProxyStatus(name.removeprefix(PROXY_FAMILY), len(each.nodes), now - each.heard_s)
            for name, each in sorted(self._proxies.items())
        )

    def tolerates_silence(self, identity: str) -> bool:
        """Say whether a node may be silent because its proxy is: it finds another way meanwhile."""
        proxy = self._proxies.get(self._ways.get(identity, ""))
        return proxy is not None and SILENT_S < self._clock() - proxy.heard_s < GRACE_S

    def receive(self, limit: int = RECEIVE_LIMIT) -> list[Received]:
        """Return what has arrived, without waiting: at most so many frames, those of a proxy with all that they hold.

        Raises MidstepError when nothing can arrive any more.
        """
        arrived: list[Received] = []
        for received in self._router.receive(limit):
            if received.identity.startswith(PROXY_FAMILY):
                arrived += self._unfold(received)
                continue
            if self._ways:
                self._leave_way(received.identity)
            arrived.append(received)
        return arrived

    def send(self, identity: str, data: bytes) -> bool:
        """Send to a client; to one behind a proxy with `flush`. False: it is not connected, or its queue is full."""
        proxy = self._proxies.get(self._ways.get(identity, ""))
        if proxy is None:
            return self._router.send(identity, data)
        proxy.leaving.append(Parcel(identity, data))
        return True

    def flush(self) -> None:
        """Send what this turn has for nodes behind proxies, and what has changed of the keys before it."""
        if not self._proxies:
            return
        listed, now = self._listed.look(), self._clock()
        for name, proxy in self._proxies.items():
            leaving, proxy.leaving = proxy.leaving, []
            if now - proxy.heard_s > GRACE_S:
                continue
            self._tell_keys(name, proxy, listed)
            for parcels in together(leaving):
                if not self._router.send(name, frame_of(ToProxy(parcels))):
                    self._refused["proxy not connected"] += len(parcels)  # what matters is sent again

    def _unfold(self, received: Received) -> list[Received]:
        """Return the frames of nodes in that of a proxy, and note which way these are."""
        try:
            said = said_in(received.data, FromProxy)
        except MalformedMessage:
            self._refused["malformed frame of a proxy"] += 1
            return []
        proxy = self._proxies.get(received.identity)
        if proxy is None:
            self._forget_silent()
            if len(self._proxies) >= MOST_PROXIES:
                self._refused["too many proxies"] += 1
                return []
            _log.info("%s speaks for nodes from now on", received.identity)
            proxy = self._proxies[received.identity] = KnownProxy()
        proxy.heard_s = self._clock()
        if said.begins:
            proxy.keys, proxy.serves = {}, False
        for node in said.gone:
            if self._ways.get(node) == received.identity:
                self._leave_way(node)
        alive = [node for node in said.alive if self._ways.get(node) == received.identity]
        return [
            *(each for parcel in said.parcels if (each := self._of_node(parcel, received.identity, proxy))),
            *(Received(node, node, SIGN_OF_LIFE) for node in alive),
        ]

    def _of_node(self, parcel: Parcel, name: str, proxy: KnownProxy) -> Received | None:
        if not parcel.node.startswith(_OF_NODES):
            self._refused["not for a proxy to hand on"] += 1
            return None
        if self._ways.get(parcel.node) != name:
            self._leave_way(parcel.node)
            self._ways[parcel.node] = name
            self._note(parcel.node, proxy)
        family = JOINING_FAMILY if parcel.node.startswith(JOINING_FAMILY) else parcel.node
        return Received(parcel.node, family, parcel.data) if parcel.data else None

    def _note(self, node: str, proxy: KnownProxy) -> None:
        """Note that a node is behind a proxy. One that asks to join has a connection for that alone, and leaves it."""
        if not node.startswith(JOINING_FAMILY):
            proxy.nodes.add(node)
            return
        self._joining.append(node)
        if len(self._joining) > MAX_OF_FAMILIES:
            self._leave_way(self._joining.popleft())

    def _forget_silent(self) -> None:
        """Forget proxies that went, and were not needed again."""
        for name in [name for name, proxy in self._proxies.items() if not proxy.nodes]:
            if self._clock() - self._proxies[name].heard_s > GRACE_S:
                del self._proxies[name]

    def _leave_way(self, node: str) -> None:
        proxy = self._proxies.get(self._ways.pop(node, ""))
        if proxy is not None:
            proxy.nodes.discard(node)

    def _tell_keys(self, name: str, proxy: KnownProxy, listed: dict[str, str]) -> None:
        """Tell a proxy which keys are admitted, and which no longer, where it does not know; then nodes may come."""
        if proxy.serves and proxy.keys is listed:
            return
        changed = {key: text for key, text in listed.items() if proxy.keys.get(key) != text}
        changed |= {key: "" for key in proxy.keys if key not in listed}
        items = list(changed.items())
        for start in range(0, max(1, len(items)), KEYS_AT_ONCE):
            part, end = dict(items[start : start + KEYS_AT_ONCE]), start + KEYS_AT_ONCE
            said = ToProxy(keys=part, whole=not proxy.serves and not start, serves=end >= len(items))
            if not self._router.send(name, frame_of(said)):
                proxy.keys, proxy.serves = {}, False  # all of it once more, when there is a connection
                return
        proxy.keys, proxy.serves = listed, True


class ListedKeys:
    """Reads which public keys of nodes are admitted, again where the folder has changed."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._changed_ns = -1
        self._again_s = 0.0  # two changes within one tick of the kernel look like one
        self._files: dict[str, int] = {}  # when each was written
        self._listed: dict[str, str] = {}

    def look(self) -> dict[str, str]:
        """Return what is listed of each key (`JobKeys`); the same object while nothing has changed."""
        changed_ns, now = self._folder.stat().st_mtime_ns, self._clock()
        if changed_ns != self._changed_ns:
            self._again_s = now + SETTLED_S
        elif now < self._again_s or not self._again_s:
            return self._listed
        else:
            self._again_s = 0.0
        self._changed_ns = changed_ns
        with os.scandir(self._folder) as entries:
            files = {each.name: each.stat().st_mtime_ns for each in entries if not each.name.startswith(".")}
        if files != self._files:
            self._listed, self._files = self._read(files), files
        return self._listed

    def _read(self, files: dict[str, int]) -> dict[str, str]:
        listed = {key: text for key, text in self._listed.items() if key in files}
        for name, written_ns in files.items():
            if self._files.get(name) != written_ns:
                text = (self._folder / name).read_text("utf-8")
                listed.pop(name, None)
                if text.startswith(_OF_NODES):
                    listed[name] = text
        return listed
