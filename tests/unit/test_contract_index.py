"""`docs/contracts.md` lists every scenario that midstep is held against, and each has its test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contracts.md"
HERE = ROOT / "tests" / "unit" / "contracts"

_LISTED = re.compile(r"^## Every scenario\n(.*)", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`(test_\w+)`")
_ELSEWHERE = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")
_DEFINED = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


def defined(*files: Path) -> list[str]:
    """The tests that are defined in files."""
    return [name for file in files for name in _DEFINED.findall(file.read_text())]


def test_every_scenario_listed_has_its_test_and_every_test_is_listed() -> None:
    """`make docs` writes the list from the tests; a test that is renamed or gone shows here."""
    (listed,) = _LISTED.findall(PAGE.read_text())

    assert sorted(_NAMED.findall(listed)) == sorted(defined(*HERE.glob("test_*.py")))


def test_scenarios_have_names_of_their_own() -> None:
    """A name is an address: two tests of one name could not be told apart."""
    names = defined(*HERE.glob("test_*.py"))

    assert len(names) == len(set(names)) > 100


def test_every_test_that_the_page_names_as_a_counterpart_is_there() -> None:
    """Above the list: the tests that stand for those of DLRover."""
    before, _, _ = PAGE.read_text().partition("## Every scenario")

    assert set(_NAMED.findall(before)) <= set(defined(*HERE.glob("test_*.py")))


@pytest.mark.parametrize(("file", "name"), _ELSEWHERE.findall(PAGE.read_text()))
def test_every_test_with_real_processes_that_the_page_names_is_there(file: str, name: str) -> None:
    """By path and name, as pytest takes it."""
    assert (ROOT / file).is_file()
    assert not name or name in defined(ROOT / file)
