"""The docs say what the code says: generated parts, links, commands and settings in them are checked.

Run as a script (`make docs`) it puts the generated parts into the docs.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstep.cli.main import COMMANDS
from midstep.controller.state import Phase
from midstep.controller.table import ROWS, diagram
from midstep.policies.files import parse_policy

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")])

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_YAML = re.compile(r"^```ya?ml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^|`|\$ )midstep ([a-z][a-z-]*)\b", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def transition_table() -> str:
    """Return the machine's rows as a markdown table: one line for each event."""
    lines = ["| event | taken in | leads to, at most |", "| --- | --- | --- |"]
    for row in ROWS:
        targets = [phase for phase in Phase if phase in row.to]
        lines.append(f"| `{row.event.__name__}` | {_phases(row.phases)} | {_phases(targets) or 'stays'} |")
    return "\n".join(lines) + "\n"


def _phases(phases: tuple[Phase, ...] | list[Phase]) -> str:
    if not phases:
        return ""
    left_out = [phase for phase in Phase if phase not in phases]
    if not left_out:
        return "every phase"
    if len(left_out) <= 2:
        return f"all but {', '.join(left_out)}"
    return ", ".join(phases)


GENERATED: dict[str, Callable[[], str]] = {
    "state diagram": lambda: f"```mermaid\n{diagram()}```\n",
    "transition table": transition_table,
}


def refresh() -> None:
    """Put the generated parts into the docs."""
    text = ARCHITECTURE.read_text()
    for name, generate in GENERATED.items():
        before, _, rest = text.partition(f"<!-- {name}: begin -->\n")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        text = f"{before}<!-- {name}: begin -->\n{generate()}{end}{after}"
    ARCHITECTURE.write_text(text)


@pytest.mark.parametrize("name", GENERATED)
def test_what_the_docs_generate_from_the_code_is_what_the_code_gives(name: str) -> None:
    """After a change of the transition table `make docs` has been run."""
    found = re.findall(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", ARCHITECTURE.read_text(), re.DOTALL)

    assert found == [GENERATED[name]()], "run `make docs`"


def _links() -> Iterator[tuple[Path, str]]:
    for page in DOCS:
        for target in _LINK.findall(_without_code(page.read_text())):
            if not re.match(r"[a-z]+:", target):
                yield page, target


@pytest.mark.parametrize(("page", "target"), _links(), ids=lambda value: getattr(value, "name", value))
def test_every_link_leads_somewhere(page: Path, target: str) -> None:
    """Relative links name files that are there, and headings that the page has."""
    file, _, anchor = target.partition("#")
    goal = (page.parent / file).resolve() if file else page

    assert goal.exists()
    assert goal.is_relative_to(ROOT)
    if anchor:
        assert anchor in {_anchor(heading) for heading in _HEADING.findall(goal.read_text())}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_command_that_the_docs_name_is_there(page: Path) -> None:
    """`midstep frobnicate` in a page would be an invitation to an error."""
    assert set(_COMMAND.findall(page.read_text())) <= set(COMMANDS)


def test_the_readme_names_every_command_for_users() -> None:
    """Controller and agent are started by `midstep run`; all others are for users and shown with a line of use."""
    named = set(_COMMAND.findall((ROOT / "README.md").read_text()))

    assert named >= set(COMMANDS) - {"controller", "agent"}


def _policies() -> Iterator[tuple[str, str]]:
    for page in DOCS:
        for text in _YAML.findall(page.read_text()):
            yield page.name, text


@pytest.mark.parametrize(("page", "text"), _policies())
def test_every_piece_of_policy_in_the_docs_is_one(page: str, text: str) -> None:
    """Its keys exist, its values are allowed, and no rule between keys is broken."""
    policy = parse_policy(text, page)

    assert policy.ladder


def test_there_is_something_to_check() -> None:
    """The patterns above still match: links, commands and policies are found."""
    assert len(list(_links())) > 10
    assert len(list(_policies())) > 3
    assert all(_COMMAND.findall(page.read_text()) for page in DOCS if page.name in {"README.md", "operations.md"})


if __name__ == "__main__":
    refresh()
