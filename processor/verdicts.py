"""What an exception in the train thread means for this process, and the report of it."""

import logging
import traceback
from typing import TYPE_CHECKING

import msgspec

from ..protocol.errors import CheckpointError, CommunicatorError, LinkUpFailed, RecoveryError
from ..protocol.types import FaultKind
from .exception_patterns import patterns_here
from .exceptions import Finding, Reaction, chain_of, classify, reaction

if TYPE_CHECKING:
    from .runtime import Runtime

_log = logging.getLogger("midstep")


class Verdicts:
    """Judges exceptions, in the train thread."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._patterns = patterns_here()
        self.update_began_us: int | None = None  # the last update, by the device's clock

    def in_training(self, error: Exception) -> Reaction:
        """Say what an exception of the train function means, and report it if it is news."""
        runtime = self._runtime
        finding = self._with_window(classify(chain_of(error), self._patterns))
        collateral = runtime.interrupted() or runtime.communicator.failed is not None
        what_now = reaction(finding, collateral=collateral)
        if what_now is Reaction.WAIT:
            if not finding.known:
                _log.warning("taken for a consequence of being interrupted: %s: %s", type(error).__name__, finding.text)
            return what_now
        detail = f"{finding.text} ({finding.meaning})" if finding.known else traceback.format_exc()
        if what_now is Reaction.REPORT:
            _log.error("%s", detail, exc_info=True)
        kind = finding.kind or FaultKind.COMMUNICATION  # stopped, and not by midstep: somebody else's doing
        runtime.report_fault(kind, detail, finding.level, mendable=finding.mendable)
        return what_now

    def on_the_way_back(self, error: Exception) -> None:
        """Report why rebuild, repair or rollback failed; raise it again if this process cannot go on."""
        if isinstance(error, LinkUpFailed):
            kind = FaultKind.LINK_UP
        elif isinstance(error, RecoveryError | CheckpointError):
            kind = FaultKind.CORRUPTION
        elif isinstance(error, CommunicatorError):
            kind = FaultKind.COMMUNICATION
        else:
            if self.in_training(error) is Reaction.LEAVE:
                self._runtime.flush()
                raise error
            return
        if not self._runtime.interrupted():
            self._runtime.report_fault(kind, str(error))

    def _with_window(self, finding: Finding) -> Finding:
        """Decide whether an error that was noticed late has spread.

        What was read between the error and its discovery was wrong. If the last update began after it, its gradients
        may have been made of that, on all ranks. If the error is younger, only this rank's memory is wrong.
        """
        if finding.kind is not FaultKind.MEMORY_MULTI_BIT:
            return finding
        began_us = self.update_began_us
        if finding.time_us is not None and (began_us is None or finding.time_us > began_us):
            return finding
        when = "at an unknown time" if finding.time_us is None else "before the last update began"
        meaning = f"{finding.meaning}; it came {when}, so the update may have used it on all ranks"
        return msgspec.structs.replace(finding, mendable=False, meaning=meaning)
