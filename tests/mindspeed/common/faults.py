"""Faults of MindSpeed-LLM's own program, at moments of its step: each happens once in a job.

MIDSTEP_TEST_FAULTS is a JSON list of `[rank, iteration, moment, how]`; `iteration` is the number of updates before it.
MIDSTEP_TEST_RECORDS is the folder in which it is noted that one has happened. To `wait` is to do so while there is a
file `gate` in it.
"""

import functools
import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ON_CANN = "FAKE_CANN_HOME" in os.environ  # torch-npu's own device: its library has the faults, and torch-npu raises
RANK = int(os.environ.get("RANK", "0"))
COLLECTIVE_S = 0.2  # in which the others come to it
GATE_S = 0.02
_models: list[torch.nn.Module] = []


def begin_with_groups() -> None:
    """Look for the faults of this rank when the script makes its groups."""
    make = dist.init_process_group

    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        watch()

    places: Any = (dist, dist.distributed_c10d)
    for place in places:
        place.init_process_group = init_process_group


def watch() -> None:
    """Look for the faults of this rank from now on: all that the program imports is imported."""
    if not json.loads(os.environ.get("MIDSTEP_TEST_FAULTS", "[]")):
        return
    import mindio_ttp.framework_ttp as ttp
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.pipeline_parallel import schedules
    from mindspeed_llm.training import training

    _wrap(training, "train_step", before="before")
    _wrap(schedules, "forward_step", before="forward", look=_note_model)
    _wrap(schedules, "backward_step", before="backward")
    _wrap(param_and_grad_buffer._ParamAndGradBucketGroup, "start_grad_sync", before="collective")
    for name in ("core.high_availability.tft_replica_optimizer", "core.high_availability.tft_replica_chainedoptimizer"):
        module = importlib.import_module(f"mindspeed_llm.{name}")
        for function, moments in (
            ("tft_start_updating_os", ("barrier", "update")),
            ("tft_end_updating_os", ("", "gather")),
        ):
            if getattr(module, function, None) is getattr(ttp, function):
                _wrap(module, function, before=moments[0], after=moments[1])
    _wrap(training, "save_checkpoint_and_time", before="save")


def happen(moment: str) -> None:
    """Do what is due at this moment, if anything is."""
    from megatron.training import get_args

    if not moment:
        return
    iteration = getattr(get_args(), "curr_iteration", None)
    for rank, when, where, how in json.loads(os.environ["MIDSTEP_TEST_FAULTS"]):
        mark = Path(os.environ["MIDSTEP_TEST_RECORDS"]) / f"fault.{RANK}.{when}.{where}"
        if (rank, when, where) == (RANK, iteration, moment) and not mark.exists():
            mark.touch()
            _do(how, moment)


def _do(how: str, moment: str) -> None:
    if moment == "collective":
        time.sleep(COLLECTIVE_S)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while how == "wait" and (Path(os.environ["MIDSTEP_TEST_RECORDS"]) / "gate").exists():
        time.sleep(GATE_S)
    if how == "wait":
        return
    if how not in {"memory", "link"}:
        raise RuntimeError(how)
    (_fail_on_cann if ON_CANN else _fail)(how)


def _fail(how: str) -> None:
    from midstep.devices.fake_chip import CHIP

    if how == "memory":
        CHIP.corrupt(next(_models[-1].parameters()))
    raise RuntimeError("UCE ERROR" if how == "memory" else "HCCL OP RETRY FAILED")


def _fail_on_cann(how: str) -> None:
    from tests.cann.faults import inject

    from midstep.protocol.faults import FaultAction

    inject(FaultAction.MEMORY_PERSISTENT if how == "memory" else FaultAction.LINK_DOWN)


def _note_model(args: tuple[Any, ...]) -> None:
    _models[:] = [args[2]]


def _wrap(
    place: Any,
    name: str,
    *,
    before: str = "",
    after: str = "",
    look: Callable[[tuple[Any, ...]], None] = lambda _: None,
) -> None:
    original = getattr(place, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        look(args)
        happen(before)
        result = original(*args, **kwargs)
        happen(after)
        return result

    setattr(place, name, watched)
