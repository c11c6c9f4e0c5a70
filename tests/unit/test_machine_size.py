"""The recovery machine stays small enough to be read: its files, its lines, and the way of one plain kill through them.

Everything counts that the machine and the loop of a rank import, directly or not, from `controller/`, `policies/` and
`processor/`; the nouns of the messages that they exchange (`protocol/`) are counted apart. Of a kill every function
with a name counts that runs in the product, whatever its file.
"""

import ast
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import midstep
from midstep.testing.fake_cluster import FakeCluster

ROOT = Path(midstep.__file__).parent
CORE = ("controller/recovery/machine.py", "processor/rank_loop.py")
NOUNS = "protocol"
# 45 of these lines are copies in host memory: 28 of the repair plan, 15 of the policy, 2 of the step order; 13 nouns.
# Those on a second node are 50 more, and the file of who keeps copies for whom, which is mostly older.
# The controls of operators are a file and 373 lines (a topic, kinds of planned change), and a file and 290 of nouns: 23
# and 50 of them are faults on purpose and orders about the lead, which have a record, too.
# Votes of the ranks are 101: who was wrong too often (69), its policy and records; 16 nouns.
# Audits are 6 more of the policy, and of the same topic; 9 nouns, with what flips can be.
# Rules on reported values: 225 lines (of decisions, 35 of the plan, 20 of the policy), a file and 146 of nouns.
# Answers of ranks that came together, handled at once: 9; a rank that is about to leave what it has waited for: 3;
# a node that comes when the job is over: 8.
# The words of ranks and the orders to them, in one message of their node: 70 of nouns.
# A policy that changes while the job runs: what may change (92 lines), and 50 more.
# The format of checkpoints: 2 lines of the policy, 8 of nouns. Asynchronous ones: 2 lines of the policy, 2 of nouns.
# Slow nodes: 72 lines (37 of what is done about one, its policy and records); 15 of nouns, the times of a rank's steps.
# A refusal that ends the job, and the depth that a node chooses: 4 of nouns.
# A limit of stalls that is learned (its file is none of the core): 14 lines of the policy, 10 of blame, 6 of nouns.
# Rules on lines of logs: 8 lines of their topic, 175 of nouns (a file of 145, which patterns are allowed).
# Actions of ranks that an operator holds: 80 lines of the topic of controls, 69 of nouns. A node that was to go and has
# another agent now: 8.
# Devices that are isolated for the next jobs: 14 lines (what was raised by the job itself, why a node at a start is not
# used, the policy's key); files and names are none of the core.
# An event of which two detectors tell, or that two rules count: 9.
# Clocks that were read apart, a first step that is told twice, a node that was given back and joins: 14.
# How long the first step after a recovery may take, for agents as well: 7 of nouns, 4 less here.
# Which proxies speak for how many nodes, in the status: 8 of nouns.
# All processes that a node is to start, and all that it has started, in one message each: 24 of nouns.
MOST_FILES, MOST_LINES, MOST_LEVELS = 29, 9534, 9
MOST_NOUN_FILES, MOST_NOUN_LINES = 14, 2944
MOST_FILES_OF_A_KILL, MOST_FUNCTIONS_OF_A_KILL = 16, 110


def test_the_core_can_be_read_in_an_afternoon() -> None:
    """The machine, what it decides with, and the loop of a rank; each file stands on those below it only."""
    files = [path for path in _core() if path.parts[0] != NOUNS]
    assert len(files) <= MOST_FILES, sorted(map(str, files))
    assert sum(map(_lines, files)) <= MOST_LINES
    assert max(map(_level, files)) <= MOST_LEVELS
    nouns = _core() - {*files}
    assert len(nouns) <= MOST_NOUN_FILES
    assert sum(map(_lines, nouns)) <= MOST_NOUN_LINES


def test_one_plain_kill_is_decided_in_few_functions(cluster: FakeCluster) -> None:
    """From the exit of a process to the commands for all, with the ladder and what is asked of the state."""
    event, called = cluster.exited(1), set[CodeType]()

    def count(frame: FrameType, kind: str, _: object) -> None:
        if kind == "call":
            called.add(frame.f_code)

    sys.setprofile(count)
    try:
        actions = cluster.machine.handle(event, cluster.now)
    finally:
        sys.setprofile(None)
    assert actions
    product = [code for code in called if Path(code.co_filename).is_relative_to(ROOT / "controller")]
    product += [code for code in called if Path(code.co_filename).is_relative_to(ROOT / "policies")]
    product += [code for code in called if Path(code.co_filename).is_relative_to(ROOT / NOUNS)]
    names = {(code.co_filename, code.co_firstlineno) for code in product if not code.co_name.startswith("<")}
    assert len(names) <= MOST_FUNCTIONS_OF_A_KILL, sorted(names)
    assert len({file for file, _ in names}) <= MOST_FILES_OF_A_KILL


def _lines(path: Path) -> int:
    return len((ROOT / path).read_text().splitlines())


@cache
def _core() -> frozenset[Path]:
    """Return the files that the core consists of."""
    found, waiting = set[Path](), [Path(name) for name in CORE]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path)
    return frozenset(found)


@cache
def _level(path: Path) -> int:
    """Return how many files stand on each other up to this one; a circle would be endless."""
    return 1 + max((_level(each) for each in _imported(path) if each.parts[0] != NOUNS), default=0)


@cache
def _imported(path: Path) -> frozenset[Path]:
    """Return the product's modules that a module names in its imports."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        package = path.parents[node.level - 1]
        module = package / node.module.replace(".", "/") if node.module else package
        names = (
            [module] if node.module and not (ROOT / module).is_dir() else [module / name.name for name in node.names]
        )
        found |= {name.with_suffix(".py") for name in names if (ROOT / name.with_suffix(".py")).exists()}
    return frozenset(found)
