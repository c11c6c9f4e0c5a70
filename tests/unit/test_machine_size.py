"""The recovery machine stays small enough to be read: its packages, and the way of one plain kill through them."""

import ast
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import pytest

import midstep.controller

from ..fakes.cluster import FakeCluster

CONTROLLER = Path(midstep.controller.__file__).parent
PACKAGES = ("state", "changes", "recovery", "handlers")
MOST_FILES, MOST_LINES, MOST_LEVELS, MOST_FUNCTIONS = 10, 1800, 6, 40


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_of_the_machine_can_be_read_in_one_go(package: str) -> None:
    """At most ten files, 1,800 lines, and six files that stand on each other."""
    files = [path for path in (CONTROLLER / package).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MOST_FILES
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES
    below = {path.stem: _siblings(path) & {other.stem for other in files} for path in files}

    @cache
    def level(name: str) -> int:
        return 1 + max((level(other) for other in below[name]), default=0)

    assert max(map(level, below)) <= MOST_LEVELS


def test_one_plain_kill_is_decided_in_few_functions(cluster: FakeCluster) -> None:
    """From the exit of a process to the commands for all: those that handle, decide and change, without the ladder.

    What they ask of the state, and how the ladder weighs its rungs, is not counted: these are short answers.
    """
    event, called = cluster.exited(1), set[CodeType]()

    def count(frame: FrameType, kind: str, _: object) -> None:
        if kind == "call":
            called.add(frame.f_code)

    sys.setprofile(count)
    try:
        actions = cluster.machine.handle(event, cluster.now)
    finally:
        sys.setprofile(None)
    names = {
        f"{Path(code.co_filename).stem}.{code.co_name}"
        for code in called
        if Path(code.co_filename).is_relative_to(CONTROLLER)
        and Path(code.co_filename).parent.name in PACKAGES[1:]
        and not code.co_name.startswith("<")
    }
    assert actions
    assert "decision.decide" in names
    assert len(names) <= MOST_FUNCTIONS, sorted(names)


def _siblings(path: Path) -> set[str]:
    """Return the modules of its own package that a file imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    own = [node for node in nodes if node.level == 1]
    return {node.module for node in own if node.module} | {
        alias.name for node in own if not node.module for alias in node.names
    }
