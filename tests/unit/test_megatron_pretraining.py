"""The way in for Megatron-LM's pretrain, as far as it needs no Megatron-LM: what is refused, and data positions."""

import types
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from torch.utils.data import DataLoader, Dataset

from midstep.adapters.megatron import resilient_pretrain
from midstep.adapters.megatron.data import PositionedLoader
from midstep.adapters.megatron.pretraining import (
    MAY_TAKE,
    REFUSED_ARGUMENTS,
    TAKES,
    USED,
    check_training,
    refuse_arguments,
)
from midstep.protocol.errors import ConfigurationError


def training(signature: str) -> types.ModuleType:
    """Return a module that has what is used of Megatron-LM's, with a `train` of this signature."""
    module = types.ModuleType("training")
    for name in USED:
        setattr(module, name, print)
    exec(f"def train({signature}): pass", vars(module))
    return module


@pytest.mark.parametrize(
    "signature",
    [
        ", ".join(TAKES),  # core_v0.14.0, core_v0.15.3
        ", ".join(TAKES) + ", inference_model=None",  # core_v0.16.1
        ", ".join(TAKES) + "".join(f", {name}=None" for name in MAY_TAKE),  # core_v0.19.0
    ],
)
def test_the_loops_that_are_known_are_taken(signature: str) -> None:
    """The signatures of train() in Megatron-LM's releases."""
    check_training(training(signature))


@pytest.mark.parametrize(
    ("signature", "told"),
    [
        (", ".join(TAKES[1:]), "takes no forward_step_func"),
        (", ".join(TAKES) + ", surprise=None", "takes surprise"),
        (", ".join(TAKES) + ", inference_model", "takes inference_model"),
    ],
)
def test_a_loop_of_another_signature_is_refused(signature: str, told: str) -> None:
    """The error names what is different."""
    with pytest.raises(ConfigurationError, match=told):
        check_training(training(signature))


def test_a_pretrain_that_is_not_megatron_lms_is_refused() -> None:
    """Its module lacks what is hooked, and the error says so."""
    module = training(", ".join(TAKES))
    del module.setup_model_and_optimizer
    with pytest.raises(ConfigurationError, match="has no setup_model_and_optimizer, which midstep hooks"):
        check_training(module)


def test_outside_midstep_run_pretrain_is_what_it_was() -> None:
    """Under torchrun nothing is replaced."""

    def pretrain() -> None:
        """Train."""

    assert resilient_pretrain(pretrain) is pretrain


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_arguments_that_cannot_be_followed_are_refused(name: str) -> None:
    """Each by its name, with a reason; unset they are nothing."""
    refuse_arguments(types.SimpleNamespace(**dict.fromkeys(REFUSED_ARGUMENTS)))
    with pytest.raises(ConfigurationError, match=f"{name}: {REFUSED_ARGUMENTS[name]}"):
        refuse_arguments(types.SimpleNamespace(**{name: [3]}))


class Numbers(Dataset[int]):
    """A hundred numbers."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


class Sampler:
    """Hands out this rank's part of each micro-batch as Megatron-LM's does: rank 1 of 2, two samples each."""

    micro_batch_times_data_parallel_size = 4

    def __init__(self, consumed_samples: int) -> None:
        self._consumed = consumed_samples

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self._consumed, 100, 4):
            yield [start + 2, start + 3]


def build(dataset: Any, consumed_samples: int) -> Any:
    """Build a loader as Megatron-LM does."""
    return None if dataset is None else DataLoader(dataset, batch_sampler=Sampler(consumed_samples))


def test_a_loaders_iterator_goes_on_where_it_is_put() -> None:
    """Forward and back, by the samples of the whole job; and what torch draws is drawn at once."""
    batches: Any = iter(PositionedLoader.of(build)(Numbers(), 8))
    assert [next(batches).tolist(), next(batches).tolist()] == [[10, 11], [14, 15]]
    position = batches.state_dict()
    assert position == {"consumed_samples": 16}
    assert next(batches).tolist() == [18, 19]
    batches.load_state_dict(position)
    drawn = torch.get_rng_state()
    assert next(batches).tolist() == [18, 19]
    assert torch.equal(drawn, torch.get_rng_state())


def test_a_rank_without_a_loader_keeps_none() -> None:
    """Tensor parallel ranks other than the first have none."""
    assert PositionedLoader.of(build)(None, 0) is None
