"""Holds the lines that the ranks of a node print against the policy's rules, beside the training.

What a rank prints goes into a file, which nothing stands in front of: a rank is never slowed by who reads it. The ends
of these files are read four times a second, in a thread, so that neither a file system that hangs nor many lines hold
up heartbeats and orders. Rules on lines take a bounded time (`protocol/line_patterns.py`), and of very many lines so
many are looked at as fit into a share of the time; what is passed over then is counted, and logged.

The rest of the lines of a process that ends is read before its end is reported: what it said last is often the reason.
That is done in a thread, too, and the report waits for it for `END_S` at most.
"""

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ..protocol import types as t
from ..protocol.line_patterns import LONGEST_LINE
from ..protocol.messages import FaultReported
from ..protocol.rules import JobRule, RuleAction

EVERY_S = 0.25
SHARE_S = 0.025  # of each round: a tenth of one core at most
READ_BYTES = 64 * 1024
BEHIND_BYTES = 1024 * 1024  # of a log that has grown faster than it is read, the latest so many
LAST_BYTES = 256 * 1024  # of a process that has ended
LAST_S = 0.1  # for reading it, and for the thread that may be reading the log already
END_S = 2.5 * LAST_S  # after which the end of a process is reported without its last words
MOST_ENDS = 16  # processes whose last words are being read; more hang in their file system
LINES_AT_ONCE = 16
AGAIN_S = 60.0  # a rule that reports is reported again after this time
_log = logging.getLogger(__name__)


class LineFound(msgspec.Struct, frozen=True):
    """A line that a rule is about."""

    rule: JobRule
    line: str


class Lines:
    """Cuts what is read of a log into lines. Pure."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_long = False  # the beginning of the present line was taken already

    def take(self, data: bytes) -> list[str]:
        """Return the lines that end in `data`, and one that is longer than any that is looked at, once."""
        *ended, self._rest = re.split(rb"[\r\n]", self._rest + data)
        whole = ended[1:] if self._is_long and ended else ended
        self._is_long = self._is_long and not ended
        most = 4 * LONGEST_LINE  # bytes
        if len(self._rest) > most:
            whole = whole if self._is_long else [*whole, self._rest]
            self._rest, self._is_long = b"", True
        return [line[:most].decode("utf-8", "replace")[:LONGEST_LINE] for line in whole if line]

    def end(self) -> list[str]:
        """Return the last line, which has no end."""
        return [] if self._is_long else self.take(b"\n")


class Patterns:
    """The rules on lines. Pure."""

    def __init__(self, rules: Iterable[JobRule]) -> None:
        self._patterns = [(rule, re.compile(rule.line)) for rule in rules if rule.line is not None]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def broken_by(self, line: str) -> list[LineFound]:
        """Return the rules that a line breaks."""
        return [LineFound(rule, line) for rule, pattern in self._patterns if pattern.search(line)]


class LinesReported:
    """Remember when each rule was reported of a process: not each line of many is a report. Pure."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, float]] = {}

    def is_news(self, rule: JobRule, generation: int, now: float) -> bool:
        """Say whether a line is to be reported now: after a while, or what acts in each generation."""
        before = self._told.get(rule.name)
        acts = rule.then is not RuleAction.REPORT
        if before is not None and now - before[1] < AGAIN_S and not (acts and generation != before[0]):
            return False
        self._told[rule.name] = generation, now
        return True


class FollowedLog:
    """One process's log, from where it stood when the process began. Read by one thread at a time."""

    def __init__(self, path: Path, begin: int, tell: Callable[[LineFound], None]) -> None:
        """`tell` is called in the loop with the first line of those read at once that breaks a rule, for each rule."""
        self._path, self._at, self.tell = path, begin, tell
        self._lines = Lines()
        self.passed_over = 0  # bytes
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return self._path.name

    def read(self, patterns: Patterns, until_s: float, *, ended: bool = False) -> list[LineFound]:
        """Return the rules that new lines break, up to a time of the monotonic clock. It raises nothing.

        `ended`: nothing more will come.
        """
        found: dict[str, LineFound] = {}
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            self._keep_up(os.fstat(descriptor).st_size, LAST_BYTES if ended else BEHIND_BYTES)
            while (data := os.pread(descriptor, READ_BYTES, self._at)) and time.monotonic() <= until_s:
                self._at += len(data)
                self._look(self._lines.take(data), patterns, until_s, found)
        except OSError as error:
            _log.debug("%s: %s", self._path, error)
        finally:
            os.close(descriptor)
        if ended:
            self._look(self._lines.end(), patterns, until_s, found)
        return list(found.values())

    def _look(self, lines: Sequence[str], patterns: Patterns, until_s: float, found: dict[str, LineFound]) -> None:
        for number, line in enumerate(lines):
            for each in patterns.broken_by(line):
                found.setdefault(each.rule.name, each)
            if number % LINES_AT_ONCE == LINES_AT_ONCE - 1 and time.monotonic() > until_s:
                self.passed_over += sum(len(each) + 1 for each in lines[number + 1 :])
                return

    def _keep_up(self, size: int, most: int) -> None:
        """Begin again where a log was cut, and pass over what is too much."""
        if size < self._at:
            self._at, self._lines = 0, Lines()
        if size - self._at > most:
            self.passed_over += size - self._at - most
            self._at, self._lines = size - most, Lines()


class _End:
    """The end of a process, which is reported once."""

    def __init__(self, log: FollowedLog, words: Callable[[], str], then: Callable[[str], None]) -> None:
        self.log, self.words = log, words
        self.timer: asyncio.TimerHandle | None = None
        self._then: Callable[[str], None] | None = then

    def report(self, words: str) -> None:
        """Report it, if that was not done. In the loop."""
        then, self._then = self._then, None
        if self.timer is not None:
            self.timer.cancel()
        if then is not None:
            then(words)


class LogRules:
    """Looks in a thread at the logs of the processes of a node, from `begin` to `end` of each."""

    def __init__(self, node: str, post: Callable[[FaultReported], None]) -> None:
        """`post` sends a report to the controller."""
        self._node, self._post = node, post
        self._loop = asyncio.get_running_loop()
        self._patterns = Patterns(())
        self._logs: dict[FollowedLog, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reading = False
        self._ends = 0  # threads that read what a process has said last
        self._first = 0  # of the logs, in the next round: none is starved by another that grows

    def start(self, rules: Sequence[JobRule]) -> None:
        """Go by these rules from now on. Without any on lines nothing is read. Once."""
        self._patterns = Patterns(rules)
        if self._patterns:
            self._timer = self._loop.call_later(EVERY_S, self._tick)

    def begin(
        self, process: t.RunningProcess, clock: Callable[[], t.RankProgress | None], path: Path, begin: int
    ) -> FollowedLog:
        """Follow the log of a process from byte `begin` on. `clock` reads its step clock."""
        told = LinesReported()
        log = FollowedLog(path, begin, lambda found: self._line_found(process, clock(), found, told))
        self._logs[log] = None
        return log

    def forget(self, log: FollowedLog | None) -> None:
        """Follow the log of a process no more. None: of one that was never followed."""
        if log is not None:
            self._logs.pop(log, None)

    def end(self, log: FollowedLog, words: Callable[[], str], then: Callable[[str], None]) -> None:
        """Follow the log of a process no more; tell of what it has said last, then call `then` with its last words.

        `words` reads them, in a thread. `then` is called in the loop, after `END_S` at the latest, with nothing then.
        """
        self.forget(log)
        end = _End(log, words, then)
        reader = threading.Thread(target=self._read_end, args=(end, self._patterns), name="last-words", daemon=True)
        try:
            if self._ends >= MOST_ENDS:
                raise RuntimeError(f"{self._ends} logs are being read, and none has ended")
            reader.start()
        except RuntimeError as error:
            _log.warning("%s: what was printed last is not read: %s", log, error)
            then("")
            return
        self._ends += 1
        end.timer = self._loop.call_later(END_S, self._late, end)

    def close(self) -> None:
        """Look at nothing more. Idempotent."""
        self._patterns = Patterns(())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(EVERY_S, self._tick)
        if self._reading or not self._logs:
            return
        logs = list(self._logs)
        self._first = (self._first + 1) % len(logs)
        self._reading = True
        reader = threading.Thread(
            target=self._read, args=(logs[self._first :] + logs[: self._first],), name="log-rules", daemon=True
        )
        try:
            reader.start()
        except RuntimeError as error:  # too many threads: the next round reads it
            self._reading = False
            _log.debug("logs are not read: %s", error)

    def _read(self, logs: Sequence[FollowedLog]) -> None:
        """Read the logs once. Runs in a thread."""
        found: list[tuple[FollowedLog, LineFound]] = []
        until_s = time.monotonic() + SHARE_S
        for log in logs:
            with log.lock:
                passed_over = log.passed_over
                found += [(log, each) for each in log.read(self._patterns, until_s)]
                if log.passed_over > passed_over:
                    _log.warning("%s grows faster than rules look at it: %d bytes passed over", log, log.passed_over)
            if time.monotonic() > until_s:
                break
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._told, found)

    def _read_end(self, end: "_End", patterns: Patterns) -> None:
        """Read what a process has said last. Runs in a thread."""
        log, found, words = end.log, list[LineFound](), ""
        try:
            if patterns and log.lock.acquire(timeout=LAST_S):
                try:
                    found = log.read(patterns, time.monotonic() + LAST_S, ended=True)
                finally:
                    log.lock.release()
            words = end.words()
        except OSError as error:
            _log.debug("%s: %s", log, error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._end_told, end, found, words)

    def _end_told(self, end: "_End", found: Sequence[LineFound], words: str) -> None:
        self._ends -= 1
        for each in found:  # also where it is late
            end.log.tell(each)
        end.report(words)

    def _late(self, end: "_End") -> None:
        _log.warning("%s: what was printed last is not reported: its file is not read within %g s", end.log, END_S)
        end.report("")

    def _told(self, found: Sequence[tuple[FollowedLog, LineFound]]) -> None:
        self._reading = False
        for log, each in found:
            if self._timer is not None:
                log.tell(each)

    def _line_found(
        self, process: t.RunningProcess, clock: t.RankProgress | None, found: LineFound, told: LinesReported
    ) -> None:
        """Report a line that a rule is about, at the step in which its rank is by now."""
        generation, step = (process.generation, 0) if clock is None else (clock.generation, clock.step)
        if not told.is_news(found.rule, generation, time.monotonic()):
            return
        report = t.FaultReport.of_rank(
            t.FaultKind.RULE,
            f"printed: {''.join(char if char.isprintable() else ' ' for char in found.line)}",
            (process.rank, process.incarnation),
            node=self._node,
            generation=generation,
            seen_by=t.node_address(self._node),
            at_s=time.time(),
        )
        self._post(FaultReported(msgspec.structs.replace(report, code=found.rule.name, trusted_step=step)))
