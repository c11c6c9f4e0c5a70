"""The train state of plain PyTorch: what one process captures, another one continues with."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from midstep.adapters.ddp.state import TrainState
from midstep.processor.range_transfer import ShardMemory
from midstep.protocol.errors import NotUnderMidstep, RecoveryError
from midstep.protocol.types import InjectionPoint


class _Script:
    def __init__(self, seed: int, optimizer: str = "adamw", width: int = 6) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2))
        make: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lbfgs": torch.optim.LBFGS}[optimizer]
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = GradScaler("cpu", init_scale=64.0)
        self.state = TrainState(self.model, self.optimizer, self.scheduler, self.scaler)

    def loss(self) -> Any:
        return self.model(torch.randn(8, 4)).pow(2).mean()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss()).backward()
            self.scaler.unscale_(self.optimizer)
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(lambda: 0.0)  # type: ignore[no-untyped-call]
            else:
                self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def numbers(self) -> list[Any]:
        return [
            *(tensor.tolist() for tensor in self.model.state_dict().values()),
            self.scheduler.get_last_lr(),
            self.scaler.state_dict(),
            torch.rand(2).tolist(),
        ]


def _carry(source: _Script, target: _Script, blob: bytes) -> None:
    opened = source.state.open_shard("replicated")
    accepted = target.state.accept_shard("replicated", opened.header)
    for mine, arrived in zip(accepted.tensors, opened.tensors, strict=True):
        mine.copy_(arrived)
    target.state.adopt_shard("replicated", accepted)
    target.state.restore_local(blob)
    target.state.rolled_back(0)


def test_memory_for_a_newcomers_optimizer_is_got_before_its_state_arrives() -> None:
    """What is expected is enough for what is accepted, is used for it, and its thread ends when it is adopted."""
    source, newcomer = _Script(1, width=1_000_000), _Script(2, width=1_000_000)
    source.train(1)
    (hold,) = source.state.shards()
    before = set(threading.enumerate())
    newcomer.state.expect_shard(hold.shard_id, hold.size_bytes)
    (room,) = set(threading.enumerate()) - before
    _carry(source, newcomer, source.state.capture_local())
    assert not room.is_alive()
    assert set(threading.enumerate()) == before
    for theirs, mine in zip(source.model.parameters(), newcomer.model.parameters(), strict=True):
        for key, value in source.optimizer.state[theirs].items():
            assert torch.equal(newcomer.optimizer.state[mine][key], value)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lbfgs"])
def test_another_process_continues_bit_for_bit(optimizer: str) -> None:
    """Also one that had a state of its own, and with an optimizer that keeps its state in its own way."""
    source = _Script(1, optimizer)
    source.train(3)
    blob = source.state.capture_local()
    for stale_steps in (0, 2):
        target = _Script(2, optimizer)
        target.train(stale_steps)
        _carry(source, target, blob)
        assert target.state.shards() == source.state.shards()
        target.train(2)
        there = target.numbers()
        torch.manual_seed(0)
        twin = _Script(3, optimizer)
        _carry(source, twin, blob)
        twin.train(2)
        assert there == twin.numbers()
    source.state.restore_local(blob)
    source.train(2)
    assert source.numbers() == there


def test_handles_on_parameters_and_optimizer_stay_valid() -> None:
    """Parameters are filled in place, and live optimizer state is received into directly."""
    source, target = _Script(1), _Script(2)
    source.train(1)
    target.train(1)
    first: Any = target.model[0]
    parameter = first.weight
    moment = target.optimizer.state[parameter]["exp_avg"].data_ptr()
    address = parameter.data_ptr()
    _carry(source, target, source.state.capture_local())
    assert first.weight is parameter
    assert (parameter.data_ptr(), target.optimizer.state[parameter]["exp_avg"].data_ptr()) == (address, moment)


def test_a_parameter_in_another_memory_order_is_carried_too() -> None:
    """Its bytes go through a contiguous copy."""

    def make(seed: int) -> tuple[nn.Module, TrainState]:
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, TrainState(model)

    (source, opened), (target, state) = make(1), make(2)
    shard = opened.open_shard("replicated")
    accepted = state.accept_shard("replicated", shard.header)
    assert ShardMemory(accepted.tensors).size_bytes == state.shards()[0].size_bytes
    for mine, arrived in zip(accepted.tensors, shard.tensors, strict=True):
        mine.copy_(arrived)
    state.adopt_shard("replicated", accepted)
    assert torch.equal(source.weight, target.weight)  # type: ignore[arg-type]
    assert target.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[operator]


def test_rollback_drops_gradients_and_half_done_scaling() -> None:
    """The repeated step starts from nothing: unscaling again is not refused."""
    script = _Script(1)
    script.scaler.scale(script.loss()).backward()
    script.scaler.unscale_(script.optimizer)
    script.state.clean()
    script.state.rolled_back(0)
    assert all(parameter.grad is None for parameter in script.model.parameters())
    script.train(1)
    assert script.scheduler.last_epoch == 1


def test_another_model_is_refused_with_what_differs() -> None:
    """Shapes and names are compared before a byte is taken in."""
    header = _Script(1).state.open_shard("replicated").header
    with pytest.raises(RecoveryError, match="same model"):
        _Script(1, width=7).state.accept_shard("replicated", header)
    with pytest.raises(RecoveryError, match="same script"):
        TrainState(nn.Linear(2, 2)).accept_shard("replicated", header)


def test_steps_need_midstep_around_them() -> None:
    """The error says what to do."""
    with pytest.raises(NotUnderMidstep, match=r"midstep\.resilient"):
        TrainState(nn.Linear(1, 1)).steps(3)


@pytest.mark.parametrize("point", [InjectionPoint.FORWARD, InjectionPoint.BACKWARD])
def test_an_armed_fault_fires_once_in_the_middle_of_the_pass(point: InjectionPoint) -> None:
    """And leaves no hook behind."""
    script = _Script(1)
    fired: list[str] = []
    script.state.fire_in(point, lambda: fired.append(point))
    loss = script.loss()
    assert len(fired) == (point is InjectionPoint.FORWARD)
    loss.backward()
    script.loss().backward()
    assert fired == [point]
    assert all(not module._forward_hooks for module in script.model.modules())
    assert all(not parameter._backward_hooks for parameter in script.model.parameters())
