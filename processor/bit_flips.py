"""Flip bits of what a rank holds, on purpose: what `midstep inject --flip` does in the training process.

The memory is changed behind torch's back, as a stray particle does: no version counter moves, and nothing is raised.
Of the tensors of a kind one is chosen by chance, and in it an element that is not zero. What is only about to be
computed, an activation or a gradient in the middle of a backward pass, is flipped when it comes by.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..protocol.errors import ConfigurationError
from ..protocol.faults import ArmedFault, FaultAction, FlippedBits, InjectionPoint
from . import tree
from .checkpoints.dcp import SUFFIX as DCP_SHARD
from .checkpoints.entries import complete_steps
from .checkpoints.files import SHARD, step_directory
from .framework import Exposed

if TYPE_CHECKING:
    from .framework import Framework, OpenShard

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXPONENT_BITS = {torch.float32: 8, torch.bfloat16: 8, torch.float16: 5, torch.float64: 11}
_FLOAT_BYTES = 4
_MOST_OF_A_FILE_BYTES = 1 << 20  # that is read and written again
_HIGH_BITS = 6  # of a mantissa: lower ones can be lost in the next rounding, and then nothing is wrong
_PARTS = {FaultAction.FLIP_PARAMETER: "parameters", FaultAction.FLIP_MOMENT: "optimizers"}


class BitFlips:
    """Flips bits in the train thread of one rank."""

    def __init__(self, framework: "Framework", rank: int, incarnation: int, checkpoints: str | None = None) -> None:
        """`checkpoints`: where the job has them."""
        self._framework = framework
        self._checkpoints = checkpoints
        self._dice = random.Random(f"{rank}/{incarnation}")

    def flip(self, fault: ArmedFault) -> None:
        """Do what the fault says. Raises ConfigurationError where the framework has no such tensors."""
        if fault.action is FaultAction.FLIP_ACTIVATION:
            self._flip_next_activation(fault)
            return
        if fault.action is FaultAction.FLIP_CHECKPOINT:
            self._flip_newest_checkpoint(fault)
            return
        if fault.action is FaultAction.FLIP_GRADIENT and fault.point is InjectionPoint.BACKWARD:
            self._flip_next_gradient(fault)
            return
        self._flip_one_of(self._tensors(fault.action), fault)

    def spoil(self, shards: "dict[str, OpenShard]", fault: ArmedFault) -> "dict[str, OpenShard]":
        """Return copies of shards that are to be sent, in one of which bits have flipped. The shards stay as they are.

        Raises ConfigurationError as `flip` does.
        """
        copies: dict[str, OpenShard] = {name: _Copy(shard) for name, shard in shards.items()}
        self._flip_one_of([each for copy in copies.values() for each in self._parts_of(copy, "parameters")], fault)
        return copies

    def _flip_one_of(self, tensors: Sequence[torch.Tensor], fault: ArmedFault) -> None:
        floats = [tensor for tensor in tensors if _can_be_flipped(tensor)]
        if not floats:
            raise ConfigurationError(f"{fault.action}: there is no such tensor of floats here, or not yet")
        self._flip(self._dice.choice(floats), fault)

    def _flip(self, flipped: torch.Tensor, fault: ArmedFault) -> None:
        tensor = flipped.data.view(-1)  # `data`: its version counter is its own
        words = tensor.view(_INTEGERS[tensor.element_size()])
        if fault.bits is FlippedBits.TENSOR:
            words ^= 1 << (_mantissa_bits(tensor) - 1)
            return
        place = self._place(tensor)
        if fault.bits is FlippedBits.ELEMENT:
            tensor[place] = tensor[place] * self._dice.uniform(2.0, 5.0) + 1.0
        else:
            words[place] ^= _signed(1 << self._bit(tensor, fault.bits), 8 * tensor.element_size())

    def _flip_next_activation(self, fault: ArmedFault) -> None:
        """Flip what the next layer gives that gives floats."""

        def flip(_layer: object, _inputs: object, output: object) -> None:
            given = _local(output[0] if isinstance(output, tuple | list) and output else output)
            if isinstance(given, torch.Tensor) and _can_be_flipped(given):
                handle.remove()
                self._flip(given, fault)

        handle = torch.nn.modules.module.register_module_forward_hook(flip)

    def _flip_next_gradient(self, fault: ArmedFault) -> None:
        """Flip the next gradient of a parameter that the backward pass computes, before it is reduced."""
        handles: list[torch.utils.hooks.RemovableHandle] = []

        def flip(whole: torch.Tensor) -> None:
            gradient = _local(whole)
            if handles and _can_be_flipped(gradient):
                for handle in handles:
                    handle.remove()
                handles.clear()
                self._flip(gradient, fault)

        attach: list[Any] = [parameter.register_hook for parameter in self._parameters()]
        handles += [hook(flip) for hook in attach]

    def _flip_newest_checkpoint(self, fault: ArmedFault) -> None:
        """Flip bits behind the middle of the largest shard of the newest checkpoint that is complete."""
        steps = complete_steps(self._checkpoints) if self._checkpoints else ()
        if self._checkpoints is None or not steps:
            raise ConfigurationError(f"{FaultAction.FLIP_CHECKPOINT}: no checkpoint is complete yet")
        files = step_directory(self._checkpoints, max(steps)).iterdir()
        shards = [path for path in files if path.name.endswith((SHARD, DCP_SHARD))]
        largest = max(shards, key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            place = file.seek(largest.stat().st_size // 2 // _FLOAT_BYTES * _FLOAT_BYTES)
            read = file.read(_MOST_OF_A_FILE_BYTES)
            data = bytearray(read[: len(read) // _FLOAT_BYTES * _FLOAT_BYTES])
            self._flip(torch.frombuffer(data, dtype=torch.float32), fault)  # whatever it is that lies there
            file.seek(place)
            file.write(data)

    def _parameters(self) -> list[torch.Tensor]:
        if not isinstance(self._framework, Exposed):
            raise ConfigurationError(f"{FaultAction.FLIP_GRADIENT}: the framework does not show its gradients")
        return list(self._framework.trained())

    def _tensors(self, action: FaultAction) -> Sequence[torch.Tensor]:
        if action is FaultAction.FLIP_GRADIENT:
            return self._framework.gradients() if isinstance(self._framework, Exposed) else ()
        found: list[torch.Tensor] = []
        for hold in self._framework.shards():
            found += self._parts_of(self._framework.open_shard(hold.shard_id), _PARTS[action])
        return found

    def _parts_of(self, shard: "OpenShard", part: str) -> list[torch.Tensor]:
        parts = zip(tree.tensor_names(shard.header), shard.tensors, strict=True)
        return [tensor for name, tensor in parts if name.startswith(part)]

    def _place(self, tensor: torch.Tensor) -> int:
        """Return an element that is not zero, if there is one near."""
        place = self._dice.randrange(tensor.numel())
        nonzero = torch.nonzero(tensor[place : place + 4096])
        return place + int(nonzero[0]) if len(nonzero) else place

    def _bit(self, tensor: torch.Tensor, bits: FlippedBits) -> int:
        mantissa, width = _mantissa_bits(tensor), 8 * tensor.element_size()
        if bits is FlippedBits.SIGN:
            return width - 1
        if bits is FlippedBits.EXPONENT:
            return self._dice.randrange(mantissa, width - 1)
        return self._dice.randrange(max(0, mantissa - _HIGH_BITS), mantissa)


class _Copy:
    """A copy of an opened shard, in memory of its own."""

    def __init__(self, shard: "OpenShard") -> None:
        self.header = shard.header
        self.tensors = [tensor.detach().clone() for tensor in shard.tensors]


def _local(tensor: Any) -> Any:
    """Return this rank's piece of a sharded tensor, in the same memory; anything else as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _can_be_flipped(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _EXPONENT_BITS and tensor.is_contiguous() and tensor.numel() > 1


def _mantissa_bits(tensor: torch.Tensor) -> int:
    return 8 * tensor.element_size() - 1 - _EXPONENT_BITS[tensor.dtype]


def _signed(value: int, width: int) -> int:
    """Return the integer of this width that has these bits."""
    return value - (1 << width) if value >> (width - 1) else value
