"""Good messages made bad, as bytes and field by field. Seeded, so that every case can be had again."""

import enum
import random
import re
from typing import Any

import msgspec

_AT_THE_BOUNDS = 0.03
LONG_CHARS = 500
SHORTER_CHARS = (64, 8)  # where a pattern allows no more
_HALF = 0.5
_WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 3000, b"\xff" * 50,
    [], {}, [[]] * 50, {"type": "StopJob"}, "\x00", "node/", "rank/", "rank/00", "rank/-1", "../..",
)  # fmt: skip
_LIES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\x7f",
)


def damaged(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """Return the bytes flipped, cut, spliced with `other`, with a length that is a lie, nested, or with some more."""
    way, at = chance.randrange(6), chance.randrange(len(data) + 1)
    if way == 0:
        flipped = bytearray(data)
        for _ in range(chance.randint(1, 8)):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        return bytes(flipped)
    if way == 1:
        return data[:at]
    if way == 2:
        return data[:at] + other[chance.randrange(len(other) + 1) :]
    if way == 3:
        return data[:at] + chance.choice(_LIES) + data[at:]
    if way == 4:
        return data[:at] + chance.choice((b"\x91", b"\x81", b"[", b'{"a":')) * chance.choice((10, 1000, 100_000))
    return data[:at] + chance.randbytes(chance.randint(1, 40)) + data[at:]


def wrong_somewhere(value: Any, chance: random.Random) -> Any:
    """Return plain data with one value in it, at any depth, replaced by one of another sort or size."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    if not items or chance.random() < 0.2:
        return chance.choice(_WRONG)
    place, inner = chance.choice(items)
    changed = dict(value) if isinstance(value, dict) else list(value)
    if isinstance(changed, dict) and chance.random() < 0.1:
        del changed[place]
    else:
        changed[place] = wrong_somewhere(inner, chance)
    return changed


class Maker:
    """Makes values of any type that messages consist of: mostly small and of few names, so that they fit together."""

    def __init__(self, chance: random.Random, names: tuple[str, ...]) -> None:
        self._chance = chance
        self._names = names

    def make(self, kind: Any) -> Any:
        """Return a value of a type that is within its bounds."""
        return self._made(msgspec.inspect.type_info(kind))

    def _made(self, info: Any) -> Any:
        chance, inspect = self._chance, msgspec.inspect
        if isinstance(info, inspect.UnionType):
            return self._made(chance.choice(info.types))
        if isinstance(info, inspect.StructType):
            return info.cls(**{field.name: self._made(field.type) for field in info.fields})
        if isinstance(info, inspect.VarTupleType):
            count = max(chance.choice((0, 1, 2, 2, 4)), info.min_length or 0)
            return tuple(self._made(info.item_type) for _ in range(count))
        if isinstance(info, inspect.DictType):
            return {self._made(info.key_type): self._made(info.value_type) for _ in range(chance.randint(0, 3))}
        return self._leaf(info)

    def _leaf(self, info: Any) -> Any:
        chance, inspect = self._chance, msgspec.inspect
        if isinstance(info, inspect.EnumType):
            return chance.choice(list[enum.Enum](info.cls))
        if isinstance(info, inspect.IntType):
            bounds = (0 if info.ge is None else info.ge, 2**63 - 1 if info.le is None else info.le)
            if chance.random() < _AT_THE_BOUNDS:
                return chance.choice(bounds)
            return min(bounds[0] + chance.randint(0, 3), bounds[1])
        if isinstance(info, inspect.FloatType):
            least, most = -1.0 if info.gt is None else info.gt, 1e12 if info.le is None else info.le
            return chance.choice([each for each in (0.0, 0.1, 1.0, 2.0, 1e9, 1e12) if least < each <= most])
        if isinstance(info, inspect.StrType):
            return self._text(info)
        return chance.random() < _HALF if isinstance(info, inspect.BoolType) else None

    def _text(self, info: msgspec.inspect.StrType) -> str:
        """Return a text within its bounds: one of the names that fit, or a long one."""
        fitting = [
            name for name in self._names if re.search(info.pattern or "", name) and len(name) >= (info.min_length or 0)
        ]
        if not fitting or self._chance.random() < _AT_THE_BOUNDS:
            lengths = (min(info.max_length or LONG_CHARS, LONG_CHARS), *SHORTER_CHARS)
            texts = ["x" * length for length in lengths]
            return next((text for text in texts if re.search(info.pattern or "", text)), texts[0])
        return self._chance.choice(fitting)
