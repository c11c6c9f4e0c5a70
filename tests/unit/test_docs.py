"""The docs say what the code says: generated parts, links, commands and settings in them are checked.

Run as a script (`make docs`) it puts the generated parts into the docs.
"""

import ast
import difflib
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeGuard

import pytest

from midstep.benchmarks.peers import report, results
from midstep.benchmarks.peers.registry import PEERS, SHARDED
from midstep.benchmarks.regression import record, text
from midstep.cli.main import COMMANDS
from midstep.controller.recovery.machine import ROWS
from midstep.controller.recovery.state import Phase
from midstep.policies.acjob.translation import translate
from midstep.policies.files import parse_policy
from midstep.policies.scripted_roles import is_job_of_roles, parse_roles
from midstep.policies.yaml_text import read_tree
from midstep.testing.transitions import LEADS_TO, diagram

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
RECOVERY = ROOT / "docs" / "recovery.md"
ACJOB = ROOT / "docs" / "acjob.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
CONTRACTS = ROOT / "docs" / "contracts.md"
SECURITY = ROOT / "docs" / "security.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
ACJOB_EXAMPLE = "examples/acjob.yaml"
ACJOB_HEAD = 11  # lines of the policy that the quick start shows
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
EXAMPLES = ("train_plain.py", "train_resilient.py")

MAX_LINE = 120
MAX_ARCHITECTURE_LINES = 300
_INDENTED_FENCE = re.compile(r"^ +```.*?^ +```$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"^<!-- (.*): begin -->$.*?^<!-- \1: end -->$", re.MULTILINE | re.DOTALL)
_WHOLE = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)")  # inline code and links
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_YAML = re.compile(r"^```ya?ml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?![a-z]+:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TYPED = re.compile(r"^(?:\$ )?midstep ([a-z][a-z-]*)\b", re.MULTILINE)  # in a block of code
_NAMED = re.compile(r"`midstep ([a-z][a-z-]*)\b")
_SENTENCE = re.compile(r"(?:^|(?<=[.!?:;] ))(?:What|Who|Whoever|Whatever) [^.!?:;]*[.!:;]")
_SOURCE = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|yaml|md))\b")


def _without_code(text: str) -> str:
    return _FENCE.sub("", text)


LINKS = [(page, target) for page in DOCS for target in _LINK.findall(_without_code(page.read_text()))]
POLICIES = [(page.name, text) for page in DOCS for text in _YAML.findall(page.read_text())]


# --- what is generated ----------------------------------------------------------------------------------------------


def transition_table() -> str:
    """Return the machine's rows as a markdown table, with where each event leads from any of its phases."""
    lines = ["| event | taken in | leads to |", "| --- | --- | --- |"]
    for row in ROWS:
        reached = {after for phase in row.phases for after in LEADS_TO.get((phase, row.event), ())}
        targets = [phase for phase in Phase if phase in reached]
        lines.append(f"| `{row.event.__name__}` | {_phases(row.phases)} | {_phases(targets) or 'stays'} |")
    return "\n".join(lines) + "\n"


def _phases(phases: Sequence[Phase]) -> str:
    left_out = [phase for phase in Phase if phase not in phases]
    if not left_out:
        return "every phase"
    if len(left_out) <= 2:
        return f"all but {', '.join(left_out)}"
    return ", ".join(phases)


def changes() -> str:
    """Return what makes the plain example resilient as a diff; a line that is only indented deeper is unchanged."""
    plain, resilient = (_body(name).splitlines() for name in EXAMPLES)
    lines = []
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in plain], [line.strip() for line in resilient])
    for _, begin, end, first, last in matcher.get_opcodes():
        same = [line.strip() for line in plain[begin:end]] == [line.strip() for line in resilient[first:last]]
        lines += [] if same else [f"-{line}" for line in plain[begin:end]]
        lines += [f"{' ' if same or not line else '+'}{line}".rstrip() for line in resilient[first:last]]
    return "```diff\n" + "\n".join(lines) + "\n```\n"


def _body(name: str) -> str:
    """Return what an example does in `main`, without its docstring."""
    _, _, after = (ROOT / "examples" / name).read_text().partition("def main() -> None:\n")
    main, _, _ = after.partition("\nif __name__")
    return textwrap.dedent("".join(main.strip("\n").splitlines(keepends=True)[1:]))


def acjob() -> str:
    """Return the policy that the example AscendJob becomes."""
    return f"```yaml\n{translate((ROOT / ACJOB_EXAMPLE).read_text(), ACJOB_EXAMPLE).text}```\n"


def acjob_head() -> str:
    """Return the command that translates the example AscendJob, and the first lines of what it prints."""
    text = translate((ROOT / ACJOB_EXAMPLE).read_text(), ACJOB_EXAMPLE).text
    head = "\n".join(text.splitlines()[:ACJOB_HEAD])
    return f"```\n$ midstep policy from-acjob {ACJOB_EXAMPLE}\n{head}\n...\n```\n"


def contracts() -> str:
    """Return every contract scenario as a table for each file: the test, and the sentence that it holds midstep to."""
    lines = []
    for file in sorted((ROOT / "tests" / "unit" / "contracts").glob("test_*.py")):
        tree = ast.parse(file.read_text())
        title = (ast.get_docstring(tree) or "").splitlines()[0]
        lines += [f"### `{file.relative_to(ROOT)}`", "", title, "", "| scenario | what holds |", "| --- | --- |"]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                holds = " ".join((ast.get_docstring(node) or "").split())
                lines.append(f"| `{node.name}` | {holds} |")
        lines.append("")
    return "\n".join(lines)


def attacks() -> str:
    """Return every test that is marked as an attack as a table for each file of `tests/attack`."""
    lines = []
    for file in sorted((ROOT / "tests" / "attack").glob("test_*.py")):
        tree = ast.parse(file.read_text())
        title = (ast.get_docstring(tree) or "").splitlines()[0]
        lines += [f"### `{file.relative_to(ROOT)}`", "", title, ""]
        lines += ["| attack | what holds | what the user reads |", "| --- | --- | --- |"]
        for call in filter(_is_attack, (mark for node in tree.body for mark in getattr(node, "decorator_list", ()))):
            said = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            lines.append(f"| {ast.literal_eval(call.args[0])} | {said['holds']} | {said.get('reads', 'nothing')} |")
        lines.append("")
    return "\n".join(lines)


def _is_attack(mark: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "attack"


# name of the markers -> page, and what stands between them
GENERATED: dict[str, tuple[Path, Callable[[], str]]] = {
    "state diagram": (RECOVERY, lambda: f"```mermaid\n{diagram()}```\n"),
    "transition table": (RECOVERY, transition_table),
    "changes": (README, changes),
    "acjob": (ACJOB, acjob),
    "acjob head": (QUICKSTART, acjob_head),
    "contracts": (CONTRACTS, contracts),
    "attacks": (SECURITY, attacks),
    "peers": (BENCHMARKS, lambda: report.page(results.load(report.KEPT, {}), PEERS)),
    "peers under a schedule": (BENCHMARKS, lambda: report.page(results.load(report.KEPT_SCHEDULED, {}), PEERS)),
    "sharded peers": (BENCHMARKS, lambda: report.page(results.load(report.KEPT_SHARDED, {}), SHARDED)),
    "history": (BENCHMARKS, lambda: text.history(record.kept())),
}


def refresh() -> None:
    """Put the generated parts into the docs."""
    for name, (page, generate) in GENERATED.items():
        before, begin, rest = page.read_text().partition(f"<!-- {name}: begin -->\n")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        page.write_text(f"{before}{begin}{generate()}{end}{after}")


def test_the_architecture_is_read_in_one_sitting() -> None:
    """What is longer is on the pages that it names."""
    assert ARCHITECTURE.read_text().count("\n") <= MAX_ARCHITECTURE_LINES


@pytest.mark.parametrize("name", GENERATED)
def test_what_the_docs_take_from_the_code_is_what_the_code_gives(name: str) -> None:
    """After a change of the transition table or of an example script `make docs` has been run."""
    page, generate = GENERATED[name]
    found = re.findall(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", page.read_text(), re.DOTALL)

    assert found == [generate()], "run `make docs`"


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["examples", "examples/fsdp", "examples/mindspore"])
def test_a_plain_loop_becomes_resilient_with_ten_changed_lines(folder: str) -> None:
    """Indentation and blank lines aside; the import is one of them."""
    plain, resilient = (
        [line.strip() for line in (ROOT / folder / name).read_text().splitlines() if line.strip(' "\n')]
        for name in EXAMPLES
    )
    changed = [line for line in difflib.ndiff(plain, resilient) if line.startswith("+ ") and '"""' not in line]

    assert 0 < len(changed) <= 10


@pytest.mark.parametrize(("page", "target"), LINKS, ids=lambda value: getattr(value, "name", value))
def test_every_link_leads_somewhere(page: Path, target: str) -> None:
    """Relative links name files that are there, and headings that the page has."""
    file, _, anchor = target.partition("#")
    goal = (page.parent / file).resolve() if file else page

    assert goal.exists()
    assert goal.is_relative_to(ROOT)
    if anchor:
        assert anchor in {_anchor(heading) for heading in _HEADING.findall(_without_code(goal.read_text()))}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_lines_of_a_page_fit_a_diff(page: Path) -> None:
    """A changed word changes one short line. Tables, code and what cannot be broken are as long as they are."""
    text = _INDENTED_FENCE.sub("", _GENERATED.sub("", page.read_text()))
    lines = _without_code(text).splitlines()
    long = [line for line in lines if len(line) > MAX_LINE and not line.startswith("|")]
    breakable = [line for line in long if " " in _WHOLE.sub("whole", line.lstrip(" -*0123456789.")).strip()]

    assert breakable == []


@pytest.mark.parametrize("page", [page for page in DOCS if page.parent.name != "decisions"], ids=lambda page: page.name)
def test_a_sentence_of_a_page_has_a_subject(page: Path) -> None:
    """It does not begin as a noun clause: "What is missing is named." Headings and tables are fragments anyhow."""
    text = _without_code(_INDENTED_FENCE.sub("", page.read_text()))
    paragraphs = [each.replace("\n", " ") for each in re.split(r"\n(?:\s*\n|(?=[-|#*]))", text)]
    prose = [each.lstrip(" \n-") for each in paragraphs if not each.strip().startswith(("#", "|"))]

    assert [found for each in prose for found in _SENTENCE.findall(re.sub(r" {2,}", " ", each))] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_source_file_that_the_docs_name_is_there(page: Path) -> None:
    """Readers follow the names of files into the code."""
    named = set(_SOURCE.findall(page.read_text()))

    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_command_that_the_docs_name_is_there(page: Path) -> None:
    """`midstep frobnicate` in a page would be an invitation to an error."""
    assert _commands(page) <= set(COMMANDS)


def test_the_readme_is_a_page_that_names_the_two_first_commands() -> None:
    """What needs more room is in docs/; `.ci/run` starts with the same two commands."""
    text = README.read_text()

    assert len(text.splitlines()) <= 150
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("make ")] == [
        ["make", "demo"],
        ["make", "test"],
    ]


def test_the_index_leads_to_every_document() -> None:
    """Decisions aside, of which the index names the first."""
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for page, target in LINKS if page == index}

    assert linked >= {*(ROOT / "docs").glob("*.md")} - {index}


def test_the_readme_shows_every_command_for_users() -> None:
    """Controller and agent are started by `midstep run`; all others are for users."""
    assert _commands(README) >= set(COMMANDS) - {"controller", "agent"}


def _commands(page: Path) -> set[str]:
    text = page.read_text()
    typed = {name for block in _FENCE.findall(text) for name in _TYPED.findall(block)}
    return typed | set(_NAMED.findall(_without_code(text)))


@pytest.mark.parametrize(("page", "text"), POLICIES)
def test_every_piece_of_policy_in_the_docs_is_one(page: str, text: str) -> None:
    """Its keys exist, its values are allowed, and no rule between keys is broken; also in jobs of several roles."""
    if is_job_of_roles(read_tree(text, page)):
        assert parse_roles(text, page).roles
    else:
        assert parse_policy(text, page).ladder


def test_there_is_something_to_check() -> None:
    """The patterns above still match."""
    assert len(LINKS) > 10
    assert len(POLICIES) > 3


if __name__ == "__main__":
    refresh()
