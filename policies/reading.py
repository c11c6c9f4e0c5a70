"""Check plain YAML values against the policy's structs, and report every mistake at once.

Each is reported with its key, what was found, what is allowed, and the name that was probably meant. The structs of
`schema.py` are the only description of the file; nothing is listed twice.
"""

import difflib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

from ..devices.kinds import communicator_names, device_names
from .schema import COMMUNICATORS, DEVICES, Policy

_NAMES = {DEVICES: device_names, COMMUNICATORS: communicator_names}


class Problem(msgspec.Struct, frozen=True, order=True):
    """One mistake: the path of its key (empty: the whole file), and what is wrong and what is allowed."""

    key: str
    text: str


def problems_of(tree: object, form: type[msgspec.Struct] = Policy) -> list[Problem]:
    """Return every mistake in `tree` (what a YAML reader gave), in its order; empty when it has the form."""
    return _check(tree, inspect.type_info(form), "")


def _check(value: object, kind: inspect.Type, key: str) -> list[Problem]:  # noqa: PLR0911 (one for each sort of type)
    match kind:
        case inspect.StructType():
            return _check_mapping(value, kind, key)
        case inspect.VarTupleType():
            return _check_list(value, kind, key)
        case inspect.DictType():
            return _check_names_and_values(value, kind, key)
        case inspect.UnionType():
            return _check_union(value, kind, key)
        case inspect.EnumType():
            return _check_name(value, [str(member.value) for member in kind.cls], key)
        case inspect.LiteralType():
            return _check_name(value, list(map(str, kind.values)), key)
        case inspect.Metadata(extra={"names_of": names_of}):  # of what other packages may add to
            return _check_name(value, _NAMES[names_of](), key)
        case _:
            return _check_scalar(value, kind, key)


def _check_union(value: object, kind: inspect.UnionType, key: str) -> list[Problem]:
    """Check a value of one type that may be null, or one of some words, instead."""
    words = [str(word) for each in kind.types if isinstance(each, inspect.LiteralType) for word in each.values]
    if value in words or (value is None and kind.includes_none):
        return []
    (inner,) = [each for each in kind.types if not isinstance(each, inspect.NoneType | inspect.LiteralType)]
    instead = " or ".join([*words, *(["null"] * kind.includes_none)])
    return [
        Problem(problem.key, f"{problem.text}, or {instead}" if problem.key == key else problem.text)
        for problem in _check(value, inner, key)
    ]


def _check_mapping(value: object, kind: inspect.StructType, key: str) -> list[Problem]:
    fields = {field.encode_name: field for field in kind.fields}
    if not isinstance(value, dict):
        return [Problem(key, f"found {_shown(value)}; allowed: a mapping with the keys {', '.join(fields)}")]
    problems: list[Problem] = []
    for name, inner in value.items():
        path = f"{key}.{name}" if key else str(name)
        if not isinstance(name, str) or name not in fields:
            problems.append(Problem(path, f"unknown key; allowed: {', '.join(fields)}{_meant(name, fields)}"))
        else:
            problems += _check(inner, fields[name].type, path)
    for name, field in fields.items():
        if field.required and name not in value:
            problems.append(Problem(f"{key}.{name}" if key else name, f"missing; allowed: {_allowed(field.type)}"))
    return problems


def _check_names_and_values(value: object, kind: inspect.DictType, key: str) -> list[Problem]:
    """Check a mapping whose keys are the user's own."""
    if not isinstance(value, dict):
        return [Problem(key, f"found {_shown(value)}; allowed: a mapping")]
    problems: list[Problem] = []
    for name, inner in value.items():
        path = f"{key}.{name}"
        if not isinstance(name, str):
            problems.append(Problem(path, f"found {_shown(name)} as a name; write it in quotes"))
        else:
            problems += _check(inner, kind.value_type, path)
    return problems


def _check_list(value: object, kind: inspect.VarTupleType, key: str) -> list[Problem]:
    if not isinstance(value, list):
        return [Problem(key, f"found {_shown(value)}; allowed: a list")]
    return [
        problem for index, inner in enumerate(value) for problem in _check(inner, kind.item_type, f"{key}[{index}]")
    ]


def _check_name(value: object, names: Sequence[str], key: str) -> list[Problem]:
    if isinstance(value, str) and value in names:
        return []
    return [Problem(key, f"found {_shown(value)}; allowed: {', '.join(names)}{_meant(value, names)}")]


def _check_scalar(value: object, kind: inspect.Type, key: str) -> list[Problem]:
    fits = False
    match kind:
        case inspect.BoolType():
            fits = isinstance(value, bool)
        case inspect.IntType():
            fits = isinstance(value, int) and not isinstance(value, bool) and _within(value, kind)
        case inspect.FloatType():
            fits = isinstance(value, int | float) and not isinstance(value, bool) and _within(value, kind)
        case inspect.StrType():
            fits = isinstance(value, str)
    return [] if fits else [Problem(key, f"found {_shown(value)}; allowed: {_allowed(kind)}")]


def _within(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def _allowed(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true, false"
        case inspect.IntType():
            return f"a whole number{_bounds(kind)}"
        case inspect.FloatType():
            return f"a number{_bounds(kind)}"
        case inspect.EnumType():
            return ", ".join(str(member.value) for member in kind.cls)
        case inspect.StrType():
            return "a text"
        case _:
            return "a mapping or a list, see docs/policies.md"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    limits = (("of at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    words = [f"{word} {_digits(limit)}" for word, limit in limits if limit is not None]
    return f" {' and '.join(words)}" if words else ""


def _digits(limit: float) -> str:
    return f"{limit:.0f}" if limit == int(limit) else f"{limit:g}"


def _meant(value: Any, names: Any) -> str:
    close = difflib.get_close_matches(str(value)[:64], list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _shown(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return f"the text {value[:64]!r}"
        case _:
            return f"{value!s:.64}"
