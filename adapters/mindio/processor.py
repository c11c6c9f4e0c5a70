"""The functions of mindio_ttp for the thread that trains.

`tft_exception_handler` has the training function called again after a fault, by MindIO's patterns of exceptions.
"""

import functools
import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ...devices.npu_environment import doubts, require_recoverable
from ...processor.runtime import Runtime
from ...protocol.errors import ConfigurationError, NotUnderMidstep
from .driver import FORCE_STOP, HandlerDriver
from .handlers import HANDLERS, HandlerKind
from .package import offer
from .state import replicas_of
from .values import (
    NextAction,
    RepairStrategy,
    ReportState,
    get_l2_hbm_error_time,
    is_mindspore,
    pauses_after_update,
    tft_can_do_uce_repair,
)

STEP_FINISH = "STEP FINISH"
KEEPS_NAMES = ("use_ascend_mc2", "use_ascend_coc")
FRAMEWORKS = ("MindSpeed", "MindSpeed-LLM")
_log = logging.getLogger("midstep")
Result = TypeVar("Result")
OTHER = "OTHER"
_CAN_REPAIR, _CANNOT_REPAIR = "HBM MULTI BIT ECC can repair", "HBM MULTI BIT ECC can't repair"
_CODE = re.compile(r"\bdevice error type\s*([0-9a-f]+)\b", re.IGNORECASE)
_CHOSEN = re.compile(r"\bload ckpt step=(\d{1,15})\b")  # as MindSpeed-LLM's handler of PRECISION ERROR reads it
_states: dict[str, str] = {
    "FORCE STOP": "RS_NORMAL",
    "UCE ERROR": "RS_UCE",
    _CAN_REPAIR: "RS_UCE",
    _CANNOT_REPAIR: "RS_UCE_CORRUPTED",
    "ARF FINISH": "RS_PREREPAIR_FINISH",
    "STEP FINISH": "RS_STEP_FINISH",
    "HCCL OP RETRY FAILED": "RS_HCCL_FAILED",
    "SUSPECT REMOTE ERROR": "RS_HCCL_FAILED",
    "UB LINK ERROR": "RS_HCCL_FAILED",
    "HCCS LINK ERROR": "RS_HCCL_FAILED",
    OTHER: "RS_UNKNOWN",
}
_WITHOUT_CLEAN = frozenset({"ARF FINISH", "STEP FINISH"})


class _Process:
    """The settings of this process."""

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

    Raises ConfigurationError if rank or world_size are not the job's, or the script's NPU cannot be recovered in this
    environment; NotUnderMidstep outside `midstep run`.
    """
    runtime = Runtime.current()
    if runtime is None:
        raise NotUnderMidstep("this mindio_ttp is midstep's: start the script with `midstep run --mindio`")
    runtime.await_rank()
    if (rank, world_size) != (runtime.rank, runtime.world_size):
        raise ConfigurationError(
            f"tft_init_processor: this process is rank {runtime.rank} of {runtime.world_size} in its job, and was "
            f"given rank {rank} of {world_size}. Take RANK and WORLD_SIZE from the environment."
        )
    if enable_local_copy:
        _log.warning("enable_local_copy: midstep keeps no copy of the optimizer in host memory; it has no effect")
    npu = getattr(sys.modules.get("torch_npu"), "npu", None)
    if npu is not None:
        require_recoverable(os.environ, runtime.settings.link_up_s, npu.get_allocator_backend())
        _warn_of_settings(runtime.settings.link_up_s)
        _warn_of_kept_names()
    _Process.device = None if npu is None else npu.current_device()
    _Process.driver = HandlerDriver(runtime, HANDLERS, _Process.device)
    _Process.driver.recovery.choose = _choose
    if is_mindspore():
        offer(_Process.driver.update_begins)


def _warn_of_settings(link_up_s: float) -> None:
    """Log, on the first rank of each node, the settings that make recoveries slow or fragile."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        for line in doubts(os.environ, link_up_s):
            _log.warning("%s.", line)


def _warn_of_kept_names() -> None:
    """Log which options of MindSpeed keep names of communicators, which are others after a process was replaced."""
    given = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    for name in filter(lambda each: getattr(given, each, False), KEEPS_NAMES):
        _log.warning(
            "--%s: its operators may look for HCCL's communicators by names of before a recovery. This has never run; "
            "leave the option out where a recovery has to be sure (docs/mindspeed-llm.md)",
            name.replace("_", "-"),
        )


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


def _of_two(text: str) -> str:
    found = get_l2_hbm_error_time(text)
    return _CAN_REPAIR if found is not None and tft_can_do_uce_repair(found) else _CANNOT_REPAIR


# A pattern, and what its text becomes; then what that is to `tft_report_error`. In the order in which they are tried.
_readings: dict[str, Callable[[str], str]] = {"HBM MULTI BIT ECC": _of_two}
for _pattern in _states:
    if _pattern not in {OTHER, _CAN_REPAIR, _CANNOT_REPAIR}:
        _readings[_pattern] = lambda text, found=_pattern: found  # type: ignore[misc]


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    """Add a pattern: `fault_handle(text)` names it, `fault_type` is the name of a `ReportState`."""
    _states[fault_pattern] = fault_type
    _readings[fault_pattern] = fault_handle


def _choose(step: int) -> None:
    """Have the script read of a checkpoint to go back to, as if this rank had found its numbers wrong, too."""
    for pattern, state in _states.items():
        if state == ReportState.RS_RETRY.name:
            _readings[pattern](f"{pattern}, load ckpt step={step}")


def tft_exception_handler(func: Callable[..., Result]) -> Callable[..., Result]:
    """Call a training function again after each fault that this process survives.

    Its arguments are the `args` of the handlers. Raises what it raised when this process is to be replaced.
    """
    if not callable(func):
        raise TypeError("tft_exception_handler takes a function")

    @functools.wraps(func)
    def train(*args: Any, **kwargs: Any) -> Result:
        given: Any = args if get_mindio_export_version() in FRAMEWORKS else list(args)
        HANDLERS.arguments = given
        processor = driver()
        if not processor.is_replacement:
            processor.begin()
        while True:
            try:
                result = func(*given, **kwargs)
            except Exception as error:
                _report_and_wait(error)
            else:
                if processor.finish():
                    return result
            _free_memory()

    return train


def reading_of(error: BaseException) -> tuple[str, ReportState]:
    """Return which pattern fits an exception, and what it is to be reported as."""
    text = str(error)
    if isinstance(error, RuntimeError):
        for pattern, read in _readings.items():
            if pattern in text:
                name = read(text)
                return name, ReportState[_states[name]]
    return OTHER, ReportState.RS_UNKNOWN


def _report_and_wait(error: Exception) -> None:
    """Report, and return when training continues. Raises `error` when it does not."""
    name, state = reading_of(error)
    processor = driver()
    code, chosen = _CODE.search(str(error)), _CHOSEN.search(str(error))
    processor.report(
        state,
        code.group(1) if code else "",
        error if name == OTHER else None,
        back_to=int(chosen.group(1)) if chosen else None,
    )
    if name not in _WITHOUT_CLEAN and not processor.await_clean():
        _leave(error)
    _free_memory()
    if tft_wait_repair_action() != NextAction.RETRY.value:
        _leave(error)


def _leave(error: Exception) -> None:
    HANDLERS.call(HandlerKind.EXIT)
    raise error


def _free_memory() -> None:
    gc.collect()
    library = sys.modules.get("torch_npu")
    if library is not None and hasattr(library.npu, "empty_cache"):
        library.npu.empty_cache()
