"""The logs of a training process: what it prints, and, in a second file, what is for debugging.

The first file is shown at the terminal of `midstep run` as it grows, so it holds what the script prints and nothing of
a recovery that went well.

A machine that loses its power keeps its logs to itself. So its agent tells the end of them while it lives, and the
report shows that end when the node is lost.
"""

import contextlib
import os
import stat
import sys
from pathlib import Path

from .bounds import LONGEST_WORDS, MOST_OF_NODES_WORDS, MOST_WITH_WORDS
from .reports import NodeWords

_DIRECTORY = "logs"
LAST_BYTES = 2000
LAST_LINES = 20
_SHOWN = "_midstep_shown"  # of an exception: its traceback is in the output
LONGEST_OUTPUT = 8000  # characters, of all that a node said
AGENT = "agent"


def output_log(job_directory: str, rank: int, incarnation: int) -> Path:
    """Return the file that holds what a process has printed."""
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.{incarnation}.log"


def debug_log(job_directory: str, rank: int, incarnation: int) -> Path:
    """Return the file with tracebacks of interrupted collectives, and with the interpreter's dump after a crash."""
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.{incarnation}.debug.log"


def error_file(job_directory: str, rank: int, incarnation: int) -> Path:
    """Return the file in which torch's `@record` writes what the script raised, as JSON."""
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.{incarnation}.error.json"


def built_log(job_directory: str, rank: int, spare: str = "") -> Path:
    """Return the file that holds what processes print that are built ahead for a rank, up to the train function.

    `spare`: the node on which they are, where that is not the rank's own.
    """
    return Path(job_directory) / _DIRECTORY / f"rank-{rank}.built{'.' * bool(spare)}{spare}.log"


def last_words(log: Path, most_bytes: int = LAST_BYTES) -> str:
    """Return the last lines of a log; the empty string for what is no file, or cannot be read. It does not wait."""
    return "\n".join(end_of_log(log, most_bytes).splitlines()[-LAST_LINES:])


def end_of_log(log: Path, most_bytes: int) -> str:
    """Return the end of a log from the beginning of a line on, as `last_words` does, but all that so many bytes hold.

    Of a line that is longer, its end.
    """
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        begin = max(0, status.st_size - most_bytes)
        text = os.pread(descriptor, most_bytes, begin).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    _, cut, rest = text.partition("\n") if begin else ("", "", text)
    return rest if cut or not begin else text


def show_once(error: BaseException) -> None:
    """Print the traceback of an exception as an interpreter does at its end, unless that has been done."""
    if getattr(error, _SHOWN, False):
        return
    with contextlib.suppress(AttributeError, TypeError):  # a class may refuse attributes: then it is shown twice
        setattr(error, _SHOWN, True)
    sys.excepthook(type(error), error, error.__traceback__)


def room_of_each(ranks: int) -> int:
    """Return how many bytes each of so many ranks may have told, and the agent at least as many."""
    return min(LONGEST_WORDS, MOST_OF_NODES_WORDS // (1 + min(ranks, MOST_WITH_WORDS)))


def end_of(text: str, most_bytes: int) -> str:
    """Return the end of a text, of so many bytes at most, as a message can carry it."""
    return text.encode("utf-8", "replace")[-most_bytes:].decode("utf-8", "ignore")


def size_of(words: NodeWords) -> int:
    """Return how many bytes of text a node says."""
    return sum(len(text.encode("utf-8", "replace")) for text in (words.agent, *(each.text for each in words.ranks)))


def in_lines(words: NodeWords) -> str:
    """Return what a node said: each line with who has printed it, the ranks in their order and then the agent."""
    speakers = [(f"rank {each.rank}", each.text) for each in words.ranks if each.text.strip()]
    speakers += [(AGENT, words.agent)] if words.agent.strip() else []
    room = LONGEST_OUTPUT // max(1, len(speakers))
    return "\n".join(line for who, text in speakers for line in _last_lines(f"[{who}] ", text, room))


def _last_lines(prefix: str, text: str, room: int) -> list[str]:
    """Return the last lines that fit, and of a last one that does not its end."""
    lines: list[str] = []
    for line in reversed([line for line in text.splitlines() if line.strip()]):
        said = prefix + (line if lines else line[-max(1, room - len(prefix) - 1) :])
        room -= len(said) + 1
        if room < 0 and lines:
            break
        lines.insert(0, said)
    return lines
