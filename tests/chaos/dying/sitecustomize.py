"""Every Python that has this folder on its path runs this: a controller kills itself over the first news that it hears.

That it has started, and which nodes there are, each controller hears again, so that is no news.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE, WHEN = Path(os.environ["TEST_DYING_FILE"]), os.environ["TEST_DYING_WHEN"]
BEFORE, AFTER = "before", "after"


def _die_over_news() -> None:
    """Die when the first news are durable and nothing has followed from them, or in front of the next, as WHEN says."""
    from midstep.controller.journal.journal import Journal
    from midstep.controller.recovery.events import ControllerStarted
    from midstep.protocol.messages import NodeJoined

    append = Journal.append
    written: list[Any] = []

    def dying(self: Journal, entries: Sequence[Any], at_s: float) -> tuple[bool, ...]:
        news = [entry for entry in entries if not isinstance(entry.event, ControllerStarted | NodeJoined)]
        if not FILE.exists():
            return append(self, entries, at_s)
        if news and written:
            os.kill(os.getpid(), signal.SIGKILL)
        fresh = append(self, entries, at_s)
        written.extend(news)
        if written and WHEN == AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return fresh

    Journal.append = dying  # type: ignore[method-assign]


if b"controller" in Path("/proc/self/cmdline").read_bytes().split(b"\0"):
    _die_over_news()
