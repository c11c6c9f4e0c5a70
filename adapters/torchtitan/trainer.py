"""Redirect what torchtitan's trainer calls: its process groups, and `Trainer.train`, which becomes resilient.

Nothing in torchtitan is changed on disk. Under `midstep run` a trainer that is built trains by midstep's loop: its own
`train` is called, and called again after a fault, at the step that was interrupted.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FSDPModule

from ...processor.local_state import RandomState
from ...processor.runtime import Runtime
from ...processor.train_thread import TrainThread
from ..process_groups import redirect_default_group
from .compatibility import check_version, config_of, refuse_unsupported

_installed = False


def install() -> None:
    """Make the trainers of this process resilient. Before torchtitan makes one; outside `midstep run`: does nothing.

    A trainer is torchtitan's own, or of a class that has its `train` from it.

    Raises:
        ConfigurationError: torchtitan is missing, or is a version that midstep does not know. What a trainer does that
            cannot be recovered is refused when it begins to train.
        NotUnderMidstep: See `Runtime.current`.
    """
    global _installed  # noqa: PLW0603 - what is redirected is global, too
    check_version()
    runtime = Runtime.current()
    if runtime is None or _installed:
        return
    _installed = True
    redirect_default_group()
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = _keep_timeouts
    utils.clip_grad_norm_ = _reporting(utils.clip_grad_norm_, runtime)
    trainer_class = _trainer_class()
    plain = inspect.unwrap(trainer_class.train)  # without torchelastic's record of the exception that it raises

    @functools.wraps(plain)
    def train(trainer: Any) -> Any:
        return _train(trainer, plain)

    trainer_class.train = train


def _trainer_class() -> Any:
    try:
        from torchtitan.trainer import Trainer
    except ImportError:  # 0.2.2
        from torchtitan.train import Trainer
    return Trainer


def _keep_timeouts(timeout: Any, parallel_dims: Any) -> None:
    """Leave timeouts as they are: how long a collective may take is said by the policy (communicator.collective_s)."""


def _reporting(plain: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Report the gradient norm of each step, for rules of the policy. It is that of all ranks."""

    @functools.wraps(plain)
    def clip(*args: Any, **options: Any) -> Any:
        norm = plain(*args, **options)
        runtime.report_values({"grad_norm": norm})
        return norm

    return clip


def _train(trainer: Any, plain: Callable[[Any], Any]) -> Any:
    """Train a trainer that is built, through all faults."""
    from .state import TitanState

    runtime = Runtime.current()
    assert runtime is not None
    refuse_unsupported(trainer)
    checkpointer = trainer.checkpointer
    if runtime.connected:  # others get their state from ranks that have gone further
        checkpointer.load(step=config_of(trainer).checkpoint.load_step)
    checkpointer.load = _loaded
    state = TitanState(trainer)
    checkpointer.save = _aside(state, checkpointer.save)
    if getattr(trainer, "validator", None) is not None:
        trainer.validator.validate = _validation(state, trainer.validator.validate)

    def call() -> Any:
        _settle_modules(trainer)
        if state.step and state.is_cut_off:
            state.checkpoints.make_up()
        return plain(trainer)

    return TrainThread(runtime, state).run(call)


def _settle_modules(trainer: Any) -> None:
    """Set what a whole step leaves set, on all ranks alike: a survivor was interrupted, and a newcomer has made none.

    torchtitan 0.3.0 computes the loss in chunks. Meanwhile the head of the model stays gathered, and afterwards its
    switches are others than those with which it was made. Ranks whose switches differ gather it differently often, and
    wait for each other for ever.
    """
    for part in trainer.model_parts:
        part.train()  # a validation that was interrupted leaves the other mode
    head = getattr(trainer.loss_fn, "lm_head", None)
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.set_requires_gradient_sync(True, recurse=False)


def _loaded(*_: Any, **__: Any) -> bool:
    """Stand for `checkpointer.load` at the head of `train`, which is called again after each fault."""
    return True


def _aside(state: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what comes after an update and may be done a second time: it leaves random numbers as they were.

    A checkpoint draws some where the data loader has no iterator yet, which is so in a recovery only.
    """

    @functools.wraps(plain)
    def call(*args: Any, **options: Any) -> Any:
        numbers = RandomState()
        before = numbers.capture()
        with state.paused():
            result = plain(*args, **options)
        numbers.restore(before)
        return result

    return call


def _validation(state: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    aside = _aside(state, plain)

    @functools.wraps(plain)
    def validate(model_parts: Any, step: int) -> Any:
        result = aside(model_parts, step)
        state.checkpoints.validated(step)
        return result

    return validate
