"""Keeps `midstep detect` running beside a job that has fault sources.

A process of its own, so that no document, however it is written, can disturb the controller.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections import deque
from functools import partial

from ..agent.kernel import die_with_parent
from ..protocol.private_files import open_log
from .job_start import Job

RESTARTS = 10  # within RESTARTS_WINDOW_S; then the job goes on without
RESTARTS_WINDOW_S = 60.0
PAUSE_S = 0.5

_log = logging.getLogger(__name__)


async def watch_faults(job: Job) -> None:
    """Run the detector of a job's fault sources until cancelled, again and again if it dies."""
    starts: deque[float] = deque(maxlen=RESTARTS)
    with open_log(job.job_directory / "logs" / "detect.log") as log:
        while len(starts) < RESTARTS or time.monotonic() - starts[0] > RESTARTS_WINDOW_S:
            starts.append(time.monotonic())
            sources = [argument for source in job.fault_sources for argument in ("--source", str(source))]
            for serial, node in job.policy.faults.node_serials.items():
                sources += ["--serial", f"{serial}={node}"]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "midstep.cli.main", "detect", *sources, "--", str(job.job_directory)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
            _log.warning("the watch over fault sources ended with status %d; starting it again", status)
            await asyncio.sleep(PAUSE_S)  # one that ends at once must not take a core
    _log.error("nobody watches the fault sources any more: it has ended %d times; see %s", RESTARTS, log.name)
