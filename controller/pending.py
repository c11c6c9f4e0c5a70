"""An event that waits to be durable, with its sender and with the request that waits for the answer."""

from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.errors import JournalError
from .endpoints.control_requests import Refused, Reply
from .journal.store import JournalEntry
from .wire import Arrival

Answer = Callable[[Reply], None]


@dataclass
class Pending:
    """An event on its way into the journal. Then `arrival` is acknowledged, and the request gets an `answer`."""

    entry: JournalEntry
    arrival: Arrival | None = None
    answer: Answer | None = None


def regret(error: JournalError) -> Refused:
    """Return the answer to a request that cannot be made durable."""
    return Refused(f"nothing was done, because the journal cannot be written: {error}")
