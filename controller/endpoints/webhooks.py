"""Hand notices to a webhook, from a thread of its own: one POST at a time, tried again until it is taken or too old.

Only http.client of the standard library is used. It follows no redirect and knows no proxy, so that nothing is asked
but the address in the file that the policy names. That file and the one with a header are read at each try: a secret
can be replaced while the job runs. What is said of a failure has neither of them.
"""

import contextlib
import http.client
import ipaddress
import queue
import socket
import ssl
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import msgspec

from ...policies.schema import WebhookPolicy, WebhookShape
from ...protocol.errors import ConfigurationError
from ...protocol.private_files import read_secret
from ..journaled import Notice

TRY_S = 10.0  # from the connection to the answer
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 300.0
HURRIED_WAIT_S = 5.0  # at most, when the job is over
GIVE_UP_S = 24 * 3600.0  # after the notice was decided
MOST_WAITING = 50  # in the thread's queue; the others wait in the book
_REDIRECTS = range(300, 400)
_LATE = f"it did not answer within {TRY_S:g} s"
_TAKEN = range(200, 300)


class PostFailed(Exception):
    """A webhook has not taken a notice; says why, without its address."""


class Address(msgspec.Struct, frozen=True):
    """Where a webhook is. Never printed."""

    secure: bool
    host: str
    port: int | None
    target: str


def address_of(url: str, path: str) -> Address:
    """Return where a URL leads. `path`: the file that it is from. Raises PostFailed: it is no https URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = SplitResult("", "", "", "", ""), None, None
    if parts.scheme not in {"https", "http"} or not host or not url.isprintable() or " " in url:
        raise PostFailed(f"{path}: it has no URL in one line, as https://host/path")
    if parts.username is not None or parts.password is not None:
        raise PostFailed(f"{path}: its URL has a user in it; put `Authorization: ...` into header_file")
    if parts.scheme == "http" and not _is_this_machine(host):
        raise PostFailed(f"{path}: its URL is http, which others can read on the way; only https leaves this machine")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme == "https", host, port, target)


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def body_of(shape: WebhookShape, job: str, notice: Notice) -> bytes:
    """Return the JSON that is posted. What a user or a script has written is no markup and no mention in a chat."""
    if shape is WebhookShape.SLACK:
        text = f"midstep job {job}: {notice.text}"
        return msgspec.json.encode({"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")})
    at = datetime.fromtimestamp(notice.at_s, timezone.utc).isoformat(timespec="milliseconds")
    told = {"job": job, "event": notice.kind, "subject": notice.subject, "text": notice.text}
    return msgspec.json.encode({**told, "at": at.replace("+00:00", "Z"), "id": notice.id})


def post(webhook: WebhookPolicy, body: bytes) -> None:
    """Hand it over once, within TRY_S. Raises PostFailed."""
    try:
        address = address_of(read_secret(Path(webhook.url_file)), webhook.url_file)
        headers = {"Content-Type": "application/json", "User-Agent": "midstep", **_header(webhook)}
    except ConfigurationError as error:
        raise PostFailed(str(error).rstrip(".")) from None
    made: http.client.HTTPConnection
    if address.secure:
        context = ssl.create_default_context()
        made = http.client.HTTPSConnection(address.host, address.port, timeout=TRY_S, context=context)
    else:
        made = http.client.HTTPConnection(address.host, address.port, timeout=TRY_S)
    late = threading.Timer(TRY_S, _cut, (made,))
    late.daemon = True
    late.start()
    try:
        made.request("POST", address.target, body, headers)
        status = made.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PostFailed(_why(error)) from None
    finally:
        late.cancel()
        made.close()
    if status in _REDIRECTS:
        raise PostFailed(f"it answers {status}, which leads elsewhere, and that is not followed")
    if status not in _TAKEN:
        raise PostFailed(f"it answers {status}")


def _cut(connection: http.client.HTTPConnection) -> None:
    """End what takes too long: each byte alone would be in time."""
    if isinstance(connection.sock, socket.socket):
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _header(webhook: WebhookPolicy) -> dict[str, str]:
    if webhook.header_file is None:
        return {}
    name, colon, value = read_secret(Path(webhook.header_file)).partition(":")
    if not colon or not name.strip().replace("-", "").isalnum() or not value.strip().isprintable():
        raise ConfigurationError(f"{webhook.header_file}: it has no header in one line, as `Authorization: Bearer ...`")
    return {name.strip(): value.strip()}


def _why(error: Exception) -> str:
    """Say what went wrong, in words that have neither the address nor what was sent."""
    words = {
        ssl.SSLCertVerificationError: "its certificate is not trusted here, or is another host's",
        TimeoutError: _LATE,
        socket.gaierror: "its host is not known",
        ssl.SSLError: "no TLS connection could be made",
        http.client.HTTPException: f"it gave no answer in HTTP within {TRY_S:g} s",
        ValueError: "its address, or the header, cannot be sent",
    }
    known = next((said for kind, said in words.items() if isinstance(error, kind)), "")
    return known or (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


class Told(msgspec.Struct, frozen=True):
    """The outcome of a try. `trouble`: why it was not taken. `settled`: the notice is not tried any more."""

    webhook: str
    id: str
    trouble: str = ""
    settled: bool = True


class WebhookThread:
    """Hands one webhook its notices, in their order. `told` gets what comes of each try, in the thread."""

    def __init__(
        self,
        webhook: WebhookPolicy,
        job: str,
        now: Callable[[], float],
        told: Callable[[Told], None],
    ) -> None:
        """Do nothing before `start`. `now`: the clock that notices have their times of; read in the thread."""
        self._webhook, self._job, self._now, self._told = webhook, job, now, told
        self._queue: queue.Queue[Notice] = queue.Queue(MOST_WAITING)
        self._closed, self._woken = threading.Event(), threading.Event()
        self._longest_wait_s = LONGEST_WAIT_S
        self._thread = threading.Thread(target=self._run, name=f"webhook {webhook.name}", daemon=True)

    def start(self) -> None:
        """Begin to hand over."""
        self._thread.start()

    def take(self, notice: Notice) -> bool:
        """Take a notice to be handed over; say whether there was room for it. Never waits."""
        try:
            self._queue.put_nowait(notice)
        except queue.Full:
            return False
        return True

    def hurry(self) -> None:
        """Try again at once, and soon after that: there is little time left. Idempotent."""
        if self._longest_wait_s != HURRIED_WAIT_S:
            self._longest_wait_s = HURRIED_WAIT_S
            self._woken.set()

    def close(self) -> None:
        """Make no further try. What is under way ends by itself within TRY_S, and is not waited for."""
        self._closed.set()
        self._woken.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                self._hand_over(self._queue.get(timeout=0.2))

    def _hand_over(self, notice: Notice) -> None:
        wait_s = FIRST_WAIT_S
        while not self._closed.is_set():
            try:
                post(self._webhook, body_of(self._webhook.shape, self._job, notice))
            except PostFailed as error:
                late = self._now() - notice.at_s + wait_s > GIVE_UP_S
                self._told(Told(self._webhook.name, notice.id, str(error), settled=late))
                if late:
                    return
                self._woken.wait(min(wait_s, self._longest_wait_s))
                self._woken.clear()
                wait_s = min(2.0 * wait_s, LONGEST_WAIT_S)
            else:
                self._told(Told(self._webhook.name, notice.id))
                return
