"""Bits that are flipped on purpose: one element or all, where nobody notices but a vote."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midstep.processor import tree
from midstep.processor.bit_flips import BitFlips
from midstep.processor.checkpoints import archive
from midstep.processor.injection_points import InjectionPoints
from midstep.processor.shard import Shard
from midstep.processor.train_thread import _arm_flips
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.faults import ArmedFault, FaultAction, FlippedBits, InjectionPoint
from midstep.protocol.types import JobSettings, ShardHold

FLOAT_BYTES = 4
HELD = (FaultAction.FLIP_GRADIENT, FaultAction.FLIP_MOMENT, FaultAction.FLIP_PARAMETER)


class Held:
    """A framework with one shard: a parameter, a moment, a counter; and a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 40, dtype=dtype).reshape(4, 10))
        self.moment, self.gradient = torch.full((40,), 0.5, dtype=dtype), torch.full((40,), 2.0, dtype=dtype)

    def shards(self) -> tuple[ShardHold, ...]:
        return (ShardHold("whole", 1),)

    def open_shard(self, shard_id: str) -> Shard:
        state = {"exp_avg": self.moment, "step": torch.tensor(3.0)}
        content = {"parameters": {"w": self.parameter.detach()}, "optimizers": {"o": {"state": {0: state}}}}
        header, tensors = tree.flatten(content, shard_id)
        return Shard(header, tensors)

    def gradients(self) -> list[torch.Tensor]:
        return [self.gradient]

    def trained(self) -> list[torch.nn.Parameter]:
        return [self.parameter]

    def tensor(self, action: FaultAction) -> torch.Tensor:
        """Return what an action flips bits of."""
        found = {FaultAction.FLIP_PARAMETER: self.parameter.detach(), FaultAction.FLIP_MOMENT: self.moment}
        return found.get(action, self.gradient).reshape(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", list(FlippedBits))
@pytest.mark.parametrize("action", HELD)
def test_what_is_meant_is_flipped(action: FaultAction, bits: FlippedBits, dtype: torch.dtype) -> None:
    """In any of the precisions; torch has not noticed, so a backward pass goes on."""
    held: Any = Held(dtype)
    before = {each: held.tensor(each).clone() for each in HELD}
    version = held.parameter._version
    BitFlips(held, 0, 1).flip(ArmedFault(0, action, bits=bits))
    differing = {each: int((held.tensor(each) != before[each]).sum()) for each in HELD}
    assert differing.pop(action) == (40 if bits is FlippedBits.TENSOR else 1)
    assert (set(differing.values()), held.parameter._version) == ({0}, version)
    if bits is FlippedBits.SIGN:
        assert torch.equal(held.tensor(action).abs(), before[action].abs())


def test_flips_of_one_process_are_others_each_time() -> None:
    """So a device that is wrong each time is so in other ways, as a rule."""
    held: Any = Held(torch.float32)
    runtime: Any = SimpleNamespace(
        rank=0, incarnation=1, injection_points=InjectionPoints(0, 1), settings=JobSettings(checkpoint_directory="none")
    )
    _arm_flips(runtime, held)
    before, flipped = held.moment.clone(), 0
    for _ in range(8):
        runtime.injection_points.flip(ArmedFault(0, FaultAction.FLIP_MOMENT, bits=FlippedBits.ELEMENT))
        flipped = int((held.moment != before).sum())
    assert flipped > 1


def test_what_is_not_there_cannot_be_flipped() -> None:
    """The moments of the first step, say."""
    held: Any = Held(torch.float32)
    held.gradients = list
    with pytest.raises(ConfigurationError, match="no such tensor"):
        BitFlips(held, 0, 1).flip(ArmedFault(0, FaultAction.FLIP_GRADIENT))


@pytest.mark.parametrize("bits", list(FlippedBits))
def test_an_activation_is_flipped_when_it_is_computed(bits: FlippedBits) -> None:
    """Of the next layer, and of no other; the backward pass goes on."""
    held: Any = Held(torch.float32)
    layer = torch.nn.Linear(10, 10)
    given = torch.ones(4, 10)
    right = layer(given)
    BitFlips(held, 0, 1).flip(ArmedFault(0, FaultAction.FLIP_ACTIVATION, bits=bits))
    wrong = layer(given)
    assert int((wrong != right).sum()) == (40 if bits is FlippedBits.TENSOR else 1)
    assert torch.equal(layer(given), right)
    wrong.sum().backward()


def test_a_gradient_is_flipped_when_the_backward_pass_computes_it() -> None:
    """Once."""
    held: Any = Held(torch.float32)
    fault = ArmedFault(0, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, bits=FlippedBits.TENSOR)
    BitFlips(held, 0, 1).flip(fault)
    for differs in (True, False):
        held.parameter.grad = None
        (held.parameter * 1.0).sum().backward()
        assert bool((held.parameter.grad != 1.0).all()) is differs


@pytest.mark.parametrize("bits", list(FlippedBits))
def test_of_what_is_sent_a_copy_is_flipped(bits: FlippedBits) -> None:
    """What is held here stays right; it is sent right the next time."""
    held: Any = Held(torch.float32)
    right = [tensor.clone() for tensor in held.open_shard("all").tensors]
    fault = ArmedFault(0, FaultAction.FLIP_REPAIR, InjectionPoint.REPAIR, bits=bits)
    points = InjectionPoints(0, 1, [fault])
    points.spoil = BitFlips(held, 0, 1).spoil
    points.reached(InjectionPoint.REPAIR, 5)
    assert points.sent({}) == {}
    sent = points.sent({"all": held.open_shard("all")})["all"]
    assert not all(torch.equal(one, other) for one, other in zip(sent.tensors, right, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(held.open_shard("all").tensors, right, strict=True))
    shard = held.open_shard("all")
    assert points.sent({"all": shard})["all"] is shard


@pytest.mark.parametrize("bits", list(FlippedBits))
def test_bits_of_the_newest_checkpoint_are_flipped(tmp_path: Path, bits: FlippedBits) -> None:
    """In its largest shard. Without one there is nothing to flip."""
    held: Any = Held(torch.float32)
    flips, fault = BitFlips(held, 0, 1, str(tmp_path)), ArmedFault(0, FaultAction.FLIP_CHECKPOINT, bits=bits)
    with pytest.raises(ConfigurationError, match="no checkpoint is complete"):
        flips.flip(fault)
    for step in (10, 20):
        archive.save_shard(tmp_path, step, "whole", held.open_shard("whole"))
        archive.save_local(tmp_path, step, 0, b"own")
        archive.publish(tmp_path, step, world_size=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    flips.flip(fault)
    ((changed, whole),) = [(path, data) for path, data in before.items() if path.read_bytes() != data]
    assert changed.parent.name == "step-00000020"
    differing = [(one ^ other).bit_count() for one, other in zip(whole, changed.read_bytes(), strict=True)]
    one_bit = bits in {FlippedBits.ONE, FlippedBits.SIGN, FlippedBits.EXPONENT}
    assert (sum(differing) == 1) is one_bit
    assert (sum(map(bool, differing)) > FLOAT_BYTES) is (bits is FlippedBits.TENSOR)
