"""The bar of a demo's steps: on a terminal only, below all other lines, and gone with the job."""

import pytest

from midstep.cli.display.display import StepBar
from midstep.cli.display.terminal import Terminal

ERASED = b"\x1b[1A\x1b[2K"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """One of 80 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal(stderr=True, width=80)


def test_a_bar_takes_the_place_of_the_one_before_and_the_next_line_takes_its_place(terminal: Terminal) -> None:
    bar = StepBar(100, terminal)
    first = bar.drawn(7)
    assert b"step 7 of 100" in first
    assert not first.startswith(ERASED)
    assert b"\n" not in first
    assert bar.drawn(7) == b""
    assert bar.drawn(8).startswith(ERASED)
    assert bar.erased() == ERASED
    assert bar.erased() == b""
    assert b"step 8 of 100" in bar.drawn(8), "it stands below the line that took its place"
    assert bar.ended().startswith(ERASED)
    assert bar.ended() == b""


def test_nothing_is_drawn_where_there_is_no_terminal_or_the_number_of_steps_is_not_known(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert StepBar(0, terminal).drawn(1) == b""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert StepBar(100, Terminal(stderr=True, width=80)).drawn(1) == b""
