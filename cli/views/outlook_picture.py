"""A forecast as a picture: what each incident cost over time, by rung, and where the time went."""

from pathlib import Path

from ...forecast.outlook import Loss, Outlook
from ...protocol.errors import ConfigurationError
from ...protocol.types import Rung
from .timeline_picture import DOTS_PER_INCH, FORMATS
from .wording import duration_text

SIZE_INCHES = (11.0, 6.2)
HOUR_S = 3600.0
# Okabe and Ito's colours, from green for the cheapest to red for the stop; the markers differ, too.
LOOKS = {
    Rung.RETRY_STEP: ("#009E73", "o"),
    Rung.RECOVER_IN_PLACE: ("#56B4E9", "s"),
    Rung.RECOVER: ("#0072B2", "^"),
    Rung.RESCHEDULE_POD: ("#E69F00", "D"),
    Rung.RESCHEDULE_JOB: ("#CC79A7", "v"),
    Rung.STOP: ("#D55E00", "X"),
}


def write_outlook_picture(outlook: Outlook, path: Path) -> None:
    """Draw into `path`; its ending says the format. Raises ConfigurationError: unknown ending, no matplotlib."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"{path}: a picture ends with one of {', '.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("pictures need matplotlib: pip install 'midstep[plot]'") from error
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 1))
    figure.suptitle(
        f"{outlook.ranks} ranks, {outlook.hours:g} h, seed {outlook.seed}: "
        f"{outlook.incidents} incidents, goodput {100 * outlook.goodput:.2f} %"
    )
    for rung, rows in outlook.by_rung().items():
        colour, marker = LOOKS[rung]
        above.scatter(
            [row.at_h for row in rows], [max(row.cost_s, 0.1) for row in rows],
            c=colour, marker=marker, label=f"{rung} ({len(rows)})", s=28,
        )  # fmt: skip
    above.set(yscale="log", xlim=(0, outlook.hours), xlabel="hours", ylabel="lost in one incident")
    if outlook.timeline:
        above.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(Rung), fontsize="small", frameon=False)
        for axis_ticks in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
            axis_ticks(lambda seconds, _: duration_text(seconds))
    lost_h = [outlook.lost_s[loss] / HOUR_S for loss in Loss]
    below.barh([loss.value for loss in Loss], lost_h, color="#999999")
    for place, hours in enumerate(lost_h):
        below.text(hours, place, f" {hours:.2f} h", va="center", fontsize="small")
    below.set(xlabel="hours lost", xlim=(0, 1.15 * max(*lost_h, 0.01)))
    below.invert_yaxis()
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
