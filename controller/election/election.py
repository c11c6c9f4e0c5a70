"""What an election gives: one controller that leads, others that stand by, and a way for a leader to lose its lead.

Who leads is one question, and what is durable is another (the journal). A leader that does not know yet that it was
deposed can do no harm: the journal takes nothing of an earlier term, and agents refuse its orders.
"""

from collections.abc import Callable
from typing import Protocol


class Leadership(Protocol):
    """What a controller holds while it leads."""

    def begin(self, term: int) -> None:
        """Be found as the leader of a term. Called while the journal begins it, and lets no other controller write.

        Raises ElectionLost: another one has deposed the same leader before.
        """

    def beat(self) -> None:
        """Show that this process lives. Called often, and cheap; never raises."""

    def require(self) -> None:
        """Raise JournalSuperseded when another controller leads by now."""

    def overthrow(self) -> bool:
        """End the process of the leader that was deposed, which holds up the journal; False where that cannot be."""

    def close(self) -> None:
        """Let the next one lead. Idempotent."""


class Election(Protocol):
    """Where a controller stands for the lead."""

    def stand(self, wait_s: float | None, beat: Callable[[], None]) -> Leadership:
        """Wait until this controller may lead: at most `wait_s`; None: for as long as it takes.

        `beat` is called again and again meanwhile. Raises JournalError: another one leads after `wait_s`.
        """
