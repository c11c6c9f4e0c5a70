"""Where phases are laid in time, and how few characters still show each of them."""

from itertools import pairwise

import msgspec
import pytest

from midstep.cli.views.timeline import Span, lay_out
from midstep.cli.views.timeline_text import RANK_ROWS, bar_cells, rows_to_show
from midstep.protocol.incidents import JobStatus


def letters(spans: tuple[Span, ...], columns: int, length_s: float = 1.0) -> str:
    return "".join(cell.letter if cell else " " for cell in bar_cells(spans, (0.0, length_s), columns))


def test_rank_phases_lie_in_the_controller_phase_that_ordered_them(status: JobStatus) -> None:
    timeline = lay_out(status.incidents[0])
    phases = {span.name: span for span in timeline.phases}
    for lane in timeline.lanes.values():
        for span in lane:
            home = phases["quiescing" if span.name in ("stop", "clean", "join") else "rejoining"]
            assert home.began_s <= span.began_s
            assert span.ended_s <= home.ended_s


def test_phases_of_a_rank_never_overlap(status: JobStatus) -> None:
    for incident in status.incidents:
        for lane in lay_out(incident).lanes.values():
            assert all(before.ended_s <= after.began_s for before, after in pairwise(lane))


def test_observers_whose_clocks_run_ahead_give_no_negative_times(status: JobStatus) -> None:
    incident = status.incidents[0]
    ahead = msgspec.structs.replace(incident, began_s=incident.began_s + 10)
    timeline = lay_out(ahead)
    assert all(span.length_s >= 0 and span.began_s >= 0 for span in timeline.phases)
    assert all(mark.at_s >= 0 for mark in timeline.marks)


def test_every_phase_gets_a_character_however_short() -> None:
    spans = tuple(
        Span(name, 1, began, began + 0.0001)
        for name, began in (("stop", 0.0), ("clean", 0.0001), ("rebuild", 0.5), ("repair", 0.9999), ("rollback", 1.0))
    )
    assert letters(spans, 10) == "sc   b  ro"


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 40])
def test_bars_have_the_width_that_they_were_given(columns: int) -> None:
    spans = tuple(Span(name, 1, 0.0, 1.0) for name in ("stop", "clean", "rebuild"))
    assert len(bar_cells(spans, (0.0, 1.0), columns)) == columns
    assert len(bar_cells(spans, (0.0, 0.0), columns)) == columns


def test_of_a_big_world_newcomers_and_the_slowest_are_shown() -> None:
    lanes = {rank: (Span("stop", 1, 0.0, 0.001 * rank),) for rank in range(1000)}
    lanes[5] = (Span("join", 1, 0.0, 0.001),)
    shown = rows_to_show(lanes)
    assert len(shown) == RANK_ROWS
    assert shown[0] == 5
    assert shown[-1] == 999
