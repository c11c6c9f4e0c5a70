"""Have the notices of a job told: look at the job now and then, journal what changed, and hand over what is owed.

In the loop of the driver, which it costs a look each second. Threads hand the notices over (`webhooks.py`), and another
one looks at the checkpoint directory, which may be on a file server that hangs. A notice is handed over once it is in
the journal, and what a webhook has taken is journaled: so the next controller continues with what is still owed.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...policies.schema import Policy
from ...processor.checkpoints.entries import look_into
from ...processor.checkpoints.files import step_directory
from ...protocol.errors import MidstepError
from ...protocol.incidents import WebhookStatus
from ...protocol.types import JobSpec
from ..journaled import NoticeEvent, NoticeSettled
from ..metrics import Observation, publish_every_s
from ..notifications import JOURNAL, NewestCheckpoint, NoticeBook, changes, journal_notice
from .webhooks import Told, WebhookThread

CHECKPOINTS_S = 10.0  # between two looks at the directory

_log = logging.getLogger(__name__)


class CheckpointLook:
    """Looks for the newest complete checkpoint, in a thread, while it is open."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._closed = threading.Event()
        self.latest: NewestCheckpoint | None = None  # an assignment is all that is shared
        self._thread = threading.Thread(target=self._run, name="newest checkpoint", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more. A look that hangs is not waited for."""
        self._closed.set()

    def _run(self) -> None:
        while self._directory is not None:
            with contextlib.suppress(MidstepError, OSError):  # next time, perhaps
                self.latest = newest_in(self._directory, time.time())
            if self._closed.wait(CHECKPOINTS_S):
                return


def newest_in(directory: str, now: float) -> NewestCheckpoint:
    """Return the newest complete checkpoint of a directory, and its age. Raises CheckpointError, OSError."""
    steps = look_into(directory, 1).complete
    if not steps:
        return NewestCheckpoint(None)
    written_s = Path(step_directory(directory, steps[-1])).stat().st_mtime
    return NewestCheckpoint(steps[-1], max(0.0, now - written_s))


class Notifier:
    """Tells webhooks of one job. `tell`: takes an event in, in the loop's thread; `book`: what is owed."""

    def __init__(
        self,
        job: JobSpec,
        policy: Policy,
        *,
        observe: Callable[[], Observation],
        book: Callable[[], NoticeBook],
        tell: Callable[[NoticeEvent], None],
        now: Callable[[], float],
    ) -> None:
        """Start nothing before `run`. `now`: the job's clock."""
        self._job, self._notify = job, policy.notify
        self._observe, self._book, self._tell, self._now = observe, book, tell, now
        self._checkpoints = CheckpointLook(job.settings.checkpoint_directory)
        self._asked = frozenset[str]()  # changes that are on their way into the journal
        self._handed: set[tuple[str, str]] = set()  # webhook and notice that a thread has, or has settled
        self._troubles: dict[str, str] = {}
        self._unwritable = False
        self._threads: dict[str, WebhookThread] = {}

    async def run(self) -> None:
        """Look and hand over until cancelled."""
        loop = asyncio.get_running_loop()

        def told(what: Told) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: the next controller tells it again
                loop.call_soon_threadsafe(self._take, what)

        for each in self._notify.webhooks:
            self._threads[each.name] = WebhookThread(each, self._job.job, self._now, told)
            self._threads[each.name].start()
        if self._notify.checkpoint_age_s is not None:
            self._checkpoints.start()
        try:
            while True:
                self.look()
                await asyncio.sleep(publish_every_s(self._job.world_size))
        finally:
            self._checkpoints.close()
            for thread in self._threads.values():
                thread.close()
            self._say_what_is_left()

    def look(self) -> None:
        """Journal what has changed, and hand over what is owed and was not handed over."""
        seen, book = self._observe(), self._book()
        if seen.writable:
            self._unwritable = False
            fresh = changes(seen, book, self._checkpoints.latest)
            for change in fresh:
                if change.key not in self._asked:
                    self._tell(change)
            self._asked = frozenset(change.key for change in fresh)
        elif not self._unwritable:
            self._unwritable = True
            self._tell_unremembered(seen.at_s)
        if seen.state.result is not None:
            for thread in self._threads.values():
                thread.hurry()
        for owed in book.owed.values():
            for name in owed.webhooks:
                if (name, owed.notice.id) not in self._handed and self._threads[name].take(owed.notice):
                    self._handed.add((name, owed.notice.id))
        self._handed &= {(name, owed.notice.id) for owed in book.owed.values() for name in owed.webhooks}

    def webhooks(self) -> tuple[WebhookStatus, ...]:
        """Return how each webhook is doing."""
        book = self._book()
        return tuple(
            WebhookStatus(each.name, book.waiting_for(each.name), self._troubles.get(each.name, ""))
            for each in self._notify.webhooks
        )

    def _say_what_is_left(self) -> None:
        for owed in self._book().owed.values():
            _log.warning("not taken yet by %s: %s", ", ".join(owed.webhooks), owed.notice.text)

    def _tell_unremembered(self, now: float) -> None:
        notice = journal_notice(now)
        for each in self._notify.webhooks:
            if notice.kind in each.events:
                self._threads[each.name].take(notice)

    def _take(self, told: Told) -> None:
        """Note what came of a try: in the log when a webhook fails first and when it is well again."""
        before = self._troubles.pop(told.webhook, "")
        if told.trouble:
            self._troubles[told.webhook] = told.trouble
            if not before:
                _log.error("webhook %s: %s; it is tried again", told.webhook, told.trouble)
        elif before:
            _log.info("webhook %s takes notices again", told.webhook)
        if not told.settled:
            return
        if told.trouble:
            _log.error("webhook %s did not take notice %s, which is too old now", told.webhook, told.id)
        if not told.id.startswith(JOURNAL):
            self._tell(NoticeSettled(told.id, told.webhook, delivered=not told.trouble))
