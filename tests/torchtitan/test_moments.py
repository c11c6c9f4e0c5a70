"""torchtitan's debug model, unmodified, loses ranks at every moment of a step: no bit is another one at the end."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..chaos.jobs import Record
from ..chaos.losing import calm_record
from .conftest import HSDP, PATIENCE_S, Moment, StartTitan, check_moments, whole_checkpoints

pytestmark = pytest.mark.chaos

STEPS = 9
SETTINGS: dict[str, Any] = {
    **HSDP,
    "training.steps": STEPS,
    "training.global_batch_size": 16,  # two batches are accumulated
    "checkpoint.enable": True,
    "checkpoint.interval": 3,
}
LONG: dict[str, Any] = {
    **SETTINGS,
    "training.steps": 26,
    "checkpoint.async_mode": "async",
    "validator.enable": True,
    "validator.freq": 11,
    "validator.steps": 2,
    "validator.dataloader.dataset": "c4_test",
}


def lost(rank: int, point: InjectionPoint, step: int, **how: Any) -> Moment:
    """Return the loss of one rank in a step, which all repeat."""
    action = how.pop("action", FaultAction.KILL)
    return Moment(rank, step, ArmedFault(rank, action, point, step, 1, **how))


def in_collective(rank: int, operation: str, step: int, group: tuple[int, ...] = ()) -> Moment:
    """Return the loss of one rank in a certain collective of a step."""
    return lost(rank, InjectionPoint.COLLECTIVE, step, operation=operation, group=group)


def in_update(rank: int, step: int) -> Moment:
    """Return the loss of one rank in its update, which the others have done: nothing is repeated."""
    return lost(rank, InjectionPoint.UPDATE, step)._replace(resumed_step=step + 1)


def after(rank: int, place: str, step: int) -> Moment:
    """Return the loss of one rank after the commit of a step; `step` is torchtitan's, from 1."""
    return Moment(rank, step, loss={"rank": rank, "place": place, "step": step})


def each_in_its_life(moments: Iterable[Moment]) -> list[Moment]:
    """Return the moments with the incarnation that holds the rank by then."""
    lives: Counter[int] = Counter()
    found = []
    for moment in moments:
        lives[moment.rank] += 1
        life = lives[moment.rank]
        if moment.fault is not None:
            found.append(moment._replace(fault=msgspec.structs.replace(moment.fault, incarnation=life)))
        elif moment.loss is not None:
            found.append(moment._replace(loss={**moment.loss, "life": life}))
    return found


@pytest.fixture(scope="module")
def calm(start_titan: StartTitan) -> Record:
    """The record of the short run, to which nothing happens."""
    return calm_record(start_titan(SETTINGS), PATIENCE_S)


def test_torchtitan_recovers_within_its_step(start_titan: StartTitan, calm: Record) -> None:
    """In forward, reduce-scatter, checkpoint and update; survivors keep their processes, its checkpoints are whole."""
    moments = each_in_its_life(
        (
            lost(1, InjectionPoint.FORWARD, 1),
            in_collective(3, "reduce_scatter_single", 3),
            after(0, "checkpoint", 6),
            in_update(2, 7),
        )
    )
    job = check_moments(start_titan, SETTINGS, moments, calm)
    assert whole_checkpoints(job) == [3, 6, 9]


TWELVE = (
    in_collective(1, "allreduce", 1),  # of the count of tokens, before the forward pass
    in_collective(2, "all_gather_single", 3),
    lost(3, InjectionPoint.FORWARD, 5),
    lost(0, InjectionPoint.BACKWARD, 7),
    in_collective(1, "reduce_scatter_single", 9),
    after(2, "validation", 11),
    in_collective(3, "allreduce", 13, group=(1, 3)),  # of gradients, between the rows
    in_collective(0, "allreduce", 15, group=(0, 1)),  # of the norm, by which gradients are clipped
    lost(1, InjectionPoint.BARRIER, 17),
    in_update(2, 19),
    after(3, "metrics", 22),
    after(0, "checkpoint", 24),
)


@pytest.mark.soak
def test_every_moment_with_asynchronous_checkpoints_and_validation(start_titan: StartTitan) -> None:
    """Twelve losses in one job."""
    calm = calm_record(start_titan(LONG), PATIENCE_S)
    job = check_moments(start_titan, LONG, each_in_its_life(TWELVE), calm)
    assert {24, 26} <= set(whole_checkpoints(job))


@pytest.mark.soak
def test_without_a_replica_the_world_starts_again_from_torchtitans_checkpoint(start_titan: StartTitan) -> None:
    """One dimension, and no checkpoint of midstep's own. Torchtitan's holds no random numbers: they begin again."""
    settings = {
        **SETTINGS,
        "parallelism.data_parallel_shard_degree": 4,
        "parallelism.data_parallel_replicate_degree": 1,
    }
    calm = calm_record(start_titan(settings), PATIENCE_S)
    job = start_titan(settings, [lost(1, InjectionPoint.FORWARD, 4)])
    assert job.wait(PATIENCE_S) == 0, job.said()
    (incident,) = job.report()["incidents"]
    assert incident["rung"] == "reschedule_pod", incident
    for rank, end in job.record().ends.items():
        differ = {"pid": 0, "random numbers": ""}
        assert {**end, **differ} == {**calm.ends[rank], **differ}
