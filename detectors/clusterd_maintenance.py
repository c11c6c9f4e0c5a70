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

from ..protocol import controls as c
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


class _Stage(StrEnum):
    TRAINING = "training"
    PAUSING = "pausing"
    PAUSED = "paused"
    SWITCHING = "switching"
    TESTING = "testing"
    CONTINUING = "continuing"
    LEAVING = "leaving"  # ClusterD waits for nothing, and the pause stands until the ranks' action is over


_EXPECTS = frozenset({_Stage.PAUSING, _Stage.SWITCHING, _Stage.TESTING, _Stage.CONTINUING, _Stage.LEAVING})
_HELD = frozenset({_Stage.PAUSED, _Stage.SWITCHING, _Stage.TESTING})


class Maintenance:
    """The job's side: where it is between a pause and its end. Any clock will do."""

    def __init__(self) -> None:
        self._stage = _Stage.TRAINING
        self._until_s = 0.0  # of a report that ClusterD waits for
        self._test = d.StressTest({})
        self._operations: list[int] = []  # of the test: the one that is performed, and those after it
        self._results: dict[int, dict[int, tuple[str, str]]] = {}
        self._asked: c.PerformAction | None = None  # of the ranks, after so many controls
        self._counted = 0

    @property
    def is_waiting(self) -> bool:
        """Say whether ClusterD waits for something that the job will show."""
        return self._stage in _EXPECTS

    # --- what ClusterD asks for ---------------------------------------------------------------------------------------

    def pause(self, signal: d.Signal, now: float) -> Iterator[d.Action]:
        """Have the job stand still."""
        held_s = (signal.timeout_s or PAUSE_S) + BOUNDARY_S
        self._stage, self._until_s = _Stage.PAUSING, now + min(held_s, d.REPORTED_S)
        yield d.Steer(c.PauseTraining(held_s))

    def switch_nics(self, signal: d.SwitchNics, status: JobStatus) -> Iterator[d.Action]:
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
        yield self._perform(c.PerformAction(SWITCH, arguments, None, SWITCH_S), status)

    def test(self, signal: d.StressTest, status: JobStatus) -> Iterator[d.Action]:
        """Have ranks test their devices, one operation after the other."""
        if self._stage is _Stage.TESTING:
            return
        self._test, self._results = signal, {}
        asked = {each for every in signal.operations.values() for each in every}
        self._operations = sorted(asked & OPERATIONS.keys())  # others are of a later ClusterD
        if self._stage is not _Stage.PAUSED:
            yield self._tested()
            return
        yield from self._next_operation(status)

    def train_on(self, now: float) -> Iterator[d.Action]:
        """End the pause."""
        self._stage, self._until_s = _Stage.CONTINUING, now + d.REPORTED_S
        yield d.Steer(c.EndPause())

    def leave(self) -> None:
        """End at the next look a pause that ClusterD will not end: it leads a fault now, or has forgotten it."""
        if self._stage is not _Stage.TRAINING:
            self._stage = _Stage.LEAVING

    # --- what the job shows -------------------------------------------------------------------------------------------

    def refused(self, control: c.Control, why: str) -> Iterator[d.Action]:
        """Say that the job does not do it."""
        if isinstance(control, c.PauseTraining):
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
            yield from self._is_broken(status, ended)
        elif self._stage in {_Stage.SWITCHING, _Stage.TESTING}:
            yield from self._is_performing(status)
        if self._stage is _Stage.LEAVING:
            yield from self._is_leaving(status)

    def _is_pausing(self, status: JobStatus, ended: str | None, now: float) -> Iterator[d.Action]:
        if status.held:
            self._stage = _Stage.PAUSED
            yield d.ReportStopComplete(d.OK, "all ranks stand still", ())
        elif ended is not None or now >= self._until_s:
            self._stage = _Stage.LEAVING
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

    def _is_broken(self, status: JobStatus, ended: str | None) -> Iterator[d.Action]:
        was_testing = self._stage is _Stage.TESTING
        self._stage = _Stage.LEAVING
        said = ended or f"the ranks stand still no longer: the job is {status.phase}"
        yield d.ReportRecoverStatus("", d.UNRECOVERABLE, said)
        if was_testing:  # of a switch ClusterD hears enough by the code; of a test it waits for the results as well
            yield self._tested()

    def _is_leaving(self, status: JobStatus) -> Iterator[d.Action]:
        action = status.controls.action
        if status.controls.pause is None or status.exit_code is not None:
            self._stage = _Stage.TRAINING
        elif action is None or not action.waiting:
            self._stage = _Stage.TRAINING
            yield d.Steer(c.EndPause())

    def _is_performing(self, status: JobStatus) -> Iterator[d.Action]:
        action = status.controls.action
        if action is None or action.number <= self._counted or action.control != self._asked or action.waiting:
            return
        if self._stage is _Stage.SWITCHING:
            self._stage = _Stage.PAUSED
            yield d.ReplySwitchNicResult(all(each.succeeded for each in action.results))
            return
        operation = self._operations.pop(0)
        without = TIMED_OUT if status.at_s >= action.until_s else NOT_PERFORMED
        for each in action.results:
            self._results.setdefault(each.rank, {})[operation] = _code_in(each.text) or without
        yield from self._next_operation(status)

    def _next_operation(self, status: JobStatus) -> Iterator[d.Action]:
        if not self._operations:
            self._stage = _Stage.PAUSED
            yield self._tested()
            return
        self._stage = _Stage.TESTING
        number = self._operations[0]
        ranks = tuple(sorted(rank for rank, each in self._test.operations.items() if number in each))
        operation = OPERATIONS[number]
        yield self._perform(c.PerformAction(TEST, {"operation": operation.name}, ranks, operation.within_s), status)

    def _perform(self, control: c.PerformAction, status: JobStatus) -> d.Steer:
        self._asked, self._counted = control, status.controls.counted
        return d.Steer(control)

    def _tested(self) -> d.ReplyStressTestResult:
        """Return the results so far. What was not performed has failed, which speaks against no device."""
        return d.ReplyStressTestResult(
            {
                rank: {each: self._results.get(rank, {}).get(each, NOT_PERFORMED) for each in operations}
                for rank, operations in self._test.operations.items()
            }
        )


def _code_in(text: str) -> tuple[str, str] | None:
    """Return the code of a test, and what it means; None: the rank has not come so far."""
    code, dash, meaning = text.partition("-")
    return (code, meaning) if dash and code.isascii() and code.isdigit() else None
