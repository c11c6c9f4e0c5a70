"""What ClusterD has done while a job stands still: each signal, and each change of the job, has its answer."""

import msgspec
import pytest

from midstep.detectors import clusterd_signals as d
from midstep.detectors.clusterd import Dialogue
from midstep.detectors.clusterd_maintenance import OPERATIONS
from midstep.protocol.controls import (
    ActionResult,
    Asked,
    Controls,
    EndPause,
    PauseTraining,
    PerformAction,
    StandingAction,
    StandingPause,
)
from midstep.protocol.incidents import JobStatus

TRAINING = JobStatus("job", 100.0, "running", 1, 1, 7, 0.1, (), (), (), ())
PAUSING = msgspec.structs.replace(
    TRAINING, controls=Controls(pause=StandingPause(700.0, Asked("clusterd", "operator", "for a test")))
)
HELD = msgspec.structs.replace(PAUSING, phase="pausing", held=True)
FAULTY = msgspec.structs.replace(PAUSING, phase="quiescing")
ENDED = msgspec.structs.replace(TRAINING, phase="ended", exit_code=1, reason="out of budget")
PAUSE = d.Signal("u1", "stopTrain", actions=("pause_train",))
CONTINUE = d.Signal("u1", "changeStrategy", strategy="continue", actions=("change_strategy",))
STOP = d.Signal("u2", "stopTrain", actions=("stop_train",))
SWITCH = d.SwitchNics((0, 3), (True, False))
TEST = d.StressTest({2: (0, 1), 3: (0,)})
ON = d.Steer(EndPause())
NOT_PERFORMED = ("1", "exec failed")


@pytest.fixture
def dialogue() -> Dialogue:
    return Dialogue("detector/clusterd", 2)


def paused(dialogue: Dialogue) -> Dialogue:
    dialogue.heard(PAUSE, TRAINING, 1.0)
    dialogue.looked(HELD, 2.0)
    return dialogue


def performed(
    asked: d.Action, *texts: str, waiting: frozenset[int] = frozenset(), before: JobStatus = HELD, at_s: float = 100.0
) -> JobStatus:
    """The job when ranks have answered: without a text, or with a test's code 0, they have succeeded."""
    assert isinstance(asked, d.Steer)
    assert isinstance(asked.control, PerformAction)
    ranks = asked.control.ranks or range(4)
    results = tuple(ActionResult(rank, text in {"", "0-OK"}, text) for rank, text in zip(ranks, texts, strict=False))
    number = before.controls.counted + 1
    action = StandingAction(number, asked.control, 400.0, waiting, results)
    controls = msgspec.structs.replace(before.controls, action=action, counted=number)
    return msgspec.structs.replace(before, controls=controls, at_s=at_s)


def code_of(action: d.Action) -> int:
    assert isinstance(action, d.ReportStopComplete | d.ReportRecoverStatus)
    return action.code


@pytest.mark.parametrize(("timeout_s", "held_s"), [(0, 660.0), (900, 960.0)])
def test_a_pause_lasts_as_long_as_clusterd_says_or_as_taskd_would_hold_it(
    dialogue: Dialogue, timeout_s: int, held_s: float
) -> None:
    """And the time that the ranks need to come to the boundary."""
    assert dialogue.heard(msgspec.structs.replace(PAUSE, timeout_s=timeout_s), TRAINING, 1.0) == [
        d.Steer(PauseTraining(held_s))
    ]
    assert dialogue.is_waiting


def test_that_the_job_stands_still_is_said_when_all_ranks_do(dialogue: Dialogue) -> None:
    dialogue.heard(PAUSE, TRAINING, 1.0)
    assert dialogue.looked(PAUSING, 1.1) == []
    assert dialogue.looked(FAULTY, 1.2) == []  # a fault goes first, and the pause comes after it
    assert dialogue.looked(HELD, 1.3) == [d.ReportStopComplete(d.OK, "all ranks stand still", ())]
    assert dialogue.looked(HELD, 1.4) == []
    assert not dialogue.is_waiting


def test_a_job_that_cannot_pause_says_so_at_once(dialogue: Dialogue) -> None:
    (asked,) = dialogue.heard(PAUSE, TRAINING, 1.0)
    assert isinstance(asked, d.Steer)
    assert dialogue.refused(asked, "a plain script") == [d.ReportStopComplete(d.FAILED, "a plain script", ())]


@pytest.mark.parametrize(
    ("status", "at_s", "sent"),
    [(PAUSING, 600.0, []), (PAUSING, 662.0, [d.ReportStopComplete, d.Steer]), (ENDED, 2.0, [d.ReportStopComplete])],
)
def test_a_pause_that_does_not_come_has_failed(
    dialogue: Dialogue, status: JobStatus, at_s: float, sent: list[type]
) -> None:
    dialogue.heard(PAUSE, TRAINING, 1.0)
    said = dialogue.looked(status, at_s)
    assert [type(each) for each in said] == sent
    assert not said or code_of(said[0]) == d.FAILED


def test_the_job_trains_on_when_clusterd_says_so(dialogue: Dialogue) -> None:
    paused(dialogue)
    assert dialogue.heard(CONTINUE, HELD, 3.0) == [ON]
    assert dialogue.looked(HELD, 3.1) == []
    assert dialogue.looked(TRAINING, 3.2) == [d.ReportRecoverStatus("continue", d.OK, "all ranks train on")]


@pytest.mark.parametrize(("status", "at_s"), [(ENDED, 3.1), (FAULTY, 850.0)])
def test_a_job_that_does_not_train_on_has_failed(dialogue: Dialogue, status: JobStatus, at_s: float) -> None:
    paused(dialogue).heard(CONTINUE, HELD, 3.0)
    (said,) = dialogue.looked(status, at_s)
    assert code_of(said) == d.FAILED


def test_a_fault_in_a_pause_ends_it_and_is_led_by_clusterd_as_any_other(dialogue: Dialogue) -> None:
    said, on = paused(dialogue).looked(FAULTY, 3.0)
    assert (code_of(said), on) == (d.UNRECOVERABLE, ON)
    assert dialogue.looked(FAULTY, 3.1) == []
    assert dialogue.heard(STOP, FAULTY, 4.0) == []
    (said,) = dialogue.looked(FAULTY, 4.1)
    assert said == d.ReportStopComplete(d.OK, "the job is quiescing", ())


def test_a_stop_after_a_pause_ends_it(dialogue: Dialogue) -> None:
    """ClusterD goes by a fault now, and will not say that the job may train on."""
    assert paused(dialogue).heard(STOP, HELD, 4.0) == []
    assert dialogue.looked(HELD, 4.1)[-1] == ON


def test_a_new_subscription_ends_the_pause(dialogue: Dialogue) -> None:
    """ClusterD has forgotten it."""
    paused(dialogue).began()
    assert dialogue.looked(HELD, 3.0) == [ON]
    assert dialogue.looked(HELD, 3.1) == []


def test_a_pause_does_not_end_before_what_the_ranks_perform_in_it(dialogue: Dialogue) -> None:
    """The controller would refuse it, and hold the ranks again after the fault."""
    (asked,) = paused(dialogue).heard(SWITCH, HELD, 3.0)
    waiting = performed(asked, waiting=frozenset({1}))
    (said,) = dialogue.looked(msgspec.structs.replace(waiting, held=False, phase="quiescing"), 4.0)
    assert code_of(said) == d.UNRECOVERABLE
    assert dialogue.is_waiting
    assert dialogue.looked(msgspec.structs.replace(waiting, held=False, phase="rejoining"), 5.0) == []
    assert dialogue.looked(performed(asked, *[""] * 4), 6.0) == [ON]
    assert not dialogue.is_waiting


def test_all_ranks_switch_their_ports(dialogue: Dialogue) -> None:
    """Each has to know which of the others use another one."""
    (asked,) = paused(dialogue).heard(SWITCH, HELD, 3.0)
    assert asked == d.Steer(PerformAction("switch_nic", {"ranks": "0,3", "use_backup": "1,0"}, None, 600.0))
    assert dialogue.heard(SWITCH, HELD, 3.1) == []
    assert dialogue.looked(HELD, 3.2) == []
    assert dialogue.looked(performed(asked, "", waiting=frozenset({1, 2, 3})), 3.3) == []
    assert dialogue.looked(performed(asked, *[""] * 4), 3.4) == [d.ReplySwitchNicResult(True)]
    assert not dialogue.is_waiting


def test_a_switch_in_which_one_rank_fails_has_failed(dialogue: Dialogue) -> None:
    (asked,) = paused(dialogue).heard(SWITCH, HELD, 3.0)
    assert dialogue.looked(performed(asked, "", "no such port", "", ""), 4.0) == [d.ReplySwitchNicResult(False)]


def test_what_ranks_have_done_before_is_no_answer(dialogue: Dialogue) -> None:
    """Not the same switch either, of a pause that was."""
    (asked,) = paused(dialogue).heard(SWITCH, HELD, 3.0)
    before = performed(asked, *[""] * 4)
    dialogue.began()
    dialogue.looked(before, 4.0)
    paused(dialogue).heard(SWITCH, before, 5.0)
    assert dialogue.looked(before, 5.1) == []
    assert dialogue.looked(performed(asked, *[""] * 4, before=before), 5.2) == [d.ReplySwitchNicResult(True)]


def test_what_is_to_be_done_without_a_pause_has_failed(dialogue: Dialogue) -> None:
    """No operation of it has run, which speaks against no device."""
    assert dialogue.heard(SWITCH, TRAINING, 3.0) == [d.ReplySwitchNicResult(False)]
    (said,) = dialogue.heard(TEST, TRAINING, 3.0)
    assert said == d.ReplyStressTestResult({2: {0: NOT_PERFORMED, 1: NOT_PERFORMED}, 3: {0: NOT_PERFORMED}})


@pytest.mark.parametrize("signal", [SWITCH, TEST])
def test_what_the_controller_refuses_has_failed(dialogue: Dialogue, signal: d.Heard) -> None:
    (asked,) = paused(dialogue).heard(signal, HELD, 3.0)
    assert isinstance(asked, d.Steer)
    (said,) = dialogue.refused(asked, "no rank stands still")
    assert isinstance(said, d.ReplySwitchNicResult | d.ReplyStressTestResult)
    assert not dialogue.is_waiting


def test_a_test_performs_one_operation_after_the_other_on_the_ranks_that_have_it(dialogue: Dialogue) -> None:
    (first,) = paused(dialogue).heard(TEST, HELD, 3.0)
    assert first == d.Steer(PerformAction("stress_test", {"operation": "aic"}, (2, 3), OPERATIONS[0].within_s))
    after = performed(first, "0-OK", "2-find fault rank")
    (second,) = dialogue.looked(after, 4.0)
    assert second == d.Steer(PerformAction("stress_test", {"operation": "hccs"}, (2,), OPERATIONS[1].within_s))
    (said,) = dialogue.looked(performed(second, "0-OK", before=after), 5.0)
    assert said == d.ReplyStressTestResult({2: {0: ("0", "OK"), 1: ("0", "OK")}, 3: {0: ("2", "find fault rank")}})


@pytest.mark.parametrize(("at_s", "told"), [(100.0, NOT_PERFORMED), (400.0, ("3", "exec timeout"))])
def test_a_rank_that_says_no_code_has_not_performed_its_test_or_took_too_long(
    dialogue: Dialogue, at_s: float, told: tuple[str, str]
) -> None:
    """ClusterD takes the second for a fault of the rank."""
    (asked,) = paused(dialogue).heard(d.StressTest({2: (0,), 3: (0,)}), HELD, 3.0)
    (said,) = dialogue.looked(performed(asked, "0-OK", "no code", at_s=at_s), 4.0)
    assert said == d.ReplyStressTestResult({2: {0: ("0", "OK")}, 3: {0: told}})


def test_an_operation_that_is_not_known_is_not_performed(dialogue: Dialogue) -> None:
    (said,) = paused(dialogue).heard(d.StressTest({2: (7,)}), HELD, 3.0)
    assert said == d.ReplyStressTestResult({2: {7: NOT_PERFORMED}})


def test_a_fault_in_a_test_is_said_and_so_are_the_results_that_are_there(dialogue: Dialogue) -> None:
    """ClusterD waits for both."""
    (first,) = paused(dialogue).heard(TEST, HELD, 3.0)
    dialogue.looked(performed(first, "0-OK", "0-OK"), 3.5)
    fault, results, on = dialogue.looked(FAULTY, 4.0)
    assert (code_of(fault), on) == (d.UNRECOVERABLE, ON)
    assert results == d.ReplyStressTestResult({2: {0: ("0", "OK"), 1: NOT_PERFORMED}, 3: {0: ("0", "OK")}})


def test_a_fault_in_a_switch_is_said_once(dialogue: Dialogue) -> None:
    paused(dialogue).heard(SWITCH, HELD, 3.0)
    assert [type(each) for each in dialogue.looked(FAULTY, 4.0)] == [d.ReportRecoverStatus, d.Steer]
    assert dialogue.looked(FAULTY, 4.1) == []


@pytest.mark.parametrize("kind", ["pauseStartAgent", "continueStartAgent"])
def test_agents_are_not_to_be_held_back(dialogue: Dialogue, kind: str) -> None:
    """Those of midstep start nothing by themselves."""
    assert dialogue.heard(d.Signal("u3", kind), HELD, 3.0) == []
