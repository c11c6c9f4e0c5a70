"""MindSpeed-LLM's own program, unmodified, loses processes, links and memory, and ends with the same bits.

It is in no package. Check out MindSpeed-LLM, the MindSpeed that it asks for, and Megatron-LM core_v0.12.1, name the
places in MIDSTEP_MINDSPEED_LLM, MIDSTEP_MINDSPEED (each may be several, with a colon between them, in one order) and
MIDSTEP_MEGATRON_LM_0_12, and run `make test SUITE=mindspeed`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from midstep.controller.endpoints.control_requests import Accepted, StopJobRequest

from ..chaos.built import built, wait_until_built
from ..chaos.comparing import assert_nobody_harmed, finish
from .conftest import ITERATIONS, PATIENCE_S, POLICY, Fault, Programs, Saved, Start, Training

LAYOUTS: dict[str, tuple[str, ...]] = {
    "tensor": ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--overlap-grad-reduce"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "experts": (
        "--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2",
        "--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "aux_loss",
    ),
}  # fmt: skip
# Its last checkpoint has the count of the scheduler with which it began: training continues with another one, which its
# handler makes when it loads. So it is under MindIO.
STALE_COUNT = "/mp_rank_00/model_optim_rng.pt/opt_param_scheduler/num_steps"
MOMENTS = ("before", "forward", "backward", "collective", "barrier", "update", "gather", "save")
# A rank that was stopped while it logged an update logs it again in its rollback handler, with collectives, which hang
# if the others were further. After the forward pass all are: it adds up the loss. So it is under MindIO.
AFTER_THE_LOG = "backward"
SAVING = ("--save-interval", "5")


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield the places at which two checkpoints do not have the same bits."""
    if isinstance(one, torch.Tensor):
        if not (isinstance(other, torch.Tensor) and torch.equal(one, other)):
            yield where
    elif isinstance(one, dict):
        if set(one) != set(other):
            yield f"{where}: the names"
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{where}: how many"
        for place, (each, its) in enumerate(zip(one, other, strict=False)):
            yield from differences(each, its, f"{where}/{place}")
    elif str(one) != str(other):
        yield where


def incidents_of(training: Training) -> list[dict[str, Any]]:
    """Wait for the end, and return what has happened."""
    training.job.wait(PATIENCE_S)
    incidents: list[dict[str, Any]] = finish(training.job)["incidents"]
    return incidents


def assert_same_end(training: Training, calm: Saved, *, but: str = "") -> None:
    """The checkpoint at the end has the bits of the undisturbed training: model, optimizer, random numbers."""
    found = set(differences(calm, training.saved()))
    assert found <= {but}, found


def assert_replaced_alone(training: Training, kills: Sequence[Fault], calm: Saved, *, ranks: int) -> None:
    """Each kill cost the process of its rank and no step, and the end is that of the undisturbed training."""
    incidents = incidents_of(training)
    assert len(incidents) == len(kills), training.job.said()
    for incident, (rank, *_) in zip(incidents, kills, strict=True):
        assert_nobody_harmed(incident, {rank}, ranks=ranks)
    assert_same_end(training, calm)


def test_a_rank_that_is_killed_at_each_moment_of_a_step_is_replaced(start: Start, calm: Callable[..., Saved]) -> None:
    """Its process alone: the other one lives on, and no step is lost."""
    kills: list[Fault] = [(place % 2, 2 + 2 * place, moment, "kill") for place, moment in enumerate(MOMENTS[:-1])]
    layout = ("--save-interval", str(ITERATIONS - 2))
    kills.append((1, ITERATIONS - 3, "save", "kill"))
    assert_replaced_alone(start(2, layout, kills), kills, calm(2, layout), ranks=2)


def test_a_process_that_is_built_ahead_needs_no_imports(start: Start, calm: Callable[..., Saved]) -> None:
    """It has run the program up to its groups before the fault."""
    faults: list[Fault] = [(0, 3, "before", "wait"), (1, 5, "backward", "kill")]
    training = start(2, (), faults, gate=True, policy={**POLICY, "standby": {"depth": "built"}})
    wait_until_built(training.job, 2)
    (training.job.records / "gate").unlink()
    (incident,) = incidents_of(training)
    assert_nobody_harmed(incident, {1}, ranks=2)
    assert built(training.job)[incident["pids_after"]["1"]] == 1
    assert_same_end(training, calm(2))


@pytest.mark.parametrize("how", ["memory", "link"])
def test_damaged_memory_and_a_broken_link_replace_no_process(
    how: str, start: Start, calm: Callable[..., Saved]
) -> None:
    training = start(2, (), [(1, 7, AFTER_THE_LOG, how)])
    (incident,) = incidents_of(training)
    assert_nobody_harmed(incident, set(), ranks=2)
    assert incident["rung"] == "retry_step", incident
    assert_same_end(training, calm(2))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_that_share_a_model_come_back_as_well(
    layout: Sequence[str], start: Start, calm: Callable[..., Saved]
) -> None:
    kills: list[Fault] = [(1, 5, "backward", "kill"), (2, 9, "update", "kill")]
    assert_replaced_alone(start(4, layout, kills), kills, calm(4, layout), ranks=4)


def test_without_replicas_all_load_the_checkpoint_in_living_processes(start: Start, calm: Callable[..., Saved]) -> None:
    """By MindSpeed-LLM's own repair handler; the steps since then are done again."""
    layout = ("--distributed-optimizer-no-replica", *SAVING)
    training = start(2, layout, [(1, 13, "backward", "kill")])
    (incident,) = incidents_of(training)
    assert set(incident["replaced"]) == {1}, training.job.said()
    assert (incident["healthy_pids_kept"], incident["resumed_step"]) == (True, 10), incident
    assert_same_end(training, calm(2, layout), but=STALE_COUNT)


def test_an_exception_that_nothing_explains_replaces_its_process(start: Start, calm: Callable[..., Saved]) -> None:
    """It ends with its traceback, and no step is lost."""
    faults: list[Fault] = [(0, 9, "backward", "a mistake in the script")]
    assert_replaced_alone(start(2, (), faults), faults, calm(2), ranks=2)


def test_wrong_numbers_take_all_back_to_the_checkpoint_that_is_named(
    programs: Programs, start: Start, calm: Callable[..., Saved]
) -> None:
    """No process is replaced. The rank that was stopped before it had found the same hears of the step."""
    if not programs.has("tft_precision_error_handler"):
        pytest.skip("this MindSpeed-LLM registers no PRECISION ERROR with MindIO: 2.3.0 and older do not")
    training = start(2, SAVING, [(1, 13, "before", "PRECISION ERROR, load ckpt step=5")])
    (incident,) = incidents_of(training)
    assert not incident["replaced"], training.job.said()
    assert (incident["healthy_pids_kept"], incident["resumed_step"]) == (True, 5), incident
    assert_same_end(training, calm(2, SAVING), but=STALE_COUNT)


def stopped(start: Start) -> Training:
    """Return a training that was stopped after some steps, which is dumped."""
    training = start(2, (), [(0, 6, "before", "wait")], gate=True)
    training.job.until(lambda status: all(rank.step >= 6 for rank in status.ranks), "the sixth step", PATIENCE_S)
    assert isinstance(training.job.ask(StopJobRequest("enough")), Accepted)
    (training.job.records / "gate").unlink()
    training.job.wait(PATIENCE_S)
    training.job.assert_nothing_left()
    return training


def test_a_stop_is_dumped_and_another_job_continues_from_there(start: Start, calm: Callable[..., Saved]) -> None:
    second = start(2, folder=stopped(start).saves)
    assert not incidents_of(second)
    assert_same_end(second, calm(2))


def test_a_rank_is_replaced_in_a_training_that_was_continued(start: Start, calm: Callable[..., Saved]) -> None:
    """It loads nothing when it starts, and takes all from its peer, the count of samples of the learning rate, too."""
    kills: list[Fault] = [(0, 15, "backward", "kill")]
    assert_replaced_alone(start(2, (), kills, folder=stopped(start).saves), kills, calm(2), ranks=2)
