"""Kubernetes YAML as fields that know where they stand, so that a mistake, or a comment, can name path and line;
and the mistakes, collected so that all are reported at once.

A file may hold several documents, and lists of them as `kubectl get -o yaml` prints. Values are looked up, not built:
what is not asked for costs nothing, however often anchors repeat it.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from ...protocol.errors import PolicyError, YamlError
from ...protocol.plain_yaml import compose_yaml
from ...protocol.wording import one_line
from ..yaml_text import MAX_FILE_BYTES

_MERGE = "tag:yaml.org,2002:merge"
_STRING = "tag:yaml.org,2002:str"
_INTEGER = "tag:yaml.org,2002:int"
_NULL = "tag:yaml.org,2002:null"
_SHOWN = 64
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Field:
    """A value in a document: where it stands, and what is below it. Lines count from 1."""

    path: str
    node: yaml.Node

    @property
    def line(self) -> int:
        """The line on which the value begins."""
        return self.node.start_mark.line + 1

    @property
    def is_mapping(self) -> bool:
        """True if there are keys below."""
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_null(self) -> bool:
        """True if the key stands there without a value."""
        return self.node.tag == _NULL

    @property
    def text(self) -> str | None:
        """The value, if YAML reads it as a text; an unquoted `10` or `on` is none."""
        return self.node.value if isinstance(self.node, yaml.ScalarNode) and self.node.tag == _STRING else None

    @property
    def number(self) -> int | None:
        """The value, if every reader of YAML takes it for the same whole number: 010 is 8 to some, and 10 to others."""
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag != _INTEGER:
            return None
        return int(self.node.value) if _NUMBER.fullmatch(self.node.value) else None

    @property
    def shown(self) -> str:
        """The value as an error names it."""
        if isinstance(self.node, yaml.ScalarNode):
            cut = str(self.node.value)[:_SHOWN]
            return f"the text {cut!r}" if self.text is not None else cut or "nothing"
        return "a mapping" if self.is_mapping else "a list"

    def get(self, *keys: str) -> "Field | None":
        """Return the field below `keys`, one step for each; None where one of them is not there."""
        found: Field | None = self
        for key in keys:
            node = None if found is None else _lookup(found.node, key, set())
            found = None if found is None or node is None else Field(_joined(found.path, key), node)
        return found

    def fields(self) -> "Iterator[Field]":
        """Yield what stands directly below, in order; merged-in keys are not among it."""
        if isinstance(self.node, yaml.MappingNode):
            for key, value in self.node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                    yield Field(_joined(self.path, key.value), value)
        elif isinstance(self.node, yaml.SequenceNode):
            for index, value in enumerate(self.node.value):
                yield Field(f"{self.path}[{index}]", value)

    def repeated(self) -> "Iterator[Field]":
        """Yield the keys directly below that stand there a second time."""
        seen: set[str] = set()
        for field in self.fields():
            if self.is_mapping and field.path in seen:
                yield field
            seen.add(field.path)


class Mistakes:
    """The errors in a document, one line for each: where, what was found, what is allowed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, field: Field, text: str) -> None:
        """Note a mistake in a field that is there."""
        self.lines.append(one_line(f"line {field.line}: {field.path or 'the document'}: {text}"))

    def refuse(self, field: Field, allowed: str) -> None:
        """Note a value that is not among those `allowed`."""
        self.say(field, f"found {field.shown}; allowed: {allowed}")

    def mapping(self, field: Field | None) -> None:
        """Note a field that is no mapping, and keys in it that stand there twice."""
        if field is None or field.is_null:
            return
        if not field.is_mapping:
            self.refuse(field, "a mapping")
        for repeated in field.repeated():
            self.say(repeated, "stands twice in this mapping")

    def number(self, field: Field | None, least: int, most: int) -> int | None:
        """Return the whole number at `field`, None if it is not there, or is noted as a mistake."""
        if field is None or field.is_null:
            return None
        if field.number is not None and least <= field.number <= most:
            return field.number
        self.refuse(field, f"a whole number from {least} to {most}, without quotes")
        return None

    def quoted(self, field: Field | None) -> str | None:
        """Return the text of a label, an annotation or a variable: Kubernetes takes nothing but texts there."""
        if field is None:
            return None
        if field.text is None:
            self.refuse(field, "a text, so put it into quotes: Kubernetes takes nothing else here")
        return field.text

    def quoted_number(self, field: Field | None, least: int, most: int) -> str | None:
        """Return the text at `field` if it is a whole number, as labels carry them."""
        text = self.quoted(field)
        if field is None or text is None:
            return None
        digits = text.isascii() and text.isdigit() and len(text) <= len(str(most))
        if digits and least <= int(text) <= most:
            return text
        self.refuse(field, f'a whole number from "{least}" to "{most}"')
        return None

    def choice(self, field: Field | None, allowed: Sequence[str]) -> str | None:
        """Return the text at `field` if it is one of those allowed."""
        text = self.quoted(field)
        if field is None or text is None or text in allowed:
            return text
        self.refuse(field, f"{', '.join(allowed)}{meant(text, allowed)}")
        return None


def meant(word: str, names: Sequence[str]) -> str:
    """Return the name that was probably meant, as the end of an error; empty when none is near."""
    close = difflib.get_close_matches(word[:_SHOWN], names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def documents(text: str, source: str) -> list[Field]:
    """Return the documents of `text`, items of lists each as one; `source` names it in errors.

    Raises PolicyError when it is not YAML, or larger than MAX_FILE_BYTES.
    """
    found: list[Field] = []
    if len(text) > MAX_FILE_BYTES:
        raise PolicyError(f"{source}: larger than {MAX_FILE_BYTES} bytes, which no such file is")
    try:
        nodes = compose_yaml(text)
    except YamlError as error:
        raise PolicyError(f"{source}: {error}") from error
    for node in nodes:
        if node.tag == _NULL:
            continue
        document = Field("", node)
        items = document.get("items")
        kind = document.get("kind")
        if items is not None and kind is not None and (kind.text or "").endswith("List"):
            found += [Field("", item.node) for item in items.fields()]
        else:
            found.append(document)
    return found


def _lookup(node: yaml.Node, key: str, seen: set[int]) -> yaml.Node | None:
    """Return the value of `key`: of the mapping itself, else of what is merged into it, each looked at once."""
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return None
    seen.add(id(node))
    merged: list[yaml.Node] = []
    own: yaml.Node | None = None
    for name, value in node.value:
        if isinstance(name, yaml.ScalarNode) and name.tag == _MERGE:
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        elif isinstance(name, yaml.ScalarNode) and name.value == key:
            own = value
    for each in merged:
        own = _lookup(each, key, seen) if own is None else own
    return own


def _joined(path: str, key: str) -> str:
    """Add a key to a path; one with dots in it stands in brackets, as kubectl writes it."""
    if "." in key or "/" in key:
        return f"{path}['{key}']"
    return f"{path}.{key}" if path else key
