"""A generation's own part of a rendezvous store, which others can disturb and not use.

All that members leave for each other goes through it, and what gloo and HCCL leave as well: a foreign value under one
of their names would otherwise reach C++ that trusts it. The names are secret and every value is signed. So whatever a
store brings or fails with, it is either what a member wrote, or a link-up that has failed and says why.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import Store

from ..protocol.errors import LinkUpFailed
from ..protocol.types import StoreEndpoint
from .authenticator import Authenticator
from .generation_scope import cause

MOST_BYTES = 1 << 26  # of one value; gloo's addresses of a large world are a few hundred kilobytes


class AuthenticatedStore(Store):
    """The part `part` of a torch store, for those who have the authenticator.

    Raises LinkUpFailed, which names store and key, for everything but a wait that takes too long: that is torch's
    DistStoreError.
    """

    def __init__(self, inner: Any, endpoint: StoreEndpoint, authenticator: Authenticator, part: str) -> None:
        super().__init__()
        self._inner = inner
        self._where = f"the rendezvous store at {endpoint.host}:{endpoint.port}"
        self._authenticator = authenticator
        self._part = part

    def set(self, key: str, value: Any) -> None:
        """As torch's."""
        with self._asking("write", key) as name:
            self._inner.set(name, self._authenticator.sign(self._whole(key), _bytes(value)))

    def get(self, key: str) -> bytes:
        """As torch's."""
        with self._asking("read", key) as name:
            sealed = bytes(self._inner.get(name))
        return self._opened(key, sealed)

    def add(self, key: str, amount: int) -> int:
        """As torch's. A number cannot be signed."""
        with self._asking("add to", key) as name:
            return int(self._inner.add(name, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """As torch's."""
        whole, before = self._whole(key), _bytes(expected)
        with self._asking("replace", key) as name:
            known = self._authenticator.sign(whole, before) if before else b""
            present = bytes(self._inner.compare_set(name, known, self._authenticator.sign(whole, _bytes(desired))))
        return self._opened(key, present) if present else present

    def delete_key(self, key: str) -> bool:
        """As torch's."""
        with self._asking("delete", key) as name:
            return bool(self._inner.delete_key(name))

    def num_keys(self) -> int:
        """As torch's: of the whole store."""
        return int(self._inner.num_keys())

    def check(self, keys: Sequence[str]) -> bool:
        """As torch's."""
        with self._asking("look for", ", ".join(keys)):
            return bool(self._inner.check([self._authenticator.hashed_key(self._whole(key)) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As torch's."""
        with self._asking("wait for", ", ".join(keys)):
            names = [self._authenticator.hashed_key(self._whole(key)) for key in keys]
            if timeout is None:
                self._inner.wait(names)
            else:
                self._inner.wait(names, timeout)

    def has_extended_api(self) -> bool:
        """Say that only the above can be used."""
        return False

    def refuse(self, key: str, why: str) -> LinkUpFailed:
        """Return what to raise for a value of `key` that is signed and makes no sense."""
        return LinkUpFailed(f"{self._where}: what a member left as {self._whole(key)} cannot be used: {why}")

    def _opened(self, key: str, sealed: bytes) -> bytes:
        value = self._authenticator.verify(self._whole(key), sealed) if len(sealed) <= MOST_BYTES else None
        if value is None:
            raise LinkUpFailed(
                f"{self._where}: {len(sealed)} bytes lie there as {self._whole(key)} that no member of this generation "
                "wrote. Somebody else writes to the store; keep its port closed to all but the job's nodes."
            )
        return value

    @contextmanager
    def _asking(self, what: str, key: str) -> Iterator[str]:
        """Ask the store; yields the name of `key`."""
        try:
            yield self._authenticator.hashed_key(self._whole(key))
        except dist.DistStoreError:  # torch's word for a timeout
            raise
        except Exception as error:  # torch's C++ turns what a store sends into errors of any kind
            raise LinkUpFailed(
                f"{self._where} could not be asked to {what} {self._whole(key)}: {cause(error)}"
            ) from error

    def _whole(self, key: str) -> str:
        return f"{self._part}/{key}"


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
