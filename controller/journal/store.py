"""What a controller needs of its journal, whatever it is kept in: sqlite on one host, etcd on several.

Who leads is decided elsewhere (`election/`). A store only sees to it that nothing of a term that is over is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from ...protocol.mailbox import SenderMemory
from ..clock import Clock
from ..recovery.events import Event
from .records import Founding


class JournalEntry(msgspec.Struct, frozen=True):
    """An event and where it came from. `number` 0: not numbered, so it cannot be distinguished from a repetition."""

    event: Event
    sender: str
    session: int
    number: int


class JournalStore(Protocol):
    """The journal of a job, open for the controller of one term. `session` is higher than in all earlier terms."""

    founding: Founding
    clock: Clock
    term: int
    session: int

    def load(
        self, restore: Callable[[bytes], None], beat: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Event, float]]:
        """Have the newest snapshot restored that can be read, and yield the events after it, in order."""

    def append(self, entries: Sequence[JournalEntry], at_s: float) -> tuple[bool, ...]:
        """Make events durable, all or none; False marks repetitions. Raises JournalSuperseded when the term is over."""

    def taken_in(self) -> Iterator[tuple[str, SenderMemory]]:
        """Yield what was taken in from each sender, so that no later controller takes it in twice."""

    def compact(self, snapshot: Callable[[], bytes], *, quiet: bool) -> None:
        """Do a little of what keeps the journal short, if something is due. Raises as `append` does."""

    def conclude(self, snapshot: Callable[[], bytes]) -> None:
        """The job is over: leave what reports need, and nothing that would have to be removed. Raises as `append`."""

    def require_lead(self) -> None:
        """Show that this controller lives. Raises JournalSuperseded when another one leads by now."""
