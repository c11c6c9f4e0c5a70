"""What a rank does that keeps its process in a larger world, and what it refuses before its first step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import midstep
from midstep.launch.job import Start, policy_of
from midstep.policies.schema import Policy, ScalePolicy
from midstep.processor.data import ResumableBatches
from midstep.processor.framework import Growing
from midstep.processor.recovery_phases import RecoveryPhases
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.types import JobSettings

SAMPLES, BATCH = 37, 2


def batches_of(rank: int, ranks: int, *, drop_last: bool = False) -> ResumableBatches:
    """Return batches of samples that are their own numbers, in the global order of one seed."""
    data = TensorDataset(torch.arange(SAMPLES))
    sampler: Any = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=True, seed=5, drop_last=drop_last)
    return ResumableBatches(DataLoader(data, batch_size=BATCH, sampler=sampler))


def rest(batches: ResumableBatches) -> list[list[int]]:
    """Return the samples that are left of this epoch, batch by batch."""
    return [each.tolist() for (each,) in batches]


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_that_stay_and_ranks_that_join_divide_what_is_left_alike(drop_last: bool) -> None:
    """A sampler that was made for fewer ranks gives what one gives that is made for all of them."""
    old = [batches_of(rank, 2, drop_last=drop_last) for rank in range(2)]
    for each in old:
        next(iter(each))
    position = old[0].state_dict()
    made = [batches_of(rank, 4, drop_last=drop_last) for rank in range(4)]
    for each in old:
        each.grown(4)
    for each in (*old, *made):
        each.load_state_dict(position)
    assert [rest(each) for each in old] == [rest(each) for each in made[:2]]
    assert [len(each) for each in old] == [len(each) for each in made[:2]]


def test_data_of_each_rank_goes_on_as_it_was() -> None:
    """Where no sampler divides it among the ranks there is nothing to be divided again."""
    batches = ResumableBatches(DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH))
    next(iter(batches))
    position = batches.state_dict()
    batches.grown(4)
    batches.load_state_dict(position)
    assert rest(batches)[0] == [BATCH, BATCH + 1]


class Position:
    """A position in the data that knows nothing of other ranks."""

    def state_dict(self) -> dict[str, int]:
        """Return it."""
        return {"place": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set it."""


def state_with(data: dict[str, Any]) -> midstep.TrainState:
    """Return a state of a small model."""
    return midstep.TrainState(torch.nn.Linear(2, 2), data=data)


def test_data_that_cannot_be_divided_again_is_refused_by_name() -> None:
    """One that has the method is told of the number of ranks."""
    state = state_with({"texts": Position(), "images": batches_of(0, 1)})
    assert isinstance(state, Growing)
    with pytest.raises(ConfigurationError, match=r"policy: data\[texts\] cannot be divided"):
        state.refuse_growth()
    told: list[int] = []
    texts = Position()
    texts.grown = told.append  # type: ignore[attr-defined]
    state = state_with({"texts": texts})
    state.refuse_growth()
    state.grown(4)
    assert told == [4]


def test_a_framework_with_pieces_for_each_rank_is_refused_at_start() -> None:
    """Before any step, by a sentence that names the key."""
    settings = JobSettings(grows_in_place=True)
    runtime: Any = SimpleNamespace(settings=settings)
    framework: Any = SimpleNamespace()
    with pytest.raises(ConfigurationError, match=r"scale\.in_place in the policy: what a rank holds"):
        RecoveryPhases(runtime, framework, framework, framework, framework)


def test_a_communicator_whose_groups_have_one_size_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The policy alone does not tell: the device may be of the command line."""
    script = tmp_path / "train.py"
    script.write_text("import midstep\n")
    policy = Policy(scale=ScalePolicy(min_nodes=1, in_place=True))
    assert policy_of(Start(command=(str(script),), policy=policy)).scale.in_place
    with pytest.raises(ConfigurationError, match="groups of the communicator fake have one size"):
        policy_of(Start(command=(str(script),), policy=policy, device="fake"))
