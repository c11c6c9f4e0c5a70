"""Each decision says whether it still stands, and the index lists all of them.

Run as a script (`make docs`) it writes the index.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
INDEX = FOLDER / "README.md"
DECISIONS = sorted(FOLDER.glob("0*.md"))
HEAD = """# Decisions

Half a page each: what the question was, what was decided, what follows, and what else was thought of.
`make docs` writes this list.

| number | decision | status | area |
| --- | --- | --- | --- |
"""
_BEGINNING = re.compile(
    r"# (?P<number>\d{4}) (?P<title>.+)\n\n"
    r"\*(?P<status>Accepted|(?:Accepted, amended|Superseded)\sby\s\[\d{4}\]\(\S+\))\.\sArea:\s(?P<area>[a-z]+)\.\*\n"
)


def beginning(page: Path) -> dict[str, str]:
    """Return number, title, status and area of a decision."""
    found = _BEGINNING.match(page.read_text())
    assert found, f"{page.name} begins with '# 0123 Title', an empty line, and '*Accepted. Area: machine.*'"
    return {name: " ".join(said.split()) for name, said in found.groupdict().items()}


def index() -> str:
    """Return the list of all decisions."""
    rows = []
    for page in DECISIONS:
        said = beginning(page)
        cells = (f"[{said['number']}]({page.name})", said["title"], said["status"].lower(), said["area"])
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_a_decision_says_whether_it_stands_and_what_it_is_about(page: Path) -> None:
    assert beginning(page)["number"] == page.name[:4]


def test_no_two_decisions_have_one_number() -> None:
    assert [number for number, times in Counter(page.name[:4] for page in DECISIONS).items() if times > 1] == []


def test_the_index_lists_every_decision() -> None:
    assert INDEX.read_text() == index(), "run `make docs`"


if __name__ == "__main__":
    INDEX.write_text(index())
