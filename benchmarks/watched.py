"""Measure what looking costs: the step time of a job with page and metrics in use, and the recovery of a killed rank.

One job of a GPT of ten million parameters, by turns of some seconds: in every second turn nothing looks; in the others
three viewers read the page's events, one opens them and does not read, a scraper asks for the metrics each second, and
once 1,000 connections come to the page at once. In the last part of such a turn the page's process is frozen, and in
the last turn it is killed. A ratio is taken of the medians of two turns that follow each other, so that what else the
machine does counts in both. In the middle of each turn a rank is killed.
"""

import contextlib
import http.client
import itertools
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from midstep.benchmarks import figures, launching, records
from midstep.benchmarks.overhead import NOBODY
from midstep.controller.endpoints.control_requests import StatusReply, StatusRequest
from midstep.launch.reached_job import HereJob
from midstep.protocol.errors import MidstepError
from midstep.protocol.incidents import JobStatus

SCRIPT = "recovery_job.py"
START_S, LOOK_S, RECOVER_S = 240.0, 0.1, 60.0
LEAVE_OUT_S = 1.0  # of a turn, for what the one before has left
CROWD = 1000
GOAL = 1.01
POLICY = """\
ladder:
- {rung: retry_step, attempts: 8, budget: {per_job: 1000}}
- {rung: recover_in_place, attempts: 8, budget: {per_job: 1000}}
- {rung: stop}
node: {failures: null}
"""


class Watchers:
    """All that looks at a job, from `begin` to `end`."""

    def __init__(self, directory: Path, metrics_port: int) -> None:
        self._metrics_port = metrics_port
        command = [sys.executable, "-m", "midstep.cli.main", "page", str(directory), "--listen", ":0"]
        self._page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._page.stdout is not None
        self._page.stdout.readline()
        self._port = int(self._page.stdout.readline().split(" at ")[1].split()[0].rstrip("/").rpartition(":")[2])
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._slow: socket.socket | None = None
        self.scrapes = self.events = 0

    def begin(self) -> None:
        """Look from now on."""
        self._over.clear()
        looks = [self._view, self._view, self._view, self._scrape, self._crowd]
        self._threads = [threading.Thread(target=self._kept_on, args=(look,), daemon=True) for look in looks]
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(OSError):  # the page is killed
            self._slow = socket.create_connection(("127.0.0.1", self._port), 5.0)
            self._slow.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def freeze(self) -> None:
        """Stop the page's process, with what it serves open."""
        self._page.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kill the page's process."""
        self._page.kill()

    def end(self) -> None:
        """Look no more."""
        self._page.send_signal(signal.SIGCONT)
        self._over.set()
        for thread in self._threads:
            thread.join(10.0)
        if self._slow is not None:
            self._slow.close()

    def close(self) -> None:
        """End the page."""
        self._page.kill()
        self._page.wait(10.0)
        if self._page.stdout is not None:
            self._page.stdout.close()

    def _kept_on(self, look: Callable[[], None]) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                look()
            self._over.wait(1.0)

    def _view(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2.0)
        with contextlib.closing(connection):
            connection.request("GET", "/events")
            answer = connection.getresponse()
            while not self._over.is_set() and answer.readline():
                self.events += 1

    def _scrape(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._metrics_port, timeout=2.0)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            self.scrapes += b"midstep_step" in connection.getresponse().read()

    def _crowd(self) -> None:
        with contextlib.ExitStack() as crowd:
            for _ in range(CROWD):
                crowd.enter_context(socket.create_connection(("127.0.0.1", self._port), 1.0))
        self._over.wait(3600.0)  # once in a turn


@contextlib.contextmanager
def running(ranks: int, folder: Path, metrics_port: int) -> Iterator[HereJob]:
    """Run the job until the turns are over."""
    notes = folder / "notes"
    notes.mkdir()
    options = ["--nproc-per-node", str(ranks), "--job-dir", str(folder / "job"), "--fixed-nodes"]
    (folder / "policy.yaml").write_text(POLICY)
    options += ["--policy", str(folder / "policy.yaml")]
    options += ["--metrics-listen", f"127.0.0.1:{metrics_port}"]
    script = str(Path(__file__).parent / SCRIPT)
    command = [sys.executable, "-m", "midstep.cli.main", "run", *options, script, str(notes), "10000000", NOBODY]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True) as launcher:
        try:
            yield HereJob(folder / "job")
        finally:
            launching.end(launcher)


def status_of(job: HereJob, holds: Callable[[JobStatus], bool], limit_s: float) -> JobStatus:
    """Return the status of a job when it is as wanted. Raises JobFailed."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        with contextlib.suppress(MidstepError, OSError):
            reply = job.ask(StatusRequest(), 2.0)
            if isinstance(reply, StatusReply) and holds(reply.status):
                return reply.status
        time.sleep(LOOK_S)
    raise launching.JobFailed(f"the job is not as wanted in {limit_s:g} s")


def turn(job: HereJob, seconds: float, watchers: Watchers | None, *, last: bool) -> dict[str, float]:
    """Train for some seconds with or without anything that looks; a rank is killed in the middle."""
    if watchers is not None:
        watchers.begin()
    began_s = time.monotonic()
    time.sleep(seconds / 2)
    quiet_s = time.monotonic()
    if watchers is not None:
        watchers.kill() if last else watchers.freeze()
    before = status_of(job, lambda told: told.phase == "running", RECOVER_S)
    os.kill(before.ranks[secrets.randbelow(len(before.ranks))].pid, signal.SIGKILL)
    count = len(before.incidents)
    told = status_of(job, lambda told: len(told.incidents) > count and _is_over(told), RECOVER_S)
    time.sleep(seconds / 2)
    if watchers is not None:
        watchers.end()
    recovered_s = told.incidents[-1].recovery_s
    assert recovered_s is not None
    return {"began_s": began_s, "quiet_s": quiet_s, "recovery_s": recovered_s}


def _is_over(told: JobStatus) -> bool:
    return told.incidents[-1].recovery_s is not None


def step_seconds(notes: Path, turns: list[dict[str, float]]) -> list[float]:
    """Return the median step of each turn, up to its kill, over all ranks."""
    by_turn: list[list[float]] = [[] for _ in turns]
    for path in notes.glob("rank-*.jsonl"):
        lines = (json.loads(line) for line in path.read_text().splitlines())
        steps = [(note["step"], note["at_s"]) for note in lines if "step" in note]
        for (index, at_s), (after, end_s) in itertools.pairwise(steps):
            for number, each in enumerate(turns):
                if after == index + 1 and each["began_s"] + LEAVE_OUT_S <= at_s and end_s <= each["quiet_s"]:
                    by_turn[number].append(end_s - at_s)
    if not all(by_turn):
        raise click.ClickException("there is a turn without a step: give them more --seconds, on an idle machine.")
    return [statistics.median(each) for each in by_turn]


def measure(ranks: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Run the job through all turns. Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="midstep-bench-") as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        folder, turns = Path(name), list[dict[str, float]]()
        with running(ranks, folder, port) as job:
            status_of(job, lambda told: told.phase == "running" and told.committed > records.WARM_UP_STEPS, START_S)
            watchers = Watchers(job.directory, port)
            try:
                for number in range(pairs):
                    turns.append(turn(job, seconds, None, last=False))
                    turns.append(turn(job, seconds, watchers, last=number == pairs - 1))
            finally:
                watchers.close()
        steps = step_seconds(folder / "notes", turns)
    ratios = [on / off for off, on in zip(steps[::2], steps[1::2], strict=True)]
    recoveries = [each["recovery_s"] for each in turns]
    return {
        "ranks": ranks,
        "ratio": figures.spread(ratios),
        "step_s": {"alone": figures.spread(steps[::2]), "watched": figures.spread(steps[1::2])},
        "recovery_s": {"alone": figures.spread(recoveries[::2]), "watched": figures.spread(recoveries[1::2])},
        "scrapes": watchers.scrapes,
        "event_lines": watchers.events,
    }


@click.command()
@click.option("--ranks", type=int, default=2, show_default=True, help="Ranks of the job, on one node.")
@click.option("--pairs", type=int, default=6, show_default=True, help="Turns without and with what looks.")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Seconds of a turn.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write all figures into this file.")
def main(ranks: int, pairs: int, seconds: float, path: Path | None) -> None:
    """Measure what page and metrics cost a job, and how long a recovery takes with them."""
    launching.end_jobs_on_sigterm()
    found = measure(ranks, pairs, seconds)
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")
    ratio, recovery = found["ratio"], found["recovery_s"]
    click.echo(f"{ranks} ranks, {pairs} pairs of turns of {seconds:g} s; {found['scrapes']} scrapes")
    click.echo(f"step, watched / alone: {ratio['median']:.4f} ({ratio['min']:.4f} to {ratio['max']:.4f}), goal {GOAL}")
    for name, each in recovery.items():
        click.echo(f"recovery, {name}: {each['median']:.3f} s ({each['min']:.3f} to {each['max']:.3f})")


if __name__ == "__main__":
    main()
