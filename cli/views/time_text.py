"""Where a job's time went, in words: a line for `midstep status`, a table for reports and forecasts."""

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from ...protocol.incidents import JobStatus
from ...protocol.time_spent import TimeCategory, TimeSpent
from .wording import ABSENT, duration_text

SHOWN = 3  # of what the rest of the time went to
MONTH_S = 30 * 24 * 3600.0
MEANING = {
    TimeCategory.TRAINING: "training",
    TimeCategory.REPEATED: "steps repeated",
    TimeCategory.START: "start",
    TimeCategory.WAITING: "waiting for nodes",
    TimeCategory.DETECT: "recovery: detect",
    TimeCategory.RESTART: "recovery: all processes start again",
    TimeCategory.QUIESCE: "recovery: quiesce",
    TimeCategory.REJOIN: "recovery: rejoin",
    TimeCategory.FIRST_STEP: "recovery: first step",
    TimeCategory.CHECKPOINT: "emergency checkpoint",
    TimeCategory.PLANNED: "planned changes",
    TimeCategory.UNGUARDED: "unguarded",
    TimeCategory.FINISH: "finish",
}
_NAMED_LEAST = 0.0005  # of the time: less is no share that can be read


def share_text(share: float | None) -> str:
    """Return a share as 98.6 %, and as a dash where it is not known."""
    return ABSENT if share is None else f"{100 * share:.1f} %"


def time_line(status: JobStatus, forecast: TimeSpent | None = None) -> list[Text]:
    """Return the goodput since the start and lately, and what most of the rest went to; nothing before the start.

    `forecast`: the one that was kept with the job.
    """
    spent = status.time
    if spent is None or spent.wall_s <= 0.0:
        return []
    if spent.goodput is None:
        return [Text("goodput: not known, no rank has trained in a train function that midstep watches", style="dim")]
    foreseen = "" if forecast is None else f"forecast {share_text(forecast.goodput)}, so far "
    text = Text(f"goodput {foreseen}").append(share_text(spent.goodput), style="bold")
    text.append(f" of {duration_text(spent.wall_s)}")
    lately = [f"{share_text(each.goodput)} of the last {_window_text(each)}" for each in status.time_lately]
    text.append(f" ({', '.join(lately)})" if lately else "")
    rest = sorted(
        ((duration_s, each) for each, duration_s in spent.seconds.items() if each is not TimeCategory.TRAINING),
        reverse=True,
    )
    named = [(duration_s, each) for duration_s, each in rest[:SHOWN] if duration_s >= _NAMED_LEAST * spent.wall_s]
    told = ", ".join(f"{MEANING[each]} {duration_text(duration_s)}" for duration_s, each in named)
    text.append(f"; {told}" if told else "")
    return [text]


def time_view(status: JobStatus, forecast: TimeSpent | None = None) -> list[Table | Text]:
    """Return the table of where the time went, and the share that was productive in the last 30 days.

    `forecast`: the one that was kept with the job; its times are of another length, its shares say the same.
    """
    spent = status.time
    if spent is None or spent.wall_s <= 0.0:
        return []
    month = next((each for each in status.time_lately if each.wall_s >= MONTH_S * 0.999), spent)
    of = "the last 30 days" if month is not spent else f"the {duration_text(spent.wall_s)} so far"
    line = Text("effective training time ratio (ETTR) of ").append(of).append(": ")
    line.append(share_text(month.goodput), style="bold")
    if spent.goodput is None:
        line.append(" (no rank has trained in a train function that midstep watches)", style="dim")
    columns = {"time": spent} if forecast is None else {"time": spent, "forecast": forecast}
    line.append("" if forecast is None else f" (forecast {share_text(forecast.goodput)})")
    return [time_table(columns), line]


def time_table(columns: Mapping[str, TimeSpent]) -> Table:
    """Return a line per category, with its time and share for each of some accounts, by their headings."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("where the time went", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
    for category in TimeCategory:
        if any(category in spent.seconds for spent in columns.values()):
            table.add_row(MEANING[category], *(cell for spent in columns.values() for cell in _cells(spent, category)))
    return table


def _cells(spent: TimeSpent, category: TimeCategory) -> tuple[str, str]:
    duration_s = spent.seconds.get(category, 0.0)
    return duration_text(duration_s), share_text(duration_s / spent.wall_s if spent.wall_s > 0.0 else None)


def _window_text(spent: TimeSpent) -> str:
    hours = round(spent.wall_s / 3600)
    if hours <= 1:
        return "hour"
    return "day" if hours == 24 else f"{hours // 24} days"
