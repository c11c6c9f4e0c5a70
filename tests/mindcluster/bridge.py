"""`midstep clusterd` beside a job, and what it and its ClusterD say to each other, out of its log."""

import re
import subprocess
import sys
import time
from pathlib import Path

from ..chaos.jobs import Job

PATIENCE_S = 120.0
_SIGNAL = re.compile(r"heard: Signal\(uuid='(?P<uuid>.*?)', type='(?P<type>.*?)', .*strategy='(?P<strategy>.*?)'")
_NOTICE = re.compile(r"heard: (SwitchNics|StressTest)\(")
_REPORT = re.compile(r"(Rep\w+): ClusterD answers (\d+)")


class Bridge:
    """One `midstep clusterd`. `walked`: signals and reports, in order; one that is said twice is there once."""

    def __init__(self, job: Job, server: str, task: str, log: Path) -> None:
        words = ["clusterd", str(job.directory), "--server", server, "--task", task]
        self._log = log
        with log.open("w") as output:
            command = [sys.executable, "-m", "midstep.cli.main", *words]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._seen = 0

    def said(self) -> str:
        """Return its log."""
        return self._log.read_text()

    def walked(self) -> list[str]:
        """Return what has been said since the last time that something was waited for."""
        return _steps(self.said())[self._seen :]

    def until(self, last: str, job: Job) -> list[str]:
        """Wait until a step is there, and return all up to it since the last time."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            steps = self.walked()
            if last in steps:
                found = steps[: steps.index(last) + 1]
                self._seen += len(found)
                return found
            assert time.monotonic() < deadline, f"still waiting for {last}:\n{self.said()}\n{job.said()}"
            time.sleep(0.1)

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def _steps(log: str) -> list[str]:
    found: list[tuple[str, str]] = []  # a name, and what tells it from another of that name
    for line in log.splitlines():
        if (signal := _SIGNAL.search(line)) is not None:
            step = (" ".join((signal["type"], *signal["strategy"].split())), signal["uuid"])
            if step not in found:
                found.append(step)
        elif (notice := _NOTICE.search(line)) is not None:
            found.append((notice[1], line))
        elif (report := _REPORT.search(line)) is not None:
            refused = "" if report[2] == "0" else f" {report[2]}"
            found.append((report[1] + refused, line))
    return [name for name, _ in found]
