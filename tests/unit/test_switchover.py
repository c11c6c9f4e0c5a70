"""An admin may promote a controller that stands by, and pause the failover."""

import time
from pathlib import Path

import pytest

from midstep.controller.election.succession import PREFERRED_S, FileSuccession
from midstep.controller.endpoints.control_requests import Accepted, PauseFailoverRequest, PromoteRequest, Refused
from midstep.controller.switchover import Switchover
from midstep.protocol.errors import JournalError, SteppedDown
from midstep.protocol.incidents import ControllerPhase, ControllerStatus


class Clock:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = time.time()  # what is shown in a status is compared with the real one

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def succession(tmp_path: Path, clock: Clock) -> FileSuccession:
    return FileSuccession(tmp_path, lambda: clock.now_s)


class Entry:
    """The entry of the controller that leads."""

    name = "first"

    def enter(self, phase: ControllerPhase, term: int = 0) -> None:
        """Say where it stands."""

    def close(self) -> None:
        """Leave."""


def listed() -> tuple[ControllerStatus, ...]:
    phases = {"first": ControllerPhase.HOT, "second": ControllerPhase.COLD, "third": ControllerPhase.LOADING}
    return tuple(ControllerStatus(name, 1, "m0", phase, 0, 0.0) for name, phase in phases.items())


@pytest.fixture
def switchover(succession: FileSuccession) -> Switchover:
    return Switchover(Entry(), listed, succession)


def test_any_controller_may_lead_when_nothing_was_asked_for(succession: FileSuccession) -> None:
    assert succession.admits("second", standby=True)
    assert succession.paused_until_s() == 0.0


def test_the_lead_is_left_to_a_promoted_controller_for_some_seconds(succession: FileSuccession, clock: Clock) -> None:
    succession.prefer("second")
    assert [succession.admits(name, standby=True) for name in ("first", "second", "third")] == [False, True, False]
    assert not succession.admits("a restarted one", standby=False)
    clock.advance(PREFERRED_S)
    assert succession.admits("third", standby=True)


def test_a_pause_holds_up_those_that_stand_by_and_ends_by_itself(succession: FileSuccession, clock: Clock) -> None:
    """The leader may come back under its name, and who starts one by hand without --standby means it."""
    succession.pause("first", 60)
    assert not succession.admits("second", standby=True)
    assert succession.admits("first", standby=True)
    assert succession.admits("second", standby=False)
    assert succession.paused_until_s() == clock.now_s + 60
    clock.advance(60)
    assert succession.admits("second", standby=True)
    assert succession.paused_until_s() == 0.0


def test_a_pause_can_be_ended_and_does_not_hold_up_a_promoted_controller(succession: FileSuccession) -> None:
    succession.pause("first", 60)
    succession.prefer("second")
    assert succession.admits("second", standby=True)
    succession.pause("first", 0)
    assert succession.paused_until_s() == 0.0


def test_wishes_of_a_clock_that_was_set_back_do_not_count(succession: FileSuccession, clock: Clock) -> None:
    succession.pause("first", 60)
    succession.prefer("first")
    clock.advance(-3600)
    assert succession.admits("second", standby=True)


def test_a_file_that_cannot_be_read_keeps_no_controller_from_the_lead(
    succession: FileSuccession, tmp_path: Path
) -> None:
    (tmp_path / "succession.json").write_text("{")
    assert succession.admits("second", standby=True)


def test_a_promoted_controller_is_preferred_and_the_leader_leaves_when_it_has_answered(
    switchover: Switchover, succession: FileSuccession, monkeypatch: pytest.MonkeyPatch
) -> None:
    switchover.require_unpromoted()
    assert switchover.answer(PromoteRequest("second")) == Accepted("first hands the lead over to second")
    assert not succession.admits("first", standby=True)
    switchover.require_unpromoted()  # the answer is on its way
    monkeypatch.setattr("midstep.controller.switchover.SETTLE_S", 0.0)
    switchover.answer(PromoteRequest("second"))
    with pytest.raises(SteppedDown, match="second was promoted: first stands by"):
        switchover.require_unpromoted()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("first", "controller first leads already"),
        ("nine", "there is no controller 'nine'; those that stand by: second, third"),
        ("third", "controller third does not stand by: it is loading"),
    ],
)
def test_a_controller_that_cannot_lead_is_not_promoted(switchover: Switchover, name: str, reason: str) -> None:
    assert switchover.answer(PromoteRequest(name)) == Refused(reason)
    switchover.require_unpromoted()


def test_a_pause_is_answered_and_shown_in_the_status(
    switchover: Switchover, succession: FileSuccession, clock: Clock
) -> None:
    assert switchover.answer(PauseFailoverRequest(60)) == Accepted(
        "for 60 s no standby takes over from first; recovery continues as ever"
    )
    assert not succession.admits("second", standby=True)
    assert switchover.standing() == (listed(), clock.now_s + 60)
    answer = switchover.answer(PauseFailoverRequest(0))
    assert isinstance(answer, Accepted)
    assert succession.admits("second", standby=True)
    assert switchover.standing() == (listed(), 0.0)


def test_a_controller_on_a_copy_of_the_journal_has_no_successor() -> None:
    assert isinstance(Switchover().answer(PromoteRequest("second")), Refused)


def test_what_the_store_cannot_do_is_refused_with_its_reason(
    switchover: Switchover, succession: FileSuccession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise JournalError("the disk is full")

    monkeypatch.setattr(succession, "prefer", fail)
    assert switchover.answer(PromoteRequest("second")) == Refused("the disk is full")
    switchover.require_unpromoted()
