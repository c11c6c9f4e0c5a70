"""The launcher decides about its controller: how long to wait, when it is lost, what is tried, what is said."""

import os
import time
from pathlib import Path

import pytest

from midstep.launch.processes import TICK_S, Backoff, RestartBackoff, RunningTime
from midstep.launch.supervisor import (
    STOP_TRIES,
    ControllerNotice,
    ControllerStage,
    NextStart,
    NoticeFile,
    Outage,
    read_notice,
    why_no_answer,
)
from midstep.policies.files import parse_policy
from midstep.policies.schema import ControllerPolicy, WhenLost
from midstep.protocol.errors import PolicyError

BACKOFF = Backoff(first_s=0.1, longest_s=30.0, reset_s=60.0)
STOP = ControllerPolicy(lost_after_s=30.0, when_lost=WhenLost.STOP)
CONTINUE = ControllerPolicy(lost_after_s=30.0)


def test_the_waits_between_restarts_double_up_to_the_longest() -> None:
    waits = RestartBackoff(BACKOFF)
    assert [waits.delay_s(0.5, 1.0) for _ in range(11)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    )


def test_chance_spreads_a_wait_over_its_upper_half() -> None:
    assert RestartBackoff(BACKOFF).delay_s(0.5, 0.0) == pytest.approx(0.05)
    assert RestartBackoff(BACKOFF).delay_s(0.5, 0.5) == pytest.approx(0.075)


def test_a_controller_that_lived_for_a_minute_begins_a_new_row() -> None:
    waits = RestartBackoff(BACKOFF)
    for _ in range(8):
        waits.delay_s(0.5, 1.0)
    assert waits.delay_s(60.0, 1.0) == pytest.approx(0.1)
    assert waits.deaths == 1


def test_ten_thousand_deaths_overflow_nothing() -> None:
    waits = RestartBackoff(BACKOFF)
    assert max(waits.delay_s(0.0, 1.0) for _ in range(10_000)) == 30.0


def test_time_in_which_the_launcher_did_not_run_is_not_counted() -> None:
    clock = RunningTime(1000.0)
    assert clock.at(1000.5) == pytest.approx(0.5)
    assert clock.at(4000.5) == pytest.approx(0.5 + TICK_S)
    assert clock.at(4001.5) == pytest.approx(1.5 + TICK_S)


def test_time_does_not_run_backwards() -> None:
    clock = RunningTime(1000.0)
    assert clock.at(999.0) == 0.0


def test_an_outage_is_a_loss_only_after_the_time_that_the_policy_gives() -> None:
    outage = Outage(CONTINUE, 0.0)
    outage.stays_up()
    assert not outage.is_lost(1000.0)
    outage.ended(1000.0)
    outage.ended(1020.0)  # the next one has ended, too, and has not stayed up between
    assert not outage.is_lost(1029.0)
    assert outage.is_lost(1030.0)
    outage.stays_up()
    assert not outage.is_lost(2000.0)


def test_by_default_a_controller_is_tried_again_for_ever() -> None:
    outage = Outage(CONTINUE, 0.0)
    assert {outage.next_attempt(now) for now in (0.0, 40.0, 4000.0)} == {NextStart.ORDINARY}


def test_with_when_lost_stop_the_last_resort_is_tried_once_and_then_the_training_is_left_alone() -> None:
    outage = Outage(STOP, 0.0)
    assert outage.next_attempt(29.0) is NextStart.ORDINARY
    assert outage.next_attempt(31.0) is NextStart.LAST_RESORT
    assert [outage.next_attempt(now) for now in (40.0, 400.0)] == [NextStart.ORDINARY] * 2


@pytest.mark.parametrize("policy", [STOP, CONTINUE])
def test_a_user_who_stops_the_job_gets_some_tries_the_last_resort_and_then_an_end(policy: ControllerPolicy) -> None:
    outage = Outage(policy, 0.0)
    outage.ask_to_stop()
    attempts = [outage.next_attempt(float(now)) for now in range(STOP_TRIES + 3)]
    assert attempts == [NextStart.STOPPING] * STOP_TRIES + [NextStart.LAST_RESORT, NextStart.NONE, NextStart.NONE]


def test_without_the_users_wish_ranks_are_never_ended_unsaved() -> None:
    """A controller of last resort has begun to park and save, and has died: it is tried again."""
    outage = Outage(STOP, 0.0)
    assert outage.next_attempt(31.0) is NextStart.LAST_RESORT
    outage.stopping = True
    attempts = [outage.next_attempt(40.0 + number) for number in range(200)]
    assert NextStart.NONE not in attempts
    assert attempts.count(NextStart.LAST_RESORT) > 10
    outage.ask_to_stop()
    assert NextStart.NONE in [outage.next_attempt(400.0 + number) for number in range(STOP_TRIES + 2)]


def test_a_controller_that_stayed_up_while_it_stopped_the_job_gives_the_tries_back() -> None:
    outage = Outage(CONTINUE, 0.0)
    outage.ask_to_stop()
    for now in range(STOP_TRIES + 1):
        outage.next_attempt(float(now))
    outage.stays_up()
    outage.ended(1000.0)
    assert outage.next_attempt(1000.0) is NextStart.STOPPING


def test_the_notice_is_rewritten_in_place_and_read_back(tmp_path: Path) -> None:
    file = NoticeFile(tmp_path)
    size = (tmp_path / "controller.json").stat().st_size
    notice = ControllerNotice(ControllerStage.ENDED, 1.0, 0, 7, "ended with exit status 70" * 100, 5.0, 2.0)
    file.write(notice)
    file.close()
    file.close()
    assert (tmp_path / "controller.json").stat().st_size == size
    read = read_notice(tmp_path)
    assert read is not None
    assert (read.stage, read.deaths, read.lost_since_s) == (ControllerStage.ENDED, 7, 2.0)
    assert read.last.startswith("ended with exit status 70")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 100, b'{"stage": "no such"}'])
def test_a_notice_that_cannot_be_read_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "controller.json").write_bytes(content)
    assert read_notice(tmp_path) is None
    assert why_no_answer(tmp_path, os.getpid()) is None


@pytest.mark.parametrize(
    ("notice", "expected"),
    [
        (ControllerNotice(ControllerStage.SERVING, 1.0, os.getpid()), "lives and does not answer"),
        (ControllerNotice(ControllerStage.SERVING, 1.0, 2**22 + 1), "has just ended"),
        (
            ControllerNotice(ControllerStage.STARTING, 1.0, os.getpid(), 1, "ended with signal 9"),
            "the one before ended with sig",
        ),
        (
            ControllerNotice(ControllerStage.ENDED, 1.0, 0, 3, "ended with exit status 70", 0.0),
            "70, 3 times in a row; the next",
        ),
        (
            ControllerNotice(ControllerStage.ENDED, 1.0, 0, 9, "ended with exit status 70", 0.0, 1.0),
            "training is unguarded",
        ),
    ],
)
def test_a_status_without_an_answer_says_what_has_become_of_the_controller(
    tmp_path: Path, notice: ControllerNotice, expected: str
) -> None:
    file = NoticeFile(tmp_path)
    file.write(notice)
    file.close()
    said = why_no_answer(tmp_path, os.getpid())
    assert said is not None
    assert expected in said
    assert (f"kill -INT {os.getpid()}" in said) == (notice.lost_since_s is not None)


def test_a_status_says_when_the_launcher_itself_has_gone(tmp_path: Path) -> None:
    NoticeFile(tmp_path).close()
    assert "has gone" in (why_no_answer(tmp_path, 2**22 + 1) or "")


def test_a_wait_for_the_next_try_is_told_as_it_stands_now(tmp_path: Path) -> None:
    file = NoticeFile(tmp_path)
    file.write(ControllerNotice(ControllerStage.ENDED, 1.0, 0, 1, "ended with signal 9", time.time() + 1000.0))
    file.close()
    said = why_no_answer(tmp_path, None) or ""
    assert "started in 1000 s" in said or "started in 99" in said


def test_a_policy_cannot_take_a_slow_disk_for_a_hang() -> None:
    with pytest.raises(PolicyError, match="hang_s"):
        parse_policy("controller: {hang_s: 2}", "job.yaml")
    assert parse_policy("controller: {when_lost: stop}", "job.yaml").controller.when_lost is WhenLost.STOP
