"""torchtitan's own checkpoints and validation, which come after the commit of a step: what a fault has cut off of them.

A fault between the commit of a step and the end of its iteration takes the rest of that iteration along, since the next
thing that ranks do after a recovery is the next step. So before it, a checkpoint that was due and is not whole, and a
validation that no rank has finished, are done again. Lines of metrics are not.
"""

import logging
import os
from concurrent import futures
from typing import Any

import torch
import torch.distributed as dist

from ...protocol.errors import RecoveryError
from .compatibility import config_of

SAVING_S = 120.0  # for the thread of an asynchronous checkpoint to come to its next collective, which fails
_WHOLE = (".metadata", "model.safetensors.index.json")  # what torchtitan's loader looks for
_log = logging.getLogger("midstep")


class Checkpoints:
    """The end of one trainer's iterations. Used by the train thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._validated = 0  # the last step after which this rank has finished a validation

    def end_interrupted(self) -> None:
        """Wait for the thread of an asynchronous checkpoint, whose collectives were aborted. Runs in clean.

        It must not go on in the next generation, where the other ranks have no such thread.

        Raises:
            RecoveryError: The thread is still writing after SAVING_S; this process is to be replaced.
        """
        checkpointer = self._trainer.checkpointer
        saving = getattr(checkpointer, "save_future", None)
        if saving is None:
            return
        if not futures.wait([saving], SAVING_S).done:
            raise RecoveryError(
                f"the thread of torchtitan's asynchronous checkpoint still writes after {SAVING_S:.0f} s. Have it "
                "write to a faster place, or use checkpoint.async_mode disabled"
            )
        checkpointer.save_future = None
        if saving.exception() is not None:
            _log.warning("a checkpoint of torchtitan that was being written is not whole: %s", saving.exception())

    def validated(self, step: int) -> None:
        """Note that this rank has finished the validation after a step."""
        self._validated = step

    def make_up(self) -> None:
        """Do what was due after the last committed step and was cut off. Between two steps, on all ranks."""
        trainer = self._trainer
        checkpointer, step = trainer.checkpointer, trainer.step
        config = config_of(trainer)
        last = step == config.training.steps
        validator: Any = getattr(trainer, "validator", None)
        saves = bool(checkpointer._should_save(step, last))
        validates = validator is not None and bool(validator.should_validate(step))
        if not (saves or validates):
            return
        whole = saves and dist.get_rank() == 0 and self._is_whole(step)
        done = torch.tensor([step if whole else 0, self._validated], device=trainer.device)
        dist.all_reduce(done, dist.ReduceOp.MAX)
        if saves and int(done[0]) < step:
            _log.warning("torchtitan's checkpoint of step %d was cut off by a fault; it is written again", step)
            checkpointer.save(step, last_step=last)
        if validates and int(done[1]) < step:
            validator.validate(trainer.model_parts, step)

    def _is_whole(self, step: int) -> bool:
        """Return whether torchtitan would load the checkpoint of a step. One rank asks: folders may be its own."""
        folder = self._trainer.checkpointer._create_checkpoint_id(step)
        try:
            from torchtitan.tools import filesystem  # 0.3.0, where a folder may be at a URL
        except ImportError:
            return any(os.path.isfile(os.path.join(folder, name)) for name in _WHOLE)
        return any(filesystem.isfile(filesystem.join(folder, name)) for name in _WHOLE)
