"""The code speaks the words of docs/glossary.md: one meaning each, and no name that another term has replaced."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from midstep.processor.callbacks import Lifecycle
from midstep.protocol.types import Rung

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"

FOLDERS = (
    "adapters",
    "agent",
    "cli",
    "communicators",
    "controller",
    "detectors",
    "devices",
    "examples",
    "forecast",
    "launch",
    "platforms",
    "policies",
    "processor",
    "protocol",
    "simulation",
)


class Retired(NamedTuple):
    """A word that names no longer use."""

    use: str  # what to say instead: a term of the glossary, or plain words
    pending: tuple[str, ...] = ()  # folders that still have it: remove one when its rename has landed


# a word in the name of a module, class or function, in any spelling (`Zygote`, `start_zygote`)
RETIRED = {
    "desk": Retired("request handler"),
    "door": Retired("endpoint"),
    "doors": Retired("endpoint"),
    "excuse": Retired("allowed deviation"),
    "excuses": Retired("allowed deviation"),
    "handover": Retired("planned change"),
    "heart": Retired("heartbeat"),
    "hurt": Retired("inject"),
    "injuries": Retired("fault action"),
    "injury": Retired("fault action"),
    "lie": Retired("byzantine message"),
    "lies": Retired("byzantine message"),
    "life": Retired("incarnation, or scope of a generation"),
    "lives": Retired("incarnations"),
    "moment": Retired("injection point"),
    "moments": Retired("injection point"),
    "nurseries": Retired("fork server"),
    "nursery": Retired("fork server"),
    "openings": Retired("generation"),
    "reseat": Retired("reconnect"),
    "retirement": Retired("disposal"),
    "seat": Retired("connect"),
    "seated": Retired("connected"),
    "seating": Retired("connecting"),
    "seats": Retired("connections, or places of ranks"),
    "standbys": Retired("warm pool"),
    "strikes": Retired("injected faults"),
    "strike": Retired("corrupt, or inject"),
    "struck": Retired("corrupted"),
    "verdicts": Retired("exception policy"),
    "waiters": Retired("completion threads"),
    "ward": Retired("peer copy"),
    "wards": Retired("peer copies"),
    "zygote": Retired("fork server"),
    "zygotes": Retired("fork server"),
}

# the name of a module, as a whole
RETIRED_MODULES = {
    "deciding": Retired("decision"),
    "detected": Retired("hardware faults"),
    "draining": Retired("planned change"),
    "ending": Retired("shutdown"),
    "helpers": Retired("the name of what it does"),
    "host_lines": Retired("host group"),
    "kernel": Retired("linux"),
    "leaving": Retired("process exit"),
    "manager": Retired("the name of what it does"),
    "notices": Retired("discovery files"),
    "own_word": Retired("memory faults"),
    "passes": Retired("autograd hooks"),
    "planned": Retired("planned change"),
    "planning": Retired("planned change"),
    "rejoining": Retired("recovery"),
    "room": Retired("prefaulted memory"),
    "standing": Retired("step state"),
    "utils": Retired("the name of what it does"),
}

# words of a docstring, in any spelling
RETIRED_PROSE = {
    "anew": Retired("again"),
    "anybody": Retired("any rank, any process"),
    "comes to nothing": Retired("fails, or has no effect"),
    "everybody": Retired("all ranks, all processes"),
    "goes on": Retired("continues"),
    "is told": Retired("gets, or is ordered"),
    "likewise": Retired("the same, said in full"),
    "nobody": Retired("no rank, no process"),
    "somebody": Retired("another process, another user"),
    "whoever": Retired("the process that"),
}

# names of two public classes: remove one when its rename has landed
PENDING_TWICE: set[str] = set()

_ROW = re.compile(r"^\| (?!term |---)(.+?) \| (.+) \|$", re.MULTILINE)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

TERMS = _ROW.findall(GLOSSARY.read_text())


def modules(folder: str) -> list[Path]:
    """Return the sources of a folder of the product."""
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def parts(source: Path) -> tuple[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    """Return what can have a docstring: the module, its classes and its functions."""
    return tuple(node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, (*_NAMED, ast.Module)))


def names(source: Path) -> Iterator[str]:
    """Yield the names of a module: its own and its folders', and those of its classes and functions."""
    yield from source.relative_to(ROOT).with_suffix("").parts
    yield from (part.name for part in parts(source) if not isinstance(part, ast.Module))


def words(name: str) -> set[str]:
    """Split a name in any spelling into its words."""
    return {word.lower() for word in _WORD.findall(name)}


def docstrings(source: Path) -> Iterator[str]:
    """Yield every docstring of a module, in lower case and on one line."""
    for part in parts(source):
        yield " ".join((ast.get_docstring(part) or "").lower().split())


def forbidden(retired: dict[str, Retired], folder: str) -> dict[str, str]:
    """Return the words that a folder may not use, each with what to say instead."""
    return {word: entry.use for word, entry in retired.items() if folder not in entry.pending}


def test_every_term_has_one_meaning() -> None:
    """A term is listed once, with a meaning of one line, and the list is long enough to be one."""
    listed = [term for term, _ in TERMS]

    assert len(listed) > 80
    assert sorted(set(listed)) == sorted(listed)


def test_terms_are_found_where_the_alphabet_puts_them() -> None:
    """Within a section."""
    for section in GLOSSARY.read_text().split("\n## ")[1:]:
        listed = [term.strip("`").lower() for term, _ in _ROW.findall(section)]
        assert listed == sorted(listed)


def test_every_rung_and_every_callback_has_its_line() -> None:
    """They are what a policy file and a script name."""
    listed = {term.partition(" (")[0].strip("`") for term, _ in TERMS}

    assert listed >= {rung.value for rung in Rung}
    assert listed >= {name for name in Lifecycle.__annotations__ if not name.startswith("_")}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_has_a_word_that_was_retired(folder: str) -> None:
    """Names of modules, classes and functions; what to say instead is in the message."""
    retired = forbidden(RETIRED, folder)
    found = [
        f"{source.relative_to(ROOT)}: {name} ({word}: say {retired[word]})"
        for source in modules(folder)
        for name in names(source)
        for word in sorted(words(name) & retired.keys())
    ]

    assert found == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_has_a_name_that_was_retired(folder: str) -> None:
    """The words themselves may be right elsewhere."""
    retired = forbidden(RETIRED_MODULES, folder)
    found = [
        f"{source.relative_to(ROOT)}: say {retired[source.stem]}"
        for source in modules(folder)
        if source.stem in retired
    ]

    assert found == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_has_a_phrase_that_was_retired(folder: str) -> None:
    """Plain words are found by a search."""
    retired = forbidden(RETIRED_PROSE, folder)
    found = [
        f"{source.relative_to(ROOT)}: {phrase!r} (say {retired[phrase]})"
        for source in modules(folder)
        for text in docstrings(source)
        for phrase in retired
        if re.search(rf"\b{phrase}\b", text)
    ]

    assert found == []


def test_no_two_public_classes_have_one_name() -> None:
    """A name that means two things has to be read with its module."""
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for source in modules(folder):
            for part in parts(source):
                if isinstance(part, ast.ClassDef) and not part.name.startswith("_"):
                    found.setdefault(part.name, []).append(str(source.relative_to(ROOT)))
    twice = {name: sources for name, sources in found.items() if len(sources) > 1}

    assert {name: sources for name, sources in twice.items() if name not in PENDING_TWICE} == {}
    assert twice.keys() >= PENDING_TWICE


def test_what_is_pending_names_folders() -> None:
    """A folder that is misspelled would forbid nothing less and hide a word for ever."""
    entries = [*RETIRED.values(), *RETIRED_MODULES.values(), *RETIRED_PROSE.values()]

    assert {folder for entry in entries for folder in entry.pending} <= set(FOLDERS)


def test_no_term_of_the_glossary_is_retired() -> None:
    """The terms are the replacements."""
    assert [term for term, _ in TERMS if words(term) & RETIRED.keys()] == []
