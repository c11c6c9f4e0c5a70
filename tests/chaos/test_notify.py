"""Webhooks of real jobs: each kind of notice arrives, by https too; what failed is told again, by the next controller.

The alerts of `tests/prometheus` are looked at together with the notices about the same faults.
"""

import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from midstep.cli.inject import report_of
from midstep.controller.endpoints.control_requests import Accepted
from midstep.controller.journaled import ConditionChanged
from midstep.launch.reached_job import read_story
from midstep.policies.fault_codes import LevelName
from midstep.protocol.incidents import JobStatus, NoticeKind
from midstep.protocol.types import InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import PATIENCE_S, ROOMY, Job, inject
from .status_server import has_openssl, make_certificate

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

GATE = 15
SHORT_HOUR = Path(__file__).parents[1] / "prometheus" / "short_hour"
HEADER = "Bearer of-the-header"


class Chat:
    """A web server on this machine that answers 500 as long as it is ill. `root`: where its certificate is made."""

    def __init__(self, root: Path | None = None) -> None:
        self.ill = True
        self.refused: list[dict[str, Any]] = []
        self.got: list[dict[str, Any]] = []
        self.admissions: set[str | None] = set()
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ill = chat.ill
                chat.admissions.add(self.headers["Authorization"])
                (chat.refused if ill else chat.got).append(told)
                self.send_response(500 if ill else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        where = "http://127.0.0.1"
        if root is not None:
            self.certificate, key = make_certificate(root)
            context, where = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "https://localhost"
            context.load_cert_chain(self.certificate, key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"{where}:{self._server.server_port}/services/secret"

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def chat() -> Iterator[Chat]:
    made = Chat()
    yield made
    made.close()


@pytest.fixture
def secure_chats(tmp_path: Path) -> Iterator[tuple[Chat, Chat]]:
    """Two with a certificate each."""
    made = Chat(tmp_path / "trusted"), Chat(tmp_path / "strange")
    yield made
    for each in made:
        each.close()


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"still waiting for {what}"
        time.sleep(0.05)


def until_told(chat: Chat, kind: str, subject: str = "") -> None:
    """Wait until a webhook has been told of something, whatever it answered."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (kind, subject) not in (told := {(each["event"], each["subject"]) for each in chat.got + chat.refused}):
        assert time.monotonic() < deadline_s, f"{kind} {subject} was not told; there are {sorted(told)}"
        time.sleep(0.1)


def policy(root: Path, url: str) -> dict[str, Any]:
    """A policy whose budget in place is spent by one fault, with a webhook."""
    ladder = [
        {**rung, "budget": {"per_job": 1}} if rung["rung"] == "recover_in_place" else rung for rung in ROOMY["ladder"]
    ]
    oncall = {"name": "oncall", "url_file": own_file(root / "oncall.url", url)}
    return {**ROOMY, "ladder": ladder, "notify": {"webhooks": [oncall]}}


def own_file(path: Path, text: str) -> str:
    """Write a file that is its user's alone, in the place of the one that is there."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    return str(fresh.replace(path))


def noted(job: Job, key: str) -> list[bool]:
    """Return whether something that webhooks are told of held, each time that the journal has a change of it."""
    events = (turn.event for turn in read_story(job.directory))
    return [event.notice is not None for event in events if isinstance(event, ConditionChanged) and event.key == key]


def assert_kept_secret(job: Job) -> None:
    """Neither address nor header of a webhook stands in a file of the job."""
    secrets = (b"services/secret", HEADER.encode())
    files = [path for path in job.directory.rglob("*") if path.is_file()]
    assert not [path for path in files if any(secret in path.read_bytes() for secret in secrets)]


def test_a_notice_that_a_killed_controller_owed_arrives_from_the_next_one(
    start_job: StartJob, tmp_path: Path, chat: Chat
) -> None:
    """The webhook answers 500; the controller is killed; the webhook is well. Then the same at the end of the job.

    Training does not wait for any of it. What was not taken is seen in the status, and the secret nowhere.
    """
    faults = [inject(1, InjectionPoint.FORWARD, 6)]
    job = start_job(policy=policy(tmp_path, chat.url), faults=faults, gates=[GATE], nodes=1, ranks_per_node=2)
    before = job.held_at(GATE)  # the recovery and the steps after it waited for no webhook
    until(lambda: len(chat.refused) >= 2, "the second try")
    assert chat.refused[0]["event"] == "budget"
    assert chat.refused[0]["text"].startswith("budget recover_in_place per job: 1 of 1 are spent")

    def failing(status: JobStatus) -> bool:
        return [(each.name, each.waiting, each.trouble) for each in status.webhooks] == [
            ("oncall", 1, "it answers 500")
        ]

    job.until(failing, "the trouble of the webhook in the status")
    os.kill(job.controller_pid(), signal.SIGKILL)
    chat.ill = False
    job.until(lambda status: status.term > before.term, "the next controller")
    until(lambda: chat.got, "the notice from the next controller")
    assert chat.got[0] == chat.refused[0], "it is the same notice, with the same id"
    job.until(lambda status: [each.waiting for each in status.webhooks] == [0], "nothing to be owed")
    chat.ill = True
    job.open_gate(GATE)
    until(lambda: chat.refused[-1]["event"] == "ended", "the end to be told")
    assert not (job.directory / "result.json").exists(), "a controller that is killed now would have none after it"
    os.kill(job.controller_pid(), signal.SIGKILL)
    chat.ill = False
    report = finish(job)
    assert report["exit_code"] == 0
    # A try that was on its way when its controller was killed may arrive as well: once more, with the same id.
    assert [each["event"] for each in {each["id"]: each for each in chat.got}.values()] == ["budget", "ended"]
    assert chat.got[-1]["text"].startswith("the job has ended with exit code 0")
    assert_kept_secret(job)


@pytest.mark.skipif(not has_openssl, reason="there is no openssl to make a certificate with")
def test_a_webhook_is_told_by_https_where_its_certificate_is_trusted(
    start_job: StartJob, tmp_path: Path, secure_chats: tuple[Chat, Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, of a CA that the machine does not know, gets nothing until its file has the address of the first.

    The job is over then, and waits for that. Both are shown the header of their file, and only those told.
    """
    trusted, strange = secure_chats
    trusted.ill = strange.ill = False
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted.certificate))
    header = own_file(tmp_path / "header", f"Authorization: {HEADER}")
    address = tmp_path / "strange.url"
    hooks = [
        {"name": "oncall", "url_file": own_file(tmp_path / "oncall.url", trusted.url)},
        {"name": "talk", "url_file": own_file(address, strange.url), "shape": "slack"},
    ]
    notify = {"webhooks": [{**hook, "header_file": header} for hook in hooks]}
    job = start_job(
        nodes=1,
        ranks_per_node=1,
        script="true",
        arguments=[],
        options=["--no-python"],
        policy={**ROOMY, "notify": notify},
    )

    log = job.directory / "logs" / "controller.log"
    until(
        lambda: log.exists() and "webhook talk: its certificate is not trusted here" in log.read_text(), "its trouble"
    )
    own_file(address, trusted.url)
    assert finish(job)["exit_code"] == 0
    end = "the job has ended with exit code 0: all ranks have finished"
    assert {each.get("event"): each["text"] for each in trusted.got} == {
        "ended": end,
        None: f"midstep job {job.name}: {end}",
    }
    assert (trusted.admissions, strange.admissions) == ({HEADER}, set())
    assert_kept_secret(job)


@pytest.mark.soak
def test_each_kind_of_notice_is_told_of_one_job(
    start_job: StartJob, tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts; its spare node has a fault for a person; a rank dies, and the controller; it ends.

    In all of its processes the hour of the goodput has 20 s, and it writes no checkpoint. The next controller may be
    there half a second after the one before it has died.
    """
    monkeypatch.setenv("PYTHONPATH", str(SHORT_HOUR))
    chat.ill = False
    chosen = policy(tmp_path, chat.url)
    limits = {"asked_after_s": 0.5, "unguarded_s": 0.05, "checkpoint_age_s": 1.0, "goodput_under": 0.99}
    chosen["notify"] = {**chosen["notify"], **limits}
    chosen["checkpoint"] = {"every_steps": 1_000_000}
    job = start_job(
        nodes=1,
        ranks_per_node=2,
        spares=1,
        policy=chosen,
        faults=[inject(1, InjectionPoint.FORWARD, 6)],
        steps=GATE + 3,
        gates=[GATE],
    )
    job.held_at(GATE)
    until_told(chat, NoticeKind.ASKED, "training")
    until_told(chat, NoticeKind.BUDGET, "recover_in_place per job")

    def spares(status: JobStatus) -> list[str]:
        return [node.node for node in status.nodes if node.state == "spare"]

    (spare,) = spares(job.until(lambda status: bool(spares(status)), "the spare node"))
    until(lambda: noted(job, "no_spare:"), "it to be noted")  # only one that was there can be missed
    assert isinstance(job.ask(report_of(LevelName.MANUALLY_SEPARATE_NPU, None, spare, 0)), Accepted)
    until_told(chat, NoticeKind.NO_SPARE)
    until_told(chat, NoticeKind.ASKED, f"{spare}, device 0")

    os.kill(job.controller_pid(), signal.SIGKILL)
    until_told(chat, NoticeKind.UNGUARDED)
    until_told(chat, NoticeKind.GOODPUT_LOW)
    until_told(chat, NoticeKind.CHECKPOINT_OLD)
    job.open_gate(GATE)
    report = finish(job)
    assert [each["outcome"] for each in report["incidents"]] == ["resumed"]
    told = {each["id"]: (each["event"], each["subject"]) for each in chat.got}  # one may come twice, with the same id
    alone = set(NoticeKind) - {NoticeKind.ASKED, NoticeKind.BUDGET}
    asked = {(NoticeKind.ASKED, "training"), (NoticeKind.ASKED, f"{spare}, device 0")}
    assert sorted(told.values()) == sorted(
        {*asked, (NoticeKind.BUDGET, "recover_in_place per job"), *((kind, "") for kind in alone)}
    )
