"""All that commands print goes through `cli/display/`, which knows what a text could do to a terminal."""

import ast
import io
import logging
from pathlib import Path

import midstep.cli
from midstep.cli.display.plain import HarmlessFormatter
from midstep.cli.views.wording import duration_text, harmless

CLI = Path(midstep.cli.__file__).parent
PRINTING = {"print", "Console", "Progress", "Live"}


def test_no_command_prints_by_itself() -> None:
    """A console of rich's own would take users' texts for markup, and click would print escape sequences."""
    found = set()
    for path in sorted(CLI.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            given = {keyword.arg for keyword in node.keywords}
            match node.func:
                case ast.Name(id=name) if name in PRINTING and "console" not in given:
                    found.add((path.name, name))
                case ast.Attribute(value=ast.Name(id="click"), attr="echo" | "secho" as name):
                    found.add((path.name, name))
                case ast.Attribute(attr="from_markup" | "from_ansi" as name):
                    found.add((path.name, name))
    # The other one prints YAML, escaped by the library that has written it; a program is to read it.
    assert found == {("plain.py", "echo"), ("policy.py", "echo")}


def test_a_log_record_stays_one_record() -> None:
    """What a rank reports is logged by the controller, and shown by `cat`."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HarmlessFormatter("%(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.error("incident 1: %s", "ValueError: \x1b[2J\nINFO the job is over")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["ERROR incident 1: ValueError: ?[2J", "    INFO the job is over", "ERROR failed"]
    assert "\x1b" not in stream.getvalue()


def test_harmless_text_keeps_what_can_be_read() -> None:
    """Lines, blanks of every kind and all that is printed."""
    assert harmless("a\n数据\u3000故障\u00a0é") == "a\n数据 故障 é"
    assert harmless("\x1b]0;x\x07\r\t\u202e\x9b") == "?]0;x?  ??"


def test_a_duration_of_a_clock_that_was_wrong_is_none() -> None:
    """It would fill the table."""
    assert [duration_text(each) for each in (float("nan"), float("inf"), -1e300, 1e12)] == ["-"] * 4
