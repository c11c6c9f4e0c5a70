"""What happened in a simulated job, line by line, to understand a failing seed.

Lines are put together when they are read: most jobs go well, and theirs are not.
"""

from collections import deque
from collections.abc import Callable, Iterable

from ...controller.recovery.events import Action, Event, Send
from ...controller.recovery.state import Phase

SHOWN = 400  # lines that are kept, unless all are
LONGEST_LINE = 260


class Transcript:
    """The last lines of a job, or all of them."""

    def __init__(self, *, whole: bool = False) -> None:
        self._lines: deque[tuple[float, str | Callable[[], str]]] = deque(maxlen=None if whole else SHOWN)

    def say(self, at_s: float, line: str) -> None:
        """Add a line."""
        self._lines.append((at_s, line))

    def handled(
        self, at_s: float, event: Event, actions: Iterable[Action], *, generation: int, before: Phase, after: Phase
    ) -> None:
        """Add an event of the controller, and what followed from it."""

        def line() -> str:
            sent = [f"{type(each.body).__name__}->{each.receiver}" for each in actions if isinstance(each, Send)]
            phase = f"{before}" if before is after else f"{before} -> {after}"
            return f"g{generation} [{phase}] {_short(event)}  => {', '.join(sent) or '-'}"

        self._lines.append((at_s, line))

    def lines(self) -> list[str]:
        """Return it in the order of time."""
        return [f"{at_s:10.4f}  {line if isinstance(line, str) else line()}" for at_s, line in self._lines]


def _short(event: Event) -> str:
    text = str(event)
    return text if len(text) < LONGEST_LINE else f"{text[:LONGEST_LINE]}..."
