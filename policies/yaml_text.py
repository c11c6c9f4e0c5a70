"""Reads files that people write in YAML, policies and code tables alike, with errors that name file, line and key."""

from pathlib import Path
from typing import Any

from ..protocol.errors import PolicyError, YamlError
from ..protocol.plain_yaml import read_yaml
from .reading import Problem

MAX_FILE_BYTES = 1 << 20
MAX_SHOWN = 100  # mistakes of one file


def read_text(path: str | Path) -> str:
    """Return the text of a file. Raises PolicyError when it cannot be read, is not UTF-8, or is too large."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror or error}") from error
    return decoded_text(data, str(path))


def decoded_text(data: bytes, source: str) -> str:
    """Return bytes as text, without a byte order mark; `source` names them in errors. Raises PolicyError."""
    if len(data) > MAX_FILE_BYTES:
        raise PolicyError(f"{source}: larger than {MAX_FILE_BYTES} bytes, which no such file is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PolicyError(f"{source}: byte {error.start} is not UTF-8; save the YAML text as UTF-8") from error


def read_tree(text: str, source: str) -> Any:
    """Return the plain values of YAML text; `source` names it in errors. Raises PolicyError."""
    try:
        return read_yaml(text)
    except YamlError as error:
        raise PolicyError(f"{source}: {error}") from error


def refuse(problems: list[Problem], source: str) -> None:
    """Raise PolicyError, a line for each problem, when there is one."""
    refuse_lines([": ".join(filter(None, (problem.key, problem.text))) for problem in problems], source)


def refuse_lines(lines: list[str], source: str) -> None:
    """Raise PolicyError with the lines, each after `source`, when there is one. Of very many, the first are shown."""
    if lines:
        more = [f"{len(lines) - MAX_SHOWN} more mistakes"] if len(lines) > MAX_SHOWN else []
        raise PolicyError("\n".join(f"{source}: {line}" for line in [*lines[:MAX_SHOWN], *more]))
