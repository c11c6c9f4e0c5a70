"""Reports and status of a job whose names, reasons and numbers are hostile"""

import enum
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from midstep.cli import report as report_command
from midstep.cli import status as status_command
from midstep.cli.display.display import JobFollower
from midstep.cli.main import main
from midstep.controller.endpoints.control_requests import StatusReply
from midstep.launch import reached_job as reaching
from midstep.launch.reached_job import HereJob
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.incidents import JobStatus, StandingFault
from midstep.protocol.slow_records import SlowRecord, SlowTold
from midstep.protocol.types import FaultKind, FaultLevel, FaultReport

from ..unit.report.conftest import running, status  # noqa: F401 - fixtures
from .attack import attack
from .fuzzing import CASES, LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)
PAGES = min(max(1, CASES // 20), 200)  # a page takes a tenth of a second to lay out
TURNS = min(CASES // 2, 2000)

HOSTILE = (
    "[/x]",
    "[red]red[/red]",
    "[bold",
    "[link=https://example.org]here[/link]",
    ":bug: :smile:",
    "\x1b[2J\x1b[H",
    "\x1b]0;renamed\x07",
    "\x1b]8;;https://example.org\x1b\\click\x1b]8;;\x1b\\",
    "\x9b31m\x85\x90",
    "line\nJob gpt: FINISHED with exit code 0",
    "over\rwritten\b\b\b",
    "\t\v\f\0\x7f",
    "\u202egnirts\u2066 \u200b\u2028new\u2029",
    "$\\frac{1}{$ %s {0} {job}",
    "数据\u3000故障 \U0001f525",
    "x" * 5000,
    "",
)
NUMBERS = (0.0, -1.0, 1e-12, 1e18, -1e18, 1e300, float("inf"), float("-inf"), float("nan"))


def hostile(value: Any, rng: random.Random, share: float) -> Any:
    """Return a record with some of its texts and numbers replaced, and some of its lists cut or repeated."""
    changed: Any
    match value:
        case None | bool() | enum.Enum():
            changed = value
        case msgspec.Struct():
            changed = type(value)(
                **{each: hostile(getattr(value, each), rng, share) for each in value.__struct_fields__}
            )
        case dict():
            changed = {key: hostile(each, rng, share) for key, each in value.items()}
        case tuple():
            items = tuple(hostile(each, rng, share) for each in value)
            cut = rng.random() < share / 2
            changed = items[: rng.randrange(len(items) + 1)] * rng.choice((1, 2, 7)) if cut else items
        case str():
            changed = rng.choice(("", value)) + rng.choice(HOSTILE)
        case float():
            changed = rng.choice(NUMBERS)
        case _:
            changed = rng.choice((0, -1, 2**31, 10**12, value))
    return changed if not isinstance(value, str | float | int) or rng.random() < share else value


@pytest.fixture
def lived(status: JobStatus, running: JobStatus) -> JobStatus:  # noqa: F811
    """A job that has lived through everything, with a fault that stands and an incident under way."""
    report = FaultReport(
        FaultKind.DEVICE, status.at_s, "detector/files", "a fan", node="node-0", device=3, level=FaultLevel.RESTART_NPU
    )
    return msgspec.structs.replace(
        status,
        incidents=(*status.incidents, *running.incidents),
        faults=(StandingFault(report, status.at_s - 5.0, 2),),
        refused={"[/x]\x1b[2J": 3},
        exit_code=None,
    )


SLOW = SlowTold(
    (SlowRecord("slow", FaultKind.SLOW, "[/x]\x1b[2J", "rank 1 [red]is slow[/red]\x1b]0;\x07\n", 1.0, {1: 2.0}),)
)


class Commands:
    """Runs `midstep status` and `midstep report`, which find the job in `told`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: JobStatus | None = None
        monkeypatch.setattr(reaching, "group_meant", lambda *_: None)
        for command in (status_command, report_command):
            monkeypatch.setattr(command, "reached", lambda *_: HereJob(Path("job")))
        monkeypatch.setattr(status_command, "look", lambda _: (self.told, self.told.reason if self.told else ""))
        monkeypatch.setattr(report_command, "load_history", lambda _: (self.told, SLOW))

    def __call__(self, told: JobStatus, *arguments: str, charset: str = "utf-8") -> str:
        """Return what a command prints about a job, on stdout and on stderr."""
        self.told = told
        result = CliRunner(charset=charset).invoke(main, list(arguments))
        assert result.exception is None, (told, result.exception)
        assert_harmless(result.output)
        return result.stdout


@pytest.fixture
def midstep(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """The commands."""
    return Commands(monkeypatch)


def assert_harmless(text: str) -> None:
    """Nothing in it but printable characters and line breaks."""
    found = {character for character in text if not character.isprintable() and character != "\n"}
    assert not found, (found, text)


def strictly(text: str) -> Any:
    """Read JSON, and no words of Python's own such as NaN."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def worse_and_worse(lived: JobStatus, count: int) -> Iterator[JobStatus]:
    """Yield statuses with hostile records."""
    rng = random.Random(20261122)
    for _ in range(count):
        yield hostile(lived, rng, rng.choice((0.02, 0.1, 0.5, 1.0)))


@attack(
    "names, reasons, error texts and numbers in a job's records that are markup, escape sequences or no numbers at all",
    holds="`midstep status` and `midstep report` show them as text; no byte of them moves the cursor or forges a line",
)
def test_status_and_report_show_hostile_records_as_text(lived: JobStatus, midstep: Commands) -> None:
    """All of them, whatever is in them."""
    for told in worse_and_worse(lived, PAGES):
        midstep(told, "status")
        midstep(told, "report")


@attack(
    "the same records, as data: `midstep status --json`, `midstep report --json --trace FILE`",
    holds="each is one JSON document; what is printed is plain ASCII with all else escaped",
)
def test_data_of_hostile_records_is_plain_json(lived: JobStatus, midstep: Commands, tmp_path: Path) -> None:
    """A program reads it, and a terminal may show it."""
    for told in worse_and_worse(lived, 2 * PAGES):
        status_json = midstep(told, "status", "--json")
        assert status_json.isascii()
        assert strictly(status_json)["job"] == told.job
        report_json = midstep(told, "report", "--json", "--trace", str(tmp_path / "trace.json"))
        assert report_json.isascii()
        assert strictly(report_json)["job"] == told.job
        strictly((tmp_path / "trace.json").read_text())


@attack(
    "the same records, while the job runs",
    holds="the launcher says each turn of the job as text",
)
def test_the_launcher_says_hostile_records_as_text(
    lived: JobStatus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks the controller, which has them from anybody."""
    from midstep.cli.display.display import Display

    replies = worse_and_worse(lived, TURNS)
    monkeypatch.setattr("midstep.cli.display.display.ask", lambda *_: StatusReply(next(replies)))
    display = Display(tmp_path, tmp_path, quiet=True)
    for _ in range(TURNS):
        display._job = JobFollower(tmp_path, display._show)
        display._job.look()
    shown = capsys.readouterr().err
    assert_harmless(shown)
    assert shown.count("\n") == shown.count("\nmidstep: ") + 1


@attack(
    "the same records, as a picture: `midstep report --picture FILE`",
    holds="it is drawn; a dollar sign is no formula",
)
@pytest.mark.parametrize("text", ["$\\frac{1}{$", "\x1b[2J\0", "$%s${0}", "[/x]"])
@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")
def test_a_picture_of_hostile_records_is_drawn(text: str, lived: JobStatus, midstep: Commands, tmp_path: Path) -> None:
    """Names of nodes and phases are what is drawn of them."""
    pytest.importorskip("matplotlib")
    incident = lived.incidents[1]
    reports = tuple(msgspec.structs.replace(each, node=text, detail=text) for each in incident.reports)
    phases = tuple(msgspec.structs.replace(each, name=text) for each in incident.phases)
    named = msgspec.structs.replace(incident, reports=reports, phases=phases)
    midstep(msgspec.structs.replace(lived, incidents=(named,)), "report", "--picture", str(tmp_path / "report.svg"))
    assert (tmp_path / "report.svg").stat().st_size > 0


@attack(
    "a terminal that knows only ASCII, and records that are Chinese",
    holds="what it lacks is escaped; no command fails on it",
)
def test_a_terminal_that_knows_only_ascii_shows_the_rest(lived: JobStatus, midstep: Commands) -> None:
    """LC_ALL=C, as in many a container."""
    told = msgspec.structs.replace(lived, reason="设备故障 \U0001f525", exit_code=1)
    for command in ("status", "report"):
        assert "\\u8bbe\\u5907" in midstep(told, command, charset="ascii")


def test_a_bracket_is_shown_as_it_is(lived: JobStatus, midstep: Commands) -> None:
    """In every place where a name can stand."""
    ranks = tuple(msgspec.structs.replace(each, role="[r/1]", activity="[a/2]", node="[n/3]") for each in lived.ranks)
    nodes = tuple(msgspec.structs.replace(each, node="[n/4]", note="[/o]\nJob [j/6]: FINISHED") for each in lived.nodes)
    shown = midstep(msgspec.structs.replace(lived, ranks=ranks, nodes=nodes, job="[j/6]"), "status")
    for each in ("[r/1]", "[a/2]", "[n/3]", "[n/4]", "[/o]", "[j/6]"):
        assert each in shown, shown
    assert [line[:11] for line in shown.splitlines() if line.startswith("Job ")] == ["Job [j/6]: "]


@attack(
    "an error text of another program or file with escape sequences, in what a command is refused with",
    holds="it is shown without them",
    reads="Error: a?[2Jb",
)
def test_what_a_command_is_refused_with_is_text(midstep: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are shown in one place."""

    def fail(*_: object) -> None:
        raise ConfigurationError("a\x1b[2Jb\x07")

    monkeypatch.setattr(status_command, "reached", fail)
    result = CliRunner().invoke(main, ["status"])
    assert result.exit_code == 1
    assert result.output == "Error: a?[2Jb?\n"
