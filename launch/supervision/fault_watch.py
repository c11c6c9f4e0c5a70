"""Keeps `midstep detect` running beside a job that has fault sources, and says in the job's status when it does not.

A process of its own, so that no document, however it is written, can disturb the controller. It gives signs of life:
one that looks at nothing for long is ended and started again, as is one that dies, with growing pauses and without a
limit. Until the next one has looked at everything, a fault stands in the job's status.
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
from pathlib import Path
from typing import BinaryIO

from ...agent.linux import die_with_parent
from ...detectors.files import Sign
from ...detectors.reporter import FaultReporter
from ...platforms.processes import open_log
from ...protocol.discovery import read_endpoint
from ...protocol.errors import MidstepError
from ...protocol.keys import JobKeys
from ...protocol.time_limit import within
from ...protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, detector_address
from ..jobs.start import PreparedJob
from .backoff import Backoff, RestartBackoff

NAME = "watch"  # the name under which the launcher reports that nothing watches
FAULT_ID = "fault-watch"
KEYS_NAME = "keys"
BACKOFF = Backoff(first_s=0.5)  # one that ends at once must not take a core
SILENCE_S = 60.0  # without a sign of life; one file takes some seconds at most
KILLED_S = 5.0
_READ_BYTES = 4096

_log = logging.getLogger(__name__)


async def watch_faults(job: PreparedJob) -> None:
    """Run the detector of a job's fault sources until cancelled, again and again when it ends."""
    while True:
        try:
            await _watch(job)
        except (MidstepError, OSError) as error:  # the disk is full, for one: there may be room later
            _log.error("nothing watches the fault sources, trying again in %g s: %s", BACKOFF.longest_s, error)
            await asyncio.sleep(BACKOFF.longest_s)


async def _watch(job: PreparedJob) -> None:
    keys = job.run_directory / KEYS_NAME
    JobKeys.add(keys, detector_address(NAME))
    endpoint = read_endpoint(job.run_directory)
    if endpoint is None:
        raise MidstepError(f"{job.run_directory}: no controller has come up, so faults cannot be reported to it")
    path = job.job_directory / "logs" / "detect.log"
    with open(open_log(path), "ab", buffering=0) as log:
        lookup = partial(read_endpoint, job.run_directory)
        async with FaultReporter(job.spec.job, endpoint, NAME, keys, lookup=lookup) as reporter:
            await _FaultWatch(job, log, path, reporter).keep()


class _FaultWatch:
    """The watch of one job, over all its processes."""

    def __init__(self, job: PreparedJob, log: BinaryIO, path: Path, reporter: FaultReporter) -> None:
        self._job = job
        self._log = log
        self._path = path
        self._reporter = reporter
        self._down = False

    async def keep(self) -> None:
        """Start the detector whenever there is none."""
        waits = RestartBackoff(BACKOFF)
        while True:
            began_s = time.monotonic()
            why = await self._one_process()
            pause_s = waits.delay_s(time.monotonic() - began_s, random.random())
            self._report_down(f"`midstep detect` {why}; it is started again after a pause, see {self._path}")
            await asyncio.sleep(pause_s)

    async def _one_process(self) -> str:
        """Start a detector, see it to its end, and return how it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "midstep.cli.main", "detect", "--signs", *self._options()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:  # no process can be had: there may be one later
            return f"cannot be started: {error}"
        try:
            return await self._signs_of(process)
        finally:
            await _ended(process)

    def _options(self) -> list[str]:
        options = [argument for source in self._job.fault_sources for argument in ("--source", str(source))]
        for name, node in self._job.policy.faults.named_nodes.items():
            options += ["--node-name", f"{name}={node}"]
        return [*options, "--", str(self._job.job_directory)]

    async def _signs_of(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        while True:
            try:
                signs = await within(SILENCE_S, process.stdout.read(_READ_BYTES))
            except TimeoutError:
                return f"has looked at no file for {SILENCE_S:g} s"
            if not signs:
                with contextlib.suppress(TimeoutError):
                    await within(KILLED_S, process.wait())
                return f"ended with status {process.returncode}"
            if Sign.LOOKED.encode() in signs:
                self._report_up()

    def _report_down(self, why: str) -> None:
        _log.warning("nothing watches the fault sources: %s", why)
        if not self._down:
            self._down = True
            self._tell(f"nothing watches the fault sources: {why}", Assertion.OCCUR)

    def _report_up(self) -> None:
        if self._down:
            self._down = False
            self._tell("the fault sources are watched again", Assertion.RECOVER)

    def _tell(self, detail: str, assertion: Assertion) -> None:
        self._reporter.tell(
            FaultReport(
                kind=FaultKind.DETECTOR,
                at_s=time.time(),
                seen_by=detector_address(NAME),
                detail=detail,
                level=FaultLevel.NOT_HANDLE,
                fault_id=FAULT_ID,
                assertion=assertion,
            )
        )


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill a process that has not ended; one that the kernel does not let go is left to it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            await within(KILLED_S, process.wait())
