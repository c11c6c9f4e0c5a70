"""Megatron-LM's own `pretrain`, a tiny GPT on data that it makes up, on the CPU.

Runs under `midstep run`: `pretraining.py RECORDS ARGUMENTS...`, with a checkout of Megatron-LM on PYTHONPATH, and
Megatron-LM's own arguments. Each rank writes down the loss and gradient norm of each iteration as exact bits, with a
digest of what its optimizer holds.
"""

import functools
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training import digest, held  # type: ignore[import-not-found]  # beside this file, which runs as a script

from midstep.adapters.megatron import resilient_pretrain
from midstep.testing.megatron_on_cpu import use_cpu


def use_cpu_in_training() -> Any:
    """Let Megatron-LM's training run on the CPU, too; returns its module. Each line is a place that fails without."""
    import megatron.core.datasets.utils
    import megatron.legacy.fused_kernels
    from megatron.training import training

    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1  # it makes its groups only where there are devices
    cuda.set_device = lambda *_: None
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.memory_stats = lambda *_: {}
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=8, minor=0, name="cpu")
    module: Any = training
    module.initialize_megatron = functools.partial(module.initialize_megatron, allow_no_cuda=True)
    module.set_jit_fusion_options = lambda: None
    megatron.core.datasets.utils.compile_helpers = lambda: None  # the package brings them compiled
    megatron.legacy.fused_kernels.load = lambda _: None
    return module


def record(training: Any, records: Path) -> None:
    """Write down every iteration, and at the end which process it was."""
    plain = training.train_step

    def train_step(step: Any, iterator: Any, model: Any, optimizer: Any, *others: Any, **options: Any) -> Any:
        result = plain(step, iterator, model, optimizer, *others, **options)
        losses = {name: float(loss).hex() for name, loss in result[0].items()}
        norm = 0.0 if result[5] is None else float(result[5]).hex()
        arguments = training.get_args()
        with (records / f"steps.{dist.get_rank()}").open("a") as file:
            told = f"{losses.get('lm loss', '-')}/{norm}/{arguments.consumed_train_samples}"
            file.write(f"{arguments.curr_iteration} {told} {digest(held(optimizer))}\n")
        return result

    training.train_step = train_step


def main(records: Path) -> None:
    """Train as pretrain_gpt.py does."""
    warnings.filterwarnings("ignore")
    use_cpu()
    training = use_cpu_in_training()
    record(training, records)
    import pretrain_gpt
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.global_vars import get_args

    if hasattr(pretrain_gpt, "gpt_builder"):
        model_provider = functools.partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder)
    else:
        model_provider = pretrain_gpt.model_provider
    pretrain_gpt.train_valid_test_datasets_provider.is_distributed = True
    resilient_pretrain(pretrain)(
        pretrain_gpt.train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
    )
    end = {"iterations": get_args().curr_iteration, "pid": os.getpid()}
    (records / f"end.{dist.get_rank()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    main(folder)
