"""Regular expressions for lines of a log: which of them take a bounded time for any line. Pure.

An agent matches lines of its ranks beside heartbeats and orders, and a match cannot be broken off. Some expressions
take longer than the age of the universe on a line of forty characters. So it is counted here, before a job starts, in
how many ways an expression can be tried on the longest line that is looked at; what takes too many is refused.

What can be tried in many ways are repetitions. One that may give back what it has taken (`.*` in `a.*b.*c`) multiplies
the ways of all that follows it. One behind which nothing can stand that it would take itself (`\\d+ `) does not.
"""

import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

LONGEST_LINE = 400  # characters; of a longer one that many are looked at
LONGEST_PATTERN = 200
MOST_TRIES = 1e9  # some milliseconds to tenths of a second on the worst line
_parser: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
# Beside ASCII a space, a letter, a digit, a dash, and a letter without cases.
_PROBES = [*map(chr, range(128)), "\u00a0", "\u00e9", "\u0663", "\u2014", "\u4e00"]
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}
_ONE = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN"})  # each takes one character
_Node = tuple[Any, Any]
_END: _Node = ("END", None)
_ANYTHING: _Node = ("ANYTHING", None)


class _Refused(Exception):
    """The expression has something in it that is not allowed."""


def mistakes_in(pattern: str) -> list[str]:
    """Return what is wrong with an expression, empty when it can be used."""
    if not 0 < len(pattern) <= LONGEST_PATTERN:
        return [f"has {len(pattern)} characters; allowed: 1 to {LONGEST_PATTERN}"]
    try:
        fits_nothing = re.compile(pattern).search("") is not None
        nodes = list(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        return [f"is no regular expression: {error}"]
    if fits_nothing:
        return ["fits an empty line, and so every one"]
    try:
        tries, ends = _counted(nodes, _END, LONGEST_LINE)
    except _Refused as refused:
        return [str(refused)]
    if tries + ends > MOST_TRIES:
        return [
            "can be tried in too many ways on one line: write what stands between in place of .* or .+, or with fewer "
            r"repetitions, as in \d{1,6} or [^ ]* followed by a space"
        ]
    return []


def _counted(nodes: Sequence[_Node], follows: _Node, arrivals: float) -> tuple[float, float]:
    """Return how often anything in a sequence is tried, and how often what follows it, if it is begun so often."""
    tries = 0.0
    for place, node in enumerate(nodes):
        behind = nodes[place + 1] if place + 1 < len(nodes) else follows
        spent, arrivals = _counted_one(node, behind, arrivals)
        tries += spent
    return tries, arrivals


def _counted_one(node: _Node, behind: _Node, arrivals: float) -> tuple[float, float]:
    name, value = str(node[0]), node[1]
    if name in _ONE or name == "AT":
        return 0.0, arrivals  # the first of a row of them ends most tries, and they were counted with what is before it
    if name == "SUBPATTERN":
        return _counted(value[3], behind, arrivals)
    if name == "BRANCH":
        found = [_counted(branch, behind, arrivals) for branch in value[1]]
        return sum(tries for tries, _ in found), sum(after for _, after in found)
    if name in {"MAX_REPEAT", "MIN_REPEAT"}:
        least, most, body = int(value[0]), min(int(value[1]), LONGEST_LINE), list(value[2])
        if len(body) == 1 and str(body[0][0]) in _ONE:
            ways = max(1, most - least + 1)
            gives_back = behind is not _END and _overlap(body[0], behind)
            return arrivals * max(1, most), arrivals * (ways if gives_back else 1)
        if most <= 1:
            tries, after = _counted(body, _ANYTHING, arrivals)
            return tries + arrivals, after + arrivals
        raise _Refused(
            "repeats a group; allowed are repeated characters and sets of them, and a group with ? behind it"
        )
    raise _Refused(f"has {_NAMES.get(name, name.lower())} in it, which is not allowed for lines")


_NAMES = {
    "GROUPREF": "a reference back to a group",
    "GROUPREF_EXISTS": "a condition on a group",
    "ASSERT": "a look ahead or behind",
    "ASSERT_NOT": "a look ahead or behind",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


def _overlap(body: _Node, behind: _Node) -> bool:
    """Say whether a character that is repeated may also be what has to follow; True where that is not known."""
    if str(behind[0]) in {"MAX_REPEAT", "MIN_REPEAT"} and behind[1][0] > 0:
        behind = behind[1][2][0]  # it has to come once at least
    if str(behind[0]) not in _ONE or _reaches_far(body) or _reaches_far(behind):
        return True
    return any(_takes(body, char) and _takes(behind, char) for char in _PROBES)


def _reaches_far(node: _Node) -> bool:
    """Say whether it names characters that are not among those which are tried."""
    name, value = str(node[0]), node[1]
    if name == "IN":
        return any(_reaches_far(each) for each in value)
    if name == "RANGE":
        return bool(value[1] > 127)
    return name in {"LITERAL", "NOT_LITERAL"} and bool(value > 127)


def _takes(node: _Node, char: str) -> bool:
    """Say whether it takes a character, in upper or lower case."""
    return _takes_as_it_is(node, char) or _takes_as_it_is(node, char.swapcase())


def _takes_as_it_is(node: _Node, char: str) -> bool:
    name, value = str(node[0]), node[1]
    if name == "LITERAL":
        return char == chr(value)
    if name == "NOT_LITERAL":
        return char != chr(value)
    if name == "ANY":
        return char != "\n"
    if name == "RANGE":
        return bool(value[0] <= ord(char[0]) <= value[1])
    if name == "CATEGORY":
        category = str(value)
        asked = _CATEGORIES.get(category.replace("_NOT_", "_"))
        return asked is None or bool(asked(char)) != ("_NOT_" in category)
    items = [each for each in value if str(each[0]) != "NEGATE"]
    return any(_takes_as_it_is(each, char) for each in items) == (len(items) == len(value))
