"""YAML text to plain values, strictly, with errors that name file, line and key. For policies and code tables alike.

YAML is read by pyyaml's safe loader, made stricter: a key that stands twice in a mapping is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ..protocol.errors import PolicyError
from .reading import Problem

MAX_FILE_BYTES = 1 << 20


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, with keys that stand once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that the same mapping has already."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key.value}` stands twice in this mapping", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_text(path: str | Path) -> str:
    """Return the text of a file. Raises PolicyError when it cannot be read, is not UTF-8, or is too large."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise PolicyError(f"{path}: larger than {MAX_FILE_BYTES} bytes, which no policy is")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: byte {error.start} is not UTF-8; a policy is YAML text") from error


@contextmanager
def understandable(source: str) -> Iterator[None]:
    """Turn whatever a YAML reader raises into a PolicyError that names `source` and, where known, line and column."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" line {mark.line + 1}, column {mark.column + 1}:"
        raise PolicyError(f"{source}:{where} {error.problem or error}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise PolicyError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise PolicyError(f"{source}: nested too deeply for a policy") from error


def read_tree(text: str, source: str) -> Any:
    """Return the plain values of YAML text; `source` names it in errors. Raises PolicyError."""
    with understandable(source):
        return yaml.load(text, Loader=_StrictLoader)


def refuse(problems: list[Problem], source: str) -> None:
    """Raise PolicyError, a line for each problem, when there is one."""
    if problems:
        lines = [": ".join(filter(None, (source, problem.key, problem.text))) for problem in problems]
        raise PolicyError("\n".join(lines))
