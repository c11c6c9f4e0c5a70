"""Keeps `midstep detect` running beside a job that has fault sources.

A process of its own, so that no document, however it is written, can disturb the controller.
"""

import asyncio
import contextlib
import logging
import os
import random
import subprocess
import sys
import time
from functools import partial
from typing import IO

from ..agent.kernel import die_with_parent
from .job_start import Job
from .restart_backoff import Backoff, RestartBackoff

BACKOFF = Backoff(first_s=0.5)  # one that ends at once must not take a core

_log = logging.getLogger(__name__)


async def watch_faults(job: Job) -> None:
    """Run the detector of a job's fault sources until cancelled, again and again if it dies."""
    waits = RestartBackoff(BACKOFF)
    sources = [argument for source in job.fault_sources for argument in ("--source", str(source))]
    for serial, node in job.policy.faults.node_serials.items():
        sources += ["--serial", f"{serial}={node}"]
    with (job.job_directory / "logs" / "detect.log").open("ab") as log:
        while True:
            began_s = time.monotonic()
            how = await _watch_once(job, sources, log)
            delay_s = waits.delay_s(time.monotonic() - began_s, random.random())
            _log.warning(
                "the watch over fault sources %s, %d times in a row: no fault source is read for %.1f s; see %s",
                how,
                waits.deaths,
                delay_s,
                log.name,
            )
            await asyncio.sleep(delay_s)


async def _watch_once(job: Job, sources: list[str], log: IO[bytes]) -> str:
    """Run one detector to its end, and return how it ended."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "midstep.cli.main", "detect", *sources, "--", str(job.job_directory)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except OSError as error:
        return f"could not be started ({error})"
    try:
        return f"ended with status {await process.wait()}"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
