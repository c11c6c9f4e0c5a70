"""A stop of the device never meets a call into HCCL: it is put off until the last thread has come out."""

from __future__ import annotations

import threading

import pytest

from midstep.devices.library_calls import LibraryCalls
from midstep.protocol.errors import RecoveryError

WAIT_S = 10.0


class Held:
    """A thread that is inside a call until it is let go."""

    def __init__(self, calls: LibraryCalls) -> None:
        self.error: Exception | None = None
        self._entered, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(calls,), daemon=True)
        self._thread.start()
        assert self._entered.wait(WAIT_S)

    def _run(self, calls: LibraryCalls) -> None:
        try:
            with calls.inside("a group is built"):
                self._entered.set()
                self._leave.wait(WAIT_S)
        except RecoveryError as error:
            self.error = error

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(WAIT_S)


class Stops:
    """Takes note of what is called, and of the thread that calls it."""

    def __init__(self) -> None:
        self.called: list[tuple[str, bool]] = []

    def stop(self) -> None:
        self._note("stop")

    def restart(self) -> None:
        self._note("restart")

    def _note(self, what: str) -> None:
        self.called.append((what, threading.current_thread() is threading.main_thread()))


def test_a_stop_comes_at_once_where_no_thread_is_inside() -> None:
    calls, stops = LibraryCalls(), Stops()
    with calls.inside("a group is built"):
        pass
    calls.stop(stops.stop, stops.restart)
    calls.restart()
    assert stops.called == [("stop", True)]


def test_a_stop_that_was_put_off_is_run_once_by_the_thread_that_comes_out_last() -> None:
    """And what the train thread could not do any more, to have the device work again, is done by who asks for it."""
    calls, stops = LibraryCalls(), Stops()
    first, second = Held(calls), Held(calls)
    calls.stop(stops.stop, stops.restart)
    calls.stop(stops.stop, stops.restart)
    first.leave()
    assert not stops.called
    second.leave()
    assert stops.called == [("stop", False)]
    calls.restart()
    calls.restart()
    assert stops.called == [("stop", False), ("restart", True)]


def test_a_call_waits_for_a_stop_that_is_under_way() -> None:
    calls, stopping, let_go = LibraryCalls(), threading.Event(), threading.Event()

    def stop() -> None:
        stopping.set()
        let_go.wait(WAIT_S)

    stopper = threading.Thread(target=calls.stop, args=(stop, stop), daemon=True)
    stopper.start()
    assert stopping.wait(WAIT_S)
    entered = threading.Event()

    def enter() -> None:
        with calls.inside("a group is dropped"):
            entered.set()

    caller = threading.Thread(target=enter, daemon=True)
    caller.start()
    assert not entered.wait(0.05)
    let_go.set()
    assert entered.wait(WAIT_S)
    stopper.join(WAIT_S)
    caller.join(WAIT_S)


def test_a_stop_that_fails_late_is_raised_in_the_thread_that_comes_out() -> None:
    calls = LibraryCalls()
    held = Held(calls)

    def stop() -> None:
        raise RecoveryError("stop_device returned 1")

    calls.stop(stop, stop)
    held.leave()
    assert isinstance(held.error, RecoveryError)


def test_a_stop_that_is_put_off_is_told_of_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    calls, stops = LibraryCalls(), Stops()
    held = Held(calls)
    calls.stop(stops.stop, stops.restart)
    held.leave()
    assert "a thread is inside HCCL (a group is built)" in caplog.text
    assert "HCCL_CONNECT_TIMEOUT" in caplog.text
