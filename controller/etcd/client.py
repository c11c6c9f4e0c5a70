"""Talk to etcd over its JSON gateway: reads, transactions and leases, each within a deadline.

What may be asked twice is asked at each member before it fails. A write is not: one that fails may have been carried
out all the same, which its caller finds out by what it compares next time.
"""

import base64
import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...protocol.errors import ConfigurationError, StoreUnreachable
from .place import EtcdPlace

if TYPE_CHECKING:
    from etcd3gw import Etcd3Client

REQUEST_S = 1.0
LOGIN_TIMES = 3  # so much longer may a login take: passwords are made slow to check
PAGE = 500  # keys in one answer
_PACKAGE = "etcd3gw"
# Of an answer: the connection's login does not count any more, and nothing was done. It ends when it is not used for
# five minutes, when its member starts again, and when users or roles are changed.
_LOGIN_ENDED = ("invalid auth token", "revision of auth store is old")
_Answer = TypeVar("_Answer")


_LEASE_ENDED = "requested lease not found"


class Kept(msgspec.Struct, frozen=True):
    """A key as etcd has it. `revision`: of its last change. `lease`: with which it ends; 0 for none."""

    key: str
    value: bytes
    revision: int
    lease: int = 0


class LeaseLeft(msgspec.Struct, frozen=True):
    """How long a lease lasts: `left_s`, rounded down, negative when it has ended, of `granted_s`."""

    left_s: int
    granted_s: int


Condition = dict[str, Any]
Operation = dict[str, Any]


class Etcd:
    """A connection to one etcd, tried at the next of its members after each failure. For one thread."""

    def __init__(self, place: EtcdPlace, timeout_s: float = REQUEST_S) -> None:
        """Connect to nothing yet. Raises ConfigurationError when the client library is not installed."""
        if importlib.util.find_spec(_PACKAGE) is None:
            raise ConfigurationError(
                f"{place}: the library for etcd is not installed. Install it with `pip install 'midstep[etcd]'`."
            )
        self._place = place
        self._timeout_s = timeout_s
        self._member = 0
        self._revision = 0  # 0: read what is there now
        self._client: Etcd3Client | None = None

    def read_as_of_now(self) -> None:
        """From now on read everything as it is at this moment. Raises StoreUnreachable."""
        self._revision = int(self._ask("look", lambda client: client.status())["header"]["revision"])

    @contextlib.contextmanager
    def as_of_now(self) -> Iterator[None]:
        """While this is entered, read everything as it was at its beginning. Raises StoreUnreachable."""
        self.read_as_of_now()
        try:
            yield
        finally:
            self._revision = 0

    def get(self, key: str) -> Kept | None:
        """Return a key; None when there is none. Raises StoreUnreachable."""
        found = self._range({"key": _encoded(key)}, f"read {key}")
        return found[0] if found else None

    def list(self, folder: str, *, start: str = "", keys_only: bool = False) -> Iterator[Kept]:
        """Yield all keys that begin with `folder`, in order, from `start` on. Raises StoreUnreachable."""
        start = start or folder
        while True:
            found = self._range(
                {
                    "key": _encoded(start),
                    "range_end": _encoded(_behind(folder)),
                    "limit": PAGE,
                    "sort_order": "ASCEND",
                    "sort_target": "KEY",
                    "keys_only": keys_only,
                },
                f"list {folder}",
            )
            yield from found
            if len(found) < PAGE:
                return
            start = found[-1].key + "\0"

    def first(self, folder: str) -> Kept | None:
        """Return the first of the keys that begin with `folder`, without its value. Raises StoreUnreachable."""
        return self._end(folder, _behind(folder), "ASCEND", keys_only=True)

    def last(self, folder: str, *, before: str = "") -> Kept | None:
        """Return the last of the keys that begin with `folder`, and come before `before`. Raises StoreUnreachable."""
        return self._end(folder, before or _behind(folder), "DESCEND", keys_only=False)

    def change(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> int | None:
        """Do all of the operations if all conditions hold: return the revision; None when one does not hold.

        Raises StoreUnreachable: it may have been done or not.
        """
        body = {"compare": list(conditions), "success": list(operations), "failure": []}
        answer = self._ask_one("write", lambda client: client.transaction(body))
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    def grant(self, ttl_s: int) -> int:
        """Return a new lease that ends `ttl_s` after it was last kept alive. Raises StoreUnreachable."""
        return self._ask("ask for a lease", lambda client: client.lease(ttl_s)).id

    def keep_alive(self, lease: int) -> bool:
        """Keep a lease alive; False when it has ended. Raises StoreUnreachable."""
        from etcd3gw import Lease

        return self._ask("keep a lease", lambda client: Lease(lease, client).refresh()) > 0

    def look_at_lease(self, lease: int) -> LeaseLeft:
        """Return how long a lease still lasts. Raises StoreUnreachable."""
        body = {"ID": lease}
        answer = self._ask(
            "look at a lease", lambda client: client.post(client.get_url("/lease/timetolive"), json=body)
        )
        return LeaseLeft(int(answer.get("TTL", 0)), int(answer.get("grantedTTL", 0)))

    def revoke(self, lease: int) -> None:
        """End a lease, if it has not ended, and what is kept under it. Raises StoreUnreachable."""
        self._ask("end a lease", lambda client: _revoke(client, lease))

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._client is not None:
            self._client.session.close()
            self._client = None

    def _end(self, start: str, end: str, order: str, *, keys_only: bool) -> Kept | None:
        body = {"key": _encoded(start), "range_end": _encoded(end), "limit": 1, "keys_only": keys_only}
        found = self._range(body | {"sort_order": order, "sort_target": "KEY"}, f"look into {start}")
        return found[0] if found else None

    def _range(self, body: dict[str, Any], doing: str) -> Sequence[Kept]:
        body |= {"revision": self._revision}
        answer = self._ask(doing, lambda client: client.post(client.get_url("/kv/range"), json=body))
        return [
            Kept(
                _decoded(each["key"]).decode(),
                _decoded(each.get("value", "")),
                int(each["mod_revision"]),
                int(each.get("lease", 0)),
            )
            for each in answer.get("kvs", ())
        ]

    def _ask(self, doing: str, request: "Callable[[Etcd3Client], _Answer]") -> _Answer:
        """Ask one member after the other until one answers."""
        for _ in self._place.endpoints[1:]:
            with contextlib.suppress(StoreUnreachable):
                return self._ask_one(doing, request)
        return self._ask_one(doing, request)

    def _ask_one(self, doing: str, request: "Callable[[Etcd3Client], _Answer]") -> _Answer:
        """Ask the member that answered last. After a failure it is the next one's turn."""
        from etcd3gw.exceptions import Etcd3Exception
        from requests import RequestException

        host, port = self._place.endpoints[self._member]
        try:
            return self._ask_logged_in(host, port, request)
        except (Etcd3Exception, RequestException, KeyError, ValueError) as error:
            self.close()
            self._member = (self._member + 1) % len(self._place.endpoints)
            said = _said(error)
            raise StoreUnreachable(
                f"{self._place}: etcd at {host}:{port} cannot {doing}: {' '.join(said.split())[:300]}. Check that it "
                "runs, has a quorum and room, and can be reached from here; nothing that was acknowledged is lost."
            ) from error

    def _ask_logged_in(self, host: str, port: int, request: "Callable[[Etcd3Client], _Answer]") -> _Answer:
        """Ask, and once more after a new login where the one that there is has ended."""
        from etcd3gw.exceptions import Etcd3Exception

        if self._client is None:
            self._client = self._connect(host, port)
            self._log_in(self._client)
        try:
            return request(self._client)
        except Etcd3Exception as error:
            if self._place.access.user is None or not any(each in _said(error) for each in _LOGIN_ENDED):
                raise
        self._log_in(self._client)
        return request(self._client)

    def _log_in(self, client: "Etcd3Client") -> None:
        """Have all that is asked over this connection be asked by the user of this job's etcd, if it has one."""
        access = self._place.access
        if access.user is None:
            return
        client.session.headers.pop("Authorization", None)
        body = {"name": access.user, "password": access.password}
        client.timeout = LOGIN_TIMES * self._timeout_s
        try:
            answer = client.post(client.get_url("/auth/authenticate"), json=body)
        finally:
            client.timeout = self._timeout_s
        client.session.headers["Authorization"] = answer["token"]

    def _connect(self, host: str, port: int) -> "Etcd3Client":
        from etcd3gw import Etcd3Client
        from requests import Session

        files = self._place.access
        session = Session()
        session.trust_env = False  # a proxy, or an authority of other programs, is not for etcd
        session.verify = files.authority or True
        if files.certificate is not None:
            session.cert = files.certificate if files.key is None else (files.certificate, files.key)
        return Etcd3Client(host, port, self._place.protocol, timeout=self._timeout_s, session=session)


def _revoke(client: "Etcd3Client", lease: int) -> None:
    from etcd3gw import Lease
    from etcd3gw.exceptions import Etcd3Exception

    try:
        Lease(lease, client).revoke()
    except Etcd3Exception as error:
        if _LEASE_ENDED not in _said(error):
            raise


def _said(error: Exception) -> str:
    """Return what an error of the library says: what etcd answered, if it did."""
    return getattr(error, "detail_text", None) or str(error) or repr(error)


def absent(key: str) -> Condition:
    """Hold when there is no such key."""
    return {"key": _encoded(key), "target": "CREATE", "result": "EQUAL", "create_revision": 0}


def holds(key: str, value: bytes) -> Condition:
    """Hold when the key has this value."""
    return {"key": _encoded(key), "target": "VALUE", "result": "EQUAL", "value": _encoded(value)}


def unchanged(key: str, revision: int) -> Condition:
    """Hold when the key was last changed at `revision`; 0: when there is no such key."""
    return {"key": _encoded(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    """Set a key; with a `lease`, for as long as that is kept alive."""
    return {"request_put": {"key": _encoded(key), "value": _encoded(value), "lease": lease}}


def delete(first: str, end: str | None = None) -> Operation:
    """Delete a key, or all keys from `first` up to and without `end`."""
    return {"request_delete_range": {"key": _encoded(first)} | ({"range_end": _encoded(end)} if end else {})}


def _behind(folder: str) -> str:
    return folder[:-1] + chr(ord(folder[-1]) + 1)


def _encoded(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _decoded(data: str) -> bytes:
    return base64.b64decode(data)
