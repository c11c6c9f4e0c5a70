"""How the commands write plain lines: texts, JSON, and their logs, with nothing in them that a terminal would obey."""

import logging
import re
import sys
from io import TextIOWrapper
from json import dumps
from types import TracebackType

import click

from ..views.wording import harmless

_NOT_PLAIN = re.compile(r"[^ -~\n]")

ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


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
