"""Numbers and names read the same everywhere, and no text of a fault can do a terminal harm."""

import pytest

from midstep.cli.views.wording import duration_text, size_text, telling_line
from midstep.protocol.wording import numbers_text, ranks_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.0002, "<1 ms"),
        (0.012, "12 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (1.236, "1.24 s"),
        (9.96, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (185.2, "3 min 5 s"),
        (7800.0, "2 h 10 min"),
        (277_200.0, "3 d 5 h"),
        (-0.012, "-12 ms"),
        (-0.0001, "<1 ms"),
    ],
)
def test_duration_is_written_in_the_unit_that_fits_it(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1500, "1.5 kB"),
        (120_000_000, "120 MB"),
        (40_000_000_000, "40 GB"),
        (2e15, "2000.0 TB"),
    ],
)
def test_size_is_written_in_decimal_units(size_bytes: int, text: str) -> None:
    assert size_text(int(size_bytes)) == text


def test_numbers_are_joined_to_runs() -> None:
    assert numbers_text([3, 1, 2, 7, 9, 8, 12, 13]) == "1-3, 7-9, 12, 13"
    assert ranks_text([4]) == "rank 4"
    assert ranks_text([]) == "no rank"
    assert ranks_text([2, 0, 1, 5]) == "ranks 0-2, 5"


def test_of_very_many_ranks_the_first_are_named_and_all_are_counted() -> None:
    assert ranks_text(range(10_000)) == "ranks 0-9999"
    assert ranks_text(range(0, 100, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (50 in all)"


def test_telling_line_of_a_traceback_is_the_exception() -> None:
    assert telling_line("Traceback (most recent call last):\n  File x\nValueError: bad\n") == "ValueError: bad"


def test_telling_line_cannot_move_the_cursor_and_is_bounded() -> None:
    assert "\x1b" not in telling_line("\x1b[2Jgone")
    assert telling_line("a\rb") == "a"
    assert len(telling_line("x" * 10_000)) == 200
    assert telling_line("") == ""
