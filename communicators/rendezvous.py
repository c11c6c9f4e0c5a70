"""The rendezvous store as the members of one generation use it: with hashed keys and signed values.

Any process that can connect to a TCPStore can list, read and replace everything in it. So each generation has its own
part: keys are hashed with the generation's secret and values are signed. A value either comes from a member, or fails
the link-up with the reason. This holds for what gloo and HCCL leave there, too: a foreign value would otherwise reach
C++ code that trusts it.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ..protocol.errors import CommunicatorFailed, LinkUpFailed
from ..protocol.types import Rendezvous, StoreEndpoint
from . import handshake
from .background import Abandoned, BackgroundTask
from .dns import limit_dns_in_this_thread
from .generation_scope import error_text
from .handshake import Authenticator
from .libraries import HAS_TORCH

if TYPE_CHECKING or HAS_TORCH:
    from torch._C._distributed_c10d import Store, TCPStore
    from torch.distributed import DistStoreError
else:
    from .key_value_store import KeyValueClient as TCPStore
    from .key_value_store import Store
    from .key_value_store import StoreTimeout as DistStoreError

T = TypeVar("T")

MAX_VALUE_BYTES = 1 << 26  # gloo's addresses of a large world are a few hundred kilobytes
SHARE_TO_LOOK = 0.1  # of the time of a link-up, at its end: who is missing
_PROBE_KEY = "midstep/probe"


class StoreConnection:
    """A client connection to a TCPStore, kept from generation to generation until it breaks."""

    def __init__(self, endpoint: StoreEndpoint, limit_s: float) -> None:
        """Connect within `limit_s`. Raises RuntimeError (torch's).

        Only in a background thread: it limits the thread's name lookups, see `limit_dns_in_this_thread`.
        """
        limit_dns_in_this_thread()
        self.endpoint = StoreEndpoint(endpoint.host, endpoint.port)
        self.store = TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=False,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )

    def reaches(self, endpoint: StoreEndpoint) -> bool:
        """Return whether this is a connection to `endpoint`, and it answers."""
        if (self.endpoint.host, self.endpoint.port) != (endpoint.host, endpoint.port):
            return False
        try:
            self.store.check([_PROBE_KEY])  # type: ignore[attr-defined,unused-ignore]
        except Exception:  # torch's, of any kind; the caller then makes another connection
            return False
        return True


class GenerationStore:
    """The part of the rendezvous store that belongs to one generation."""

    def __init__(self, connection: StoreConnection, rendezvous: Rendezvous, generation: int) -> None:
        """Use `connection`, authenticated with the secret of `rendezvous`."""
        self.connection = connection
        self.authenticator = Authenticator(rendezvous, generation)

    def with_prefix(self, prefix: str) -> "AuthenticatedStore":
        """Return a torch store for the keys under `prefix`."""
        return AuthenticatedStore(self.connection.store, self.connection.endpoint, self.authenticator, prefix)

    def exchange(
        self, task: BackgroundTask[Any], name: str, members: Sequence[int], rank: int, message: T, *, missing: str
    ) -> list[T]:
        """Publish `message` and return the messages of all `members`, in their order.

        `missing` completes "rank N ..." for a member whose message does not come. Raises Abandoned when the task is
        over, LinkUpFailed when the store fails or a value cannot be decoded.
        """
        self.publish(name, rank, message)
        others = [member for member in members if member != rank]
        self._await(task, self.with_prefix(name), others, missing)
        task.stage = f"group {name} is not connected"
        received = self.read(name, others, type(message))
        received[rank] = message
        return [received[member] for member in members]

    def publish(self, name: str, rank: int, message: Any) -> None:
        """Leave this rank's `message` for the members of `name`. Raises LinkUpFailed."""
        self.with_prefix(name).set(_member_key(rank), handshake.encode(message))

    def have_published(self, name: str, members: Sequence[int]) -> bool:
        """Return whether the messages of all `members` are there. Raises LinkUpFailed."""
        return self.with_prefix(name).check([_member_key(member) for member in members])

    def read(self, name: str, members: Sequence[int], kind: type[T]) -> dict[int, T]:
        """Return what `members` have published. Raises LinkUpFailed for a value that cannot be decoded."""
        store = self.with_prefix(name)
        received = {}
        for member, value in zip(members, store.multi_get([_member_key(member) for member in members]), strict=True):
            try:
                received[member] = handshake.decode(value, kind)
            except ValueError as error:
                raise store.malformed(_member_key(member), str(error)) from error
        return received

    @staticmethod
    def _await(task: BackgroundTask[Any], store: "AuthenticatedStore", members: Sequence[int], missing: str) -> None:
        """Wait for the messages of all members at once: to ask for each of them would make the whole quadratic.

        The last part of the time is for finding out which rank is missing; if it does not suffice, none is named.
        """
        if not members:
            return
        keys = [_member_key(member) for member in members]
        task.stage = f"a rank {missing}"
        try:
            store.wait(keys, timedelta(seconds=task.remaining_s() * (1 - SHARE_TO_LOOK)))
        except DistStoreError as error:  # torch's name for a timeout
            there = bisect_left(range(len(keys)), 1, key=lambda last: not store.check(keys[: last + 1]))
            if there < len(keys):
                task.stage = f"rank {members[there]} {missing}"
                raise Abandoned from error


class AuthenticatedStore(Store):
    """A torch store with hashed keys and signed values, for the members of one generation.

    Raises LinkUpFailed, which names store and key, for everything but a wait that takes too long: that is torch's
    DistStoreError.
    """

    def __init__(self, inner: Any, endpoint: StoreEndpoint, authenticator: Authenticator, prefix: str) -> None:
        super().__init__()
        self._inner = inner
        self._where = f"the rendezvous store at {endpoint.host}:{endpoint.port}"
        self._authenticator = authenticator
        self._prefix = prefix

    def set(self, key: str, value: Any) -> None:
        """As torch's."""
        with self._calling("write", key) as hashed:
            self._inner.set(hashed, self._authenticator.sign(self._full_key(key), _bytes(value)))

    def get(self, key: str) -> bytes:
        """As torch's."""
        with self._calling("read", key) as hashed:
            signed = bytes(self._inner.get(hashed))
        return self._verified(key, signed)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As torch's, of keys that have values: in one round trip where the store can do that."""
        if not keys or not hasattr(self._inner, "multi_get"):  # the store of jobs without torch
            return [self.get(key) for key in keys]
        with self._calling("read", ", ".join(keys)):
            values = self._inner.multi_get([self._hashed(key) for key in keys])
        return [self._verified(key, bytes(value)) for key, value in zip(keys, values, strict=True)]

    def add(self, key: str, amount: int) -> int:
        """As torch's. A number cannot be signed."""
        with self._calling("add to", key) as hashed:
            return int(self._inner.add(hashed, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """As torch's."""
        full_key, before = self._full_key(key), _bytes(expected)
        with self._calling("replace", key) as hashed:
            known = self._authenticator.sign(full_key, before) if before else b""
            signed = self._authenticator.sign(full_key, _bytes(desired))
            present = bytes(self._inner.compare_set(hashed, known, signed))
        return self._verified(key, present) if present else present

    def delete_key(self, key: str) -> bool:
        """As torch's."""
        with self._calling("delete", key) as hashed:
            return bool(self._inner.delete_key(hashed))

    def num_keys(self) -> int:
        """As torch's: of the whole store."""
        return int(self._inner.num_keys())

    def check(self, keys: Sequence[str]) -> bool:
        """As torch's."""
        with self._calling("look for", ", ".join(keys)):
            return bool(self._inner.check([self._hashed(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As torch's."""
        with self._calling("wait for", ", ".join(keys)):
            hashed = [self._hashed(key) for key in keys]
            if timeout is None:
                self._inner.wait(hashed)
            else:
                self._inner.wait(hashed, timeout)

    def has_extended_api(self) -> bool:
        """Return False: only the methods above can be used."""
        return False

    def malformed(self, key: str, why: str) -> LinkUpFailed:
        """Return the error for a value of `key` that is signed and cannot be decoded."""
        return LinkUpFailed(f"{self._where}: what a member left as {self._full_key(key)} cannot be used: {why}")

    def _verified(self, key: str, signed: bytes) -> bytes:
        full_key = self._full_key(key)
        value = self._authenticator.verify(full_key, signed) if len(signed) <= MAX_VALUE_BYTES else None
        if value is None:
            raise LinkUpFailed(
                f"{self._where}: {len(signed)} bytes lie there as {full_key} that no member of this generation "
                "wrote. A process outside the job writes to the store; open its port to the job's nodes only."
            )
        return value

    @contextmanager
    def _calling(self, what: str, key: str) -> Iterator[str]:
        """Translate the errors of a call to the inner store; yield the hashed key."""
        try:
            yield self._hashed(key)
        except DistStoreError:  # torch's name for a timeout
            raise
        except Exception as error:  # torch's C++ turns what a store sends into errors of any kind
            raise LinkUpFailed(
                f"{self._where} could not be asked to {what} {self._full_key(key)}: {error_text(error)}"
            ) from error

    def _hashed(self, key: str) -> str:
        return self._authenticator.hashed_key(self._full_key(key))

    def _full_key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class ForwardingStore(Store):
    """A torch store that forwards to another, which can be replaced while process groups hold this one.

    A process group of HCCL keeps its store for good, and its members meet there again after every rebuild. But every
    generation has its own part of a store, on any node. Before the first `forward_to` every call is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self._target: Any = None

    def forward_to(self, store: Any) -> None:
        """Forward all calls to `store` from now on."""
        self._target = store

    @property
    def _inner(self) -> Any:
        if self._target is None:
            raise CommunicatorFailed("the process groups are not connected yet, so there is no store behind them")
        return self._target

    def set(self, key: str, value: Any) -> None:
        """As torch's."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """As torch's."""
        return bytes(self._inner.get(key))

    def add(self, key: str, amount: int) -> int:
        """As torch's."""
        return int(self._inner.add(key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """As torch's."""
        return bytes(self._inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """As torch's."""
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        """As torch's."""
        return int(self._inner.num_keys())

    def check(self, keys: Sequence[str]) -> bool:
        """As torch's."""
        return bool(self._inner.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As torch's."""
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)

    def has_extended_api(self) -> bool:
        """Return False: only the methods above can be used."""
        return False


def _member_key(rank: int) -> str:
    return f"member/{rank}"


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
