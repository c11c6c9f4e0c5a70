"""Decide what an exception in the train thread means for this process, and report it."""

import logging
import traceback
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..protocol.errors import CallbackFailed
from ..protocol.rank_logs import show_once
from ..protocol.types import FaultKind
from .exception_patterns import patterns_here
from .exceptions import Finding, Reaction, chain_of, classify, fault_in_recovery, reaction

if TYPE_CHECKING:
    from .runtime import Runtime

HISTORY_UPDATES = 10_000

_log = logging.getLogger("midstep")


class ExceptionPolicy:
    """Classifies exceptions, and reports the fault behind each. Used by the train thread."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._patterns = (*runtime.settings.exceptions, *patterns_here())  # the job's own first
        self._updates: deque[tuple[int, int]] = deque(maxlen=HISTORY_UPDATES)  # step, and when by the device's clock

    def update_begins(self, step: int) -> None:
        """Remember when the update of a step begins, if the device time-stamps its errors."""
        now_us = self._runtime.device.now_us()
        if now_us is not None:
            self._updates.append((step, now_us))

    def in_training(self, error: Exception) -> Reaction:
        """Return what to do about an exception of the train function; report it unless another fault caused it."""
        runtime = self._runtime
        retry_unknown = runtime.settings.retry_unknown_exceptions
        finding, spread = self._with_window(classify(chain_of(error), self._patterns, retry_unknown=retry_unknown))
        if finding.locate:
            runtime.device.memory_error_raised()
        collateral = runtime.interrupted() or runtime.communicator.failed is not None
        what_now = reaction(finding, collateral=collateral)
        if what_now is Reaction.WAIT:
            runtime.debug_log.note("an exception that follows from being interrupted; it is not reported", error)
            return what_now
        detail = f"{finding.text} ({finding.meaning})" if finding.known else "".join(traceback.format_exception(error))
        if what_now is Reaction.REPORT:
            runtime.debug_log.note(f"reported, and this process stays alive: {finding.text} ({finding.meaning})", error)
        if what_now is Reaction.LEAVE or not finding.known:
            show_once(error)  # before it is reported: a process that is to be replaced may be killed at once
        kind = finding.kind or FaultKind.COMMUNICATION  # stopped, and not by midstep
        runtime.report_fault(kind, detail, finding.level, mendable=finding.mendable, trusted_step=spread)
        return what_now

    def in_recovery(self, error: Exception) -> None:
        """Report why rebuild, repair or rollback failed; raise `error` again if this process has to end."""
        kind = fault_in_recovery(error)
        if kind is None:
            if self.in_training(error) is Reaction.LEAVE:
                self._runtime.flush()
                raise error
            return
        if isinstance(error, CallbackFailed):
            _log.error("%s", error, exc_info=error)
        if not self._runtime.interrupted():
            self._runtime.report_fault(kind, str(error))

    def _with_window(self, finding: Finding) -> tuple[Finding, int | None]:
        """Decide whether an error that was noticed late has spread, and up to which step nothing has.

        What was read between the error and its discovery was wrong. If an update began after it, its gradients may have
        been made of that, on all ranks. If the error is younger than the last one, only this rank's memory is wrong.
        """
        if finding.kind is not FaultKind.MEMORY_MULTI_BIT:
            return finding, None
        spread = spread_since(self._updates, finding.time_us)
        if spread is None:
            return finding, None
        when = "at an unknown time" if finding.time_us is None else f"before the update of step {spread} began"
        meaning = f"{finding.meaning}; it came {when}, so all ranks may have used it"
        return msgspec.structs.replace(finding, mendable=False, meaning=meaning), spread


def spread_since(updates: Sequence[tuple[int, int]], time_us: int | None) -> int | None:
    """Return the first step whose update may be made of what an error at `time_us` spoilt; None if there is none.

    `updates` are the last ones: step, and when its update began. An error of unknown time is taken for older than the
    last update, one that is older than all of them for older than anything.
    """
    if not updates:
        return None
    if time_us is None:
        return updates[-1][0]
    if time_us < updates[0][1]:
        return 0 if len(updates) == HISTORY_UPDATES else updates[0][0]
    return next((step for step, began_us in updates if began_us >= time_us), None)
