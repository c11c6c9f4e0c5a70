"""The shipped alerts in a real Prometheus, which scrapes a real job: they fire, and clear by themselves."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("prometheus") is None and "MIDSTEP_REQUIRE_PROMETHEUS" not in os.environ,
        reason="there is no prometheus: Debian's package prometheus",
    ),
]

PATIENCE_S = 90.0
RULES = resources.files("midstep.configs") / "prometheus-alerts.yaml"


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Prometheus:
    """A real one, with the shipped rules, that looks each second and waits for nothing before it fires."""

    def __init__(self, root: Path, target: int) -> None:
        root.mkdir()
        rules = yaml.safe_load(RULES.read_text())
        for rule in rules["groups"][0]["rules"]:
            rule.pop("for", None)
        (root / "rules.yaml").write_text(yaml.safe_dump(rules))
        (root / "prometheus.yaml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(root / "rules.yaml")],
                    "scrape_configs": [
                        {"job_name": "midstep", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
                    ],
                }
            )
        )
        self._port = free_port()
        listen, data = f"127.0.0.1:{self._port}", root / "data"
        with (root / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={root / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={data}",
                    f"--web.listen-address={listen}",
                ],
                stdout=log,
                stderr=log,
            )

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/alerts", timeout=10.0) as answer:
            told = json.load(answer)["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in told if alert["state"] == "firing"}

    def until(self, *, fires: str = "", clear: str = "") -> None:
        """Wait until one alert fires and another one does not."""
        deadline_s, now = time.monotonic() + PATIENCE_S, set[str]()
        while time.monotonic() < deadline_s:
            try:
                now = self.firing()
            except OSError:
                time.sleep(0.2)
                continue
            if (not fires or fires in now) and (not clear or clear not in now):
                return
            time.sleep(0.5)
        pytest.fail(f"{fires} should fire, {clear} should not; there fire {sorted(now)}")


@pytest.fixture
def target() -> int:
    """Where the job serves its numbers."""
    return free_port()


@pytest.fixture
def prometheus(tmp_path: Path, target: int) -> Iterator[Prometheus]:
    """One that has looked already before there is a job."""
    started = Prometheus(tmp_path / "prometheus", target)
    yield started
    started.process.terminate()
    started.process.wait(PATIENCE_S)


@pytest.fixture
def job(tmp_path: Path, prometheus: Prometheus, target: int) -> Iterator[Path]:
    """A job of one node and a spare, whose script does nothing; its directory."""
    prometheus.until(fires="MidstepNoController")
    directory = tmp_path / "job"
    policy = tmp_path / "policy.yaml"
    budget = {"rung": "reschedule_pod", "attempts": 1, "budget": {"per_job": 1, "window_s": 20.0}}
    policy.write_text(yaml.safe_dump({"ladder": [budget, {"rung": "stop"}]}))
    options = ["--metrics-listen", f"127.0.0.1:{target}", "--policy", str(policy), "--max-restarts", "1"]
    options += ["--spares", "1", "--fixed-nodes", "--no-python"]
    with (tmp_path / "output").open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "midstep.cli.main", "run", "--job-dir", str(directory), *options, "sleep", "600"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    yield directory
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
    launcher.wait(PATIENCE_S)


def midstep(*arguments: str) -> str:
    """What a command of midstep says."""
    command = [sys.executable, "-m", "midstep.cli.main", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def status(job: Path) -> dict[str, Any]:
    """How the job stands."""
    told: dict[str, Any] = json.loads(midstep("status", str(job), "--json"))
    return told


def spares(job: Path) -> list[str]:
    """The spare nodes of the job."""
    return [node["node"] for node in status(job)["nodes"] if node["state"] == "spare"]


def test_alerts_fire_when_the_job_is_short_of_something_and_clear_afterwards(prometheus: Prometheus, job: Path) -> None:
    """Without a job there is no controller; a job has one; its budget is spent; its spare node dies; the job ends."""
    prometheus.until(clear="MidstepNoController")
    deadline_s = time.monotonic() + PATIENCE_S
    while not (there := spares(job)):
        assert time.monotonic() < deadline_s, "no spare node has come"
        time.sleep(0.5)
    time.sleep(3.0)  # until the spare has been scraped: only one that was there can be missed
    deadline_s = time.monotonic() + PATIENCE_S
    while not (pid := int(status(job)["ranks"][0]["pid"])):
        assert time.monotonic() < deadline_s, "no process was started"
        time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    prometheus.until(fires="MidstepBudgetNearlySpent", clear="MidstepNoSpare")
    prometheus.until(clear="MidstepBudgetNearlySpent")  # its window is over
    midstep("inject", str(job), "--node", there[0])
    prometheus.until(fires="MidstepNoSpare", clear="MidstepNoController")
    midstep("stop", str(job))
    prometheus.until(fires="MidstepNoController", clear="MidstepNoSpare")
