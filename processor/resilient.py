"""`@midstep.resilient` and `midstep.init_process_group`: what a training script calls.

Under `midstep run` they hand over to the train thread's loop; started otherwise, a script runs as if they were not
there.
"""

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..protocol.errors import ConfigurationError
from .callbacks import Lifecycle
from .ledger import Ledger
from .moments import Moments
from .runtime import Runtime
from .session import Stage
from .standing import Standing
from .step_clock import StepClock
from .train_thread import TrainThread

if TYPE_CHECKING:
    from .lifecycle import Framework

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def init_process_group(**options: Any) -> None:
    """Make torch.distributed's default process group, one that survives the loss of a peer.

    Takes the place of `torch.distributed.init_process_group`. Under `midstep run` everything it needs comes from the
    agent and `options` are not used. Otherwise the call is handed on to torch, with gloo as the default backend, so
    that one script serves all: under torchrun as it is there, in plain Python as a world of one.
    """
    runtime = Runtime.current()
    if runtime is not None:
        runtime.init_process_group()
        return
    import torch.distributed as dist

    options.setdefault("backend", "gloo")
    if "RANK" not in os.environ and "init_method" not in options and "store" not in options:
        options.update(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    dist.init_process_group(**options)


def resilient(
    state: "Framework", *, lifecycle: Lifecycle | None = None
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make a train function resilient: after a fault it is called again, and repeats the interrupted step.

    `state` holds everything that training changes (`midstep.TrainState` for plain PyTorch). The function must take its
    steps from `state.steps(total)`, and must not keep progress of its own between calls. It returns when all ranks have
    finished. `lifecycle`: callbacks of your own in place of midstep's, one by one. Outside `midstep run` the function
    is called once, as it is, and no callback is.
    """

    def decorate(train: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(train)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            runtime = Runtime.current()
            if runtime is None:
                moments, standing = Moments(0, 0), Standing(clean=True)
                state.bind(Ledger(Alone(), state, moments, StepClock(None, moments, 0), standing=standing))
                return train(*args, **kwargs)
            if runtime.session.stage is not Stage.BOOTING:
                raise ConfigurationError("a process can call one resilient train function, and only once")
            return TrainThread(runtime, state, lifecycle).run(lambda: train(*args, **kwargs))

        return run

    return decorate


class Alone:
    """The surroundings of a ledger in a script that nobody started under midstep: nothing ever happens."""

    def interrupted(self) -> bool:
        """Nobody interrupts."""
        return False

    def step_done(self) -> None:
        """Nobody counts on it."""

    def update_done(self) -> None:
        """Nobody counts on it."""

    def begins(self, step: int) -> bool:
        """Nobody plans anything."""
        return True

    def keep_own(self, step: int, blob: bytes) -> bytes:
        """Nobody would read it."""
        return blob

    def swap_own(self, step: int, blob: bytes) -> None:
        """Nobody else would need it."""

    def meet(self, index: int) -> None:
        """Nobody else is there."""

    def hold_at_barrier(self) -> bool:
        """There is no barrier."""
        return False

    def committed(self, committed: int, median_step_s: float) -> None:
        """Nobody asks."""

    def barrier_passed(self) -> None:
        """There is no barrier."""
