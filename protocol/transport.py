"""The two sockets that carry bytes between controller, agents and processors. Nothing here knows messages.

Between nodes: TCP with CURVE, where a key stands for one identity. Inside a node: unix sockets that only the owner
can reach. How to wait for them, in asyncio or in a thread: see `nonblocking`.

A client names itself by its routing id: its identity, a zero byte and a nonce. The router takes the newest
connection of an identity as the valid one and no longer hears the others, so a restarted process takes over at
once. zmq would hand a routing id over to any peer that claims it, before its key is looked at; the nonce, which no peer
else knows, makes such a claim worthless. With CURVE the identity must also be the key's.

A cut cable tells neither side. Left to TCP, a connection stays silent for up to twice as long as it was cut, and is
kept for a quarter of an hour: keepalive does not act while data is underway. So a client gives up a connection on which
no word comes, and connects again until there is an answer. The other side gives it up by itself (`front`).
"""

import contextlib
import os
import resource
import secrets
import socket
import stat
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from .codec import MAX_FRAME_BYTES
from .connection import ConnectionLimits, limits_by_descriptors
from .errors import ConfigurationError
from .front import ZAP_DOMAIN, Front, Gatekeeper
from .identities import PROXY_FAMILY, is_family, key_identity, may_be
from .keys import ClientKeys, ServerKeys
from .nonblocking import RECEIVE_LIMIT, Context, HandshakeWatch, NonblockingSocket, Received, wait

__all__ = ["DealerSocket", "Received", "RouterSocket", "wait"]
OUTBOX_LIMIT = 256  # what a dealer keeps while it is not connected; the mailbox repeats what matters
MAX_IDENTITY_BYTES = 200
MAX_PEERS = 16_384  # the oldest is forgotten
MAX_OF_FAMILIES = 2048  # of them with a key that several have: they come and go, and must not push out those that stay
_BACKLOG = 4096
_NONCE_BYTES = 12
REPLACED_REMEMBERED = 16  # earlier connections of one identity that stay unheard
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 200
_HEARTBEAT_MS = 2_000  # each ping and each answer costs the controller as much as a report does
_HEARTBEAT_TIMEOUT_MS = 2_000  # for the answer
_UNACKNOWLEDGED_MS = 2_000  # by the other machine's kernel: what an agent reports is underway most of the time
_CONNECT_TIMEOUT_MS = 1_000  # TCP would ask again after 1, 3, 7, 15, ... s
MAX_IPC_PATH_BYTES = 100
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_DIRECTORY_MODE = 0o700
_PROBE_S = 1.0
_IPC = "ipc://"
_TCP = "tcp://"
_ANY = "*"
_EVERY_ADDRESS = "0.0.0.0"
_FILE_MODE = 0o600


class Peer:
    """The connections of one identity: the valid one, and those that it replaced."""

    __slots__ = ("replaced", "routing_id")

    def __init__(self, routing_id: bytes) -> None:
        self.routing_id = routing_id
        self.replaced: tuple[bytes, ...] = ()

    def move_to(self, routing_id: bytes) -> None:
        """Take `routing_id` as the valid connection from now on."""
        self.replaced = (self.routing_id, *self.replaced[: REPLACED_REMEMBERED - 1])
        self.routing_id = routing_id


class RouterSocket(NonblockingSocket):
    """The side that many connect to. `endpoint` is the actual one, with its port.

    TCP needs `curve`. For `ipc://` the directory is made if it is missing and must be the owner's alone; the socket
    file goes with `close()`. A context that is given must have no other authenticator.

    Raises ConfigurationError when the endpoint cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        curve: ServerKeys | None,
        context: Context | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """`limits`: of connections and what they cost; None: by the descriptors that there are for TCP, else none."""
        require_keys(endpoint, curve)
        path = ipc_path(endpoint)
        if path is None:
            allow_many_connections()
            limits = limits or limits_by_descriptors()
        else:
            prepare_ipc(path)
        super().__init__(zmq.ROUTER, context)
        self._path = path
        self._file: tuple[int, int] | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._front: Front | None = None
        self._peers: dict[str, Peer] = {}
        self._of_families: deque[str] = deque()
        self._newcomers: deque[str] = deque(maxlen=MAX_OF_FAMILIES)
        self._curve = curve is not None
        try:
            if curve is not None:
                self._authenticate(curve)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
            self.endpoint = self._listen(endpoint) if limits is None else self._listen_behind(endpoint, limits)
            self._file = None if path is None else file_at(path)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ConfigurationError(f"cannot listen at {endpoint}: {error}.") from error
        except BaseException:
            self.close()
            raise

    @property
    def refused(self) -> Counter[str]:
        """The count of refused and dropped messages so far, by reason, with connections that were turned away."""
        guards = (self._gatekeeper, self._front)
        return sum((guard.refused for guard in guards if guard is not None), super().refused)

    def receive(self, limit: int = RECEIVE_LIMIT) -> list[Received]:
        """Return what has arrived, without waiting. Raises MidstepError when nothing can arrive any more."""
        if self._front is not None:
            self._front.check()
        return super().receive(limit)

    def knows(self, identity: str) -> bool:
        """Say whether a client of that identity has connected."""
        return identity in self._peers

    def newcomers(self) -> list[str]:
        """Return the clients that have connected since the last call, some thousands at most. After `receive`."""
        newcomers = list(self._newcomers)
        self._newcomers.clear()
        return newcomers

    def send(self, identity: str, data: bytes) -> bool:
        """Send to a client. False: it is not connected, its queue is full, or the message is too big."""
        peer = self._peers.get(identity)
        if peer is None:
            return False
        if len(data) > MAX_FRAME_BYTES:
            self._refused["oversized, not sent"] += 1
            return False
        try:
            if self._transmit([peer.routing_id, data]):
                return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False  # the place is kept: what it replaced must stay unheard
        self._refused["queue full, not sent"] += 1
        return False

    def _authenticate(self, curve: ServerKeys) -> None:
        self._gatekeeper = Gatekeeper(self._context, curve)
        self._socket.curve_server = 1
        self._socket.curve_secretkey = curve.secret.encode()
        self._socket.curve_publickey = curve.public.encode()
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler no client gets in

    def _listen(self, endpoint: str) -> str:
        self._socket.bind(endpoint)
        if self._path is not None:
            self._path.chmod(0o600)
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _listen_behind(self, endpoint: str, limits: ConnectionLimits) -> str:
        """Listen where this process alone gets to, and let the front listen at `endpoint`."""
        name = f"midstep-{secrets.token_hex(_NONCE_BYTES)}"
        self._socket.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(2000 * limits.handshake_s))  # the front counts
        self._socket.bind(f"ipc://@{name}")
        listener = bound(endpoint)
        proof = None if self._gatekeeper is None else self._gatekeeper.last
        self._front = Front(listener, f"\0{name}", limits, proof)
        return name_of(listener)

    def _release(self) -> None:
        if self._front is not None:
            self._front.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        if self._path is not None and self._file is not None and file_at(self._path) == self._file:
            self._path.unlink(missing_ok=True)  # and not that of a process that has taken the name over

    def _accept(self, frames: Sequence[zmq.Frame]) -> Received | None:
        routing_id = frames[0].bytes
        name, separator, _ = routing_id.partition(b"\0")
        try:
            identity = name.decode()
        except UnicodeDecodeError:
            identity = ""
        if len(frames) != 2 or not separator or not identity:
            self._refused["malformed frames"] += 1
            return None
        user_id = key_identity(frames[0]) if self._curve else None
        if self._curve and not may_be(identity, user_id):
            self._refused["identity does not match key"] += 1
            return None
        comes_and_goes = user_id is not None and is_family(user_id) and user_id != PROXY_FAMILY
        if not self._admit(identity, routing_id, of_family=comes_and_goes):
            return None
        data = frames[1].bytes
        if len(data) > MAX_FRAME_BYTES:
            self._refused["oversized"] += 1
            return None
        return Received(identity, user_id, data) if data else None  # empty: the client has just connected

    def _admit(self, identity: str, routing_id: bytes, *, of_family: bool) -> bool:
        """Take the newest connection of an identity as the valid one; refuse those that it has replaced."""
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                # Most are long gone (every CLI call has a name of its own). One that is not is let in again when it
                # speaks.
                del self._peers[next(iter(self._peers))]
            self._peers[identity] = Peer(routing_id)
            self._newcomers.append(identity)
            if of_family:
                self._of_families.append(identity)
                if len(self._of_families) > MAX_OF_FAMILIES:
                    self._peers.pop(self._of_families.popleft(), None)
        elif peer.routing_id != routing_id:
            if routing_id in peer.replaced:
                self._refused["connection was replaced"] += 1
                return False
            peer.move_to(routing_id)
            self._newcomers.append(identity)
        return True


class DealerSocket(NonblockingSocket):
    """The side that connects, as `identity`. It reconnects for ever, and tells the router each time.

    What is sent while there is no connection waits in a small outbox, where the newest replaces the oldest.

    Raises ConfigurationError when the endpoint cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        identity: str,
        curve: ClientKeys | None,
        context: Context | None = None,
        watch: HandshakeWatch | None = None,
    ) -> None:
        """`watch`: of its handshakes; it is closed with the socket."""
        name = identity.encode()
        if not name or b"\0" in name or len(name) > MAX_IDENTITY_BYTES:
            raise ConfigurationError(f"{identity!r} is no identity: 1 to {MAX_IDENTITY_BYTES} bytes, none zero.")
        require_keys(endpoint, curve)
        super().__init__(zmq.DEALER, context, watch)
        self.endpoint = endpoint
        self._keys = curve
        self._outbox: deque[bytes] = deque()
        try:
            if curve is not None:
                self._socket.curve_serverkey = curve.server_public.encode()
                self._socket.curve_secretkey = curve.secret.encode()
                self._socket.curve_publickey = curve.public.encode()
            self._socket.setsockopt(zmq.ROUTING_ID, name + b"\0" + secrets.token_bytes(_NONCE_BYTES))
            # An empty message on every connection shows the router which peers are there. With IMMEDIATE this holds for
            # reconnections too, and what was queued for a router that is gone does not reach the next one.
            self._socket.setsockopt(zmq.PROBE_ROUTER, 1)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.IPV6, 1)
            reconnect_by_itself(self._socket, between_machines=ipc_path(endpoint) is None)
            self._socket.connect(endpoint)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ConfigurationError(f"cannot connect to {endpoint}: {error}.") from error

    @property
    def wants_to_send(self) -> bool:
        """True while the outbox waits for a connection."""
        return bool(self._outbox)

    @property
    def connected(self) -> bool:
        """True while there is a connection: without one nothing can be sent."""
        events = self._socket.getsockopt(zmq.EVENTS)
        self._check_soon()  # to ask uses up the edge of what has just come
        return bool(isinstance(events, int) and events & zmq.POLLOUT)

    def connect_again(self) -> None:
        """Leave what there is of a connection, and make it again. libzmq does not do so where a key was refused.

        Raises ConfigurationError when that cannot be begun.
        """
        with contextlib.suppress(zmq.ZMQError):  # it has given the connection up by itself
            self._socket.disconnect(self.endpoint)
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"cannot connect to {self.endpoint}: {error}.") from error
        self._check_soon()

    def move_to(self, endpoint: str) -> None:
        """Connect to a router elsewhere, as the same identity and with the same keys, and leave the present one.

        Raises ConfigurationError when the endpoint cannot be used; nothing has changed then.
        """
        if endpoint == self.endpoint:
            return
        require_keys(endpoint, self._keys)
        # In this order: of a connection that was refused libzmq keeps an address which the next one may get. To
        # disconnect the old one afterwards would end the new one.
        with contextlib.suppress(zmq.ZMQError):  # it has given the connection up by itself
            self._socket.disconnect(self.endpoint)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.connect(self.endpoint)
            raise ConfigurationError(f"cannot connect to {endpoint}: {error}.") from error
        self.endpoint = endpoint
        self._check_soon()

    def send(self, data: bytes) -> bool:
        """Send, or keep until there is a connection. False: the message is too big."""
        if len(data) > MAX_FRAME_BYTES:
            self._refused["oversized, not sent"] += 1
            return False
        self._flush()
        if not self._outbox and self._transmit([data]):
            return True
        if len(self._outbox) >= OUTBOX_LIMIT:
            self._outbox.popleft()
            self._refused["outbox full, oldest dropped"] += 1
        self._outbox.append(data)
        return True

    def receive(self, limit: int = RECEIVE_LIMIT) -> list[Received]:
        """Return what has arrived, without waiting, after sending what waited for a connection."""
        received = super().receive(limit)
        self._flush()
        return received

    def _flush(self) -> None:
        while self._outbox and self._transmit([self._outbox[0]]):
            self._outbox.popleft()

    def _accept(self, frames: Sequence[zmq.Frame]) -> Received | None:
        if len(frames) != 1:
            self._refused["malformed frames"] += 1
            return None
        data = frames[0].bytes
        return Received("", None, data) if data else None


def reconnect_by_itself(socket: zmq.Socket[bytes], *, between_machines: bool) -> None:
    """Have a socket reconnect for ever. On one machine, each end sees at once that the other is gone."""
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    if between_machines:
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)


# --- endpoints ------------------------------------------------------------------------------------------------------


def ipc_path(endpoint: str) -> Path | None:
    """Return the path of a unix socket; None for TCP."""
    if endpoint.startswith(_TCP):
        return None
    path = endpoint.removeprefix(_IPC)
    if not endpoint.startswith(_IPC) or not path.startswith("/"):
        raise ConfigurationError(f"{endpoint} is no endpoint: write tcp://host:port or ipc:///absolute/path.")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigurationError(
            f"the path {path} is longer than the {MAX_IPC_PATH_BYTES} bytes that fit a unix socket: "
            "choose a shorter run directory."
        )
    return Path(path)


def require_keys(endpoint: str, keys: object | None) -> None:
    """Raise ConfigurationError for what is no endpoint, and for TCP without keys."""
    if ipc_path(endpoint) is None and keys is None:
        raise ConfigurationError(f"{endpoint} needs CURVE keys: only unix sockets go without.")


def prepare_ipc(path: Path) -> None:
    """Check that no other user can reach a socket file: its directory is the owner's alone."""
    folder = path.parent
    try:
        folder.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(f"the directory {folder} of a socket cannot be made: {error}.") from error
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS:
        raise ConfigurationError(
            f"{folder} is open to others (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}): "
            "a socket in it would be too. chmod 700 it, or choose another run directory."
        )
    # Binding takes the path from the process that has it: only that of a dead process may be taken.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be examined: {error}. Remove it.") from error
    raise ConfigurationError(f"another process listens at {path}: is the job running already?")


def bound(endpoint: str) -> socket.socket:
    """Return a socket that is bound to an endpoint, and does not listen yet. Port 0 or `*`: any that is free.

    Raises OSError or ConfigurationError.
    """
    path = ipc_path(endpoint)
    family: socket.AddressFamily
    address: Any
    if path is None:
        host, _, port = endpoint.removeprefix(_TCP).rpartition(":")
        if not port.isdigit() and port != _ANY:
            raise ConfigurationError(f"{endpoint} is no endpoint: write tcp://host:port or ipc:///absolute/path.")
        number = 0 if port == _ANY else int(port)
        name = _EVERY_ADDRESS if host == _ANY else host.removeprefix("[").removesuffix("]")
        family, _, _, _, address = socket.getaddrinfo(name, number, type=socket.SOCK_STREAM)[0]
    else:
        family, address = socket.AF_UNIX, str(path)
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if path is None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            path.unlink(missing_ok=True)  # a dead process's leftover: see prepare_ipc
        made.bind(address)
        if path is not None:
            path.chmod(_FILE_MODE)
    except BaseException:
        made.close()
        raise
    return made


def file_at(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file of that name; None when there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def name_of(listener: socket.socket) -> str:
    """Return the endpoint that a socket is bound to."""
    if listener.family == socket.AF_UNIX:
        return f"{_IPC}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{_TCP}[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{_TCP}{host}:{port}"


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as it may: every client takes one, and zmq spins without."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
