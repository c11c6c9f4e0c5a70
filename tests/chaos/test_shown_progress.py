"""What takes long shows on a terminal how far it is, and writes nothing of that into a pipe or a file."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

LIMIT_S = 300.0
MIDSTEP = ("midstep.cli.main",)
# What runs, and what of its progress is seen. The run of a peer has no time: what is shown of it is all the same.
COMMANDS = {
    "simulate": ((*MIDSTEP, "simulate", "--mtbf", "3h", "--hours", "48"), r"forecast .* of 48 h"),
    "doctor": ((*MIDSTEP, "doctor"), r"looking for devices(?s:.*)step \d+ of 20"),
    "demo": ((*MIDSTEP, "demo", "--steps", "20"), r"step \d+ of 20"),
    "peers": (
        ("benchmarks.peers", "--peers", "midstep", "--settings", "default", "--faults", "none", "--ranks", "2",
         "--repeat", "1", "--limit", "0.5"),
        r"midstep.* 0/1 ",
    ),
}  # fmt: skip
LONG = frozenset({"doctor", "demo"})
STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BARS = re.compile(r"[\x1b\r━╸╺⠀-⣿]|step \d+ of \d+|looking for devices")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a command, in which nothing says what a terminal is."""
    told = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in told}
    return {**kept, "MIDSTEP_HOME": str(folder / "jobs"), "TMPDIR": str(folder), "TERM": "xterm", **more}


def on_a_terminal(words: tuple[str, ...], folder: Path) -> str:
    """Run a command on a terminal of its own; return all that it has shown there."""
    end, terminal = pty.openpty()
    with os.fdopen(end, "rb", buffering=0) as shown, subprocess.Popen(
        [sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal,
        env=environment(folder, COLUMNS="120"),
    ) as process:  # fmt: skip
        os.close(terminal)
        said, deadline_s = b"", time.monotonic() + LIMIT_S
        try:
            with contextlib.suppress(OSError):  # the terminal is closed at its other end
                while time.monotonic() < deadline_s:
                    if select.select([shown], [], [], 1.0)[0]:
                        said += shown.read(65536)
        finally:
            if process.poll() is None and time.monotonic() >= deadline_s:
                process.terminate()
    return said.decode(errors="replace")


def cases() -> list[object]:
    """Each command; those that train take longer."""
    return [pytest.param(name, marks=pytest.mark.soak if name in LONG else ()) for name in COMMANDS]


@pytest.mark.parametrize("name", cases())
def test_progress_shows_on_a_terminal(name: str, tmp_path: Path) -> None:
    words, shows = COMMANDS[name]
    said = on_a_terminal(words, tmp_path)
    assert re.search(shows, STYLES.sub("", said)), said
    assert STYLES.search(said)


@pytest.mark.parametrize("name", cases())
def test_a_pipe_gets_neither_progress_nor_escape_codes(name: str, tmp_path: Path) -> None:
    words, _ = COMMANDS[name]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(tmp_path),
        check=False,
    )
    assert done.stdout.strip(), done.stderr
    for said in (done.stdout, done.stderr):
        assert BARS.search(said) is None, said
