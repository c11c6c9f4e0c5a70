"""A script that knows mindio_ttp and nothing of midstep: ranks are replaced, and handlers are called in order."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from midstep.controller.endpoints.control_requests import Accepted, StopJobRequest

from ..built import built, wait_until_built
from ..comparing import assert_nobody_harmed, assert_same_numbers, finish
from ..jobs import PATIENCE_S, RANKS, ROOMY, Job, Record

SCRIPT = Path(__file__).with_name("training.py")
STEPS = 24
FIRST = 100  # the script's own count begins there
ARGUMENTS = 2  # of the training function
NO_CONTEXT = None
SEND, RECEIVE, STRUCK = 0, 3, 1
KILLS = 100
A_KILL_TAKES_S = 20.0  # on a busy machine, for the limit of the whole test
ENDLESS: dict[str, Any] = {
    **ROOMY,
    "ladder": [{"rung": "recover_in_place", "attempts": 8, "budget": {"per_job": 1_000_000}}, {"rung": "stop"}],
}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

Fault = tuple[int, int, str, str]
# Each once, and in an order in which each begins when the one before is over.
REPLACED: tuple[Fault, ...] = (
    (1, 3, "before", "kill"),  # right after a step
    (3, 7, "collective", "kill"),
    (0, 11, "update", "kill"),
    (2, 15, "barrier", "kill"),
)
MENDED: tuple[Fault, ...] = (
    (3, 5, "collective", "link"),
    (1, 10, "before", "memory"),
    (2, 15, "before", "low"),
)


def run(
    root: Path,
    faults: tuple[Fault, ...] = (),
    *,
    steps: int = STEPS,
    policy: dict[str, Any] = ROOMY,
    limit_s: float = PATIENCE_S,
    converting: bool = False,
    ahead: tuple[int, ...] = (),
) -> tuple[Job, dict[str, Any]]:
    """Run a job to its end. `ahead`: the steps before which the next processes of all ranks are built first."""
    arguments = [str(root / "records"), str(steps), json.dumps(faults), *(["converting"] if converting else [])]
    job = Job(
        root,
        script=SCRIPT,
        arguments=arguments,
        policy=policy,
        gates=ahead,
        options=["--mindio"],
        nodes=1,
        ranks_per_node=RANKS,
    )
    try:
        for replaced, step in enumerate(ahead):
            job.held_at(step)
            wait_until_built(job, RANKS + replaced)
            job.open_gate(step)
        job.wait(limit_s)
        return job, finish(job)
    finally:
        job.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The undisturbed job."""
    job, report = run(tmp_path_factory.mktemp("calm"))
    assert not report["incidents"], job.said()
    return job.record()


def handlers(job: Job, rank: int, life: int = 1) -> list[list[Any]]:
    """Return the calls of handlers in a process: the handler, what was being done, its arguments."""
    lines = (job.records / f"handlers.{rank}.{life}").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_killed_ranks_are_replaced_and_no_bit_changes(calm: Record, tmp_path: Path) -> None:
    """After a step, in a collective, in the update and at the commit barrier; the handlers as MindIO calls them."""
    job, report = run(tmp_path, REPLACED)

    incidents = report["incidents"]
    assert len(incidents) == len(REPLACED), job.said()
    for incident, fault in zip(incidents, REPLACED, strict=True):
        assert_nobody_harmed(incident, {fault[0]})
    assert [each["resumed_step"] for each in incidents] == [3, 7, 12, 15]
    assert all((job.records / f"handlers.{rank}.2").exists() for rank in range(4))
    assert_same_numbers(job.record(), calm)
    both = {"src": [3], "dst": [1], "rank_list": [1, 3]}
    assert handlers(job, 3)[:5] == [
        ["stop", "recover", ARGUMENTS, NO_CONTEXT],
        ["clean", "recover", False, ARGUMENTS, NO_CONTEXT],
        ["rebuild_group", "recover", [1], ARGUMENTS, NO_CONTEXT],
        _repair("recover", 3, SEND, both),
        ["rollback", "recover", FIRST + 3, ARGUMENTS, NO_CONTEXT],
    ]
    assert handlers(job, 1, 2)[:3] == [
        ["rebuild_group", "recover", [1], ARGUMENTS, NO_CONTEXT],
        _repair("recover", 3, RECEIVE, both),
        ["rollback", "recover", FIRST + 3, ARGUMENTS, NO_CONTEXT],
    ]
    assert [call[0] for call in handlers(job, 0)[:4]] == ["stop", "clean", "rebuild_group", "rollback"]  # has no part


def test_processes_that_are_built_ahead_take_the_places_of_killed_ones(calm: Record, tmp_path: Path) -> None:
    """The script has run up to its groups in them: it makes these, and all that follows, when the rank is free."""
    before = tuple(step - 1 for _, step, *_ in REPLACED)
    job, report = run(tmp_path, REPLACED, policy={**ROOMY, "standby": {"depth": "built"}}, ahead=before)

    assert len(report["incidents"]) == len(REPLACED), job.said()
    for incident, (rank, *_) in zip(report["incidents"], REPLACED, strict=True):
        assert_nobody_harmed(incident, {rank})
        assert built(job)[incident["pids_after"][str(rank)]] == rank
    assert_same_numbers(job.record(), calm)


@pytest.mark.soak
def test_a_spare_has_processes_of_such_a_script_ready_for_a_lost_nodes_ranks(calm: Record, tmp_path: Path) -> None:
    """They take the places of both ranks at once, with the groups of the ranks that live on."""
    step = 12
    job = Job(
        tmp_path,
        script=SCRIPT,
        arguments=[str(tmp_path / "records"), str(STEPS), "[]"],
        policy={**ROOMY, "standby": {"depth": "built", "nodes_per_spare": 2}},
        gates=[step],
        options=["--mindio"],
        nodes=2,
        ranks_per_node=RANKS // 2,
        spares=1,
    )
    try:
        job.held_at(step)
        wait_until_built(job, 2 * RANKS)
        before = built(job)
        job.kill_node("node1")
        job.open_gate(step)
        (incident,) = finish(job)["incidents"]
    finally:
        job.close()
    assert_nobody_harmed(incident, {2, 3})
    assert {before[incident["pids_after"][str(rank)]] for rank in (2, 3)} == {2, 3}
    assert_same_numbers(job.record(), calm)


def test_processes_that_can_go_on_stay_and_no_bit_changes(calm: Record, tmp_path: Path) -> None:
    """A broken link, damaged memory, and damage where nothing lies: no process ends, the half comes from a peer."""
    job, report = run(tmp_path, MENDED)

    incidents = report["incidents"]
    assert len(incidents) == len(MENDED), job.said()
    for incident in incidents:
        assert_nobody_harmed(incident, set())
    assert_same_numbers(job.record(), calm)
    step = [["stop", ARGUMENTS, NO_CONTEXT], ["clean", False, ARGUMENTS, NO_CONTEXT]]
    struck = [["stop", ARGUMENTS, NO_CONTEXT], ["clean", True, ARGUMENTS, NO_CONTEXT]]

    def back(at: int) -> list[Any]:
        return ["rollback", FIRST + at, ARGUMENTS, NO_CONTEXT]

    def repair(kind: int) -> list[Any]:
        line = _repair("retry", 10, kind, {"src": [3], "dst": [1], "rank_list": [1, 3]})
        return [line[0], *line[2:]]

    expected = {
        0: [*step, back(5), *step, back(10), *step, back(15)],
        1: [*step, back(5), *struck, repair(STRUCK), back(10), *step, back(15)],
        2: [*step, back(5), *step, back(10), *struck, back(15)],
        3: [*step, back(5), *step, repair(SEND), back(10), *step, back(15)],
    }
    for rank, calls in expected.items():
        found = handlers(job, rank)
        assert {call[1] for call in found} == {"retry"}
        assert [[call[0], *call[2:]] for call in found] == calls, rank


def _repair(what: str, step: int, kind: int, ranks: dict[str, Any]) -> list[Any]:
    info = {"type": [0], "repair_type": kind, **ranks}
    return ["repair", what, FIRST + step, kind == STRUCK, ranks["dst"], info, ARGUMENTS, NO_CONTEXT]


def test_brackets_that_commit_nothing_leave_the_step_where_it_is(calm: Record, tmp_path: Path) -> None:
    """Those of --reuse-fp32-param: a step that is repeated draws the numbers that it drew, and updates once."""
    job, report = run(tmp_path, REPLACED, converting=True)

    assert [set(each["replaced"]) for each in report["incidents"]] == [{fault[0]} for fault in REPLACED], job.said()
    # The first bracket of all has no step before it, and counts as one.
    assert [each["resumed_step"] for each in report["incidents"]] == [4, 8, 13, 16]
    assert [call[2] for call in handlers(job, 0) if call[0] == "rollback"] == [FIRST + 3, FIRST + 7]
    assert_same_numbers(job.record(), calm)


@pytest.mark.soak
@pytest.mark.timeout(A_KILL_TAKES_S * KILLS)
def test_a_hundred_kills_leave_neither_threads_nor_descriptors(tmp_path: Path) -> None:
    """In rank 0, which sees them all and lives: after the last recovery it has what it had after the first ones."""
    places = ("before", "collective", "update", "barrier")
    kills = tuple((1 + each % 3, 2 + 2 * each, places[each % 4], "kill") for each in range(KILLS))
    job, report = run(tmp_path, kills, steps=2 * KILLS + 4, policy=ENDLESS, limit_s=A_KILL_TAKES_S * KILLS)

    # A kill that comes before the controller has heard of the first new step of all is part of the same incident.
    replaced = Counter(rank for each in report["incidents"] for rank in each["replaced"])
    assert replaced == Counter(rank for rank, *_ in kills), job.said()
    assert all(each["healthy_pids_kept"] and each["steps_lost"] == 0 for each in report["incidents"])
    held = [tuple(map(int, line.split())) for line in (job.records / "held.0.1").read_text().splitlines()]
    assert len(held) == KILLS
    early, late = held[2:22], held[-20:]
    for kind, name in enumerate(("threads", "descriptors")):
        most, least = (sorted(each[kind] for each in part) for part in (early, late))
        assert least[len(least) // 2] <= most[-1], f"{name}: {most} in early recoveries, {least} in late ones"


@pytest.mark.parametrize("struck", [pytest.param(None, marks=pytest.mark.soak), 1])
def test_a_stop_dumps_each_shard_once_and_renames_when_all_is_written(struck: int | None, tmp_path: Path) -> None:
    """Each half by the lowest rank that holds it; where one is killed meanwhile, another writes its half."""
    faults = [] if struck is None else [[struck, "dump"]]
    arguments = [str(tmp_path / "records"), str(STEPS), json.dumps(faults)]
    job = Job(
        tmp_path, script=SCRIPT, arguments=arguments, gates=[8], options=["--mindio"], nodes=1, ranks_per_node=RANKS
    )
    try:
        job.held_at(8)
        assert isinstance(job.ask(StopJobRequest("enough")), Accepted)
        job.open_gate(8)
        job.wait()
    finally:
        job.close()

    dumps = sorted(place.name for place in job.records.glob("dump.*"))
    assert len(dumps) == 1, job.said()
    assert not dumps[0].endswith(".tmp")
    step = int(dumps[0].removeprefix("dump."))
    writers = [0, 1] if struck is None else [0, 3]
    assert {each.name for each in (job.records / dumps[0]).iterdir()} >= {f"{rank}.pt" for rank in writers}
    for rank in writers:
        calls = [call for call in handlers(job, rank) if call[1] == "dump"]
        saved = ["save_ckpt", "dump", step, [{"type": 0, "ranks": writers}], ARGUMENTS, NO_CONTEXT]
        assert calls[-2:] == [saved, ["rename", "dump", step, ARGUMENTS]] if rank == 0 else calls[-1] == saved
