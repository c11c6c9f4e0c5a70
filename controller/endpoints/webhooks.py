"""Hand notices to a webhook, from a thread of its own: one POST at a time, tried again until it is taken or too old.

Nothing is asked but the address in the file that the policy names. That file and the one with a header are read at
each try: a secret can be replaced while the job runs. What is said of a failure has neither of them.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...policies.schema import WebhookPolicy, WebhookShape
from ...protocol.errors import ConfigurationError
from ...protocol.private_files import read_secret
from ..journaled import Notice
from .posting import PostFailed, address_of, post_to, utc_text

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 300.0
HURRIED_WAIT_S = 5.0  # at most, when the job is over
GIVE_UP_S = 24 * 3600.0  # after the notice was decided
MOST_WAITING = 50  # in the thread's queue; the others wait in the book


def body_of(shape: WebhookShape, job: str, notice: Notice) -> bytes:
    """Return the JSON that is posted. What a user or a script has written is no markup and no mention in a chat."""
    if shape is WebhookShape.SLACK:
        text = f"midstep job {job}: {notice.text}"
        return msgspec.json.encode({"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")})
    told = {"job": job, "event": notice.kind, "subject": notice.subject, "text": notice.text}
    return msgspec.json.encode({**told, "at": utc_text(notice.at_s, "milliseconds"), "id": notice.id})


def post(webhook: WebhookPolicy, body: bytes) -> None:
    """Hand it over once, within TRY_S. Raises PostFailed."""
    try:
        address = address_of(read_secret(Path(webhook.url_file)), webhook.url_file)
        headers = {"Content-Type": "application/json", "User-Agent": "midstep", **_header(webhook)}
    except ConfigurationError as error:
        raise PostFailed(str(error).rstrip(".")) from None
    post_to(address, body, headers)


def _header(webhook: WebhookPolicy) -> dict[str, str]:
    if webhook.header_file is None:
        return {}
    name, colon, value = read_secret(Path(webhook.header_file)).partition(":")
    if not colon or not name.strip().replace("-", "").isalnum() or not value.strip().isprintable():
        raise ConfigurationError(f"{webhook.header_file}: it has no header in one line, as `Authorization: Bearer ...`")
    return {name.strip(): value.strip()}


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
