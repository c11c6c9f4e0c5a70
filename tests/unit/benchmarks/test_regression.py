"""`make bench` says what has moved beyond its noise, and does not judge what cannot be compared."""

from pathlib import Path
from typing import Any

import pytest

from midstep.benchmarks.regression import record, text
from midstep.benchmarks.regression.comparison import Verdict, compare, got_worse, verdict_of
from midstep.benchmarks.regression.record import Better, Figure, Record
from midstep.benchmarks.regression.sources import SOURCES, of_machine, of_overhead, of_recovery, of_repair, of_scale

MACHINE = {"cores": 2, "python": "3.11.7", "torch": "2.13.0+cpu", "system": "Linux"}


def figure(
    least: float, median: float, greatest: float, better: Better = Better.LOWER, *, yardstick: bool = True
) -> Figure:
    """A figure of three repetitions."""
    return Figure("excess", median, least, greatest, "s", better, yardstick)


def day(figures: tuple[Figure, ...], foreign: float = 0.0, machine: dict[str, Any] | None = None) -> Record:
    """A record."""
    return Record("2026-11-25", "46283dd", machine or MACHINE, foreign, figures)


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (figure(0.39, 0.45, 0.50), Verdict.WITHIN_NOISE),  # one repetition is among the old ones
        (figure(0.41, 0.45, 0.50), Verdict.WORSE),
        (figure(0.20, 0.25, 0.29), Verdict.BETTER),
        (figure(0.25, 0.29, 0.30), Verdict.WITHIN_NOISE),
        (figure(0.10, 0.35, 0.90), Verdict.WITHIN_NOISE),
    ],
)
def test_a_figure_has_moved_if_no_repetition_is_among_the_old_ones(now: Figure, verdict: Verdict) -> None:
    assert verdict_of(figure(0.30, 0.35, 0.40), now) is verdict


def test_where_more_is_better_less_is_worse() -> None:
    old = figure(0.6, 0.7, 0.8, Better.HIGHER)
    assert verdict_of(old, figure(0.4, 0.5, 0.55, Better.HIGHER)) is Verdict.WORSE
    assert verdict_of(old, figure(0.85, 0.9, 0.95, Better.HIGHER)) is Verdict.BETTER


def test_a_trifle_is_no_news_however_quiet_the_machine_was() -> None:
    assert verdict_of(figure(1.000, 1.001, 1.002), figure(1.003, 1.004, 1.005)) is Verdict.WITHIN_NOISE


@pytest.mark.parametrize(
    ("yardstick", "foreign", "machine", "verdict"),
    [
        (False, 0.0, MACHINE, Verdict.WORSE),
        (False, 0.9, MACHINE, Verdict.NOT_JUDGED),  # others had the cores
        (False, 0.0, {**MACHINE, "cores": 16}, Verdict.NOT_JUDGED),
        (False, 0.0, {**MACHINE, "system": "Linux, a newer one"}, Verdict.WORSE),
        (True, 0.9, {**MACHINE, "cores": 16}, Verdict.WORSE),  # a ratio to what was measured beside it
    ],
)
def test_only_ratios_are_judged_on_another_or_a_busy_machine(
    yardstick: bool, foreign: float, machine: dict[str, Any], verdict: Verdict
) -> None:
    old = day((figure(0.3, 0.35, 0.4, yardstick=yardstick),))
    (moved,) = compare(old, day((figure(0.6, 0.7, 0.8, yardstick=yardstick),), foreign, machine))
    assert moved.verdict is verdict
    assert moved.ratio == pytest.approx(2.0)


def test_a_figure_that_is_gone_or_new_is_told_and_is_not_worse() -> None:
    other = Figure("share", 0.5, 0.4, 0.6)
    movements = compare(day((figure(0.3, 0.35, 0.4),)), day((other,)))
    assert [(each.name, each.verdict) for each in movements] == [("excess", Verdict.GONE), ("share", Verdict.NEW)]
    assert not got_worse(movements)


def test_one_figure_that_got_worse_is_enough() -> None:
    old = day((figure(0.3, 0.35, 0.4), Figure("share", 0.5, 0.4, 0.6, yardstick=True)))
    assert got_worse(compare(old, day((figure(0.9, 1.0, 1.1), old.figures[1]))))
    assert not got_worse(compare(old, old))


def test_the_text_names_each_figure_with_both_days() -> None:
    heads, line = text.lines(compare(day((figure(0.3, 0.35, 0.4),)), day((figure(0.6, 0.7, 0.8),))))
    assert heads.split() == ["figure", "last", "kept", "now", "ratio"]
    assert line.split() == ["excess", "0.35", "(0.30-0.40)", "s", "0.70", "(0.60-0.80)", "s", "2.00", "worse"]


def test_the_history_marks_what_moved_between_two_days() -> None:
    first, second = day((figure(0.3, 0.35, 0.4),)), day((figure(0.1, 0.12, 0.2), Figure("share", 0.5, 0.4, 0.6)))
    assert text.history([first, second]).splitlines() == [
        "| | 2026-11-25, `46283dd` | 2026-11-25, `46283dd` |",
        "| --- | --- | --- |",
        "| excess | 0.35 (0.30-0.40) s | 0.12 (0.10-0.20) s ↑ |",
        "| share |  | 0.50 (0.40-0.60) |",
        "| foreign cores | 0.00 | 0.00 |",
    ]


def test_what_is_kept_is_read_again_and_never_replaced(tmp_path: Path) -> None:
    first, second = day((figure(0.3, 0.35, 0.4),)), day((figure(0.1, 0.12, 0.2),))
    assert record.keep(first, tmp_path) != record.keep(second, tmp_path)
    assert record.kept(tmp_path) == [first, second]


def test_a_recovery_is_compared_with_torchruns_of_the_same_round() -> None:
    runs = {name: [{"recovery": {"excess_s": value}} for value in values] for name, values in
            {"midstep": (0.4, 0.8), "torchrun": (4.0, 8.0)}.items()}  # fmt: skip
    found = {system: {"4": {"runs": of_system}} for system, of_system in runs.items()}
    excess, ratio = of_recovery(found)
    assert excess.median == pytest.approx(0.6)
    assert not excess.yardstick
    assert (ratio.least, ratio.greatest) == pytest.approx((0.1, 0.1))
    assert ratio.yardstick
    assert [each.name for each in of_recovery({"midstep": found["midstep"]})] == [excess.name]


def test_the_other_benchmarks_give_their_figures() -> None:
    spread = {"median": 1.0, "min": 0.9, "max": 1.1}
    overhead = list(of_overhead({"ranks": {"4": {"ratio": spread, "cpu_ratio": spread}}}))
    assert [(each.median, each.yardstick) for each in overhead] == [(1.0, True), (1.0, True)]
    (share,) = of_repair({"cells": [{"share": spread}]})
    assert share.better is Better.HIGHER
    row = {"ranks": 80, "cpu_s": 0.5, "cpu_s_least": 0.4, "cpu_s_greatest": 0.6}
    assert [each.greatest for each in of_machine({"rows": [row]})] == [0.6]
    lost = [{"cpu_s": value, "quiesce_s": value / 10} for value in (0.5, 0.7, 0.6)]
    scale = list(of_scale({"rows": [{"ranks": 80, "losses": {"a rank": lost}}]}))
    assert [each.median for each in scale] == [0.6, pytest.approx(0.06)]


def test_the_benchmarks_that_are_run_are_there() -> None:
    folder = Path(record.__file__).parents[1]
    assert [name for name in SOURCES if not (folder / f"{name}.py").is_file()] == []


def test_all_that_is_kept_can_be_read() -> None:
    assert all(each.figures for each in record.kept())
