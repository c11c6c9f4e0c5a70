"""Make scripts that call Megatron-LM's `pretrain` resilient: `resilient_pretrain(pretrain)(...)`.

`pretrain` ends in a call of Megatron-LM's own `train`, with everything that it trains with. That call is made
resilient, and what `train` reads from Megatron-LM's globals (iteration, samples, timers) is restored before it is
called again. Nothing of Megatron-LM is imported here: its module is the one in which the given function is defined.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from ...processor.runtime import Runtime
from ...protocol.errors import ConfigurationError
from ...protocol.types import Activity
from .data import PositionedLoader
from .process_groups import redirect_process_groups
from .replicas import Replica
from .resilient import resilient

# What `train` takes, by name: Megatron-LM core_v0.14.0 to core_v0.16.1, and what core_v0.19.0 takes in addition.
TAKES = (
    "forward_step_func",
    "model",
    "optimizer",
    "opt_param_scheduler",
    "train_data_iterator",
    "valid_data_iterator",
    "process_non_loss_data_func",
    "config",
    "checkpointing_context",
    "non_loss_data_func",
)
MAY_TAKE = ("inference_model", "p2p_communicator", "pg_collection")
# What else of Megatron-LM's module `training` is called or replaced.
USED = (
    "build_pretraining_data_loader",
    "build_train_valid_test_data_iterators",
    "evaluate_and_print_results",
    "get_args",
    "get_timers",
    "num_floating_point_operations",
    "save_checkpoint_and_time",
    "setup_model_and_optimizer",
    "should_disable_forward_pre_hook",
    "train",
)
_SYNC_FUNCTIONS = (
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
)  # `train` sets them, and asserts they are not set

# Arguments of Megatron-LM with which the loop does what a recovery cannot follow.
REFUSED_ARGUMENTS: dict[str, str] = {
    "iterations_to_skip": "iterations pass without a step",
    "perform_rl_step": "data is made by the model in the loop",
    "hybrid_context_parallel": "the loop wraps the data iterator itself",
    "decrease_batch_size_if_needed": "skipped samples are counted in the loop only",
    "inprocess_restart": "it restarts processes, too",
}


class _Exited(NamedTuple):
    """The exit code of a `train` that ended in sys.exit, as Megatron-LM's does after --exit-interval."""

    code: Any


def resilient_pretrain(pretrain: Callable[..., Any], *, replica: Replica | str | None = None) -> Callable[..., Any]:
    """Wrap Megatron-LM's `pretrain`: after a fault training continues with the interrupted iteration.

    Wrap it at the top of the script, before torch.distributed is initialised.

    Args:
        pretrain: The function of Megatron-LM's `megatron.training`.
        replica: As for `resilient`.

    Returns:
        The resilient function; outside `midstep run` it is `pretrain` itself.

    Raises:
        ConfigurationError: Megatron-LM's loop is not as expected, or, when it is called, `resilient` refuses it.
    """
    if Runtime.current() is None:
        return pretrain
    training = sys.modules[pretrain.__module__]
    check_training(training)
    redirect_process_groups()
    loop = _Loop(training)
    made = resilient(replica=replica)(loop.train)

    def train(*args: Any, **options: Any) -> Any:
        loop.begin(inspect.signature(loop.plain).bind(*args, **options))
        result = made(*loop.bound.args, **loop.bound.kwargs, iteration=loop.first, consumed_samples=loop.consumed)
        if isinstance(result, _Exited):
            sys.exit(result.code)
        return result

    training.train = train  # type: ignore[attr-defined]
    _replace(training, "setup_model_and_optimizer", _without_loading)
    _replace(training, "build_pretraining_data_loader", PositionedLoader.of)
    _replace(training, "build_train_valid_test_data_iterators", _with_flags)
    for name in ("evaluate_and_print_results", "save_checkpoint_and_time"):
        _replace(training, name, loop.paused)
    return pretrain


def check_training(training: ModuleType) -> None:
    """Raise ConfigurationError naming what of Megatron-LM's module `training` is not as expected."""
    missing = [name for name in USED if not callable(getattr(training, name, None))]
    if missing:
        raise ConfigurationError(
            f"{training.__name__} has no {', '.join(missing)}, which midstep hooks; give resilient_pretrain the "
            "pretrain of Megatron-LM's megatron.training"
        )
    parameters = inspect.signature(training.train).parameters
    lacking = [name for name in TAKES if name not in parameters]
    strange = [
        name
        for name, parameter in parameters.items()
        if name not in TAKES and (name not in MAY_TAKE or parameter.default is inspect.Parameter.empty)
    ]
    if lacking or strange:
        told = [f"takes no {', '.join(lacking)}"] if lacking else []
        told += [f"takes {', '.join(strange)}"] if strange else []
        raise ConfigurationError(
            f"{training.__name__}.train {' and '.join(told)}: a version of Megatron-LM that midstep does not know. It "
            "knows core_v0.14.0 to core_v0.19.0"
        )


class _Loop:
    """Megatron-LM's `train` in one process: its arguments, and what has to be restored before each call."""

    def __init__(self, training: ModuleType) -> None:
        self._training = training
        self.plain = training.train
        self.bound: inspect.BoundArguments
        self.first = 0
        self.consumed = 0
        self._operations = 0.0
        self._calls = 0
        self._functions: dict[str, Any] = {}

    def begin(self, bound: inspect.BoundArguments) -> None:
        """Take the arguments of `pretrain`'s call of `train`. Raises ConfigurationError for those that are refused."""
        arguments = self._training.get_args()
        refuse_arguments(arguments)
        self.bound = bound
        self.first, self.consumed = arguments.iteration, arguments.consumed_train_samples
        self._operations = arguments.num_floating_point_operations_so_far
        config = bound.arguments["config"]
        self._functions = {name: getattr(config, name, None) for name in _SYNC_FUNCTIONS}

    def train(  # noqa: PLR0917 - what Megatron-LM's takes
        self,
        forward_step_func: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        train_data_iterator: Any,
        valid_data_iterator: Any,
        *others: Any,
        iteration: int,
        consumed_samples: int,
        **options: Any,
    ) -> Any:
        """Call Megatron-LM's `train` at the job's iteration."""
        self._restore_globals(model, iteration, consumed_samples)
        self._calls += 1
        given = (forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator, valid_data_iterator)
        try:
            return self.plain(*given, *others, **options)
        except SystemExit as end:
            return _Exited(end.code)

    def paused(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function such that the step clock stands still in it: an evaluation or a checkpoint takes long."""

        @functools.wraps(plain)
        def call(*args: Any, **options: Any) -> Any:
            runtime = Runtime.current()
            if runtime is None or not self._calls:
                return plain(*args, **options)
            runtime.step_clock.doing(Activity.PAUSED)
            try:
                return plain(*args, **options)
            finally:
                runtime.step_clock.doing(Activity.COMPUTING)

        return call

    def _restore_globals(self, model: Any, iteration: int, consumed_samples: int) -> None:
        """Set what `train` reads at its beginning, and undo what an interrupted call has left."""
        training, arguments = self._training, self._training.get_args()
        arguments.iteration, arguments.consumed_train_samples = iteration, consumed_samples
        done = training.num_floating_point_operations(arguments, consumed_samples - self.consumed)
        arguments.num_floating_point_operations_so_far = self._operations + done
        config = self.bound.arguments["config"]
        for name, function in self._functions.items():
            setattr(config, name, function)
        for timer in training.get_timers()._timers.values():
            timer.reset()
        if training.should_disable_forward_pre_hook(arguments):
            for chunk in model:
                if not chunk.remove_forward_pre_hook_handles:  # `train` begins by taking them away
                    chunk.enable_forward_pre_hook()


def refuse_arguments(arguments: Any) -> None:
    """Raise ConfigurationError naming every argument of Megatron-LM that cannot be followed."""
    found = [f"{name}: {reason}" for name, reason in REFUSED_ARGUMENTS.items() if getattr(arguments, name, None)]
    if found:
        raise ConfigurationError(f"Megatron-LM runs with what midstep cannot recover. {'; '.join(found)}")


def _is_newcomer() -> bool:
    """Return whether this process joins a world that trains already: its collectives have no peers yet."""
    runtime = Runtime.current()
    return runtime is not None and not runtime.connected


def _without_loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Let a newcomer load no checkpoint: its state comes from the other ranks, which are further."""

    @functools.wraps(plain)
    def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
        if not _is_newcomer():
            return plain(*args, **options)
        arguments = sys.modules[plain.__module__].get_args()
        places = {name: getattr(arguments, name, None) for name in ("load", "pretrained_checkpoint")}
        for name in places:
            setattr(arguments, name, None)
        try:
            return plain(*args, **options)
        finally:
            for name, place in places.items():
                setattr(arguments, name, place)

    return setup_model_and_optimizer


def _with_flags(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Set a newcomer's flags from the arguments: it cannot receive them from rank 0."""

    @functools.wraps(plain)
    def build_train_valid_test_data_iterators(*args: Any, **options: Any) -> Any:
        iterators = plain(*args, **options)
        if _is_newcomer():
            arguments = sys.modules[plain.__module__].get_args()
            arguments.do_train = arguments.train_iters > 0
            evaluates = bool(getattr(arguments, "full_validation", False) or arguments.eval_iters)
            arguments.do_valid = arguments.do_test = evaluates
        return iterators

    return build_train_valid_test_data_iterators


def _replace(module: ModuleType, name: str, wrapped: Callable[[Any], Any]) -> None:
    setattr(module, name, wrapped(getattr(module, name)))
