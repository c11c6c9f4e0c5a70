"""Webhooks of a real job: what failed is told again, and the next controller tells what the last one could not."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import InjectionPoint

from .comparing import finish
from .conftest import StartJob
from .jobs import ONE_NODE, PATIENCE_S, ROOMY, inject

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

GATE = 15


class Chat:
    """A web server on this machine that answers 500 as long as it is ill."""

    def __init__(self) -> None:
        self.ill = True
        self.refused: list[dict[str, Any]] = []
        self.got: list[dict[str, Any]] = []
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ill = chat.ill
                (chat.refused if ill else chat.got).append(told)
                self.send_response(500 if ill else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/secret"

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def chat() -> Iterator[Chat]:
    made = Chat()
    yield made
    made.close()


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"still waiting for {what}"
        time.sleep(0.05)


def policy(root: Path, url: str) -> dict[str, Any]:
    """A policy whose budget in place is spent by one fault, with a webhook."""
    secret = root / "oncall.url"
    secret.write_text(url)
    secret.chmod(0o600)
    ladder = [
        {**rung, "budget": {"per_job": 1}} if rung["rung"] == "recover_in_place" else rung for rung in ROOMY["ladder"]
    ]
    return {**ROOMY, "ladder": ladder, "notify": {"webhooks": [{"name": "oncall", "url_file": str(secret)}]}}


def test_a_notice_that_a_killed_controller_owed_arrives_from_the_next_one(
    start_job: StartJob, tmp_path: Path, chat: Chat
) -> None:
    """The webhook answers 500; the controller is killed; the webhook is well. Then the same at the end of the job.

    Training does not wait for any of it. What was not taken is seen in the status, and the secret nowhere.
    """
    job = start_job(
        policy=policy(tmp_path, chat.url), faults=[inject(1, InjectionPoint.FORWARD, 6)], gates=[GATE], **ONE_NODE
    )
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
    left = [path for path in job.directory.rglob("*") if path.is_file() and b"services/secret" in path.read_bytes()]
    assert not left, "the secret stands in a file of the job"
