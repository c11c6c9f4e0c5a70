"""The excess of each peer after each fault, and its progress under a schedule, as SVGs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import schedule_table
from .kinds import Setting
from .plan import Peer
from .summary import OURS, Row, excess
from .table import WORDS

OWN, OTHER, SMALLER = "#0b6e4f", "#8a8f98", "#c9ccd1"
OTHERS = ("#c1554d", "#3b6fb6", "#b8860b", "#7a5195", "#555b66", "#a0522d")


def draw(rows: Sequence[Row], peers: Mapping[str, Peer], ranks: int, path: Path) -> None:
    """Draw a panel for each fault in a world of one size. Lighter bars: fewer ranks trained afterwards."""
    plt = _pyplot()
    shown = {
        fault: sorted(
            (row for row in rows if (row.trial.fault, row.trial.ranks) == (fault, ranks) and row.excess_s is not None),
            key=excess,
            reverse=True,
        )
        for fault in WORDS
    }
    shown = {fault: of_fault for fault, of_fault in shown.items() if of_fault}
    heights = [len(of_fault) + 1 for of_fault in shown.values()]
    figure, axes = plt.subplots(
        len(shown), 1, sharex=True, squeeze=False, figsize=(8, 0.25 * sum(heights) + 0.6),
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for axis, (fault, of_fault) in zip(axes[:, 0], shown.items(), strict=True):
        for place, row in enumerate(of_fault):
            assert row.excess_s is not None
            middle, least, greatest = row.excess_s.median, row.excess_s.least, row.excess_s.greatest
            colour = OWN if row.trial.tool == OURS else OTHER if row.world == ranks else SMALLER
            axis.barh(place, middle, color=colour, xerr=[[middle - least], [greatest - middle]], ecolor="#333333")
            axis.text(greatest * 1.1, place, f"{middle:.2f}", va="center")
        axis.set_yticks(range(len(of_fault)), [_name(row, peers) for row in of_fault])
        axis.set_title(f"one of {ranks} ranks {WORDS[fault]}", loc="left")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds beyond one step until all ranks train again, median with least and greatest")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_progress(rows: Sequence[schedule_table.Row], peers: Mapping[str, Peer], path: Path) -> None:
    """Draw how many steps were complete after how many seconds, a line for each tool; dashed: as it comes."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    others = [name for name in peers if name != OURS]
    for row in rows:
        if row.shown is None:
            continue
        place = others.index(row.trial.peer) if row.trial.peer in others else None
        steps = range(1, len(row.shown.done_s) + 1)
        axis.plot(
            row.shown.done_s, steps,
            color=OWN if place is None else OTHERS[place % len(OTHERS)],
            drawstyle="steps-post",
            linestyle="-" if row.trial.setting is Setting.TUNED else "--",
            label=_name(row, peers) + ("" if row.total_s else ", gave up"),
        )  # fmt: skip
        if row.total_s is None:
            axis.plot(row.shown.done_s[-1:], steps[-1:], "x", color="#333333")
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds since the start")
    axis.set_ylabel("steps complete")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _pyplot() -> Any:
    """Return what draws SVGs that are the same each time."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "midstep", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def _name(row: Row | schedule_table.Row, peers: Mapping[str, Peer]) -> str:
    return f"{peers[row.trial.peer].title}, {row.trial.setting.value}"
