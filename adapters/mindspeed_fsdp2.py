"""MindSpeed-LLM's FSDP2 trainer made resilient from outside, with none of its lines changed.

`python -m midstep.adapters.mindspeed_fsdp2 train_fsdp2.py config.yaml` takes the place of `python train_fsdp2.py
config.yaml`. `Trainer.train` is called by midstep's loop, and again after a fault. It finds its place as it does when
it is given a checkpoint to resume from: it asks its checkpoint manager, which answers here from memory. In its loop

    get_batch_samples_func     begins a step
    batches, token count, forward, backward, gradient norm
    optimizer.step             the commit barrier, then the update
    lr_scheduler.step          the last of the update: committed
    loss of all ranks, log, checkpoint
"""

import functools
import glob
import importlib
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..processor.runtime import Runtime
from ..processor.train_thread import TrainThread
from ..processor.values import Value
from ..protocol.errors import ConfigurationError
from .fsdp import ShardedTrainState
from .process_groups import redirect_default_group
from .quiet_loader import QuietLoader

_TRAINER = "mindspeed_llm.fsdp2.train.trainer"
_DATA = "mindspeed_llm.fsdp2.data.megatron_data.megatron_dataset_generate"
_HOOKED = ("train", "get_batch_samples_func")
_COUNTS = ("_total_", "_last_logged_")  # what names of the trainer's own sums and counts begin with
_MEMORY = "the memory of the ranks"  # the checkpoint that a trainer is said to resume from
_log = logging.getLogger("midstep")


# Ways of training that cannot be recovered: what they are called, how to see them, and why.
REFUSALS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "expert parallelism (parallel.ep_size)",
        lambda trainer: trainer.parallel_args.ep_size > 1,
        "its optimizer is made of several, and it was never tried",
    ),
    (
        "context parallelism (parallel.cp_size)",
        lambda trainer: trainer.parallel_args.cp_size > 1,
        "it was never tried",
    ),
    (
        "quantization (model.quant_recipe_name)",
        lambda trainer: bool(trainer.model.config.quantization_plan.recipe_name),
        "it caches what an update changes, and was never tried",
    ),
    (
        "the profiler (training.profile)",
        lambda trainer: bool(trainer.args.profile),
        "it would be started a second time after a fault",
    ),
)


def refuse_unsupported(trainer: Any) -> None:
    """Raise ConfigurationError naming every feature of this trainer that cannot be recovered."""
    found = [f"{feature}: {reason}" for feature, used, reason in REFUSALS if used(trainer)]
    if found:
        raise ConfigurationError(f"MindSpeed-LLM trains with what midstep cannot recover. {'; '.join(found)}")


class MemoryCheckpoints:
    """The checkpoint manager of one trainer: saves as that does, and loads from memory. Used by the train thread."""

    def __init__(self, trainer: Any, paused: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._plain = trainer.ckpt_manager
        self._paused = paused
        self._saved = 0  # the last step of which this rank has finished the checkpoint

    def __getattr__(self, name: str) -> Any:
        """Have all else of the manager."""
        return getattr(self._plain, name)

    def load(self, path: str, state: dict[str, Any]) -> dict[str, Any]:
        """Say where training stands. Parameters and the optimizer are there already."""
        state["extra_state"] = self._extra_state()
        return state

    def save(self, **options: Any) -> None:
        """Write a checkpoint, for as long as it takes."""
        with self._paused():
            self._plain.save(**options)
        self._saved = self._trainer.global_step

    def make_up(self) -> None:
        """Write the checkpoint that was due after the last update, if a fault has cut it off. On all ranks."""
        trainer, step = self._trainer, self._trainer.global_step
        if not _saves(trainer):
            return
        done = torch.tensor(self._saved, device=torch.accelerator.current_accelerator())
        dist.all_reduce(done, dist.ReduceOp.MAX)
        if int(done) == step:
            return
        _log.warning("MindSpeed-LLM's checkpoint of step %d was cut off by a fault; it is written again", step)
        path = os.path.join(trainer.args.output_dir, "checkpoints", f"global_step_{step}")
        state = {"model": trainer.model, "optimizer": trainer.optimizer, "extra_state": self._extra_state()}
        self.save(path=path, state=state, save_only_model=trainer.args.save_only_model, global_steps=step)
        dist.barrier()

    def _extra_state(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "global_step": trainer.global_step,
            "_global_step_last_logged": trainer._global_step_last_logged,
            "_last_logged_step": trainer._last_logged_step,
            "lr_scheduler": trainer.lr_scheduler.state_dict(),
            "train_metric": trainer.train_monitor.state_dict(),
            "torch_rng_state": torch.get_rng_state(),
        }


class _LastOfUpdate:
    """The scheduler of a trainer, whose step ends an update. An attribute of its own would be in its `state_dict`."""

    def __init__(self, plain: Any, commit: Callable[[], None]) -> None:
        self._plain, self._commit = plain, commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def step(self) -> None:
        """Set the next learning rate, and commit."""
        self._plain.step()
        self._commit()


class TrainerState(ShardedTrainState):
    """Everything that a trainer changes. It is made between two steps, after the trainer's checkpoint was read."""

    def __init__(self, trainer: Any) -> None:
        """Raise ConfigurationError or UnsupportedState for what cannot be brought back."""
        self._trainer = trainer
        self._first = trainer.global_step  # of the steps that were done before this job
        self._kept: dict[str, Any] = {}
        self.is_cut_off = False  # what comes after an update, so that it is to be made up for
        super().__init__(
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            values={"trainer": Value(get=self._counts, set=self._set_counts)},
        )

    def audit(self) -> tuple[str, ...]:
        """Return what other sharded states do, but for the functions of the scheduler: they keep nothing."""
        return tuple(finding for finding in super().audit() if "computes with functions" not in finding)

    def bind(self, ledger: Any) -> None:
        """Hook the trainer, so that its own loop makes midstep's steps."""
        super().bind(ledger)
        trainer = self._trainer
        batches, update = trainer.get_batch_samples_func, trainer.optimizer.step

        def begin() -> Any:
            ledger.begin()
            vars(trainer).update(self._kept)
            self._kept = {}
            self.is_cut_off = False
            return batches()

        @functools.wraps(update)
        def step(*args: Any, **options: Any) -> Any:
            ledger.enter_update(ledger.count)
            return update(*args, **options)

        trainer.get_batch_samples_func, trainer.optimizer.step = begin, step
        trainer.lr_scheduler = _LastOfUpdate(trainer.lr_scheduler, lambda: ledger.leave_update(ledger.count))

    def rolled_back(self, step: int) -> None:
        """Drop gradients, and set the trainer's step."""
        super().rolled_back(step)
        self.is_cut_off = True
        self._trainer.global_step = self._first + step

    def keep_counts(self) -> None:
        """Keep what the trainer takes for counts of a checkpoint when it resumes, until its next step."""
        names = ("_last_logged_step", "_global_step_last_logged")
        self._kept = {name: getattr(self._trainer, name) for name in names}

    def _counts(self) -> dict[str, Any]:
        trainer = self._trainer
        sums = {name: value for name, value in vars(trainer).items() if name.startswith(_COUNTS)}
        seqlens = [int(each) for each in trainer.batch_seqlens]
        return {"first": self._first, "sums": sums, "seqlens": seqlens, "monitor": trainer.train_monitor.state_dict()}

    def _set_counts(self, counts: dict[str, Any]) -> None:
        self._first = counts["first"]
        vars(self._trainer).update(counts["sums"])
        self._trainer.batch_seqlens[:] = counts["seqlens"]
        self._trainer.train_monitor.load_state_dict(counts["monitor"])


def install() -> None:
    """Make the trainers of this process resilient. Before train_fsdp2.py's `main`; outside `midstep run`: does nothing.

    Raises:
        ConfigurationError: This MindSpeed-LLM has another trainer. What a trainer does that cannot be recovered is
            refused when it begins to train.
        NotUnderMidstep: See `Runtime.current`.
    """
    runtime = Runtime.current()
    if runtime is None:
        return
    trainer_class = importlib.import_module(_TRAINER).Trainer
    missing = [name for name in _HOOKED if not hasattr(trainer_class, name)]
    if missing:
        raise ConfigurationError(
            f"{_TRAINER}.Trainer has no {' and no '.join(missing)}, which midstep hooks. It knows the trainer of "
            "MindSpeed-LLM 26.1.0"
        )
    redirect_default_group()
    if not runtime.connected:
        vars(importlib.import_module(_DATA))["subprocess"] = SimpleNamespace(run=_convert_once)
    plain = trainer_class.train

    @functools.wraps(plain)
    def train(trainer: Any, resume_from_checkpoint: str | None = None) -> Any:
        return _train(trainer, plain, resume_from_checkpoint)

    trainer_class.train = train


def _convert_once(command: list[str], *, check: bool) -> None:
    """Convert the data as MindSpeed-LLM does at each start, unless it is there: other ranks read it meanwhile."""
    prefix = command[command.index("--output-prefix") + 1]
    if not glob.glob(f"{glob.escape(prefix)}*.idx"):
        subprocess.run(command, check=check)


def _train(trainer: Any, plain: Callable[..., Any], resume: str | None) -> Any:
    """Train a trainer that is built, through all faults."""
    runtime = Runtime.current()
    assert runtime is not None
    refuse_unsupported(trainer)
    manager = trainer.ckpt_manager
    if manager._metadata_process_group is None:  # its first save would make it, which a newcomer may have missed
        manager._metadata_process_group = dist.new_group(backend="gloo")
    if resume and runtime.connected:  # others get their state from ranks that have gone further
        _load(trainer, resume)
    state = TrainerState(trainer)
    checkpoints = trainer.ckpt_manager = MemoryCheckpoints(trainer, state.paused)
    trainer.train_dataloader = QuietLoader(trainer.train_dataloader, lambda: state.step > 0)

    def call() -> Any:
        if state.step and state.is_cut_off:
            checkpoints.make_up()
        if trainer.global_step >= _total_steps(trainer):
            return _end(trainer)
        state.keep_counts()
        return plain(trainer, resume_from_checkpoint=_MEMORY if trainer.global_step else None)

    return TrainThread(runtime, state).run(call)


def _load(trainer: Any, path: str) -> None:
    """Load a checkpoint as the trainer does when it resumes from one."""
    state: dict[str, Any] = {"model": trainer.model, "optimizer": trainer.optimizer, "extra_state": {}}
    trainer.ckpt_manager.load(path, state)
    found = state["extra_state"]
    if found:
        trainer.global_step = found["global_step"]
        trainer._last_logged_step = trainer._global_step_last_logged = found["_global_step_last_logged"]
        trainer.lr_scheduler.load_state_dict(found["lr_scheduler"])
        torch.set_rng_state(found["torch_rng_state"])


def _end(trainer: Any) -> None:
    """End a training whose last step is committed, where a fault has cut off what comes after it."""
    args = trainer.args
    if args.save_hf_weights:
        _log.warning(
            "a fault came after the last step, and weights in the form of HuggingFace were not written. Make them "
            "from the last checkpoint with MindSpeed-LLM's checkpoint/merge_dcp_to_hf.py"
        )
    if dist.get_rank() == 0:
        trainer.ckpt_manager.save_args(args, args.output_dir)


def _updates_per_epoch(trainer: Any) -> int:
    batches: int = len(trainer.train_dataloader)
    return math.ceil(batches / int(trainer.args.gradient_accumulation_steps))


def _total_steps(trainer: Any) -> int:
    args = trainer.args
    return int(args.max_steps if args.max_steps > 0 else _updates_per_epoch(trainer) * args.num_train_epochs)


def _saves(trainer: Any) -> bool:
    """Return whether the trainer saves a checkpoint after the step that was committed last."""
    args, step = trainer.args, trainer.global_step
    if args.save_steps > 0 and step % args.save_steps == 0:
        return True
    epochs, rest = divmod(step, _updates_per_epoch(trainer))
    if rest and step >= _total_steps(trainer):  # an epoch that is not completed ends there, too
        epochs, rest = epochs + 1, 0
    return bool(args.save_epochs) and rest == 0 and epochs % args.save_epochs == 0


def main() -> None:
    """Run the script that is named first, with a trainer that is resilient. Raises what `install` raises."""
    script = Path(sys.argv[1]).resolve()
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(script.parent))
    program = importlib.import_module(script.stem)
    install()
    program.main()


if __name__ == "__main__":
    main()
