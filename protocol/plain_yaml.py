"""The only reader of YAML from users and other programs: JSON's types only, and bounded work.

PyYAML's safe loader builds whatever a tag asks for, and raises whatever the builder raises; it reads `1:30` as 90, and
a few lines of aliases as billions of values. Here values are built from the parser's events, without recursion: null,
true and false, numbers, texts, lists and mappings, as YAML 1.2 writes them. Everything else is refused with line and
column.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import yaml

from .errors import YamlError

MAX_DEPTH = 64
MAX_NODES = 200_000  # values and keys of one text: about a second of work
MAX_KEY = 1024  # characters

_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where there is one
_REFUSED = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WORDS: dict[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **{f"{sign}{word}": float(f"{sign}inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SMALL = 16 * 1024  # characters
_LONGEST_NUMBER = 64  # characters
_LARGEST = 2**63 - 1
_MERGE = "<<"


def read_yaml(text: str) -> Any:
    """Return the plain values of one YAML document; None for an empty text.

    A number that is too large for one is a text, as is a date. Raises YamlError with line and column.
    """
    builder = _Builder()
    for event in _events(text):
        builder.take(event)
    return builder.value


def compose_yaml(text: str) -> list[yaml.Node]:
    """Return the documents of a YAML text as PyYAML's nodes, with aliases and merge keys: what manifests have.

    To look values up in them is cheap: what aliases come to is counted first. Raises YamlError with line and column.
    """
    expansion = _Expansion()
    for event in _events(text, with_aliases=True):
        expansion.take(event)
    with _explaining(text):
        return [node for node in yaml.compose_all(text, Loader=_PARSER) if node is not None]


def plain_value(text: str) -> Any:
    """Return what a scalar without quotes stands for."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= _LONGEST_NUMBER:
        if _INTEGER.fullmatch(text):
            number = int(text)
            return number if abs(number) <= _LARGEST else text
        if _FLOAT.fullmatch(text) and abs(value := float(text)) != float("inf"):
            return value
    return text


def _events(text: str, *, with_aliases: bool = False) -> Iterator[yaml.Event]:
    """Yield the events of a text that keeps the limits; several documents and aliases only `with_aliases`."""
    found = _REFUSED.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        column = found.start() - text.rfind("\n", 0, found.start())
        raise YamlError(f"the character {ord(found[0]):#04x} is not allowed in YAML", line, column)
    depth = nodes = documents = 0
    with _explaining(text):
        for event in yaml.parse(text, Loader=_PARSER):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1 and not with_aliases:
                    raise _refused(event, "a second document begins here; only one is allowed")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.NodeEvent):
                nodes += 1
                depth += isinstance(event, yaml.CollectionStartEvent)
                _check_node(event, depth, nodes, with_aliases=with_aliases)
            yield event


@contextmanager
def _explaining(text: str) -> Iterator[None]:
    """Turn whatever PyYAML raises into a YamlError."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        raise _explained(text, error) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise YamlError(" ".join(str(error).split())) from error


def _explained(text: str, error: yaml.MarkedYAMLError) -> YamlError:
    """Return a parser's error. That of the parser in Python says more, and takes too long for a large text.

    The parser in C reads ahead, and has a limit of its own on what is nested.
    """
    try:
        _require_depth(yaml.parse(text[:_SMALL], Loader=yaml.SafeLoader))
    except YamlError as too_deep:
        return too_deep
    except yaml.MarkedYAMLError as better:
        error = better if len(text) <= _SMALL else error
    except (yaml.YAMLError, ValueError, RecursionError):
        pass
    mark = error.problem_mark
    line, column = (0, 0) if mark is None else (mark.line + 1, mark.column + 1)
    return YamlError(" ".join((error.problem or str(error)).split()), line, column)


def _require_depth(events: Iterator[yaml.Event]) -> None:
    """Read to the end; raise YamlError where it is nested too deeply."""
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        _check_depth(event, depth)


def _check_depth(event: yaml.Event, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _refused(event, f"is nested deeper than {MAX_DEPTH} levels")


def _check_node(event: yaml.NodeEvent, depth: int, nodes: int, *, with_aliases: bool) -> None:
    _check_depth(event, depth)
    if nodes > MAX_NODES:
        raise _refused(event, f"more than {MAX_NODES} values and keys")
    if isinstance(event, yaml.AliasEvent):
        if not with_aliases:
            raise _refused(event, f"has YAML aliases (*{str(event.anchor)[:MAX_DEPTH]}); write the value out")
    elif getattr(event, "tag", None) is not None:
        raise _refused(event, "has a YAML tag (a word after !); write the value alone, a text in quotes")
    elif isinstance(event, yaml.ScalarEvent) and event.style == '"' and not _is_unicode(event.value):
        raise _refused(event, "half of a surrogate pair (\\uD800 to \\uDFFF) is no character")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused(event: yaml.Event, problem: str) -> YamlError:
    mark = event.start_mark
    return YamlError(problem) if mark is None else YamlError(problem, mark.line + 1, mark.column + 1)


class _Open(msgspec.Struct):
    """A list or mapping whose end has not come. `key`: of the value that comes next, set if `has_key`."""

    value: Any
    key: Any = None
    has_key: bool = False


class _Builder:
    """Builds values from events, with a stack of its own: nesting costs no recursion."""

    def __init__(self) -> None:
        self.value: Any = None
        self._open: list[_Open] = []

    def take(self, event: yaml.Event) -> None:
        """Add what an event brings."""
        match event:
            case yaml.ScalarEvent():
                plain = event.implicit[0]
                self._add(plain_value(event.value) if plain else event.value, event)
            case yaml.MappingStartEvent():
                self._refuse_as_key(event)
                self._open.append(_Open({}))
            case yaml.SequenceStartEvent():
                self._refuse_as_key(event)
                self._open.append(_Open([]))
            case yaml.CollectionEndEvent():
                self._add(self._open.pop().value, event)

    def _add(self, value: Any, event: yaml.Event) -> None:
        if not self._open:
            self.value = value
            return
        top = self._open[-1]
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.has_key:
            top.value[top.key] = value
            top.has_key = False
        else:
            if isinstance(value, str) and len(value) > MAX_KEY:
                raise _refused(event, f"a key of more than {MAX_KEY} characters")
            if value in top.value:
                raise _refused(event, f"key `{str(value)[:_LONGEST_NUMBER]}` stands twice in this mapping")
            top.key, top.has_key = value, True

    def _refuse_as_key(self, event: yaml.Event) -> None:
        if self._open and isinstance(self._open[-1].value, dict) and not self._open[-1].has_key:
            raise _refused(event, "a list or a mapping is the key of a mapping; use a text")


class _Count(msgspec.Struct):
    """A list or mapping whose end has not come: its values so far, with those that aliases stand for."""

    anchor: str | None
    is_mapping: bool
    merges: bool  # it is, or is in, the value of a merge key
    nodes: int = 1
    is_key: bool = True  # the next value is a key
    merge_key: bool = False  # the last key was one


class _Expansion:
    """Counts what documents come to when each alias is followed.

    What a merge key brings in is looked at once, however often it is there, so it costs no more than all that was read.
    """

    def __init__(self) -> None:
        self._open: list[_Count] = []
        self._sizes: dict[str, int | None] = {}  # of what has an anchor; None: its end has not come
        self._read = 0
        self._total = 0

    def take(self, event: yaml.Event) -> None:
        """Count what an event brings. Raises YamlError when it is too much."""
        self._read += 1
        top = self._open[-1] if self._open else None
        merges = top is not None and (top.merges or (top.is_mapping and not top.is_key and top.merge_key))
        match event:
            case yaml.DocumentStartEvent():
                self._sizes.clear()
            case yaml.AliasEvent():
                size = self._size_of(event)
                self._add(min(size, self._read) if merges else size, event)
            case yaml.ScalarEvent():
                if event.anchor:
                    self._sizes[event.anchor] = 1
                if top is not None and top.is_mapping and top.is_key:
                    top.merge_key = event.implicit[0] and event.value == _MERGE
                    if len(event.value) > MAX_KEY:
                        raise _refused(event, f"a key of more than {MAX_KEY} characters")
                self._add(1, event)
            case yaml.CollectionStartEvent():
                if event.anchor:
                    self._sizes[event.anchor] = None
                self._open.append(_Count(event.anchor, isinstance(event, yaml.MappingStartEvent), merges))
            case yaml.CollectionEndEvent():
                closed = self._open.pop()
                if closed.anchor:
                    self._sizes[closed.anchor] = closed.nodes
                self._add(closed.nodes, event)

    def _size_of(self, event: yaml.AliasEvent) -> int:
        size = self._sizes.get(str(event.anchor))
        if size is None:
            raise _refused(event, f"the alias *{str(event.anchor)[:MAX_DEPTH]} is inside of what it stands for")
        return size

    def _add(self, nodes: int, event: yaml.Event) -> None:
        if self._open:
            self._open[-1].nodes += nodes
            self._open[-1].is_key = not self._open[-1].is_key
            whole = self._open[-1].nodes
        else:
            self._total += nodes
            whole = self._total
        if whole > MAX_NODES:
            raise _refused(event, f"more than {MAX_NODES} values and keys, with what aliases stand for")


class _PlainDumper(yaml.SafeDumper):
    """Writes what `read_yaml` reads as the same values: without aliases, and with quotes around texts like numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write out what is there twice."""
        return True


def _represent_text(dumper: _PlainDumper, text: str) -> yaml.ScalarNode:
    quoted = None if isinstance(plain_value(text), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quoted)


_PlainDumper.add_representer(str, _represent_text)


def write_yaml(tree: Any, *, on_one_line: bool = False) -> str:
    """Return plain values as YAML text, from which `read_yaml` makes the same values."""
    return yaml.dump(
        tree,
        Dumper=_PlainDumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=on_one_line,
        width=1000 if on_one_line else 80,
    )
