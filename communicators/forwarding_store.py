"""A rendezvous store that can be moved while process groups hold it.

A process group of HCCL keeps the store that it was made with for scope, and meets its members there anew after every
rebuild. midstep's stores may move to another node, and every generation has its own part of a store. So groups are
given this one, and what is behind it changes.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from ..protocol.errors import CommunicatorFailed


class ForwardingStore(Store):
    """A torch store in front of another. Before the first `move` it refuses everything."""

    def __init__(self) -> None:
        super().__init__()
        self._present: Any = None

    def forward_to(self, store: Any) -> None:
        """Stand for `store` from now on."""
        self._present = store

    @property
    def _inner(self) -> Any:
        if self._present is None:
            raise CommunicatorFailed("the groups are not seated: there is no store yet")
        return self._present

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
        """Say that only the above can be used."""
        return False
