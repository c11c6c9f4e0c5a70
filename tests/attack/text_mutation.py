"""How good inputs are made hostile: bytes, and trees of plain values, from a seeded generator of random numbers."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

SPLICES = (
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[2J", b"\n", b"\r", b"\t", b"\xe2\x80\xa8",
    b"!!bool x", b"!!float \"\"", b"!!timestamp x", b"!!python/name:os.system", b"&a [*a]", b"*a", b"<<: *a",
    b"1:1:1", b"1e999", b"-0", b".inf", b".nan", b"0x", b"2026-99-99", b"null", b"~", b"[", b"]", b"{", b"}", b":",
    b",", b"? ", b"- ",
    b'"', b"'", b"\\", b"\\ud800", b"%YAML 9.9", b"---", b"...", b"|", b">", b"#", b"@", b"`",
)  # fmt: skip
HUGE = (10**400, -(10**30), 2**63, 2**64, -1, 0, 1e308, -0.0, True, False, None)


def mutated(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Return `data` with one to four changes; `others` are inputs of which pieces are put in."""
    for _ in range(chance.randint(1, 4)):
        data = chance.choice(_CHANGES)(data, others, chance)
    return data[: 1 << 20]


def mutated_tree(tree: Any, chance: random.Random) -> Any:
    """Return plain values with one to three of them replaced, renamed, repeated or dropped; text that is JSON, too."""
    for _ in range(chance.randint(1, 3)):
        tree = _changed(tree, chance)
    return tree


def _changed(tree: Any, chance: random.Random) -> Any:
    """Return a copy with one change, anywhere below or here."""
    if isinstance(tree, str) and tree[:1] in {"{", "["} and chance.random() < 0.9:
        return _changed_text(tree, chance)
    if isinstance(tree, dict) and tree and chance.random() < 0.85:
        return _changed_mapping(tree, chance)
    if isinstance(tree, list) and tree and chance.random() < 0.85:
        index = chance.randrange(len(tree))
        if chance.random() < 0.2:
            return tree * chance.choice([2, 50])
        return [*tree[:index], _changed(tree[index], chance), *tree[index + 1 :]]
    return chance.choice(_VALUES)(chance)


def _changed_text(text: str, chance: random.Random) -> str:
    try:
        return json.dumps(_changed(json.loads(text), chance))
    except ValueError:
        return text[:-1]


def _changed_mapping(tree: dict[Any, Any], chance: random.Random) -> dict[Any, Any]:
    key = chance.choice(list(tree))
    if chance.random() < 0.15:
        return {chance.choice(list(tree)) if name == key else name: value for name, value in tree.items()}
    if chance.random() < 0.1:
        return {name: value for name, value in tree.items() if name != key}
    return {**tree, key: _changed(tree[key], chance)}


def _nested(chance: random.Random) -> Any:
    deep: Any = chance.choice(HUGE)
    for _ in range(chance.choice([1, 5, 70, 200])):
        deep = [deep] if chance.random() < 0.5 else {"a": deep}
    return deep


_VALUES: tuple[Callable[[random.Random], Any], ...] = (
    _nested,
    lambda chance: chance.choice(HUGE),
    lambda chance: "x" * chance.choice([0, 1, 300, 5000, 70_000]),
    lambda chance: chance.choice(["\0", "\x1b[2J", "\n", "\u2028", "\ud800", "SeparateNPU", "recover", "a,b,,c", " "]),
    lambda chance: chance.choice(["{", "[]", '{"a": ', '[{"fault_code": "A"}]', "1", "null", "npu-99"]),
    lambda chance: {chance.choice(["kind", "items", "data", "metadata", "faults", "NodeInfo", ""]): _nested(chance)},
    lambda chance: [_nested(chance) for _ in range(chance.randint(0, 3))],
    lambda chance: chance.uniform(-1e12, 1e15),
)


def _flip(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    changed = bytearray(data or b"x")
    for _flipped in range(chance.randint(1, 8)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    begin, end = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    return data[:begin] + data[end:] if chance.random() < 0.5 else data[begin:end]


def _splice(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(others)
    at, begin = chance.randint(0, len(data)), chance.randint(0, len(other))
    return data[:at] + other[begin : begin + chance.randint(1, 400)] + data[at:]


def _insert(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randint(0, len(data))
    return data[:at] + chance.choice(SPLICES) * chance.choice([1, 1, 1, 3, 100, 3000]) + data[at:]


def _number(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    digits = [index for index, letter in enumerate(data) if chr(letter).isdigit()]
    if not digits:
        return data + b"9"
    at = chance.choice(digits)
    return (
        data[:at] + chance.choice([b"-1", b"9" * 400, b"9" * 5000, b"1e400", b"0.1", b"00", b"null"]) + data[at + 1 :]
    )


def _repeat(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    begin, end = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    return data[:end] + data[begin:end] * chance.choice([1, 2, 20]) + data[end:]


def _exchange(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    """Put something hostile in the place of a value, or of a key."""
    places = [found.span(1) for found in _SCALAR.finditer(data)]
    if not places:
        return data + b": " + chance.choice(SPLICES)
    begin, end = chance.choice(places)
    return data[:begin] + chance.choice(SPLICES) + data[end:]


_SCALAR = re.compile(rb"(?:: |- |\[|\{|, )([^\[\]{},\n]+)")
_CHANGES: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    _flip,
    _cut,
    _splice,
    _insert,
    _number,
    _repeat,
    _exchange,
    _exchange,
)
