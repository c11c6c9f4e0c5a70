"""torchtitan's own program, which is hurt in these tests: with no line of it changed, on the CPU.

Runs under `midstep run`: `training.py RECORDS ASSETS LOSSES ARGUMENT...`; the arguments are torchtitan's. Each rank
writes down a digest of its pieces after each step, and at the end of everything that it holds. `LOSSES`: where ranks
end themselves, for moments after the commit of a step that have no injection point. A file `gate.<step>` among the
records holds all ranks in front of that step for as long as it is there.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from midstep.examples.torchtitan.on_cpu import prepare
from midstep.examples.train_and_record import digest, optimizer_tensors
from midstep.protocol import environment as names


class Loss(msgspec.Struct, frozen=True):
    """A rank that ends itself: `place` is metrics, checkpoint or validation, and `step` torchtitan's, from 1.

    With `diverges` it lives on, and its gradients are no numbers once; with `skips` its data lacks the step's batches.
    """

    rank: int
    place: str
    step: int
    life: int = 1


def local(tensor: Any) -> Any:
    """Return this rank's piece."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def pieces(trainer: Any) -> dict[str, Any]:
    """Return this rank's pieces of the parameters."""
    return {
        f"{i}.{name}": local(each)
        for i, part in enumerate(trainer.model_parts)
        for name, each in part.named_parameters()
    }


def held(trainer: Any) -> dict[str, Any]:
    """Return digests of what a rank holds at its end.

    Not the data loader's state: once restored it has read ahead by one text more, and gives the same batches.
    """
    moments: dict[str, Any] = {}
    for index, optimizer in enumerate(trainer.optimizers.optimizers):
        moments |= {f"{index}.{name}": local(each) for name, each in optimizer_tensors(optimizer).items()}
    groups = [group for optimizer in trainer.optimizers.optimizers for group in optimizer.param_groups]
    return {
        "step": trainer.step,
        "parameters": digest(pieces(trainer)),
        "optimizer": digest(moments),
        "rates": [float(group["lr"]).hex() for group in groups],
        "schedulers": [each.last_epoch for each in trainer.lr_schedulers.schedulers],
        "tokens": trainer.ntokens_seen,
        "random numbers": digest({"torch": torch.get_rng_state()}),
        "pid": os.getpid(),
    }


def watch(records: Path, losses: list[Loss]) -> None:
    """Have torchtitan's trainers write records, and the losses happen."""
    from torchtitan.distributed import utils

    from midstep.adapters.torchtitan.trainer import _trainer_class

    trainer_class = _trainer_class()
    train_step, close, checkpoint = trainer_class.train_step, trainer_class.close, trainer_class.__init__
    present: list[Any] = []

    def ending(place: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            here = Loss(dist.get_rank(), place, present[0].step, int(os.environ[names.INCARNATION]))
            if here in losses:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **options)

        return call

    def init(trainer: Any, *args: Any, **options: Any) -> None:
        present[:] = [trainer]
        checkpoint(trainer, *args, **options)
        trainer.forward_backward_step = diverging(trainer, trainer.forward_backward_step)
        if hasattr(trainer.checkpointer, "dcp_save"):
            trainer.checkpointer.dcp_save = ending("checkpoint", trainer.checkpointer.dcp_save)
        if getattr(trainer, "validator", None) is not None:
            trainer.validator.validate = ending("validation", trainer.validator.validate)

    def meets(place: str, step: int) -> bool:
        found = [each for each in losses if (each.rank, each.place, each.step) == (dist.get_rank(), place, step)]
        losses[:] = [each for each in losses if each not in found]
        return bool(found)

    def diverging(trainer: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            loss = plain(*args, **options)
            if meets("diverges", trainer.step):
                local(next(trainer.model_parts[0].parameters()).grad).fill_(math.nan)
            return loss

        return call

    def step(trainer: Any, data: Any) -> None:
        index = trainer.step - 1
        while (records / f"gate.{index}").exists():
            time.sleep(0.02)
        if meets("skips", trainer.step):
            tokens = trainer.ntokens_seen
            for _ in range(trainer.gradient_accumulation_steps):
                next(data)
            trainer.ntokens_seen = tokens
        train_step(trainer, data)
        with (records / f"steps.{dist.get_rank()}").open("a") as record:
            record.write(f"{index} {trainer.ntokens_seen} {digest(pieces(trainer))}\n")

    def end(trainer: Any) -> None:
        if sys.exc_info()[0] is None:
            (records / f"end.{dist.get_rank()}.json").write_text(json.dumps(held(trainer)))
        close(trainer)

    trainer_class.__init__, trainer_class.train_step, trainer_class.close = init, step, end
    utils.dist_max = ending("metrics", utils.dist_max)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, assets, given, *arguments = sys.argv[1:]
    sys.argv[1:] = arguments
    os.chdir(assets)
    prepare()
    watch(Path(folder), msgspec.json.decode(given, type=list[Loss]))
    from midstep.adapters.torchtitan.__main__ import main

    main()
