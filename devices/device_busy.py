"""A device that the process before has not let go of yet: how it says so, and how long it is asked again.

For some seconds after a process was killed its NPU takes no other. CANN says EJ0001 ("Maybe the last training process
is running"), and HCCL gives a communicator up with error code 7. Nothing is broken then, so it is no fault: the
newcomer waits. The root of a group must not ask: its peers have its address before HCCL refuses it, and stay with that
one until HCCL_CONNECT_TIMEOUT. It waits until the device is free for sure.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..protocol.environment import INCARNATION, STARTED_S

Result = TypeVar("Result")

HELD_S = 10.0  # CANN's own advice beside EJ0001: to wait for so long when the last training process was killed
BUSY_S = 15.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
_TEXT = re.compile(r"EJ0001|CommInitRootInfo.*?error code is 7\b", re.DOTALL)

_log = logging.getLogger("midstep")


def is_busy(error: BaseException) -> bool:
    """Return whether an error says that the device is still in use by the process before."""
    return isinstance(error, RuntimeError) and _TEXT.search(str(error)) is not None


def held_s(library: object) -> float:
    """Return how long the process before may hold this process's device yet: for HELD_S after its end.

    It had ended when the agent began to start this one, or was ended then. 0 in the first process of a rank. Where the
    rank has come from another node, it is as if the process before had been here. `library`: torch-npu, or what stands
    in its place, which may have a HELD_S of its own.
    """
    if int(os.environ.get(INCARNATION, "1")) == 1:
        return 0.0
    return max(0.0, float(os.environ[STARTED_S]) + getattr(library, "HELD_S", HELD_S) - time.monotonic())


def pauses(limit_s: float = BUSY_S) -> Iterator[float]:
    """Yield how long to wait before each further attempt: longer each time, together no longer than `limit_s`."""
    pause_s, left_s = FIRST_PAUSE_S, limit_s
    while left_s > 0:
        yield min(pause_s, left_s)
        left_s -= pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def while_busy(attempt: Callable[[], Result], before_next: Callable[[], None] = lambda: None) -> Result:
    """Return what `attempt` returns, tried again while the device is busy, for about BUSY_S.

    `before_next` is called before each further attempt, and ends them all by raising. Raises what `attempt` raises.
    """
    waits = pauses()
    while True:
        try:
            return attempt()
        except RuntimeError as error:
            pause_s = next(waits, None) if is_busy(error) else None
            if pause_s is None:
                raise
            _log.info("the device is still in use by the process before; tried again in %.1f s", pause_s)
        time.sleep(pause_s)
        before_next()
