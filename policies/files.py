"""Reads and writes policy files. The only part of the policies that touches a file; nothing here decides.

YAML is read by pyyaml's safe loader, made stricter: a key that stands twice in a mapping is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ..protocol.errors import PolicyError
from .reading import Problem, problems_of
from .rules import broken_rules
from .schema import Policy

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


def load_policy(path: str | Path) -> Policy:
    """Read the policy at `path`. Raises PolicyError, every mistake on its own line, when it is not one."""
    return parse_policy(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """Read the YAML text at `path`. Raises PolicyError when it cannot be read, is too large or not UTF-8."""
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


def parse_policy(text: str, source: str) -> Policy:
    """Make a policy of YAML text; `source` names it in errors. An empty text is the default policy.

    Raises PolicyError: one line for each mistake, with the path of its key, what was found and what is
    allowed.
    """
    tree = _tree(text, source)
    if tree is None:
        return Policy()
    _refuse(problems_of(tree), source)
    try:
        policy = msgspec.convert(tree, Policy)
    except msgspec.ValidationError as error:
        raise PolicyError(f"{source}: {error}") from error
    _refuse(broken_rules(policy), source)
    return policy


def render(policy: Policy) -> str:
    """Return `policy` as YAML text with every key; `parse_policy` makes the same policy of it."""
    tree = msgspec.to_builtins(policy)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


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


def _tree(text: str, source: str) -> object:
    with understandable(source):
        return yaml.load(text, Loader=_StrictLoader)


def _refuse(problems: list[Problem], source: str) -> None:
    if problems:
        lines = [": ".join(filter(None, (source, problem.key, problem.text))) for problem in problems]
        raise PolicyError("\n".join(lines))
