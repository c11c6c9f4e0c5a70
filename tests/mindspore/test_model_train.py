"""MindSpore's own `Model.train` and `TrainFaultTolerance`, as they are, under `midstep run --mindio`.

What MindSpore has on Ascend only is stood in for (`ascend_stand_ins.py`); the C library that its graphs look for is the
one that midstep builds.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.types import Rung

from .jobs import RANKS, Job, until

mindspore = pytest.importorskip("mindspore")

SCRIPT = Path(__file__).with_name("model_training.py")
STEPS = 22
SEND, RECEIVE = 0, 3
STOPPED = 130
# MindSpore's own launcher would set these; and what docs/mindio.md asks for.
VARIABLES = {
    "MINDIO_FOR_MINDSPORE": "1",
    "MS_ENABLE_TFT": "{TTP:1,UCE:1,ARF:1}",
    "MS_TFT_IP": "127.0.0.1",
    "MS_TFT_PORT": "8000",
    "MINDX_TASK_ID": "1",
}
Fault = tuple[int, int, str, str]
# In an order in which each begins when the one before is over, and with a rank that is in its first process.
FAULTS: tuple[Fault, ...] = (
    (2, 2, "collective", "link"),
    (1, 6, "before", "kill"),  # right after a step
    (3, 9, "collective", "kill"),
    (0, 13, "update", "kill"),
    (2, 17, "barrier", "kill"),
)
RESUMED = (2, 6, 9, 14, 17)
SOURCES = {1: 0, 3: 0, 0: 1, 2: 0}


def run(
    root: Path, faults: tuple[Fault, ...] = (), *, stages: int = 1, options: Sequence[str] = (), **more: str
) -> Job:
    """Start a job; `more`: variables beside the usual ones."""
    variables = {**VARIABLES, **more}
    named = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
    return Job(
        root,
        options=["--mindio", *named, *options],
        script=SCRIPT,
        arguments=[str(STEPS), json.dumps(faults), str(stages)],
    )


def held_at(root: Path, step: int) -> Path:
    """Have a job wait before a step, as long as there is this file."""
    gate = root / "records" / f"gate.{step}"
    gate.parent.mkdir(parents=True)
    gate.touch()
    return gate


def await_step(job: Job, step: int) -> None:
    """Wait until all ranks stand before a step."""
    files = [job.records / f"steps.{rank}" for rank in range(RANKS)]
    until(
        lambda: all(file.exists() and step - 1 in losses(job, rank) for rank, file in enumerate(files)),
        f"all before step {step}",
    )


def ends(job: Job) -> list[dict[str, Any]]:
    """Return what each rank ended with."""
    found = [json.loads((job.records / f"end.{rank}.json").read_text()) for rank in range(RANKS)]
    for each in found:
        del each["pid"], each["life"]
    return found


def losses(job: Job, rank: int) -> dict[int, set[str]]:
    """Return the losses of each step, which may have been done more than once."""
    found: dict[int, set[str]] = {}
    for line in (job.records / f"steps.{rank}").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def assert_same_numbers(job: Job, undisturbed: Job, stages: int = 1) -> None:
    """Every rank ended, and every step that was done, once or again, gave the bits of the undisturbed run."""
    assert ends(job) == ends(undisturbed)
    parameters = [each["parameters"] for each in ends(undisturbed)]
    assert parameters == [parameters[rank // (RANKS // stages) * (RANKS // stages)] for rank in range(RANKS)]
    assert len(set(parameters)) == stages
    for rank in range(RANKS):
        expected_losses = losses(undisturbed, rank)
        assert losses(job, rank).items() <= expected_losses.items()
        assert sorted(expected_losses) == list(range(STEPS))


def handlers(job: Job, rank: int, life: int) -> list[list[Any]]:
    """Return the calls of handlers in a process, if there was one: the handler, what was being done, its arguments."""
    file = job.records / f"handlers.{rank}.{life}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def expected(
    rank: int, life: int, faults: Sequence[Fault], resumed: Sequence[int], sources: dict[int, int]
) -> list[list[Any]]:
    """Return the calls that MindIO makes for these faults."""
    calls: list[list[Any]] = []
    now = 1
    for (struck, _, _, how), step in zip(faults, resumed, strict=True):
        if how == "link":
            if now == life:
                calls += [["stop", "retry"], ["clean", "retry", False]]
            continue
        now += struck == rank
        if now != life:
            continue
        source = sources[struck]
        info: dict[str, Any] = {"type": [0], "src": [source], "dst": [struck], "rank_list": sorted((source, struck))}
        if rank != struck:
            calls += [["stop", "recover"], ["clean", "recover", False]]
        calls.append(["rebuild_group", "recover", [struck]])
        if rank in {source, struck}:
            info["repair_type"] = SEND if rank == source else RECEIVE
            calls.append(["repair", "recover", step, False, [struck], info])
    return calls


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The undisturbed job."""
    job = run(tmp_path_factory.mktemp("calm") / "job")
    assert job.finish() == []
    return job


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.timeout(700)
def test_its_own_trainer_survives_kills_and_no_bit_changes(calm: Job, tmp_path: Path) -> None:
    """An error that all go on from, and a kill after a step, in a collective, in the update and at the barrier.

    Healthy processes stay, no step is lost, and handlers come in MindIO's order with its arguments.
    MindSpore's scheduler lets each new process in under the number of the one before.
    """
    job = run(tmp_path / "job", FAULTS)
    incidents = job.finish()

    replaced = [{rank} if how == "kill" else set() for rank, _, _, how in FAULTS]
    assert [set(each.replaced) for each in incidents] == replaced
    assert [each.rung for each in incidents] == [Rung.RETRY_STEP, *[Rung.RECOVER_IN_PLACE] * 4]
    assert [each.resumed_step for each in incidents] == list(RESUMED)
    assert all(each.healthy_pids_kept and each.steps_lost == 0 for each in incidents)
    assert_same_numbers(job, calm)
    for rank in range(RANKS):
        for life in (1, 2):
            assert handlers(job, rank, life) == expected(rank, life, FAULTS, RESUMED, SOURCES)


@pytest.mark.timeout(700)
def test_without_a_compiler_updates_are_committed_when_they_have_ended(calm: Job, tmp_path: Path) -> None:
    """It is said what is lost by that; a kill after a step and one in a collective are recovered all the same."""
    nowhere = str(tmp_path / "nowhere")
    job = run(tmp_path / "job", FAULTS[1:3], PATH=nowhere, XDG_CACHE_HOME=nowhere)
    incidents = job.finish()

    assert [set(each.replaced) for each in incidents] == [{1}, {3}]
    assert all(each.healthy_pids_kept and each.steps_lost == 0 for each in incidents)
    assert_same_numbers(job, calm)
    assert "there is no C compiler (cc) on the path" in job.said


@pytest.mark.timeout(700)
def test_a_source_that_is_killed_while_it_sends_costs_no_other_process(calm: Job, tmp_path: Path) -> None:
    """What waits for it in its repair handler is woken by its stop handler, and gets the state from another rank."""
    job = run(tmp_path / "job", ((1, 6, "before", "kill"), (0, 6, "repair", "kill")))
    incidents = job.finish()

    assert [set(each.replaced) for each in incidents] == [{0, 1}]
    assert [(each.resumed_step, each.steps_lost, each.healthy_pids_kept) for each in incidents] == [(6, 0, True)]
    lives = [json.loads((job.records / f"end.{rank}.json").read_text())["life"] for rank in range(RANKS)]
    assert lives == [2, 2, 1, 1]
    assert_same_numbers(job, calm)
    woken = [call for call in handlers(job, 1, 2) if call[0] in {"stop", "clean"}]
    assert woken == [["stop", "recover"], ["clean", "recover", False]]


@pytest.mark.timeout(700)
def test_a_stop_saves_by_its_own_handlers_once_and_renames(tmp_path: Path) -> None:
    """Every rank holds all, so the lowest one writes; the name is final when it has."""
    gate = held_at(tmp_path / "job", 6)
    job = run(tmp_path / "job")
    await_step(job, 6)
    job.midstep("stop")
    gate.unlink()
    job.finish(STOPPED)

    [place] = job.records.glob("t?[pt]_saved_checkpoints*")  # tft in 2.7.2, ttp in 2.10.0
    assert place.name[3:] == "_saved_checkpoints-step_6", job.said
    [saved] = place.rglob("*.ckpt")
    assert saved.parent.name == "rank_0"
    assert int(mindspore.load_checkpoint(str(saved))["global_step"].asnumpy().item()) == 6
    for rank in range(RANKS):
        assert handlers(job, rank, 1) == [["stop", "retry"], ["clean", "retry", False]]
