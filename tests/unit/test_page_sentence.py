"""The sentence on top of the page says what the job does, and what is asked of an operator."""

import msgspec
import pytest

from midstep.cli.page.sections import Looked, SectionWriter, outlook, runs
from midstep.cli.page.sentence import Mood, asked, sentence
from midstep.cli.views.status_view import vote_lines
from midstep.controller.time_account import time_spent
from midstep.protocol.incidents import BudgetUse, Incident, JobStatus, NodeStatus, RankStatus, StandingFault
from midstep.protocol.types import OPERATOR, Decision, FaultKind, FaultReport, Rung, SkippedRung

BEGAN_S = 1_790_000_000.0


def status(**changes: object) -> JobStatus:
    """A job of four ranks on two nodes that trains, with a spare node."""
    training = JobStatus(
        job="gpt",
        at_s=BEGAN_S + 100.0,
        phase="running",
        generation=1,
        term=1,
        committed=41_220,
        median_step_s=0.32,
        ranks=tuple(RankStatus(rank, f"node{rank // 2}", 100 + rank, 1, "training", 41_220, "") for rank in range(4)),
        nodes=(
            NodeStatus("node0", "a", "active", (0, 1)),
            NodeStatus("node1", "b", "active", (2, 3)),
            NodeStatus("node2", "c", "spare", ()),
        ),
        budgets=(BudgetUse("recover_in_place per job", 1, 30),),
        incidents=(),
        ranks_asked=4,
        time=time_spent(BEGAN_S, BEGAN_S + 100.0, {}, trained=True),
    )
    return msgspec.structs.replace(training, **changes)


def killed(*, decided: bool = True) -> Incident:
    """Rank 3 is gone, and comes back in place."""
    report = FaultReport(FaultKind.EXIT, BEGAN_S + 99.6, "node/node1", "ended by SIGKILL", rank=3, node="node1")
    skipped = SkippedRung(Rung.RETRY_STEP, "the process of rank 3 is gone")
    decision = Decision(Rung.RECOVER_IN_PLACE, "node1 is healthy", (skipped,))
    return Incident(1, BEGAN_S + 99.6, (report,), (decision,) if decided else (), replaced=(3,) if decided else ())


def test_a_job_that_trains_asks_nothing() -> None:
    said = sentence(status())
    assert said.mood is Mood.TRAINING
    assert said.text == "Training, nothing is asked of you (step 41,220, 3.1 steps/s, 4 ranks on 2 nodes)"


def test_processes_that_run_and_have_not_called_midstep_are_told_as_that() -> None:
    """A script that does not call it stays so: it is not being started for days."""
    ranks = tuple(RankStatus(rank, "node0", 0 if rank else 100, 1, "starting", 0, "") for rank in range(2))
    assert sentence(status(phase="starting", ranks=ranks)).headline == "Starts its processes"
    run = tuple(msgspec.structs.replace(rank, pid=100) for rank in ranks)
    said = sentence(status(phase="starting", ranks=run))
    assert (said.mood, said.headline) == (Mood.STARTING, "Its processes run, and none has called midstep so far")


def test_a_recovery_is_named_with_whom_how_and_for_how_long() -> None:
    said = sentence(status(phase="rejoining", incidents=(killed(),)))
    assert said.mood is Mood.RECOVERING
    assert said.headline == "Recovering: rank 3, in place"
    assert said.figures == "400 ms so far, rejoining; process ended: rank 3 on node1"


def test_a_recovery_that_is_not_decided_says_so() -> None:
    said = sentence(status(phase="suspecting", incidents=(killed(decided=False),)))
    assert said.headline == "Recovering: rank 3, not yet decided"


def test_a_rank_without_a_node_asks_for_one() -> None:
    homeless = tuple(RankStatus(rank, "", 0, 1, "absent", 7, "") for rank in (2, 3))
    said = sentence(status(phase="quiescing", ranks=homeless, incidents=(killed(),)))
    assert (said.mood, said.headline) == (Mood.ASKS, "Asks you for a node: ranks 2, 3 have none")


@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ({"ranks_asked": 8}, "more nodes: it trains with 4 of 8 ranks"),
        (
            {"nodes": (NodeStatus("node0", "a", "active", (0, 1, 2, 3)), NodeStatus("node1", "b", "lost", ()))},
            "a spare node: none is left, 1 node of the job is gone",
        ),
        (
            {"budgets": (BudgetUse("recover per job", 3, 3),)},
            "a look at the budget recover per job: it is spent (3 of 3)",
        ),
        ({"budgets": (BudgetUse("recover per job", 8, 10),)}, "a look at the budget recover per job: 2 of 10 left"),
        (
            {"nodes": (*status().nodes, NodeStatus("node3", "d", "isolated", (), note="fan 2 is slow"))},
            "a repair of node node3, which is isolated: fan 2 is slow",
        ),
    ],
)
def test_an_operator_is_asked_for_what_is_missing(changes: dict[str, object], asks: str) -> None:
    said = sentence(status(**changes))
    assert said.mood is Mood.ASKS
    assert said.asks == (asks,)
    assert said.headline == f"Training, and asks you for {asks}"


def test_of_several_things_the_first_is_named_and_the_rest_counted() -> None:
    said = sentence(status(ranks_asked=8, budgets=(BudgetUse("recover per job", 3, 3),)))
    assert said.headline.endswith("and 1 more thing")
    assert len(said.asks) == 2


def test_a_rung_that_is_not_allowed_asks_nothing() -> None:
    assert asked(status(budgets=(BudgetUse("reschedule_job per job", 0, 0),))) == ()


def test_a_job_without_a_controller_asks_for_one() -> None:
    said = sentence(status(), "no controller answers; this is the journal")
    assert said.mood is Mood.ASKS
    assert said.headline.startswith("Asks you for a controller")
    assert said.asks[1] == "no controller answers; this is the journal"


@pytest.mark.parametrize(("exit_code", "mood"), [(0, Mood.ENDED), (1, Mood.FAILED)])
def test_the_end_is_told_with_its_reason(exit_code: int, mood: Mood) -> None:
    said = sentence(status(phase="ended", exit_code=exit_code, reason="all ranks are done"), "the job has ended")
    assert said.mood is mood
    assert said.headline.endswith("all ranks are done")


@pytest.mark.parametrize(
    ("phase", "mood", "headline"),
    [
        ("waiting", Mood.STARTING, "Waits for nodes"),
        ("starting", Mood.STARTING, "Starts its processes"),
        ("saving", Mood.RECOVERING, "Writes a checkpoint before it ends"),
        ("finishing", Mood.TRAINING, "Training is done, the processes wind up"),
        ("pausing", Mood.TRAINING, "Training up to a step boundary, for a planned change, nothing is asked of you"),
    ],
)
def test_each_phase_has_its_words(phase: str, mood: Mood, headline: str) -> None:
    said = sentence(status(phase=phase))
    assert (said.mood, said.headline) == (mood, headline)


@pytest.mark.parametrize(
    ("used", "limit", "says"),
    [
        (0, 0, "not allowed"),
        (3, 3, "spent"),
        (0, 3, "3 left"),
        (2, 6, "4 left, for 3 min 20 s at the rate so far"),
    ],
)
def test_a_budget_says_how_long_it_lasts(used: int, limit: int, says: str) -> None:
    assert outlook(status(), used, limit) == says


def test_ranks_that_do_the_same_are_one_run() -> None:
    """The parts of a page of 10,000 ranks on 1,250 nodes stay small."""
    ranks = tuple(RankStatus(rank, f"n{rank // 8}", rank + 1, 1, "training", 7, "computing") for rank in range(10_000))
    nodes = tuple(NodeStatus(f"n{node}", "", "active", tuple(range(8 * node, 8 * node + 8))) for node in range(1250))
    parts = SectionWriter().write(Looked(status(ranks=ranks, nodes=nodes)))
    assert len(parts["beat"]) < 300
    assert len(parts["world"]) < 200_000
    assert runs([7, 7, 7, 8]) == [(7, 3), (8, 1)]


def test_an_incident_opens_to_cause_decision_and_what_was_passed_over() -> None:
    parts = SectionWriter().write(Looked(status(phase="rejoining", incidents=(killed(),))))
    told = msgspec.json.decode(parts["incident"])
    assert "SIGKILL" in told["causes"][0]
    assert told["decisions"][0]["rung"] == "recover_in_place"
    assert told["decisions"][0]["passed_over"] == [{"rung": "retry_step", "reason": "the process of rank 3 is gone"}]


def test_a_node_that_an_operator_has_left_is_among_what_operators_did() -> None:
    """With who and why, until it is released; what a detector has seen is not."""
    left = FaultReport(FaultKind.NODE, BEGAN_S, OPERATOR, "ann (operator): fan 2", node="node1", fault_id="drain node1")
    seen = msgspec.structs.replace(left, seen_by="detector/fans", fault_id="17")
    told = status(faults=(StandingFault(left, BEGAN_S), StandingFault(seen, BEGAN_S)))
    parts = SectionWriter().write(Looked(told))
    standing = msgspec.json.decode(parts["operators"])["standing"]
    assert len(standing) == 1
    assert standing[0].startswith("drain node1, since ")
    assert standing[0].endswith(" until it is released: ann (operator): fan 2")


def test_slow_ranks_and_the_age_of_copies_are_told() -> None:
    """In tenths of the time of others, so that ranks that differ by nothing are one run."""
    shades = (0.0, 0.97, 1.02, 1.66)
    ranks = tuple(
        msgspec.structs.replace(rank, slowness=slowness, copied_steps=(41_200, 41_210), copied_bytes=1_000_000)
        for rank, slowness in zip(status().ranks, shades, strict=True)
    )
    parts = SectionWriter().write(Looked(status(ranks=ranks)))
    assert msgspec.json.decode(parts["beat"])["slowness"] == [[0.0, 1], [1.0, 2], [1.7, 1]]
    assert msgspec.json.decode(parts["reserves"])["held"] == [["host copies", "of step 41210, 10 steps ago; 4.0 MB"]]
    assert msgspec.json.decode(SectionWriter().write(Looked(status()))["reserves"])["held"] == []


@pytest.mark.parametrize(
    ("agreed", "unchecked", "says"),
    [
        ((41_200, 41_210, 41_210, 41_210), 0, "the copies of step 41200 are equal, 20 steps ago"),
        ((0, 41_210, 41_210, 41_210), 0, "not yet on all ranks"),
        (
            (41_210,) * 4,
            2,
            "the copies of step 41210 are equal, 10 steps ago; not checked: shards piece2, piece3 of ranks 2, 3, of "
            "which there is no other copy",
        ),
    ],
)
def test_the_last_vote_is_told_in_the_words_of_a_terminal(agreed: tuple[int, ...], unchecked: int, says: str) -> None:
    ranks = tuple(
        msgspec.structs.replace(rank, agreed_step=step, unchecked=int(rank.rank >= 4 - unchecked))
        for rank, step in zip(status().ranks, agreed, strict=True)
    )
    told = status(ranks=ranks, single_copies=tuple(f"piece{rank}" for rank in range(4 - unchecked, 4)))
    assert msgspec.json.decode(SectionWriter().write(Looked(told))["reserves"])["held"] == [["votes", says]]
    (line,) = vote_lines(told)
    assert line.plain == f"votes: {says}"
