"""The last words of a lost node: how much of them is sent, kept and shown. They decide nothing."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from midstep.agent.last_words import words_of
from midstep.cli.views.incident_data import incident_json
from midstep.cli.views.report_text import incident_view
from midstep.controller import liveness as last_words
from midstep.controller.liveness import KeptWords
from midstep.protocol.bounds import LONGEST_TEXT, LONGEST_WORDS, MOST_OF_NODES_WORDS, MOST_WITH_WORDS, fits
from midstep.protocol.incidents import Incident
from midstep.protocol.messages import FaultReported, NodeLost
from midstep.protocol.rank_logs import LONGEST_OUTPUT, in_lines, room_of_each, size_of
from midstep.protocol.reports import NodeWords, RankWords
from midstep.protocol.types import FaultKind, FaultReport, RunningProcess
from midstep.testing.fake_cluster import FakeCluster


def logs(folder: Path, *contents: bytes | None) -> list[tuple[RunningProcess, Path]]:
    """Make the logs of ranks; None: there is none."""
    made = []
    for rank, content in enumerate(contents):
        path = folder / f"rank-{rank}.log"
        if content is not None:
            path.write_bytes(content)
        made.append((RunningProcess(rank, 100 + rank, 1, 1), path))
    return made


# --- what an agent tells ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, 1, 7, 8, MOST_WITH_WORDS, 4096])
def test_the_more_ranks_a_node_has_the_less_each_says(ranks: int) -> None:
    room = room_of_each(ranks)
    assert 100 < room <= LONGEST_WORDS
    assert room * (1 + min(ranks, MOST_WITH_WORDS)) <= MOST_OF_NODES_WORDS


def test_ends_of_logs_are_told_in_bounds_whatever_is_in_them(tmp_path: Path) -> None:
    garbage, long_line = os.urandom(100_000), b"x" * 1_000_000
    words = words_of("a", "y" * 9000, logs(tmp_path, b"one\ntwo\n", garbage, long_line, None, b""), None)

    assert [each.rank for each in words.ranks] == [0, 1, 2]
    assert words.ranks[0].text == "one\ntwo"
    assert fits(words)
    assert size_of(words) <= MOST_OF_NODES_WORDS


def test_of_very_many_ranks_those_are_told_that_have_printed_last(tmp_path: Path) -> None:
    many = logs(tmp_path, *[b"line\n"] * (MOST_WITH_WORDS + 10))
    for process, path in many:
        os.utime(path, (process.rank, process.rank))
    words = words_of("a", "", many, None)

    assert [each.rank for each in words.ranks] == list(range(10, MOST_WITH_WORDS + 10))
    assert fits(words)


def test_a_process_whose_log_was_cut_keeps_what_it_had_said_and_its_successor_does_not(tmp_path: Path) -> None:
    ((process, path),) = logs(tmp_path, b"before\n")
    before = words_of("a", "", [(process, path)], None)
    path.write_bytes(b"")

    assert words_of("a", "", [(process, path)], before) == before
    assert words_of("a", "", [(RunningProcess(0, 7, 2, 2), path)], before).ranks == ()


# --- what the controller keeps ------------------------------------------------------------------------------------


def test_a_line_says_who_printed_it_and_can_name_nobody_else() -> None:
    words = NodeWords("a", "INFO up", (RankWords(0, 1, "one\n[rank 1] two"), RankWords(1, 1, " \n")))

    assert in_lines(words).splitlines() == ["[rank 0] one", "[rank 0] [rank 1] two", "[agent] INFO up"]


@pytest.mark.parametrize("text", ["a\n" * 500, "a" * 1000, "\u2028" * 300, ""])
def test_all_that_a_node_says_is_bounded_once_more(text: str) -> None:
    words = NodeWords("a", text, tuple(RankWords(rank, 1, text) for rank in range(MOST_WITH_WORDS)))

    assert len(in_lines(words)) <= LONGEST_OUTPUT < LONGEST_TEXT


def test_the_newest_words_go_with_the_loss_and_are_forgotten_then() -> None:
    kept = KeptWords()
    for step in (1, 2):
        kept.take(NodeWords("a", "", (RankWords(0, 1, f"step {step}"),)))
    loss = NodeLost("a", "silent", 9.0)

    assert kept.completed(loss) == NodeLost("a", "silent", 9.0, "[rank 0] step 2")
    assert kept.completed(loss) == loss


def test_no_more_nodes_are_remembered_than_may_be_and_those_that_spoke_last_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(last_words, "MOST_NODES_WORDS", 2)
    kept = KeptWords()
    for node in ("a", "b", "a", "c"):
        kept.take(NodeWords(node, "there"))

    said = {node: kept.completed(NodeLost(node, "gone", 1.0)) for node in ("a", "b", "c")}
    assert {node for node, loss in said.items() if isinstance(loss, NodeLost) and loss.output} == {"a", "c"}


# --- what follows -------------------------------------------------------------------------------------------------


def lost(output: str) -> tuple[FakeCluster, list[object]]:
    """A job that loses a node with these last words, and what it does then."""
    cluster = FakeCluster().start()
    return cluster, cluster.feed(NodeLost("node1", "its agent is silent", cluster.now, output))


def quoted(incident: Incident) -> list[str]:
    """What the text of an incident shows of what was printed."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(incident_view(incident, width=100))
    lines = [line.strip() for line in console.export_text().splitlines()]
    return [line for line in lines if line.startswith("| ")]


def test_the_words_of_a_lost_node_are_in_its_incident_and_decide_nothing() -> None:
    words = "\n".join([*(f"[rank {rank}] line {line}" for rank in (2, 3) for line in range(9)), "[agent] INFO up"])
    (with_words, did), (without, does) = lost(words), lost("")

    assert did == does
    assert with_words.machine.incidents[-1].decisions == without.machine.incidents[-1].decisions
    incident = with_words.machine.incidents[-1]
    assert [report["output"] for report in incident_json(incident)["reports"]] == [words]
    of_ranks = [f"| [rank {rank}] line {line}" for rank in (2, 3) for line in (7, 8)]
    assert quoted(incident) == [*of_ranks, "| [agent] INFO up"]


def test_a_process_is_quoted_as_ever() -> None:
    cluster = FakeCluster().start()
    printed = "\n".join(f"[{number}] line" for number in range(9))
    report = FaultReport(FaultKind.EXIT, cluster.now, "node/node0", "", 1, "node0", 1, 1, output=printed)
    cluster.feed(FaultReported(report))

    assert quoted(cluster.machine.incidents[-1]) == [f"| [{number}] line" for number in (5, 6, 7, 8)]
