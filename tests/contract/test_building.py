"""`midstep.building`: a newcomer skips initial values, and everything that reads them gets the same bits."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import midstep
from midstep.processor.building import refuse_building
from midstep.processor.deferred_init import DeferredInit
from midstep.protocol.errors import ConfigurationError


def allowing(deferred: DeferredInit) -> "torch.utils.hooks.RemovableHandle":
    """Have the values of all parameters put off that are registered from now on."""

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            deferred.allow(parameter)

    return nn.modules.module.register_module_parameter_registration_hook(note)


def built(make: Callable[[], nn.Module], *, put_off: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return copies of a model's state, read in the block, and a random number that is drawn afterwards."""
    torch.manual_seed(3)
    if not put_off:
        state = make().state_dict()
        return {name: tensor.clone() for name, tensor in state.items()}, torch.rand(1)
    deferred = DeferredInit()
    hook = allowing(deferred)
    try:
        with deferred:
            state = {name: tensor.clone() for name, tensor in make().state_dict().items()}
            return state, torch.rand(1)
    finally:
        hook.remove()


class Initialized(nn.Module):
    """A module whose weights are filled by a function."""

    def __init__(self, *fills: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(6, 5)) for _ in fills)
        for weight, fill in zip(self.weights, fills, strict=True):
            fill(weight)


def seeded_twice() -> nn.Module:
    """Return two layers with the same values."""
    torch.manual_seed(7)
    first = nn.Linear(4, 4)
    torch.manual_seed(7)
    return nn.Sequential(first, nn.Linear(4, 4))


def with_noise() -> nn.Module:
    """Return layers with a random buffer between them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[1].register_buffer("noise", torch.randn(3))
    model.append(nn.Linear(4, 4))
    return model


def scaled() -> nn.Module:
    """Return a layer whose values are changed in place, as residual layers' are."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight[0].zero_()
        layer.weight.data.mul_(1 / math.sqrt(8)).clamp_(-0.1, 0.1)
        layer.bias.copy_(torch.arange(4.0))
    return layer


def copied() -> nn.Module:
    """Return a layer and its copy, with another one behind them."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, copy.deepcopy(layer), nn.Linear(4, 4))


def own_generator() -> nn.Module:
    """Return a layer between two that are filled from another generator."""
    generator = torch.Generator().manual_seed(2)
    fill = lambda weight: nn.init.normal_(weight, generator=generator)  # noqa: E731
    return Initialized(nn.init.xavier_uniform_, fill, nn.init.kaiming_normal_)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.TransformerEncoderLayer(8, 2),
    "embedding": lambda: nn.Embedding(5, 4, padding_idx=1),
    "truncated": lambda: Initialized(nn.init.trunc_normal_, nn.init.trunc_normal_),
    "orthogonal": lambda: Initialized(nn.init.normal_, nn.init.orthogonal_, nn.init.normal_),
    "sparse": lambda: Initialized(nn.init.normal_, lambda weight: nn.init.sparse_(weight, 0.5), nn.init.normal_),
    "data": lambda: Initialized(lambda weight: weight.data.normal_(0, 0.02), nn.init.ones_),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "copied": copied,
    "seeded twice": seeded_twice,
    "with noise": with_noise,
    "scaled": scaled,
    "own generator": own_generator,
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_in_the_block_has_the_bits_that_it_would_have_had(name: str) -> None:
    expected, number = built(MODELS[name], put_off=False)
    found, number_found = built(MODELS[name], put_off=True)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert torch.equal(number, number_found)


def test_a_newcomers_parameters_are_not_a_number_until_its_state_arrives() -> None:
    deferred = DeferredInit()
    hook = allowing(deferred)
    with deferred:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    hook.remove()
    deferred.leave_out()
    assert all(parameter.isnan().all() for parameter in (*model[0].parameters(), *model[2].parameters()))
    assert torch.equal(model.get_parameter("1.weight"), torch.ones(4))


def test_random_numbers_continue_after_the_block_as_if_it_had_not_been_there() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with midstep.building():
        layer = nn.Linear(4, 4)
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(1)
    assert torch.equal(layer.weight, nn.Linear(4, 4).weight)
    midstep.TrainState(model=layer)


def test_a_parameter_of_the_block_that_is_not_registered_is_refused_by_name() -> None:
    with midstep.building():
        model, teacher = nn.Linear(2, 2), nn.Conv1d(1, 1, 1)
    with pytest.raises(ConfigurationError, match=r"Conv1d\.weight, Conv1d\.bias were made .* no registered module"):
        midstep.TrainState(model=model)
    midstep.TrainState(model=[model, teacher])


def test_a_parameter_of_the_block_that_no_longer_exists_need_not_be_registered() -> None:
    with midstep.building():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
    midstep.TrainState(model=model)


def test_megatron_refuses_the_block() -> None:
    with midstep.building():
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="is for plain PyTorch: Megatron keeps states of the random number"):
        refuse_building("Megatron")
    del model
    refuse_building("Megatron")
