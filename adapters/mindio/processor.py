"""`mindio_ttp.framework_ttp`: what a training script tells midstep, and asks it, in the thread that trains."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...processor.runtime import Runtime
from ...protocol.errors import ConfigurationError, NotUnderMidstep
from .conventions import is_mindspore, pauses_after_update
from .driver import FORCE_STOP, HandlerDriver
from .handlers import HANDLERS
from .replicas import replicas_of
from .update_library import offer
from .values import NextAction, RepairStrategy, ReportState

STEP_FINISH = "STEP FINISH"
FRAMEWORKS = ("MindSpeed", "MindSpeed-LLM")

_log = logging.getLogger("midstep")


class _Process:
    """What is set in this process."""

    driver: HandlerDriver | None = None
    device: int | None = None
    framework: str | None = None
    joining = False  # MindSpore's newcomer has said that it is up, and waits for its groups


def driver() -> HandlerDriver:
    """Return the driver of this process. Raises ConfigurationError before `tft_start_processor`."""
    if _Process.driver is None:
        raise ConfigurationError("tft_init_processor and tft_start_processor have to be called first")
    return _Process.driver


# --- start and end ----------------------------------------------------------------------------------------------------


def tft_init_processor(  # noqa: PLR0917 - MindIO's own signature
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Take part in the job. Which faults are recovered, and how, says the policy, and none of the flags.

    Raises ConfigurationError if rank or world_size are not the job's, NotUnderMidstep outside `midstep run`.
    """
    runtime = Runtime.current()
    if runtime is None:
        raise NotUnderMidstep("this mindio_ttp is midstep's: start the script with `midstep run --mindio`")
    if (rank, world_size) != (runtime.rank, runtime.world_size):
        raise ConfigurationError(
            f"tft_init_processor: this process is rank {runtime.rank} of {runtime.world_size} in its job, and was "
            f"given rank {rank} of {world_size}. Take RANK and WORLD_SIZE from the environment."
        )
    if enable_local_copy:
        _log.warning("enable_local_copy: midstep keeps no copy of the optimizer in host memory; it has no effect")
    npu = getattr(sys.modules.get("torch_npu"), "npu", None)
    _Process.device = None if npu is None else npu.current_device()
    _Process.driver = HandlerDriver(runtime, HANDLERS, _Process.device)
    if is_mindspore():
        offer(_Process.driver.update_begins)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Connect to the other hosts. The addresses are midstep's own; those that are given are not used."""
    driver().connect()


def tft_destroy_processor() -> None:
    """Say that training is over, and wait until it is on all ranks.

    Raises RuntimeError with the text FORCE STOP when another rank has failed meanwhile: the step is repeated.
    """
    if _Process.driver is not None and not _Process.driver.finish():
        raise RuntimeError(FORCE_STOP)


def tft_is_reboot_node() -> bool:
    """Return whether this process takes the place of one that was lost, while the others live."""
    return _Process.driver is not None and _Process.driver.is_replacement


def tft_get_reboot_type() -> str:
    """Return `arf`, or `hot switch` for a process that was started ahead of a planned change."""
    return "hot switch" if driver().is_early else "arf"


def get_device() -> int | None:
    """Return the number of this process's NPU."""
    return _Process.device


def set_mindio_export_version(framework_type: str) -> None:
    """Note which framework calls. Raises ConfigurationError for one that MindIO does not know."""
    if framework_type not in FRAMEWORKS:
        raise ConfigurationError(f"set_mindio_export_version: {framework_type!r}; known: {', '.join(FRAMEWORKS)}")
    _Process.framework = framework_type
    os.environ["TTP_STOP_CLEAN_BEFORE_DUMP"] = "1"


def get_mindio_export_version() -> str | None:
    """Return what `set_mindio_export_version` has noted."""
    return _Process.framework


# --- what is trained --------------------------------------------------------------------------------------------------


def tft_set_optimizer_replica(rank: int, replica_info: Sequence[Mapping[str, Any]]) -> None:
    """Say which ranks hold the same optimizer state. Raises ConfigurationError."""
    driver().set_replicas(replicas_of(replica_info))


def tft_set_dp_group_info(rank: int, dp_rank_list: Sequence[int]) -> None:
    """Check the ranks of the data parallel group; midstep needs no more than `tft_set_optimizer_replica`."""
    if not isinstance(dp_rank_list, list) or not all(isinstance(each, int) for each in dp_rank_list):
        raise ConfigurationError(f"tft_set_dp_group_info: rank {rank}: not a list of ranks: {dp_rank_list!r}")


def tft_set_step_args(args: Any) -> None:
    """Set what handlers get as `args`, and begin: for MindSpore, which has no `tft_exception_handler`."""
    if args is None or _Process.framework in FRAMEWORKS:
        return
    HANDLERS.arguments = args
    driver().begin()


# --- each step --------------------------------------------------------------------------------------------------------


def tft_start_copy_os() -> None:
    """Do nothing: there is no copy in host memory."""


def tft_start_updating_os(backup_step: int = -1) -> None:
    """Pass the commit barrier: all collectives of the step are done, and the update may begin.

    Raises RuntimeError with the text FORCE STOP when the step has to be repeated.
    """
    if not driver().update_begins():
        raise RuntimeError(FORCE_STOP)


def tft_end_updating_os(step: int) -> None:
    """Say that the update is applied: `step` updates are, by the script's count."""
    if is_mindspore() and pauses_after_update():
        driver().note(step)  # its stop handler refuses before a flag is reset, which comes after this
    else:
        driver().update_ended(step)


def tft_pause_train(cur_step: int) -> None:
    """Stop between two steps if that is planned. Raises RuntimeError with the text STEP FINISH then."""
    if is_mindspore():
        driver().update_ended(cur_step)
    elif driver().stops_at_boundary:
        raise RuntimeError(STEP_FINISH)


def tft_reset_limit_step() -> None:
    """Do nothing: an update that has to wait is answered by midstep itself."""


def tft_report_load_ckpt_step(step: int) -> None:
    """Say which step was loaded from a checkpoint: training continues from there."""
    driver().loaded(step)


# --- faults -----------------------------------------------------------------------------------------------------------


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """Say why the training function was left, by a value of `ReportState`."""
    state = ReportState(getattr(error_type, "value", error_type))
    if state is ReportState.RS_INIT_FINISH:
        _Process.joining = True
        return
    driver().report(state, error_code)


def tft_wait_next_action() -> int:
    """Wait, and return 0 to train again or 1 to end. MindSpore's wait is the whole recovery, others' up to clean."""
    if _Process.joining:
        _Process.joining = False
        return NextAction.RETRY.value
    goes_on = driver().await_go() if is_mindspore() else driver().await_clean()
    return NextAction.RETRY.value if goes_on else NextAction.EXIT.value


def tft_wait_repair_action() -> int:
    """Wait until all is repaired and rolled back; return 0 to train again, 1 to end."""
    return NextAction.RETRY.value if driver().await_go() else NextAction.EXIT.value


def tft_get_repair_step() -> int:
    """Return the step with which training continues, by the script's count."""
    return driver().recovery.step


def tft_get_repair_type() -> str:
    """Return what is being done: retry, recover, dump, or unknow before the first fault."""
    return RepairStrategy(driver().recovery.strategy).value
