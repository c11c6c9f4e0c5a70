"""An event that waits to be durable, and whom it concerns: who sent it, and who wants to know what follows."""

from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.errors import JournalError
from .endpoints.control_requests import Refused, Reply
from .journal import JournalEntry
from .wire import Arrival

Answer = Callable[[Reply], None]


@dataclass
class Pending:
    """An event on its way into the journal. Then `arrival` is acknowledged, and who asked gets an `answer`."""

    entry: JournalEntry
    arrival: Arrival | None = None
    answer: Answer | None = None


def regret(error: JournalError) -> Refused:
    """Return the answer to who asked for what cannot be made durable."""
    return Refused(f"nothing was done, because the journal cannot be written: {error}")
