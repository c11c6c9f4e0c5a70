"""The shipped alerts in a real Prometheus, which scrapes real jobs: they fire, and clear by themselves.

What webhooks of these jobs are told on the way is looked at, too.
"""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from midstep.protocol.incidents import JobStatus, NoticeKind

from ..chaos.jobs import ROOMY, Job
from ..chaos.test_notify import Chat, noted, until, until_told

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("prometheus") is None and "MIDSTEP_REQUIRE_PROMETHEUS" not in os.environ,
        reason="there is no prometheus: Debian's package prometheus",
    ),
]

PATIENCE_S = 150.0  # more than LOOK_BACK
LOOK_BACK = "2m"
RULES = resources.files("midstep.configs") / "prometheus-alerts.yaml"
BOARD = resources.files("midstep.configs") / "grafana-board.json"
SHORT_HOUR = Path(__file__).parent / "short_hour"


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Prometheus:
    """A real one, with the shipped rules, that looks each second and waits for nothing before it fires.

    What the rules look back at is LOOK_BACK here: a busy machine can take a while from the first fault to the last.
    """

    def __init__(self, root: Path, target: int) -> None:
        root.mkdir()
        rules = yaml.safe_load(RULES.read_text())
        for rule in rules["groups"][0]["rules"]:
            rule.pop("for", None)
            rule["expr"] = re.sub(r"\[(1h|10m)\]", f"[{LOOK_BACK}]", rule["expr"])
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

    def asked(self, query: str) -> list[dict[str, Any]]:
        """What a query finds now."""
        place = f"http://127.0.0.1:{self._port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(place, timeout=10.0) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def shown(self, panel: str) -> dict[str, float]:
        """What a panel of the board shows now, of which an hour is LOOK_BACK here; by the texts of its legend."""
        (target,) = next(each for each in json.loads(BOARD.read_text())["panels"] if each["title"] == panel)["targets"]
        found = self.asked(target["expr"].replace("$instance", ".*").replace("[1h]", f"[{LOOK_BACK}]"))

        def legend(labels: dict[str, str]) -> str:
            return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), target["legendFormat"])

        return {legend(each["metric"]): float(each["value"][1]) for each in found}

    def until_shown(self, panel: str, line: str, least: float) -> None:
        """Wait until a line of a panel of the board has come to a value."""
        deadline_s, now = time.monotonic() + PATIENCE_S, dict[str, float]()
        while (now := self.shown(panel)).get(line, 0.0) < least:
            assert time.monotonic() < deadline_s, f"{panel}: {line} should be {least} or more; there are {now}"
            time.sleep(0.5)

    def empty_panels(self) -> set[str]:
        """The panels of the board that show no number now. Prometheus takes the expressions of all."""
        empty = set()
        for panel in json.loads(BOARD.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", LOOK_BACK)
                if not any(math.isfinite(float(each["value"][1])) for each in self.asked(expression)):
                    empty.add(panel["title"])
        return empty

    def until_panels_show(self, *, empty: set[str]) -> None:
        """Wait until each panel of the board shows a number, but for some that have nothing to show."""
        deadline_s = time.monotonic() + PATIENCE_S
        while now := self.empty_panels() - empty:
            assert time.monotonic() < deadline_s, f"these panels show nothing: {now}"
            time.sleep(0.5)

    def until(self, *, fires: str = "", clear: str = "") -> None:
        """Wait until alerts fire, whose names have a space between them, and another one does not."""
        deadline_s, now = time.monotonic() + PATIENCE_S, set[str]()
        while time.monotonic() < deadline_s:
            try:
                now = self.firing()
            except OSError:
                time.sleep(0.2)
                continue
            if set(fires.split()) <= now and clear not in now:
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
def chat() -> Iterator[Chat]:
    """What takes all notices."""
    made = Chat()
    made.ill = False
    yield made
    made.close()


def told_to(chat: Chat, root: Path, **limits: float) -> dict[str, Any]:
    """The part of a policy that has a webhook told."""
    url = root / "url"
    url.write_text(chat.url)
    url.chmod(0o600)
    return {"webhooks": [{"name": "chat", "url_file": str(url)}], **limits}


def events(notices: list[dict[str, Any]]) -> set[str]:
    """What notices are about."""
    return {each["event"] for each in notices}


@pytest.fixture
def job(tmp_path: Path, prometheus: Prometheus, target: int, chat: Chat) -> Iterator[Path]:
    """A job of one node and a spare, whose script does nothing; its directory."""
    prometheus.until(fires="MidstepNoController")
    directory = tmp_path / "job"
    policy = tmp_path / "policy.yaml"
    budget = {"rung": "reschedule_pod", "attempts": 1, "budget": {"per_job": 1, "window_s": 20.0}}
    ladder = [budget, {"rung": "stop"}]
    policy.write_text(yaml.safe_dump({"ladder": ladder, "notify": told_to(chat, tmp_path)}))
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


def test_alerts_fire_when_the_job_is_short_of_something_and_clear_afterwards(
    prometheus: Prometheus, job: Path, chat: Chat
) -> None:
    """Without a job there is no controller; a job has one; its budget is spent; its spare node dies; the job ends."""
    prometheus.until(clear="MidstepNoController")
    deadline_s = time.monotonic() + PATIENCE_S
    while not (there := spares(job)):
        assert time.monotonic() < deadline_s, "no spare node has come"
        time.sleep(0.5)
    deadline_s = time.monotonic() + PATIENCE_S
    while not prometheus.asked('midstep_nodes{state="spare"} > 0'):  # only one that was there can be missed
        assert time.monotonic() < deadline_s, "the spare node was not scraped"
        time.sleep(0.5)
    deadline_s = time.monotonic() + PATIENCE_S
    while not (pid := int(status(job)["ranks"][0]["pid"])):
        assert time.monotonic() < deadline_s, "no process was started"
        time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    prometheus.until(fires="MidstepBudgetNearlySpent", clear="MidstepNoSpare")
    prometheus.until(clear="MidstepBudgetNearlySpent")  # its window is over
    midstep("inject", str(job), "--node", there[0])
    prometheus.until(fires="MidstepNoSpare", clear="MidstepNoController")
    until_told(chat, NoticeKind.NO_SPARE)
    midstep("stop", str(job))
    prometheus.until(fires="MidstepNoController", clear="MidstepNoSpare")
    assert events(chat.got) == {"budget", "no_spare", "ended"}


# --- a job that trains ------------------------------------------------------------------------------------------------

RECOVERIES = 5
AWAY_S = 34.0  # more than the 30 s that a job may be without a controller
ASKED_S = 5.0


@pytest.fixture
def training(
    tmp_path: Path, prometheus: Prometheus, target: int, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Job]:
    """A job of two ranks that trains, writes no checkpoint, and ends with its sixth incident.

    The hour of which its goodput is told has 20 s, everywhere in its processes.
    """
    monkeypatch.setenv("PYTHONPATH", str(SHORT_HOUR))
    ladder = [
        {"rung": "recover_in_place", "attempts": 8, "budget": {"per_job": RECOVERIES, "window_s": 0}},
        {"rung": "stop"},
    ]
    notify = told_to(chat, tmp_path, asked_after_s=ASKED_S, checkpoint_age_s=AWAY_S, goodput_under=0.9)
    policy = {**ROOMY, "ladder": ladder, "deadlines": {"quiesce_s": PATIENCE_S}, "notify": notify}
    policy["checkpoint"] = {"every_steps": 1_000_000}
    listen = ("--metrics-listen", f"127.0.0.1:{target}")
    job = Job(
        tmp_path / "training", nodes=1, ranks_per_node=2, steps=1_000_000, step_s=0.05, policy=policy, options=listen
    )
    try:
        yield job
    finally:
        job.close()


def test_alerts_of_a_job_that_trains_fire_under_faults_and_clear(
    prometheus: Prometheus, training: Job, chat: Chat
) -> None:
    """It loses its controller, stands still, fails often, loses its disk, and ends.

    The end waits for a webhook that is ill by then, so that the controller is still scraped.
    """
    job = training
    job.until(lambda told: told.phase == "running" and told.committed > 0, "its first step")
    prometheus.until(clear="MidstepNoController")

    launcher = psutil.Process(job.launcher.pid)
    launcher.suspend()  # or it would start another one at once
    os.kill(job.controller_pid(), signal.SIGKILL)
    time.sleep(AWAY_S)
    launcher.resume()
    prometheus.until(fires="MidstepUnguarded MidstepGoodputLow", clear="MidstepNoController")
    until_told(chat, NoticeKind.UNGUARDED)
    until_told(chat, NoticeKind.GOODPUT_LOW)
    prometheus.until(clear="MidstepGoodputLow")
    until(lambda: not noted(job, "goodput_low:")[-1], "webhooks to be told no more of a low goodput")

    told = job.until(lambda told: told.phase == "running", "training")
    os.kill(told.ranks[0].pid, signal.SIGSTOP)
    os.kill(told.ranks[1].pid, signal.SIGKILL)
    prometheus.until(fires="MidstepNotTraining MidstepGoodputLow", clear="MidstepManyIncidents")
    until_told(chat, NoticeKind.ASKED, "training")
    os.kill(told.ranks[0].pid, signal.SIGCONT)
    trains_after(job, 1)
    prometheus.until_shown("Incidents in an hour", "recover_in_place resumed", 1.0)
    for number in range(1, 4):
        os.kill(trains_after(job, number), signal.SIGKILL)
    victim = trains_after(job, 4)
    prometheus.until(fires="MidstepManyIncidents", clear="MidstepNotTraining")
    prometheus.until_panels_show(empty={"Messages that changed nothing, in 5 minutes"})

    controller = psutil.Process(job.controller_pid())
    limits = controller.rlimit(psutil.RLIMIT_FSIZE)
    controller.rlimit(psutil.RLIMIT_FSIZE, (1, limits[1]))
    os.kill(victim, signal.SIGKILL)
    prometheus.until(fires="MidstepJournalNotWritable")
    until_told(chat, NoticeKind.ASKED, "journal")
    controller.rlimit(psutil.RLIMIT_FSIZE, limits)
    victim = trains_after(job, RECOVERIES)
    prometheus.until(clear="MidstepJournalNotWritable")
    until_told(chat, NoticeKind.CHECKPOINT_OLD)
    until_told(chat, NoticeKind.BUDGET, "recover_in_place per job")
    prometheus.until(clear="MidstepUnguarded")
    prometheus.until(clear="MidstepManyIncidents")

    assert events(chat.got) == set(NoticeKind) - {NoticeKind.NO_SPARE, NoticeKind.ENDED}
    chat.ill = True
    os.kill(victim, signal.SIGKILL)
    prometheus.until(fires="MidstepJobFailed")
    assert job.wait() != 0
    assert events(chat.refused) == {NoticeKind.ENDED}
    prometheus.until(fires="MidstepNoController", clear="MidstepJobFailed")


def trains_after(job: Job, incidents: int) -> int:
    """Wait until the job has had so many incidents and trains again, and return the process of rank 1."""

    def trains(told: JobStatus) -> bool:
        return told.phase == "running" and len(told.incidents) == incidents

    return job.until(trains, f"training after incident {incidents}").ranks[1].pid
