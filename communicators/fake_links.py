"""The links of the fake chip: one gloo device for all communicators of a process. A device's stop shuts it down."""

import threading
from collections.abc import Sequence

from ..devices.fake_chip import CHIP
from ..protocol.types import StoreEndpoint
from .gloo.links import GlooLinks

_HERE = StoreEndpoint("127.0.0.1", 1)  # only the route to it matters


class FakeLinks:
    """The links of this process's chip: one gloo device for all its communicators."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: GlooLinks | None = None
        self._peers: set[tuple[str, int]] = set()
        self._number = 0

    def up(self) -> GlooLinks:
        """Return the links; open them on first use."""
        with self._lock:
            if self._links is None:
                self._links = GlooLinks(_HERE)
                CHIP.cuts.append(self.cut)
            return self._links

    def add_peers(self, peers: Sequence[tuple[str, int]]) -> None:
        """Add the listeners of other ranks."""
        with self._lock:
            assert self._links is not None
            self._peers |= set(peers)
            self._number += 1
            self._links.expect(self._number, self._peers)

    def cut(self) -> None:
        """Shut all connections down."""
        if self._links is not None:
            self._links.cut()


LINKS = FakeLinks()
