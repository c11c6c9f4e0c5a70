"""What a rank says of the checkpoint directory at barrier one: the checkpoints that it can read, and other traces.

A directory that cannot be listed is not an empty one. It is tried again for a while, as file servers come back; then
the rank says why, and the controller decides what can be done without.
"""

import logging
import time
from collections.abc import Callable

from ...protocol.errors import CheckpointError
from ...protocol.types import CheckpointTrace
from .entries import look_into
from .fence import is_marked

JOINING_PATIENCE_S = 10.0  # a new process, which `deadlines.start_s` waits for
PARKED_PATIENCE_S = 1.0  # a survivor, which `deadlines.quiesce_s` waits for, and which may need no checkpoint
MOST_REPORTED = 1000  # the newest; a report is one message
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_NAMED = 3  # traces that are reported one by one
_MOST_CHARACTERS = 300  # of each

_log = logging.getLogger("midstep")


def survey(
    directory: str | None,
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[tuple[int, ...], CheckpointTrace]:
    """Return the steps whose checkpoints this rank can read, ascending, and what else it found. For barrier one."""
    if directory is None:
        return (), CheckpointTrace()
    end_s, wait_s = clock() + patience_s, _FIRST_WAIT_S
    while True:
        try:
            entries = look_into(directory, MOST_REPORTED)
            break
        except CheckpointError as error:
            if clock() + wait_s > end_s:
                _log.error("no checkpoint can be used: %s", error)
                return (), CheckpointTrace(directory, unlisted=str(error)[:_MOST_CHARACTERS])
        sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    trace = CheckpointTrace(directory, unusable=_in_words(entries.unusable), unmarked=not is_marked(directory))
    return entries.complete, trace


def _in_words(unusable: tuple[str, ...]) -> str:
    named = "; ".join(each[:_MOST_CHARACTERS] for each in unusable[:_NAMED])
    return f"{named}; and {len(unusable) - _NAMED} more" if len(unusable) > _NAMED else named
