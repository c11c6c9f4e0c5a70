"""The text that an operator reads at night: outcome first, everything there, nothing too wide."""

import io
import json

import msgspec
import pytest
from rich.console import Console, RenderableType

from midstep.cli.status import as_data
from midstep.cli.views.incident_data import incident_json
from midstep.cli.views.report_text import incident_view, job_view
from midstep.cli.views.status_view import status_view
from midstep.protocol.incidents import HoldRecord, Incident, JobStatus, ProxyStatus, RankPhase, RankStatus
from midstep.protocol.types import CONTROLLER, Decision, FaultKind, FaultReport, Rung, SkippedRung


def plain(view: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def incident_text(incident: Incident, width: int = 100) -> str:
    return plain(incident_view(incident, width=width), width)


def test_first_line_says_what_became_of_the_job(status: JobStatus) -> None:
    lines = plain(job_view(status, status.incidents, width=100)).splitlines()
    assert lines[0].startswith("Job gpt-stdlib: FAILED with exit code 1 at step 3001")
    assert lines[1].strip() == "budget recover_in_place per job is spent (4 of 4)"
    assert lines[2].startswith("6 incidents (5 resumed, 1 stopped), 7 steps lost")


def test_first_line_of_an_incident_is_its_outcome_rung_cost_and_cause(status: JobStatus) -> None:
    assert incident_text(status.incidents[1]).splitlines()[0].strip() == (
        "Incident 2: RESUMED after 267 ms by recover_in_place, no steps lost; process ended: rank 1 on node-0"
    )


def test_a_loss_that_is_not_known_is_not_called_none(status: JobStatus) -> None:
    """Neither the incident, nor the line that sums up, nor the data."""
    unknown = msgspec.structs.replace(status.incidents[1], committed_is_known=False)
    assert ", an unknown number of steps lost;" in incident_text(unknown).splitlines()[0]
    job = msgspec.structs.replace(status, incidents=(unknown,))
    assert "1 incident (1 resumed), an unknown number of steps lost" in plain(job_view(job, job.incidents, width=100))
    job = msgspec.structs.replace(status, incidents=(*status.incidents[1:], unknown))
    assert "at least 7 steps lost" in plain(job_view(job, job.incidents, width=100))
    assert incident_json(unknown)["steps_lost"] is None


def test_every_reason_is_shown(status: JobStatus) -> None:
    for incident in status.incidents:
        text = " ".join(incident_text(incident).split())
        for decision in incident.decisions:
            assert f"{decision.rung}: {decision.reason}" in text
            for skipped in decision.skipped:
                assert f"not {skipped.rung}: {skipped.reason}" in text


def test_a_failed_rung_is_told_from_the_one_that_worked(status: JobStatus) -> None:
    text = " ".join(incident_text(status.incidents[4]).split())
    assert "1. recover_in_place: the process of rank 1 ended, and node-0 is healthy -> not completed" in text
    assert "7 steps lost (2207 were committed)" in text
    assert "attempt 2, generation 7" in text


def test_the_last_words_of_a_process_stand_below_its_end_and_do_nothing_to_the_terminal(status: JobStatus) -> None:
    first, *others = status.incidents[1].reports
    told = msgspec.structs.replace(first, output="one\ntwo\nthree\nfour\n\n\x1b[31mred [bold]\n")
    text = incident_text(msgspec.structs.replace(status.incidents[1], reports=(told, *others)))
    assert [line.partition("| ")[2].rstrip() for line in text.splitlines() if "  | " in line] == [
        "two",
        "three",
        "four",
        " [31mred [bold]",
    ]


def test_a_process_that_did_not_stop_in_time_has_its_logs_named(status: JobStatus) -> None:
    """It had no word for the controller; one that its agent has found stopped could write nothing."""
    late = FaultReport(FaultKind.UNRESPONSIVE, 1.0, CONTROLLER, "rank 1 did not quiesce", rank=1, incarnation=2)
    stopped = msgspec.structs.replace(late, seen_by="node/node-0", detail="has been stopped for 0.5 s")

    def cause(report: FaultReport) -> str:
        return " ".join(incident_text(msgspec.structs.replace(status.incidents[1], reports=(report,))).split())

    named = "where its threads stood: logs/rank-1.2.debug.log; what it said: logs/rank-1.2.log"
    assert named in cause(late)
    assert "logs/" not in cause(stopped)


def test_the_status_shows_the_last_words_of_the_latest_incident_only(running: JobStatus, status: JobStatus) -> None:
    first, *others = running.incidents[0].reports
    told = msgspec.structs.replace(first, output="NPU 3: \x1b[31mlink down\n")
    incident = msgspec.structs.replace(running.incidents[0], reports=(told, *others))
    text = plain(status_view(msgspec.structs.replace(running, incidents=(incident,))))
    _, _, shown = text.partition(f"incident {incident.number}: rank {first.rank} on {first.node} had printed\n")
    assert shown.splitlines()[0].rstrip() == "  | NPU 3:  [31mlink down"
    later = msgspec.structs.replace(running, incidents=(incident, *status.incidents))
    assert "had printed" not in plain(status_view(later))
    assert "had printed" not in plain(status_view(running)), "it had printed nothing"


def test_a_stop_says_why(status: JobStatus) -> None:
    text = " ".join(incident_text(status.incidents[5]).split())
    assert text.startswith("Incident 6: STOPPED")
    assert "because budget recover_in_place per job is spent (4 of 4)" in text


def test_an_open_incident_names_its_phase(running: JobStatus) -> None:
    text = plain(incident_view(running.incidents[0], width=100, until_s=running.at_s))
    assert text.startswith("Incident 7: OPEN for 250 ms, rejoining by recover_in_place")


def test_a_healthy_process_that_was_lost_is_shouted(status: JobStatus) -> None:
    incident = status.incidents[1]
    lost = msgspec.structs.replace(incident, pids_after={**incident.pids_after, 2: 9999})
    text = incident_text(lost)
    assert "HEALTHY PROCESSES LOST" in text
    assert "healthy, yet not the same afterwards: rank 2" in text


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_asked_for(status: JobStatus, running: JobStatus, width: int) -> None:
    long = FaultReport(FaultKind.EXCEPTION, status.at_s, "rank/0", f"Error: {'x' * 500}", rank=0)
    wordy = msgspec.structs.replace(status.incidents[0], reports=(long,))
    for job in (status, running):
        view = job_view(job, (*job.incidents, wordy), width=width)
        assert max(map(len, plain(view, width).splitlines())) <= width
        assert max(map(len, plain(status_view(job), width).splitlines())) <= width


@pytest.mark.parametrize("width", [80, 100])
def test_bars_are_whole_at_the_widths_of_terminals(status: JobStatus, width: int) -> None:
    lines = [line.rstrip() for line in incident_text(status.incidents[1], width).splitlines()]
    newcomer = next(line for line in lines if line.startswith("  1 new"))
    assert newcomer.endswith("o"), "the rollback, which is last, was cut off"
    resuming = next(line for line in lines if line.startswith("  resuming"))
    assert len(resuming) == width


def test_plain_text_has_no_control_codes_and_is_ascii(status: JobStatus) -> None:
    nasty = FaultReport(FaultKind.EXCEPTION, 1.0, "rank/0", "\x1b[2J[red]boom[/red]", rank=0)
    decision = Decision(Rung.STOP, "\x1b[31mraised", (SkippedRung(Rung.RECOVER, "\x1b[2J"),))
    incident = msgspec.structs.replace(status.incidents[0], reports=(nasty,), decisions=(decision,))
    text = plain(job_view(status, (*status.incidents, incident), width=100))
    assert "\x1b" not in text
    assert "[red]boom[/red]" in text
    assert text.isascii()


def test_a_world_of_ten_thousand_ranks_fits_a_page(status: JobStatus) -> None:
    world = range(10_000)
    incident = msgspec.structs.replace(
        status.incidents[1],
        rank_phases=tuple(RankPhase(3, rank, "stop", 0.001) for rank in world),
        pids_before=dict.fromkeys(world, 1),
        pids_after=dict.fromkeys(world, 1),
    )
    assert len(incident_text(incident).splitlines()) < 50
    ranks = tuple(
        RankStatus(rank, "node", 1, 0, "lost" if rank == 7777 else "training", 5, "computing") for rank in world
    )
    text = plain(status_view(msgspec.structs.replace(status, ranks=ranks)))
    assert "7777" in text
    assert "9968 more ranks, most of them training" in text


def test_status_says_who_holds_which_rank_and_what_is_left(running: JobStatus) -> None:
    text = plain(status_view(running))
    assert text.startswith("Job gpt-stdlib: REJOINING at step 3100")
    assert "phase rejoining, generation 9, term 2, 3100 steps committed, median step 120 ms" in text
    for piece in ("4303", "joining", "local/1", "recover_in_place per job  1 of 8", "process ended: rank 0 on node-0"):
        assert piece in text


def test_status_says_when_the_world_is_smaller_than_it_was_asked_to_be(running: JobStatus) -> None:
    whole = msgspec.structs.replace(running, ranks_asked=len(running.ranks))
    assert "ranks" not in plain(status_view(whole)).splitlines()[1]
    small = msgspec.structs.replace(running, ranks=running.ranks[:2], ranks_asked=4)
    assert "term 2, 2 of 4 ranks, 3100 steps committed" in plain(status_view(small))
    data = json.loads(as_data(small, ""))
    assert (len(data["ranks"]), data["ranks_asked"]) == (2, 4)


def test_a_job_without_anything_yet_has_a_status_and_a_report(running: JobStatus) -> None:
    bare = msgspec.structs.replace(running, ranks=(), nodes=(), budgets=(), incidents=(), median_step_s=0.0)
    assert "No rank has joined yet." in plain(status_view(bare))
    assert "No incidents." in plain(job_view(bare, (), width=100))


def test_a_silence_that_is_or_was_held_is_told_of_with_its_length_and_its_end(status: JobStatus) -> None:
    holds = (HoldRecord(1763700012.0, 12.0, ("a", "b", "c"), 4), HoldRecord(1763700099.0, 60.0, ("b", "c"), 3, ("c",)))
    held = msgspec.structs.replace(status, holds=holds, holding="holding: 2 of 3 nodes silent for 5 s")
    for text in (plain(job_view(held, (), width=120), 120), plain(status_view(held), 120)):
        assert "holding: 2 of 3 nodes silent for 5 s" in text
        assert "3 of 4 nodes silent for 12.0 s up to 04:40:12.000 UTC, none was given up for it" in text
        assert "2 of 3 nodes silent for 1 min 0 s up to 04:41:39.000 UTC, c given up after that" in text


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        (
            (1.0, 1.92, 1.05, 1.34),
            "slowest: rank 1 on node-0 computes for 126 ms in a step, 1.92 times as long as others with equal work; "
            "then rank 3 on node-1 1.34 times",
        ),
        ((1.9, 1.8, 1.7, 1.6, 1.5, 1.4), "rank 2 on node-1 1.70 times, rank 3 on node-1 1.60 times, 2 more"),
        ((1.0, 1.09), ""),
    ],
)
def test_status_has_the_scores_of_the_slowest_ranks(status: JobStatus, ratios: tuple[float, ...], says: str) -> None:
    """The slowest in words, a few more by their numbers; the data has all."""
    ranks = tuple(
        RankStatus(rank, f"node-{rank // 2}", 100 + rank, 1, "training", 9, "", own_s=0.126, slowness=ratio)
        for rank, ratio in enumerate(ratios)
    )
    text = plain(status_view(msgspec.structs.replace(status, ranks=ranks)), width=1000)
    lines = [line.strip() for line in text.splitlines() if line.startswith("slowest: ")]
    assert lines == ([] if not says else [lines[0]])
    assert says in "".join(lines)


def test_a_status_names_proxies_and_those_that_are_silent(running: JobStatus) -> None:
    known = (ProxyStatus("rack7", 96, 0.2), ProxyStatus("rack8", 1, 3.2))
    said = plain(status_view(msgspec.structs.replace(running, proxies=known)))
    assert "proxies: rack7 with 96 nodes, rack8 with 1 node, silent for 3.20 s\n" in said
