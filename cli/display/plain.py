"""Writes plain lines for commands: texts, JSON and logs, with nothing in them that a terminal would obey.

An output of the launcher may fail, fill up or be closed at any time without harm to the job (`TolerantOutput`).
"""

import contextlib
import errno
import io
import logging
import os
import re
import select
import sys
from io import TextIOWrapper
from json import dumps
from types import TracebackType
from typing import TextIO

import click

from ..views.wording import harmless

_NOT_PLAIN = re.compile(r"[^ -~\n]")
ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
# The output is there, and may take more later; after any other error it is gone.
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_WAIT_MS = 1000


class HarmlessFormatter(logging.Formatter):
    """Formats records so that none can forge another one, or hold an order to the terminal that shows the log."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """Return the line of a record, with further lines of its message indented."""
        record.message = harmless(record.message).replace("\n", "\n    ")
        return super().formatMessage(record)

    def formatException(self, ei: ErrorInfo) -> str:  # noqa: N802 - the name is logging's
        """Return a traceback."""
        return harmless(super().formatException(ei))


def log_to_stderr(level: int, form: str) -> None:
    """Have the log of this process written to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HarmlessFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def echo(text: str, *, err: bool = False) -> None:
    """Print text that may hold what other programs wrote."""
    echo_as_it_is(harmless(text), err=err)


def echo_as_it_is(text: str, *, err: bool = False) -> None:
    """Print text of midstep's own, with what the output's encoding lacks escaped. (click would write UTF-8 there.)"""
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), err=err)


def echo_json(text: str) -> None:
    """Print JSON with every character that is not plain ASCII escaped, which changes nothing about what it says."""
    click.echo(_NOT_PLAIN.sub(lambda found: dumps(found[0])[1:-1], text))


def escape_what_cannot_be_encoded() -> None:
    """Have stdout and stderr escape the characters that their encoding lacks, where they would raise an exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class TolerantOutput:
    """Writes whole lines to one stream. `written_bytes` grows as its reader takes them."""

    def __init__(self, stream: TextIO | None) -> None:
        self.gone = "closed" if stream is None else ""
        self.written_bytes = 0
        self._stream = stream
        self._descriptor = _descriptor_of(stream)
        self._lost_lines = 0
        self._lost_because = ""
        self._torn = False

    def write(self, line: bytes) -> None:
        """Write a line; waits for a reader that is slow. What cannot be written is dropped, and counted when it can."""
        if self.gone:
            return
        try:
            self._say_what_is_lost()
            self._put(line + b"\n")
        except OSError as error:
            if error.errno not in _PASSING:
                self.close(error.strerror or str(error))
                return
            self._lost_lines += 1
            self._lost_because = error.strerror or str(error)
        except Exception as error:  # a stream that is no file, in its own words
            self.close(f"{type(error).__name__}: {error}")

    def close(self, why: str) -> None:
        """Write nothing from now on. The stream stays open: it is not this object's own."""
        self.gone = self.gone or why

    def _say_what_is_lost(self) -> None:
        if self._lost_lines:
            self._put(f"midstep: {self._lost_lines} lines could not be written here: {self._lost_because}\n".encode())
            self._lost_lines = 0

    def _put(self, data: bytes) -> None:
        if self._descriptor is None:
            self._put_text(data)
            return
        left = memoryview(b"\n" + data if self._torn else data)
        whole = len(left)
        while left:
            try:
                taken = os.write(self._descriptor, left)
            except BlockingIOError:  # another process has made it non-blocking for all that share it
                _await_room(self._descriptor)
                continue
            except OSError:
                self._torn = self._torn or len(left) < whole
                raise
            self.written_bytes += taken
            left = left[taken:]
        self._torn = False

    def _put_text(self, data: bytes) -> None:
        assert self._stream is not None
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = data.decode(errors="replace")
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()
        self.written_bytes += len(data)


def hold_standard_descriptors() -> None:
    """Put /dev/null where stdin, stdout or stderr was closed: the next file to be opened would take its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _descriptor_of(stream: TextIO | None) -> int | None:
    with contextlib.suppress(AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return None if stream is None else stream.fileno()
    return None


def _await_room(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(_WAIT_MS)
