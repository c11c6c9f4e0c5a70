"""`@midstep.resilient` and `midstep.init_process_group`: what a training script calls.

Under `midstep run` they hand over to the loop of the train thread. Started otherwise, a script runs as it does without
them.
"""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsFloat, TypeVar

import msgspec

from ..communicators.libraries import HAS_TORCH
from ..protocol.errors import ConfigurationError
from .callbacks import Lifecycle
from .group_arguments import UNSET, GroupArguments
from .injection_points import InjectionPoints
from .ledger import Ledger, Surroundings
from .runtime import Runtime
from .session import SessionStage
from .step_clock import StepClock
from .step_order import StepState
from .train_thread import TrainThread

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from .framework import Framework

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def init_process_group(  # noqa: PLR0917 - torch's own signature
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = UNSET,
    rank: int = UNSET,
    store: "Store | None" = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: "torch.device | int | None" = None,
) -> None:
    """Initialize the default process group of torch.distributed as one that survives the loss of a peer.

    Without torch: connect the ranks of the job for collectives and repairs in host memory.

    Takes the place of `torch.distributed.init_process_group`, with the same arguments in the same order. Under
    `midstep run` none is needed, as the job knows all of them; what is passed is compared with the job. Otherwise the
    call is handed on to torch, so that one script serves all: under torchrun as it is there, in plain Python as a world
    of one.

    Args:
        backend: Under `midstep run` a name of the job's communicator: `gloo` on CPUs, `hccl` on NPUs. Otherwise
            handed on; `gloo` where neither it nor `device_id` is given.
        init_method: Under `midstep run` `env://`, or the `tcp://` URL of MASTER_ADDR and MASTER_PORT.
        timeout: How long a collective may take. Under `midstep run` it takes the place of the policy's
            `communicator.collective_s`, and must be longer than `stall.grace_s`.
        world_size: Under `midstep run` the value of WORLD_SIZE.
        rank: Under `midstep run` the value of RANK.
        store: None under `midstep run`: the ranks meet in the job's own store.
        group_name: Not used, as in torch.
        pg_options: None under `midstep run`: midstep makes the groups and could not apply them.
        device_id: Under `midstep run` the device of this rank: `cpu`, or the NPU with the number LOCAL_RANK.

    Raises:
        ConfigurationError: an argument contradicts the job (its text names each one, what was found, what was expected
            and what to do), or the device, as it is set up here, could not be recovered.
        LinkUpFailed: the ranks of a world that starts together could not be connected in time.
    """
    given = GroupArguments(backend, init_method, timeout, world_size, rank, store, pg_options, device_id)
    runtime = Runtime.current()
    if runtime is not None:
        runtime.init_process_group(given)
        return
    is_alone = "RANK" not in os.environ and init_method is None and store is None
    is_alone = is_alone and rank in {UNSET, 0} and world_size in {UNSET, 1}
    if not HAS_TORCH:
        if not is_alone:
            raise ConfigurationError(
                "torch is not installed, so there is no process group to make outside `midstep run`: start the script "
                "with `midstep run`, or alone, in plain Python"
            )
        return
    import torch.distributed as dist

    options = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
    if device_id is None:
        options.setdefault("backend", "gloo")
    if is_alone:
        options.update(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    dist.init_process_group(**options)


def device() -> "torch.device":
    """Return the device that this rank computes on, as torch names it.

    Under `midstep run` the one of the policy, after `midstep.init_process_group`. Otherwise the accelerator whose
    number is LOCAL_RANK, where torch finds one, or the CPU.

    Returns:
        A torch.device.
    """
    import torch

    runtime = Runtime.current()
    if runtime is not None:
        return runtime.device.torch_device
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name in ("cuda", "npu"):
        found = getattr(torch, name, None)
        if found is not None and found.is_available():
            return torch.device(name, local_rank % found.device_count())
    return torch.device("cpu")


def report(**values: SupportsFloat) -> None:
    """Report values of the present step, where the loop is the framework's own: `midstep.report(loss=loss)`.

    As `step.report` does, for scripts that have no `step`: with Megatron from the function that computes the loss. The
    mean counts of a value that is reported several times in a step, once for each micro-batch. Call it in the train
    thread, before the optimizer's step. Outside `midstep run`, and where no train function runs, it does nothing.

    Args:
        values: Numbers, or tensors of one element, by names of small letters, digits and `_`.

    Raises:
        NotUnderMidstep: See `Runtime.current`.
    """
    runtime = Runtime.current()
    if runtime is not None:
        runtime.report_values(values)


def resilient(
    state: "Framework", *, lifecycle: Lifecycle | None = None
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make a train function resilient: after a fault it is called again, and repeats the interrupted step.

    The function must take its steps from `state.steps(total)`, and must not keep progress of its own between calls. The
    decorated one returns when all ranks have finished. Outside `midstep run` the function is called once, as it is, and
    no callback is.

    Args:
        state: Everything that training changes: `midstep.TrainState` for plain PyTorch. Its tensors may be of any shape
            and dtype, on the CPU or on the device of the job. They are restored in place.
        lifecycle: Callbacks in place of midstep's, one by one.

    Returns:
        A decorator for the train function. The decorated function returns what the train function returns.

    Raises:
        ConfigurationError: When the function is called: the process has called a resilient function before, or the
            state does not suit the job.
        RecoveryError: When the function is called: the rank-local state does not fit the black box, or this process
            cannot take part in a recovery.
    """

    def decorate(train: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(train)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            runtime = Runtime.current()
            if runtime is None:
                none_armed, step_state = InjectionPoints(0, 0), StepState(clean=True)
                state.bind(
                    Ledger(Surroundings(), state, none_armed, StepClock(None, none_armed, 0), step_state=step_state)
                )
                return train(*args, **kwargs)
            if runtime.session.stage is not SessionStage.BOOTING:
                raise ConfigurationError("a process can call one resilient train function, and only once")
            return TrainThread(runtime, state, lifecycle).run(lambda: train(*args, **kwargs))

        return run

    return decorate
