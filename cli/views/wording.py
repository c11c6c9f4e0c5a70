"""Numbers, times and names as an operator reads them, the same in every view."""

from datetime import datetime, timezone

from ...protocol.wording import one_line, summary_line

MS_PER_S = 1000
S_PER_MINUTE = 60
S_PER_HOUR = 3600
S_PER_DAY = 86400
NO_DURATION_S = 1e11  # thousands of years: of a clock that was wrong
SIZE_STEP = 1000  # decimal units, as network and disk vendors count
CELL_CHARACTERS = 120
DETAIL_CHARACTERS = 200
REASON_CHARACTERS = 400

ABSENT = "-"
UNKNOWN = "?"


def duration_text(seconds: float | None) -> str:
    """Return seconds as 12 ms, 1.24 s, 3 min 5 s, 2 h 10 min or 3 d 4 h; None as a dash."""
    if seconds is None or not abs(seconds) < NO_DURATION_S:  # nor is NaN one
        return ABSENT
    if seconds < 0:
        positive = _positive_duration_text(-seconds)
        return positive if positive == "<1 ms" else f"-{positive}"
    return _positive_duration_text(seconds) if seconds else "0 ms"


def _positive_duration_text(seconds: float) -> str:
    milliseconds = round(seconds * MS_PER_S)
    if milliseconds < MS_PER_S:
        return f"{milliseconds} ms" if milliseconds else "<1 ms"
    if round(seconds, 1) < 10:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < S_PER_MINUTE:
        return f"{seconds:.1f} s"
    return _long_duration_text(round(seconds))


def _long_duration_text(whole_s: int) -> str:
    if whole_s < S_PER_HOUR:
        return f"{whole_s // S_PER_MINUTE} min {whole_s % S_PER_MINUTE} s"
    if whole_s < S_PER_DAY:
        return f"{whole_s // S_PER_HOUR} h {whole_s % S_PER_HOUR // S_PER_MINUTE} min"
    return f"{whole_s // S_PER_DAY} d {whole_s % S_PER_DAY // S_PER_HOUR} h"


def size_text(size_bytes: int) -> str:
    """Return a number of bytes as 512 B, 1.2 MB or 40 GB."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if round(value) < SIZE_STEP:
            return f"{value:.1f} {unit}" if unit != "B" and value < 10 else f"{value:.0f} {unit}"
        value /= SIZE_STEP
    return f"{value:.1f} TB"


def clock_text(at_s: float) -> str:
    """Return wall-clock seconds as a time of day to the millisecond, in UTC."""
    at = _utc(at_s)
    return f"{at:%H:%M:%S}.{at.microsecond // MS_PER_S:03d} UTC" if at is not None else ABSENT


def date_text(at_s: float) -> str:
    """Return wall-clock seconds as date and time of day, in UTC."""
    at = _utc(at_s)
    return f"{at:%Y-%m-%d %H:%M:%S} UTC" if at is not None else ABSENT


def _utc(at_s: float) -> datetime | None:
    """Return the time as a date, and None for a clock that is off by millennia."""
    try:
        return datetime.fromtimestamp(at_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: 1 step, 2 steps, no steps."""
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def lost_text(steps: int, *, is_known: bool) -> str:
    """Return how many steps were lost. `is_known` False: it may be more."""
    if not is_known and steps == 0:
        return "an unknown number of steps lost"
    return f"{'' if is_known else 'at least '}{count_text(steps, 'step')} lost"


def harmless(text: str) -> str:
    """Return a text that a terminal shows and does not obey: lines stay lines, other control characters become "?"."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter == "\n" else " " if letter.isspace() else "?" for letter in text
    )


def cell(text: str) -> str:
    """Return a name or a note for a table: on one line, and cut."""
    return one_line(text, CELL_CHARACTERS)


def telling_line(detail: str, limit: int = DETAIL_CHARACTERS) -> str:
    """Return the one line of a detail that says most: the first one, or the last one of a traceback.

    Characters that would move a terminal's cursor or change its colours are made harmless.
    """
    line = harmless(summary_line(detail))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
