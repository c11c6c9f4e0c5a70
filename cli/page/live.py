"""Looks at a job while its page is open in a browser, and tells each what has changed.

There is one look at a time and one in a second, however many watch, and none while there are none. A viewer that is
slow gets the newest of each part and none of the older ones, so that nothing piles up for it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from ...protocol.compat import within
from ...protocol.errors import MidstepError
from .sections import Looked, SectionWriter
from .sentence import Mood, is_over

LOOK_S = 1.0
LOOK_PER_RANK_S = 0.0004  # a status of 10,000 ranks costs its controller some milliseconds: each 5 s then
IN_JOURNAL_S = 5.0  # to read a journal again costs more than to ask a controller
ENDED_S = 15.0  # a job that has ended may be resumed
MOST_VIEWERS = 32
SILENCE_S = 10.0  # after which a viewer is sent a comment, which tells both ends whether the other is there
COMMENT = b": still here\n\n"


class Viewer:
    """A page that is open somewhere: the newest of each part that it has not been sent yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self._ended = False

    def end(self) -> None:
        """Have its stream end."""
        self._ended = True
        self._news.set()

    def offer(self, parts: dict[str, bytes]) -> None:
        """Put parts aside for it, in the place of older ones."""
        if parts:
            self._waiting.update(parts)
            self._news.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until it is ended."""
        while not self._ended:
            with contextlib.suppress(TimeoutError):
                await within(SILENCE_S, self._news.wait())
            self._news.clear()
            parts, self._waiting = self._waiting, {}
            yield b"".join(event(name, data) for name, data in parts.items()) or COMMENT


def event(name: str, data: bytes) -> bytes:
    """Return a server-sent event. `data`: one line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class LiveJob:
    """The job that is looked at, and all who watch it."""

    def __init__(self, look: Callable[[], Looked]) -> None:
        """`look` is called in a thread, and raises MidstepError when nothing can be read."""
        self._look = look
        self._writer = SectionWriter()
        self._viewers: set[Viewer] = set()
        self._parts: dict[str, bytes] = {}
        self._fresh_until_s = 0.0
        self._wanted = asyncio.Event()
        self.looked: Looked | None = None

    @contextlib.contextmanager
    def viewer(self) -> Iterator[Viewer | None]:
        """Give a new viewer what is known, and hear of changes while it is open; None: there are too many."""
        if len(self._viewers) >= MOST_VIEWERS:
            yield None
            return
        viewer = Viewer()
        self._viewers.add(viewer)
        if time.monotonic() < self._fresh_until_s:
            viewer.offer(self._parts)
        else:
            self._parts = {}  # the next look tells everything to every viewer
        self._wanted.set()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    @property
    def is_watched(self) -> bool:
        """Tell whether it is open in a browser."""
        return bool(self._viewers)

    def end(self) -> None:
        """End the streams of all viewers."""
        for viewer in self._viewers:
            viewer.end()

    async def run(self) -> None:
        """Look while there are viewers, until cancelled."""
        while True:
            if not self._viewers:
                self._wanted.clear()
                await self._wanted.wait()
            began_s = time.monotonic()
            pause_s = await self._look_once()
            self._fresh_until_s = time.monotonic() + pause_s
            await asyncio.sleep(max(0.0, began_s + pause_s - time.monotonic()))

    async def _look_once(self) -> float:
        """Look, tell what has changed, and return the seconds until the next look."""
        try:
            looked = await asyncio.to_thread(self._look)
            parts = await asyncio.to_thread(self._writer.write, looked)
        except MidstepError as error:
            self._tell({"head": _unknown(str(error))})
            return IN_JOURNAL_S
        self.looked = looked
        self._tell(parts)
        if is_over(looked.status, looked.whole):
            return ENDED_S
        return pause_s(len(looked.status.ranks), in_journal=bool(looked.note))

    def _tell(self, parts: dict[str, bytes]) -> None:
        changed = {name: data for name, data in parts.items() if self._parts.get(name) != data}
        self._parts = {**self._parts, **parts}
        for viewer in self._viewers:
            viewer.offer(changed)


def pause_s(ranks: int, *, in_journal: bool) -> float:
    """Return the seconds between two looks."""
    return max(LOOK_S + LOOK_PER_RANK_S * ranks, IN_JOURNAL_S if in_journal else 0.0)


def _unknown(why: str) -> bytes:
    """Return the head of a page of a job that nothing is known of now."""
    said = {"mood": str(Mood.ASKS), "headline": "Nothing can be read of the job now", "figures": "", "asks": [why]}
    return msgspec.json.encode({**said, "live": False, "note": why})
