"""A script that knows mindio_ttp and nothing of midstep: ranks are replaced, and handlers are called in order."""

import json
from pathlib import Path
from typing import Any

import pytest

from midstep.controller.endpoints.control_requests import Accepted, StopJobRequest

from ..comparing import assert_nobody_harmed, assert_same_numbers, finish
from ..jobs import RANKS, ROOMY, Job, Record

SCRIPT = Path(__file__).with_name("training.py")
STEPS = 24
FIRST = 100  # the script's own count begins there
ARGUMENTS = 2  # of the training function
NO_CONTEXT = None
SEND, RECEIVE, STRUCK = 0, 3, 1

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


def run(root: Path, faults: tuple[Fault, ...] = ()) -> tuple[Job, dict[str, Any]]:
    """Run a job to its end."""
    arguments = [str(root / "records"), str(STEPS), json.dumps(faults)]
    job = Job(
        root, script=SCRIPT, arguments=arguments, policy=ROOMY, options=["--mindio"], nodes=1, ranks_per_node=RANKS
    )
    try:
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
