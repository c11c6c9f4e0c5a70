"""One notice to one webhook: what is posted, where, what is refused, and what is said when it fails."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import pytest

from midstep.controller.endpoints import webhooks
from midstep.controller.endpoints.posting import PostFailed, address_of
from midstep.controller.endpoints.webhooks import Told, WebhookThread, body_of, post
from midstep.controller.journaled import Notice
from midstep.policies.schema import WebhookPolicy, WebhookShape
from midstep.protocol.incidents import NoticeKind

PATIENCE_S = 20.0
NOTICE = Notice("no_spare:@1", NoticeKind.NO_SPARE, "", "<!channel> a & b", 1_700_000_000.25)


class Receiver:
    """A web server on this machine that answers as it is told."""

    def __init__(self) -> None:
        self.answers: list[int] = []  # the last one for all that follow; 0: never
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.path, dict(self.headers), body))
                status = receiver.answers.pop(0) if len(receiver.answers) > 1 else (receiver.answers or [200])[0]
                if status == 0:
                    with contextlib.suppress(OSError):  # it was cut
                        for _ in range(int(PATIENCE_S / 0.05)):  # a byte at a time, each of them soon enough
                            time.sleep(0.05)
                            self.wfile.write(b"H")
                    return
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "http://169.254.169.254/latest")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret-path?token=secret"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def secret(path: Path, text: str) -> str:
    """Write a file that is its user's alone."""
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def hook(receiver: Receiver, tmp_path: Path) -> WebhookPolicy:
    """The receiver, as a policy names it."""
    header = secret(tmp_path / "header", "Authorization: Bearer secret\n")
    return WebhookPolicy("oncall", secret(tmp_path / "url", f"{receiver.url}\n"), header)


def test_plain_json_has_all_of_a_notice() -> None:
    assert json.loads(body_of(WebhookShape.PLAIN, "demo", NOTICE)) == {
        "job": "demo",
        "event": "no_spare",
        "subject": "",
        "text": "<!channel> a & b",
        "at": "2023-11-14T22:13:20.250Z",
        "id": "no_spare:@1",
    }


@pytest.mark.parametrize(
    "url", ["https://hooks.example.com", "http://127.0.0.1:9/x", "http://[::1]/x", "http://localhost/"]
)
def test_https_and_this_machine_are_addresses(url: str) -> None:
    assert address_of(url, "/etc/url").target in {"/", "/x"}


def test_it_is_posted_with_the_header_of_the_file(receiver: Receiver, hook: WebhookPolicy) -> None:
    post(hook, b"{}")
    ((path, headers, body),) = receiver.got
    assert path == "/secret-path?token=secret"
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Content-Type"] == "application/json"
    assert body == b"{}"


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    gone = WebhookPolicy("oncall", secret(tmp_path / "url", f"http://127.0.0.1:{port}/secret"))
    with pytest.raises(PostFailed, match="Connection refused") as caught:
        post(gone, b"{}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda url, header: url.unlink(), "url: nothing can be read from it: No such file"),
        (lambda url, header: url.chmod(0o644), "url: others can read or write this file"),
        (lambda url, header: url.write_text(""), "url: it is empty"),
        (lambda url, header: header.write_text("secret"), "header: it has no header in one line"),
        (lambda url, header: header.write_text("A: secret\r\nB: secret"), "header: it has no header in one line"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    hook: WebhookPolicy, tmp_path: Path, spoil: Callable[[Path, Path], object], why: str
) -> None:
    spoil(tmp_path / "url", tmp_path / "header")
    with pytest.raises(PostFailed, match=why) as caught:
        post(hook, b"{}")
    assert "secret" not in str(caught.value).replace("secret-", "")


def started(hook: WebhookPolicy, now: Callable[[], float]) -> tuple[WebhookThread, "Queue[Told]"]:
    """A thread for a webhook, and what it tells."""
    told: Queue[Told] = Queue()
    thread = WebhookThread(hook, "demo", now, told.put)
    thread.start()
    return thread, told


def test_what_fails_twice_is_taken_the_third_time(
    receiver: Receiver, hook: WebhookPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "FIRST_WAIT_S", 0.05)
    receiver.answers = [500, 500, 200]
    thread, told = started(hook, lambda: NOTICE.at_s)
    assert thread.take(NOTICE)
    tries = [told.get(timeout=PATIENCE_S) for _ in range(3)]
    assert tries == [
        Told("oncall", NOTICE.id, "it answers 500", settled=False),
        Told("oncall", NOTICE.id, "it answers 500", settled=False),
        Told("oncall", NOTICE.id),
    ]
    thread.close()


def test_a_notice_of_yesterday_is_given_up(receiver: Receiver, hook: WebhookPolicy) -> None:
    receiver.answers = [500]
    thread, told = started(hook, lambda: NOTICE.at_s + webhooks.GIVE_UP_S)
    assert thread.take(NOTICE)
    assert told.get(timeout=PATIENCE_S) == Told("oncall", NOTICE.id, "it answers 500", settled=True)
    thread.close()


def test_a_webhook_that_hangs_takes_no_more_than_its_queue_holds(receiver: Receiver, hook: WebhookPolicy) -> None:
    """And handing over never waits."""
    receiver.answers = [0]
    thread, _ = started(hook, lambda: NOTICE.at_s)
    began_s = time.monotonic()
    room = [thread.take(NOTICE) for _ in range(webhooks.MOST_WAITING + 10)]
    assert time.monotonic() - began_s < 1.0
    assert room[0]
    assert not room[-1]
    thread.close()


def test_at_the_end_of_a_job_it_is_tried_at_once(
    receiver: Receiver, hook: WebhookPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the wait had become."""
    monkeypatch.setattr(webhooks, "FIRST_WAIT_S", 100.0)
    receiver.answers = [500, 200]
    thread, told = started(hook, lambda: NOTICE.at_s)
    assert thread.take(NOTICE)
    assert told.get(timeout=PATIENCE_S).trouble
    thread.hurry()
    assert told.get(timeout=PATIENCE_S) == Told("oncall", NOTICE.id)
    thread.close()
