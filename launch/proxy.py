"""Stands between a job's controller and some of its nodes, so that the controller has one connection for them all.

Nodes connect to it as to a controller. What one says leaves with what the others say: at once, but for heartbeats and
acknowledgements, which wait for each other. It keeps nothing: nodes and controller repeat what was lost with it, and
nodes of a proxy that is killed, or falls silent, find another way.

It listens only while it has heard from a controller that leads. Nodes that come meanwhile are turned away, and try the
next of their endpoints.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ..protocol.codec import decode, unpack
from ..protocol.errors import ConfigurationError, WireError
from ..protocol.identities import PROXY_FAMILY
from ..protocol.keys import ClientKeys, JobKeys
from ..protocol.link import Absence
from ..protocol.messages import JOINING_FAMILY, ControllersListed
from ..protocol.proxied import (
    SIGN_EVERY_S,
    SIGN_OF_LIFE,
    FromProxy,
    Parcel,
    ToProxy,
    frame_of,
    is_proxied,
    said_in,
    together,
)
from ..protocol.token import FullToken
from ..protocol.transport import DealerSocket, Received, RouterSocket
from ..protocol.types import node_address

GATHER_S = 0.2  # what needs no answer soon waits for so long; acknowledgements may take 0.5 s
ANSWER_S = 10.0  # for the controller to take this proxy in
AWAY_S = 3.5  # a controller that is replaced within this time is waited for, by the nodes as well
_OF_NODES = (node_address(""), JOINING_FAMILY)
_log = logging.getLogger(__name__)


class ProxyOptions(msgspec.Struct, frozen=True):
    """Options of a proxy. `keys`: a private directory of its own; it ends after `leave_s` without a controller."""

    job: str
    name: str
    listen: str
    controllers: tuple[str, ...]
    token: FullToken
    keys: Path
    leave_s: float


class Upstream:
    """The way to the controller that leads. `on_said` gets what it says to proxies. Belongs to the running loop."""

    def __init__(self, options: ProxyOptions, on_said: Callable[[ToProxy], None]) -> None:
        pair = options.token.proxy_keys(options.job)
        server = options.token.controller_keys(options.job).public
        self.listed: tuple[str, ...] = ()
        self.proxied = False  # a proxy behind a proxy is nothing that the controller would hear
        self.turned_away: str | None = None
        self._on_said = on_said
        identity = PROXY_FAMILY + options.name
        self._socket = DealerSocket(
            options.controllers[0], identity=identity, curve=ClientKeys(identity, pair.public, pair.secret, server)
        )
        self._socket.attach(asyncio.get_running_loop(), self._received)

    @property
    def endpoint(self) -> str:
        """Where the controller is believed to listen."""
        return self._socket.endpoint

    @property
    def connected(self) -> bool:
        """True while there is a connection to a controller that leads, or may."""
        return self._socket.connected and self.turned_away is None

    def connect_to(self, endpoint: str) -> None:
        """Make the connection again, here or elsewhere. Raises ConfigurationError."""
        self.turned_away = None
        if endpoint == self.endpoint:
            self._socket.connect_again()
        else:
            self._socket.move_to(endpoint)

    def say(self, said: FromProxy) -> bool:
        """Send, if there is a connection: what waited for one would be old."""
        return self._socket.connected and self._socket.send(frame_of(said))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _received(self, batch: list[Received]) -> None:
        for received in batch:
            try:
                if is_proxied(received.data):
                    self.turned_away = None
                    self._on_said(said_in(received.data, ToProxy))
                else:
                    self._learn(received.data)
            except WireError as error:
                _log.warning("refused: %s", error)

    def _learn(self, frame: bytes) -> None:
        """Note what a controller that stands by says to all that come."""
        for message in unpack(frame):
            body = decode(message).body
            if isinstance(body, ControllersListed) and not body.serves:
                self.listed, self.turned_away = body.endpoints, body.leads


class GatheredFrames:
    """Holds frames of nodes until they leave: at once what waits for an answer, and the rest after `GATHER_S` with it.

    Belongs to the running loop. What `say` cannot send is lost, and repeated by its node.
    """

    def __init__(self, say: Callable[[FromProxy], object]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._parcels: list[Parcel] = []
        self._gone: list[str] = []
        self._alive: dict[str, None] = {}  # in the order in which they were heard
        self._timer: asyncio.TimerHandle | None = None

    def add(self, said: Sequence[Parcel]) -> None:
        """Take in what nodes have said, and which have just connected. Signs of life leave with the next frame."""
        self._alive.update((each.node, None) for each in said if each.data == SIGN_OF_LIFE)
        parcels = [each for each in said if each.data != SIGN_OF_LIFE]
        self._parcels += parcels
        if any(not parcel.data or has_numbers(parcel.data) for parcel in parcels):
            self._leave_within(0.0)
        elif parcels:
            self._leave_within(GATHER_S)

    def lost(self, node: str) -> None:
        """Note that the connection of a node is not there."""
        self._gone.append(node)

    def begin(self, nodes: Iterable[str]) -> None:
        """Have these nodes known, in place of what there was for another controller."""
        self._parcels = [Parcel(node, b"") for node in nodes]

    def leave(self) -> None:
        """Send what there is; nothing is a sign of life."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        leaving, self._parcels = self._parcels, []
        gone, self._gone = tuple(self._gone), []
        alive, self._alive = tuple(self._alive), {}
        for parcels in together(leaving) if leaving else [()]:
            self._say(FromProxy(parcels, gone, alive=alive))
            gone = alive = ()

    def clear(self) -> None:
        """Forget all that there is. Idempotent."""
        self._parcels.clear()
        self._gone.clear()
        self._alive.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave_within(self, within_s: float) -> None:
        at_s = self._loop.time() + within_s
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self.leave)


class Proxy:
    """Carries frames between nodes and the controller. Construct it in the running loop; `run` until it is to end."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        JobKeys.create(options.keys, [], server=options.token.controller_keys(options.job))
        self._server = JobKeys.load_server(options.keys)
        self._loop = asyncio.get_running_loop()
        self._router: RouterSocket | None = None
        self._nodes: set[str] = set()  # connections that are believed to be there
        self._gathering = GatheredFrames(self._say)
        self._known = False  # to the controller, on this connection
        self._may_serve = False  # the keys of nodes are known
        self._complaint = ""
        self._listed: set[str] | None = None  # keys of a list that is not whole yet
        self._here_s = 0.0  # when there was a connection last
        self._absent = asyncio.Event()
        self._failure: OSError | None = None  # of the disk with the keys
        self._upstream = Upstream(options, self._said)
        self._absence = Absence(self._upstream, options.controllers, self._absent.set)
        self._absence.leave_s = options.leave_s
        self._answer_by_s = math.inf  # from the controller that was told of this proxy

    async def run(self, leaving: asyncio.Event) -> bool:
        """Serve until `leaving` is set, or no controller was there for too long: False then.

        Raises OSError when keys cannot be written, and MidstepError when no node can be heard any more.
        """
        beating = self._loop.create_task(self._beat())
        waits = [self._loop.create_task(each.wait()) for each in (leaving, self._absent)]
        try:
            await asyncio.wait([*waits, beating], return_when=asyncio.FIRST_COMPLETED)
            if beating.done():
                beating.result()  # raises what ended it
            return leaving.is_set()
        finally:
            for task in (*waits, beating):
                task.cancel()
            await asyncio.gather(*waits, beating, return_exceptions=True)
            self._close()

    def _close(self) -> None:
        self._stop_serving("this proxy ends")
        self._absence.close()
        self._gathering.clear()
        self._upstream.close()

    async def _beat(self) -> None:
        """Give signs of life, and look whether there is a controller."""
        while True:
            if self._failure is not None:
                raise self._failure
            now = self._loop.time()
            if self._upstream.connected:
                self._here_s = now
                if not self._known:
                    self._known = self._upstream.say(FromProxy(begins=True))
                    self._gathering.begin(sorted(self._nodes))
                    self._answer_by_s = now + ANSWER_S
                self._gathering.leave()
                self._warn_of_silence(now)
            else:
                self._known = False
                if now - self._here_s > AWAY_S:
                    self._stop_serving(f"there is no controller at {self._upstream.endpoint}")
            if self._may_serve and self._router is None:
                self._serve()
            if self._router is not None:
                self._heard(self._router.receive())
                for node in list(self._nodes):
                    if not self._router.send(node, SIGN_OF_LIFE):
                        self._lost(node)
            await asyncio.sleep(SIGN_EVERY_S)

    def _warn_of_silence(self, now: float) -> None:
        if now > self._answer_by_s:
            self._answer_by_s = math.inf
            _log.warning(
                "the controller at %s takes no proxy: set `controller.proxies: true` in the policy of job %s",
                self._upstream.endpoint,
                self._options.job,
            )

    # --- from the controller ------------------------------------------------------------------------------------

    def _said(self, said: ToProxy) -> None:
        self._answer_by_s = math.inf
        try:
            self._list(said)
        except OSError as error:
            self._failure = error
            return
        if said.serves:
            self._may_serve = True
        if self._router is None:
            return
        for parcel in said.parcels:
            if not self._router.send(parcel.node, parcel.data):
                self._lost(parcel.node)

    def _list(self, said: ToProxy) -> None:
        """Keep in files, which the authenticator reads, whose keys are admitted."""
        clients = Path(self._server.clients)
        if said.whole:
            self._listed = set()
        for key, text in said.keys.items():
            if text:
                draft = clients / f".{key}"
                draft.write_text(text)
                draft.replace(clients / key)
            else:
                (clients / key).unlink(missing_ok=True)
        if self._listed is not None:
            self._listed |= said.keys.keys()
            if said.serves:
                for name in set(os.listdir(clients)) - self._listed:
                    (clients / name).unlink(missing_ok=True)
                self._listed = None

    def _serve(self) -> None:
        try:
            self._router = RouterSocket(self._options.listen, curve=self._server)
        except ConfigurationError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("%s It is tried again.", error)
            return
        self._complaint = ""
        self._router.attach(self._loop, self._heard)
        _log.info("nodes of job %s may connect at %s", self._options.job, self._router.endpoint)

    def _stop_serving(self, why: str) -> None:
        self._may_serve = False
        if self._router is None:
            return
        _log.warning("nodes are sent away: %s", why)
        self._router.close()
        self._router = None
        self._nodes.clear()
        self._gathering.clear()

    # --- from nodes ---------------------------------------------------------------------------------------------

    def _heard(self, batch: list[Received]) -> None:
        assert self._router is not None
        parcels = [Parcel(each.identity, each.data) for each in batch if each.identity.startswith(_OF_NODES)]
        new = [each for each in self._router.newcomers() if each.startswith(_OF_NODES)]
        self._nodes.update(node for node in (*new, *(each.node for each in parcels)) if node.startswith(_OF_NODES[0]))
        self._gathering.add([*(Parcel(node, b"") for node in new), *parcels])

    def _lost(self, node: str) -> None:
        self._nodes.discard(node)
        self._gathering.lost(node)

    def _say(self, said: FromProxy) -> bool:
        return self._known and self._upstream.say(said)


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of an envelope, of which this needs the number."""

    version: int
    job: str
    sender: str
    receiver: str
    term: int
    generation: int
    session: int
    number: int


_frame = msgspec.msgpack.Decoder(list[_Head])


def has_numbers(frame: bytes) -> bool:
    """Say whether a message of a frame waits to be acknowledged, and is to leave at once."""
    try:
        return any(message.number for message in _frame.decode(frame))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return False  # the controller refuses and counts it
