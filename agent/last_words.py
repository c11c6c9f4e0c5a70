"""Tells the controller what the ranks here, and this agent, last printed: for the day on which the machine is lost.

It says so when that has changed, at most every few seconds, once, and within bounds. Logs are read in a thread, so
that a file system that hangs holds up neither heartbeats nor orders; no second thread is begun while one reads.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..protocol.bounds import MOST_WITH_WORDS
from ..protocol.rank_logs import LAST_LINES, end_of, last_words, room_of_each
from ..protocol.reports import NodeWords, RankWords
from ..protocol.types import RunningProcess

EVERY_S = 3.0
_LONGEST_LINE = 500

ProcessLog = tuple[RunningProcess, Path]

_log = logging.getLogger(__name__)


class OwnLines(logging.Handler):
    """Keeps the last lines that this process logs."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def text(self) -> str:
        """The lines, the latest at the end."""
        return "\n".join(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the beginning of a record."""
        try:
            first = record.getMessage().partition("\n")[0]
        except Exception:  # as every handler of logging: a bad record ends nobody
            self.handleError(record)
            return
        self._lines.append(f"{record.levelname} {first}"[:_LONGEST_LINE])


class LastWords:
    """Reads and tells in the running loop, from `start` to `close`."""

    def __init__(
        self,
        node: str,
        logs: Callable[[], Sequence[ProcessLog]],
        *,
        post: Callable[[NodeWords], object],
        is_connected: Callable[[], bool],
    ) -> None:
        """`logs`: the processes that run here, with what they print. `post` sends to the controller, once."""
        self._node = node
        self._logs = logs
        self._post = post
        self._is_connected = is_connected
        self._loop = asyncio.get_running_loop()
        self._own = OwnLines()
        self._timer: asyncio.TimerHandle | None = None
        self._reading = False
        self._known: NodeWords | None = None
        self._said: NodeWords | None = None  # to the controller that is there

    def start(self) -> None:
        """Begin. Once."""
        logging.getLogger().addHandler(self._own)
        self._timer = self._loop.call_later(EVERY_S, self._tick)

    def repeat(self) -> None:
        """Tell all of it again: there is a controller that may not have heard it."""
        self._said = None

    def close(self) -> None:
        """Say nothing more. Idempotent."""
        logging.getLogger().removeHandler(self._own)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(EVERY_S, self._tick)
        if not self._is_connected():
            self.repeat()
        elif not self._reading:
            self._reading = True
            reader = threading.Thread(
                target=self._read, args=(self._logs(), self._known), name="last-words", daemon=True
            )
            try:
                reader.start()
            except RuntimeError as error:  # too many threads: without it nothing is missed but words
                self._reading = False
                _log.debug("last words are not read: %s", error)

    def _read(self, logs: Sequence[ProcessLog], before: NodeWords | None) -> None:
        """In a thread."""
        words = words_of(self._node, self._own.text, logs, before)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._tell, words)

    def _tell(self, words: NodeWords) -> None:
        self._reading = False
        self._known = words
        if self._timer is not None and words != self._said and self._is_connected():
            self._said = words
            self._post(words)


def words_of(node: str, own: str, logs: Sequence[ProcessLog], before: NodeWords | None) -> NodeWords:
    """Return what is to be told of a node: the ends of these logs, and of what the agent itself has logged.

    Of very many ranks those that have printed last. A process whose log has nothing any more keeps what it said
    `before`: the log may have been cut.
    """
    chosen = sorted(_latest(logs), key=lambda each: each[0].rank)
    room = room_of_each(len(chosen))
    said = {(each.rank, each.incarnation): each.text for each in (before.ranks if before is not None else ())}
    ranks = []
    for process, log in chosen:
        known = said.get((process.rank, process.incarnation), "")
        text = end_of(last_words(log, room), room) or end_of(known, room)
        if text:
            ranks.append(RankWords(process.rank, process.incarnation, text))
    return NodeWords(node, end_of(own, room), tuple(ranks))


def _latest(logs: Sequence[ProcessLog]) -> Iterable[ProcessLog]:
    if len(logs) <= MOST_WITH_WORDS:
        return logs
    return sorted(logs, key=lambda each: _changed_s(each[1]))[-MOST_WITH_WORDS:]


def _changed_s(log: Path) -> float:
    try:
        return log.stat().st_mtime
    except OSError:
        return 0.0
