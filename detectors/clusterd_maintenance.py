"""The dialogue with ClusterD about what it has done while a healthy job stands still. Pure.

An operator of the cluster asks ClusterD for another network port of some ranks, or for a stress test of devices.
ClusterD has the job pause (`stopTrain` with the action `pause_train`), then sends the ranks and what they are to do,
takes the results, and has the job train on (`changeStrategy` with `continue`). MindIO's controller and TaskD's workers
are usually at the other end. Here a pause at a step boundary is the first, and an action of the ranks the second.

A fault goes its own way meanwhile, and ends the pause: ClusterD hears that it cannot be held any longer (code 406), and
leads the fault as any other.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ..protocol.compat import StrEnum
from ..protocol.incidents import JobStatus
from . import clusterd_signals as d

PAUSE_S = 600.0  # as long as TaskD holds a job when ClusterD names no time
BOUNDARY_S = 60.0  # for the ranks to come to the step boundary: it is no part of what ClusterD allows
SWITCH_S = 600.0
SWITCH, TEST = "switch_nic", "stress_test"


class Operation(NamedTuple):
    """One operation of the stress test: its name for a rank, and how long TaskD's worker lets it take."""

    name: str
    within_s: float


OPERATIONS = {0: Operation("aic", 300.0), 1: Operation("hccs", 600.0)}
NOT_PERFORMED = ("1", "exec failed")  # in the words of TaskD's worker
TIMED_OUT = ("3", "exec timeout")


class RankResult(NamedTuple):
    """The end of an action in one rank. The text of a test is its code, a dash, and what the code means."""

    rank: int
    succeeded: bool
    text: str


class ActionProgress(msgspec.Struct, frozen=True):
    """How far the ranks are with an action: those that are through, and those that are not."""

    results: tuple[RankResult, ...]
    waiting: tuple[int, ...]


class _Stage(StrEnum):
    TRAINING = "training"
    PAUSING = "pausing"
    PAUSED = "paused"
    SWITCHING = "switching"
    TESTING = "testing"
    CONTINUING = "continuing"


_EXPECTS = frozenset({_Stage.PAUSING, _Stage.SWITCHING, _Stage.TESTING, _Stage.CONTINUING})
_HELD = frozenset({_Stage.PAUSED, _Stage.SWITCHING, _Stage.TESTING})


class Maintenance:
    """The job's side: where it is between a pause and its end. Any clock will do."""

    def __init__(self) -> None:
        self._stage = _Stage.TRAINING
        self._until_s = 0.0  # of a report that ClusterD waits for
        self._test = d.StressTest({})
        self._operations: list[int] = []  # of the test: the one that is performed, and those after it
        self._results: dict[int, dict[int, tuple[str, str]]] = {}

    @property
    def is_waiting(self) -> bool:
        """Say whether ClusterD waits for something that the job will show."""
        return self._stage in _EXPECTS

    # --- what ClusterD asks for ---------------------------------------------------------------------------------------

    def pause(self, signal: d.Signal, now: float) -> Iterator[d.Action]:
        """Have the job stand still."""
        held_s = (signal.timeout_s or PAUSE_S) + BOUNDARY_S
        self._stage, self._until_s = _Stage.PAUSING, now + min(held_s, d.REPORTED_S)
        yield d.PauseJob(held_s)

    def switch_nics(self, signal: d.SwitchNics) -> Iterator[d.Action]:
        """Have all ranks switch: each of them has to know which ones use another port."""
        if self._stage is _Stage.SWITCHING:
            return
        if self._stage is not _Stage.PAUSED:
            yield d.ReplySwitchNicResult(False)
            return
        self._stage = _Stage.SWITCHING
        arguments = {
            "ranks": ",".join(map(str, signal.ranks)),
            "use_backup": ",".join(str(int(each)) for each in signal.use_backup),
        }
        yield d.PerformInPause(SWITCH, arguments, None, SWITCH_S)

    def test(self, signal: d.StressTest) -> Iterator[d.Action]:
        """Have ranks test their devices, one operation after the other."""
        if self._stage is _Stage.TESTING:
            return
        self._test, self._results = signal, {}
        self._operations = sorted({each for every in signal.operations.values() for each in every})
        if self._stage is not _Stage.PAUSED:
            yield self._tested()
            return
        self._stage = _Stage.TESTING
        yield from self._next_operation()

    def train_on(self, now: float) -> Iterator[d.Action]:
        """End the pause."""
        self._stage, self._until_s = _Stage.CONTINUING, now + d.REPORTED_S
        yield d.TrainOn()

    def left(self) -> Iterator[d.Action]:
        """End a pause of which ClusterD will not speak again: it leads a fault now, or has forgotten it."""
        if self._stage in _HELD | {_Stage.PAUSING}:
            yield d.TrainOn()
        self._stage = _Stage.TRAINING

    # --- what the job shows -------------------------------------------------------------------------------------------

    def refused(self, action: d.PauseJob | d.PerformInPause, why: str) -> Iterator[d.Action]:
        """Say that the job does not do it."""
        if isinstance(action, d.PauseJob):
            self._stage = _Stage.TRAINING
            yield d.ReportStopComplete(d.FAILED, why, ())
        elif self._stage is _Stage.SWITCHING:
            self._stage = _Stage.PAUSED
            yield d.ReplySwitchNicResult(False)
        elif self._stage is _Stage.TESTING:
            self._stage = _Stage.PAUSED
            yield self._tested()

    def looked(self, status: JobStatus, now: float) -> Iterator[d.Action]:
        """Take in the job's status."""
        ended = None if status.exit_code is None else f"the job has ended: {status.reason}"
        if self._stage is _Stage.PAUSING:
            yield from self._is_pausing(status, ended, now)
        elif self._stage is _Stage.CONTINUING:
            yield from self._is_continuing(status, ended, now)
        elif self._stage in _HELD and not status.held:
            was_testing = self._stage is _Stage.TESTING
            self._stage = _Stage.TRAINING
            if ended is None:
                yield d.TrainOn()
            yield d.ReportRecoverStatus(
                "", d.UNRECOVERABLE, ended or f"it stands still no longer: it is {status.phase}"
            )
            if was_testing:  # of a switch ClusterD hears enough by the code; of a test it waits for the results as well
                yield self._tested()

    def progressed(self, progress: ActionProgress) -> Iterator[d.Action]:
        """Take in how far the ranks are with an action."""
        if progress.waiting:
            return
        if self._stage is _Stage.SWITCHING:
            self._stage = _Stage.PAUSED
            yield d.ReplySwitchNicResult(bool(progress.results) and all(each.succeeded for each in progress.results))
        elif self._stage is _Stage.TESTING:
            operation = self._operations.pop(0)
            for each in progress.results:
                self._results.setdefault(each.rank, {})[operation] = _code_of(each)
            if self._operations:
                yield from self._next_operation()
            else:
                self._stage = _Stage.PAUSED
                yield self._tested()

    def _is_pausing(self, status: JobStatus, ended: str | None, now: float) -> Iterator[d.Action]:
        if status.held:
            self._stage = _Stage.PAUSED
            yield d.ReportStopComplete(d.OK, "all ranks stand still", ())
        elif ended is not None or now >= self._until_s:
            self._stage = _Stage.TRAINING
            if ended is None:
                yield d.TrainOn()
            yield d.ReportStopComplete(d.FAILED, ended or f"not all ranks stand still: the job is {status.phase}", ())

    def _is_continuing(self, status: JobStatus, ended: str | None, now: float) -> Iterator[d.Action]:
        trains = not status.held and status.controls.pause is None and status.phase in d.TRAINING
        if ended is None and not trains and now < self._until_s:
            return
        self._stage = _Stage.TRAINING
        if ended is None and trains:
            yield d.ReportRecoverStatus(d.CONTINUE, d.OK, "all ranks train on")
        else:
            yield d.ReportRecoverStatus(d.CONTINUE, d.FAILED, ended or f"the job is {status.phase}")

    def _next_operation(self) -> Iterator[d.Action]:
        number = self._operations[0]
        ranks = tuple(sorted(rank for rank, each in self._test.operations.items() if number in each))
        operation = OPERATIONS.get(number)
        if operation is None:  # of a later ClusterD
            yield from self.progressed(ActionProgress(tuple(RankResult(rank, False, "") for rank in ranks), ()))
        else:
            yield d.PerformInPause(TEST, {"operation": operation.name}, ranks, operation.within_s)

    def _tested(self) -> d.ReplyStressTestResult:
        """Return the results so far. What was not performed has failed, which speaks against no device."""
        return d.ReplyStressTestResult(
            {
                rank: {each: self._results.get(rank, {}).get(each, NOT_PERFORMED) for each in operations}
                for rank, operations in self._test.operations.items()
            }
        )


def _code_of(result: RankResult) -> tuple[str, str]:
    code, dash, meaning = result.text.partition("-")
    return (code, meaning) if dash and code.isascii() and code.isdigit() else NOT_PERFORMED
