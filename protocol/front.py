"""The front of a router: a proxy that accepts connections within limits, and closes those that exceed them.

libzmq accepts whatever comes, until the process has no descriptors left. Then it spins, and ends the process where it
needs one itself. It limits neither connections nor the parts of a message. So it listens on a private socket only, and
this thread listens for it. Bytes are carried as they are: keys and contents stay between the client and libzmq.

The gatekeeper is libzmq's authenticator: a second thread that looks a client's key up and names its identity.
"""

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

import zmq

from .connection import Allowance, Connection, ConnectionClosed, ConnectionLimits, Handshake, WaitingRoom, most_of
from .errors import ConfigurationError, KeyExpired, KeyReplaced, MidstepError
from .identities import PROXY_FAMILY
from .keys import ServerKeys

Proof = Callable[[], tuple[int, str | None]]  # how many asked for admission, and the identity of the last, if admitted

_BACKLOG = 4096
_ACCEPTS_AT_ONCE = 64
_TICK_S = 0.2
_LAST_S = 0.5  # for what the router had said when it was closed
_JOIN_S = 5.0
_PEERS_METERED = 16_384
_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# A client whose machine has lost its power says nothing. Keepalive does not act while data is underway to it.
_SILENCE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 2),
    (socket.TCP_USER_TIMEOUT, 10_000),
)
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_log = logging.getLogger(__name__)


class Front:
    """Owns `listener` and every connection that it accepts. `router_path`: the router's abstract unix socket.

    `proof`: the authenticator's last answer, where clients have keys.
    """

    def __init__(
        self, listener: socket.socket, router_path: str, limits: ConnectionLimits, proof: Proof | None = None
    ) -> None:
        self._listener = listener
        self._router_path = router_path
        self._limits = limits
        self._proof = proof
        self._refused: Counter[str] = Counter()  # written by the thread alone
        self._connections: OrderedDict[Connection, None] = OrderedDict()
        self._unproven = WaitingRoom(limits)
        self._by_identity: dict[str, deque[Connection]] = {}
        self._allowances: OrderedDict[str, Allowance] = OrderedDict()
        self._asking: deque[Connection] = deque()  # wait for their turn at the authenticator
        self._turn: Connection | None = None
        self._asked = 0  # answers of the authenticator before this turn
        self._selector = selectors.DefaultSelector()
        self._listens = False
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._closing_r, self._closing_w = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._closing_r, _READ, None)
        self._thread = threading.Thread(target=self._run, name="midstep-front", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> Counter[str]:
        """Connections that were closed so far, by reason."""
        return Counter(self._refused)

    def check(self) -> None:
        """Raise MidstepError when the thread has ended, which leaves the router without clients."""
        if self._closing_w >= 0 and not self._thread.is_alive():
            raise MidstepError("the thread that accepts connections has ended; its error is in the log. Restart.")

    def close(self) -> None:
        """Carry what the router said last, close every connection and end the thread. Idempotent. After the router."""
        if self._closing_w < 0:
            return
        os.close(self._closing_w)
        self._closing_w = -1
        self._thread.join(_JOIN_S)
        os.close(self._closing_r)

    # --- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_look_s = 0.0
        try:
            while True:
                for key, events in self._selector.select(_TICK_S):
                    if key.fileobj == self._closing_r:
                        self._carry_the_last()
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._connections:  # not closed by what came before it
                        self._serve(key.data, key.fileobj is key.data.client, events)
                now = time.monotonic()
                if now >= next_look_s:
                    next_look_s = now + _TICK_S
                    self._look(now)
        finally:
            for connection in list(self._connections):
                connection.close()
            self._selector.close()
            self._listener.close()

    def _carry_the_last(self) -> None:
        """Carry what the router had sent before it closed its ends."""
        self._listen(False)
        self._selector.unregister(self._closing_r)
        for connection in [each for each in self._connections if each.router is None]:
            self._drop(connection)
        until_s = time.monotonic() + _LAST_S
        while self._connections and time.monotonic() < until_s:
            for key, events in self._selector.select(_TICK_S):
                if key.data in self._connections:
                    self._serve(key.data, key.fileobj is key.data.client, events)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._unproven.is_closed(len(self._connections), time.monotonic()):
                self._listen(False)  # until the next look: what comes waits in the backlog
                return
            try:
                client, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NONE_LEFT:
                    self._refuse("no descriptor left for a connection")
                    self._listen(False)  # until the next look: an accept that fails at once must not spin
                    return
                continue  # the client was gone before it was accepted
            client.setblocking(False)
            self._take_in(client, address[0] if isinstance(address, tuple) else "")

    def _take_in(self, client: socket.socket, address: str) -> None:
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _SILENCE:
                client.setsockopt(socket.IPPROTO_TCP, option, value)
        refused = self._make_room(address)
        if refused is not None:
            self._refuse(refused)
            client.close()
            return
        handshake = None if self._proof is None else Handshake()
        connection = Connection(client, address, time.monotonic(), handshake)
        self._connections[connection] = None
        if handshake is not None:
            self._unproven.add(connection)
        self._watch(connection)

    def _make_room(self, address: str) -> str | None:
        """Close one connection for another, where places are short. Returns why there is none for it."""
        push = self._unproven.push(address, len(self._connections), time.monotonic())
        if push is not None and push.connection is None:
            return push.reason
        if push is not None and push.connection is not None:
            self._drop(push.connection, push.reason)
        elif len(self._connections) >= self._limits.connections and self._proof is None:
            self._drop(min(self._connections, key=lambda each: each.heard_s), "too many connections")
        return "too many connections" if len(self._connections) >= self._limits.connections else None

    def _serve(self, connection: Connection, from_client: bool, events: int) -> None:
        try:
            if events & _WRITE and from_client:
                connection.write_client()
            elif events & _WRITE:
                connection.write_router()
            if events & _READ and from_client:
                self._heard(connection, connection.read_client(self._connect))
            elif events & _READ:
                admitted = connection.read_router()
                if admitted is not None:
                    self._answered(connection, admitted)
        except ConnectionClosed as closed:
            self._drop(connection, str(closed))
        except OSError as error:
            _log.debug("a connection from %s ended: %s", connection.address, error)
            self._drop(connection)
        if connection in self._connections:
            self._watch(connection)

    def _heard(self, connection: Connection, count: int) -> None:
        now = connection.heard_s = time.monotonic()
        if not connection.proven:
            if connection.asks and connection is not self._turn and connection not in self._asking:
                self._asking.append(connection)
                self._next_turn()
            return
        if connection.identity == PROXY_FAMILY:
            return  # it speaks for many
        connection.carried_bytes += count
        if connection.carried_bytes > self._limits.carried_bytes:
            self._drop(connection, "connection has carried its share, to be made again")
        elif connection.identity is not None:
            connection.paused_until_s = self._allowance(connection.identity).spend(count, now)

    def _next_turn(self) -> None:
        """Let one client at a time ask the authenticator, so that its answer belongs to that client."""
        while self._turn is None and self._asking and self._proof is not None:
            connection = self._asking.popleft()
            if connection not in self._connections:
                continue
            self._turn, self._asked = connection, self._proof()[0]
            try:
                connection.initiate(time.monotonic())
                self._watch(connection)
            except OSError:
                self._turn = None  # here: each of hundreds that are gone would ask for the next one inside the last
                self._drop(connection)

    def _answered(self, connection: Connection, admitted: bool) -> None:
        assert self._proof is not None
        asked, identity = self._proof()
        if not admitted:  # the router closes it, when its reason has been read
            self._end_turn(connection)
        elif connection is not self._turn or asked != self._asked + 1 or identity is None:
            self._drop(connection, "handshake out of turn")
        else:
            connection.handshake, connection.identity = None, identity
            self._unproven.discard(connection)
            of_identity = self._by_identity.setdefault(identity, deque())
            of_identity.append(connection)
            self._end_turn(connection)
            if len(of_identity) > most_of(identity, self._limits):
                self._drop(of_identity[0], "connection was replaced by a newer one")

    def _end_turn(self, connection: Connection) -> None:
        if self._turn is connection:
            self._turn = None
            self._next_turn()

    def _allowance(self, identity: str) -> Allowance:
        allowance = self._allowances.pop(identity, None) or Allowance(identity, self._limits)
        self._allowances[identity] = allowance
        while len(self._allowances) > _PEERS_METERED:
            self._allowances.popitem(last=False)
        return allowance

    def _look(self, now: float) -> None:
        """Close what has taken too long, read again what was paused, and accept again."""
        for connection in self._unproven.overdue(now):
            self._drop(connection, "no handshake in time")
        for connection in list(self._connections):
            if self._limits.idle_s is not None and now - connection.heard_s > self._limits.idle_s:
                self._drop(connection, "idle for too long")
            elif 0 < connection.paused_until_s <= now:
                connection.paused_until_s = 0.0
                self._watch(connection)
        self._asking = deque(each for each in self._asking if each in self._connections)
        self._listen(True)

    def _listen(self, listens: bool) -> None:
        if listens and not self._listens:
            self._selector.register(self._listener, _READ, None)
        elif self._listens and not listens:
            self._selector.unregister(self._listener)
        self._listens = listens

    def _connect(self) -> socket.socket:
        router = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            router.setblocking(False)
            router.connect(self._router_path)
        except OSError:
            router.close()
            raise
        return router

    def _watch(self, connection: Connection) -> None:
        """Wait for what can be carried: neither side is read before the other has taken what it has to."""
        reads = not connection.to_router and connection.paused_until_s <= time.monotonic()
        wanted = _READ * reads | _WRITE * bool(connection.to_client)
        if wanted != connection.client_events:
            connection.client_events = wanted
            self._set(connection.client, connection, wanted)
        if connection.router is None:
            return
        wanted = _READ * (not connection.to_client) | _WRITE * bool(connection.to_router)
        if wanted != connection.router_events:
            connection.router_events = wanted
            self._set(connection.router, connection, wanted)

    def _set(self, end: socket.socket, connection: Connection, wanted: int) -> None:
        known = self._selector.get_map().get(end)
        if known is None and wanted:
            self._selector.register(end, wanted, connection)
        elif known is not None and not wanted:
            self._selector.unregister(end)
        elif known is not None and known.events != wanted:
            self._selector.modify(end, wanted, connection)

    def _drop(self, connection: Connection, reason: str = "") -> None:
        """Close a connection; without a reason its client has left."""
        if reason:
            self._refuse(reason)
        for end in (connection.client, connection.router):
            if end is not None:
                self._set(end, connection, 0)
        del self._connections[connection]
        self._unproven.discard(connection)
        if connection.identity is not None:
            of_identity = self._by_identity[connection.identity]
            of_identity.remove(connection)
            if not of_identity:
                del self._by_identity[connection.identity]
        connection.close()
        self._end_turn(connection)

    def _refuse(self, reason: str) -> None:
        self._refused[reason] += 1


ZAP_DOMAIN = b"midstep"
REPLACED_KEY = "key of a replaced token"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_CURVE = b"CURVE"
_FIXED_FRAMES = 6  # version, request, domain, address, identity, mechanism; then the credentials


class Gatekeeper:
    """The one authenticator of a zmq context; its maker closes it before the context.

    Raises ConfigurationError when the context has an authenticator already.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._refused: Counter[str] = Counter()  # written by the thread alone
        self._last: tuple[int, str | None] = (0, None)
        self._keys = keys
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        try:
            self._socket.bind(_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigurationError(
                "this zmq context has an authenticator already: give every CURVE router a context of its own."
            ) from error
        self._closing_r, self._closing_w = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="midstep-gatekeeper", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> Counter[str]:
        """Handshakes that were turned away so far, by reason."""
        return Counter(self._refused)

    def last(self) -> tuple[int, str | None]:
        """Return how often it was asked, and which identity asked last; None: one that was turned away."""
        return self._last

    def close(self) -> None:
        """End the thread and release what it held. Idempotent."""
        if self._closing_w < 0:
            return
        os.close(self._closing_w)
        self._closing_w = -1
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise MidstepError(f"the authenticator did not end within {_JOIN_S} s; its context is left open.")
        os.close(self._closing_r)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._closing_r, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())  # ends with close()
                if self._closing_r in ready:
                    return
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        request = frames[1] if len(frames) > 1 else b""
        identity = self._identity(frames)
        self._last = (self._last[0] + 1, identity)
        if identity is None:
            return [_VERSION, request, b"400", b"not admitted to this job", b"", b""]
        return [_VERSION, request, b"200", b"", identity.encode(), b""]

    def _identity(self, frames: list[bytes]) -> str | None:
        """Return the identity that asks for admission, or count why there is none."""
        if len(frames) != _FIXED_FRAMES + 1 or frames[0] != _VERSION or frames[5] != _CURVE:
            self._refused["no CURVE handshake"] += 1
            return None
        try:
            identity = self._keys.identity_of(frames[6])
        except KeyExpired:
            self._refused["expired key"] += 1
            return None
        except KeyReplaced:
            self._refused[REPLACED_KEY] += 1
            return None
        except (OSError, ValueError) as error:
            # The list of clients cannot be read. No client is admitted for that reason, and none is disconnected.
            self._refused[f"client list unreadable: {type(error).__name__}"] += 1
            return None
        if identity is None:
            self._refused["unknown key"] += 1
        return identity
