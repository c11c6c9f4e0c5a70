"""MindIO's controller as others call it: a training script, and TaskD in a process that is no rank.

midstep's controller is a process of its own, so in a rank what starts and steers MindIO's does nothing. Where TaskD has
a process to itself, and that names the job, `tft_start_controller` starts `midstep clusterd` beside it: what TaskD
tells MindIO's controller is handed to the job's, and TaskD's callbacks get what the job does (docs/mindcluster.md).
"""

import contextlib
import itertools
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...detectors import clusterd_signals as d
from ...detectors.clusterd_lines import encode_line, read_report
from ...protocol import environment as names
from ...protocol.errors import ConfigurationError
from ...protocol.own_programs import own_program
from ...protocol.token import CONTROLLER_VARIABLE
from .values import RET_ERROR, RET_OK

ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
STRATEGIES = (*d.RecoverStrategy, d.CONTINUE)
STOP, PAUSE = "stop", "pause"
CLOSE_S = 10.0
_log = logging.getLogger("midstep")
_callbacks: dict[str, Callable[..., Any]] = {}


def job_named(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the words that name a job to `midstep clusterd`; None: this process names none, or it is a rank."""
    if names.AGENT_SOCKET in environment:
        return None
    if environment.get(CONTROLLER_VARIABLE):
        return ()  # the token says which
    directory = environment.get(names.JOB_DIRECTORY)
    return (directory,) if directory else None


class TaskdBridge:
    """`midstep clusterd` as a child of this process. It ends with this process, or with the job."""

    def __init__(self, words: tuple[str, ...], callbacks: Mapping[str, Callable[..., Any]]) -> None:
        """Start it. Raises OSError."""
        self._callbacks = callbacks
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        command = [*own_program("midstep.cli.main"), "clusterd", *words, "--stdio"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._thread = threading.Thread(target=self._listen, name="midstep-taskd", daemon=True)
        self._thread.start()

    def send(self, kind: d.SignalType, **fields: Any) -> int:
        """Hand on what TaskD says."""
        assert self._child.stdin is not None
        with self._lock:
            signal = d.Signal(f"taskd-{next(self._numbers)}", kind, **fields)
            try:
                self._child.stdin.write(encode_line(signal) + b"\n")
                self._child.stdin.flush()
            except (OSError, ValueError) as error:
                _log.warning("%s: `midstep clusterd` has ended, and hears nothing: %s", kind, error)
                return RET_ERROR
        return RET_OK

    def close(self) -> None:
        """End it, and leave the job alone. Idempotent."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # what it has not read is of no use any more
            self._child.stdin.close()
        try:
            self._child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
            self._child.stdout.close()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            try:
                action, arguments = called_with(read_report(line))
                self._callbacks[action](*arguments)
            except Exception:  # a callback of TaskD's; MindIO logs it, too
                _log.exception("a report of the job did not reach TaskD: %s", line[:200])


class _Steering:
    """The bridge of this process, if it steers a job."""

    bridge: TaskdBridge | None = None


def called_with(report: d.Report) -> tuple[str, tuple[Any, ...]]:
    """Return the callback that takes a report, and its arguments, as MindIO's controller calls it."""
    if isinstance(report, d.ReportProcessFault):
        return "report_fault_ranks", (_types(report.ranks), {})
    if isinstance(report, d.ReportStopComplete):
        return "report_stop_complete", (report.code, report.info, _types(report.ranks))
    if isinstance(report, d.ReportRecoverStrategy):
        return "report_strategies", (_types(report.ranks), [each.value for each in report.strategies])
    if isinstance(report, d.ReportRecoverStatus):
        return "report_result", (report.code, report.info, {}, report.strategy)
    raise ConfigurationError(f"{type(report).__name__} is for ClusterD, and TaskD has not asked for it")


def _types(ranks: tuple[d.FaultyRank, ...]) -> dict[int, int]:
    return {each.rank: int(each.type) for each in ranks}


def _ranks(fault_ranks: Mapping[int, int] | None) -> tuple[d.FaultyRank, ...]:
    return tuple(d.FaultyRank(int(rank), str(kind)) for rank, kind in (fault_ranks or {}).items())


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Do nothing: the job has its controller."""


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Start `midstep clusterd` for TaskD. In a rank, or where no job is named, do nothing: the job has its controller.

    The address is not used: the lines of the job are its own, and encrypted. Raises ConfigurationError.
    """
    words = job_named(os.environ)
    if words is None or _Steering.bridge is not None:
        return
    missing = [each for each in ACTIONS if each not in _callbacks]
    if missing:
        _log.warning("no callback is registered for %s, so TaskD steers nothing (docs/mindio.md)", ", ".join(missing))
        return
    try:
        _Steering.bridge = TaskdBridge(words, _callbacks)
    except OSError as error:
        raise ConfigurationError(f"`midstep clusterd` could not be started for TaskD: {error}.") from error


def tft_destroy_controller() -> None:
    """End `midstep clusterd`, if it was started here. The job's controller ends with the job."""
    bridge, _Steering.bridge = _Steering.bridge, None
    if bridge is not None:
        bridge.close()


def tft_query_high_availability_switch() -> bool:
    """Return True: a rank of `midstep run` is always under a controller."""
    return True


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Keep a callback of the cluster's agent; return 1 for an action that MindIO does not have."""
    if action not in ACTIONS or not callable(func):
        return RET_ERROR
    _callbacks[action] = func
    return RET_OK


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = STOP, timeout: int | None = None
) -> int:
    """Report faults of ranks; or have all stand still, for so many seconds at most."""
    if stop_type not in {STOP, PAUSE}:
        return RET_ERROR
    return _notify(
        "tft_notify_controller_stop_train",
        "midstep detect, or midstep inject",
        d.SignalType.STOP_TRAIN,
        ranks=_ranks(fault_ranks),
        actions=(d.PAUSE_TRAIN,) if stop_type == PAUSE else (),
        timeout_s=timeout or 0,
    )


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """Ask which strategies are left."""
    return _notify(
        "tft_notify_controller_on_global_rank",
        "midstep detect",
        d.SignalType.GLOBAL_FAULT,
        ranks=_ranks(fault_ranks),
    )


def tft_notify_controller_prepare_action(action: str, fault_ranks: dict[int, int] | None = None) -> int:
    """Return 1: a node is left by `midstep detect` and the policy's `sub_health`."""
    return _not_steered("tft_notify_controller_prepare_action", "midstep detect, with sub_health in the policy")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Say what is to be done; return 1 for a strategy that no job of midstep offers."""
    if strategy not in STRATEGIES:
        return _not_steered(f"the strategy {strategy}", "the ladder of the policy")
    name = "tft_notify_controller_change_strategy"
    return _notify(name, "the ladder of the policy", d.SignalType.CHANGE_STRATEGY, strategy=strategy, extra=params)


def tft_notify_controller_dump() -> int:
    """End the job with a checkpoint."""
    return _notify("tft_notify_controller_dump", "midstep stop", d.SignalType.SAVE_AND_EXIT)


def _notify(name: str, instead: str, kind: d.SignalType, **fields: Any) -> int:
    return _not_steered(name, instead) if _Steering.bridge is None else _Steering.bridge.send(kind, **fields)


def _not_steered(name: str, instead: str) -> int:
    _log.warning("%s has no effect under midstep here: use %s (docs/mindio.md)", name, instead)
    return RET_ERROR
