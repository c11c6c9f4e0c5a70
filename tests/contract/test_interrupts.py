"""A controller is asked to stop by SIGINT, wherever its launcher was started."""

import asyncio
import signal
import sys
import tempfile
import time

from midstep.launch.processes import ControllerProcess, Ending

HEARD = 7
PLAYED = f"""
import os, signal, sys
from midstep.controller.keepalive import SERVING
signal.signal(signal.SIGINT, lambda *_: os._exit({HEARD}))
os.write(int(sys.argv[-1]), SERVING)
signal.pause()
"""


async def ended() -> Ending:
    """Start a process that plays a controller, ask it to stop once it serves, and return how it ended."""
    with tempfile.TemporaryFile() as log:
        serving = asyncio.Event()
        process = await ControllerProcess.start(
            [sys.executable, "-c", PLAYED], log, hang_s=60.0, now=time.monotonic, on_serving=serving.set
        )
        try:
            await serving.wait()
            process.interrupt()
            return await process.ended(lambda: None)
        finally:
            await process.close()


def test_a_controller_hears_that_it_is_to_stop_where_sigint_is_blocked_or_ignored() -> None:
    """Blocked in all that a raylet starts, ignored in what a shell starts with &: a job could not be stopped there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        assert asyncio.run(ended()).status == HEARD
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert asyncio.run(ended()).status == HEARD
    finally:
        signal.signal(signal.SIGINT, handler)
