"""Runs the Megatron training of tests/chaos on torch-npu's device: `torch.cuda` means it, as torch-npu offers."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch_npu.contrib.transfer_to_npu  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
from tests.chaos.megatron.training import Shape, main


def name_types_as_cuda() -> None:
    """Have tensors of the device say that they are CUDA's, which Megatron asks for before it clips gradients."""
    plain: Any = torch.Tensor.type

    def kind(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        named = plain(self, *args, **options)
        return named.replace("torch.npu.", "torch.cuda.") if isinstance(named, str) else named

    tensor: Any = torch.Tensor
    tensor.type = kind


if __name__ == "__main__":
    name_types_as_cuda()
    main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Shape))
