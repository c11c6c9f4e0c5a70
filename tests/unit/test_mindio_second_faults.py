"""A fault during the recovery from another one, while MindIO's handlers run in the driver thread."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from midstep.adapters.mindio.device import HandledDevice
from midstep.adapters.mindio.driver import Conversation
from midstep.adapters.mindio.handlers import HandlerKind, Handlers
from midstep.adapters.mindio.recovery import HandlerRecovery
from midstep.protocol.errors import CommunicatorAborted

PATIENCE_S = 10.0


class Played:
    """A recovery whose repair handler waits for a peer until the device is stopped."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.waits, self.stopped = threading.Event(), threading.Event()
        handlers = Handlers()
        handlers.register(HandlerKind.STOP, lambda args, ctx: self._call("stop", self.stopped.set))
        handlers.register(HandlerKind.CLEAN, lambda uce, args, ctx: self._call("clean", self.stopped.clear))
        handlers.register(HandlerKind.REPAIR, lambda ctx: self._repair())
        parts: Any = SimpleNamespace(name="cpu")
        self.recovery = HandlerRecovery(
            parts,
            handlers=handlers,
            state=parts,
            device=HandledDevice(parts),
            conversation=Conversation(),
            names=parts,
        )
        self.recovery.use_device = lambda: self.calls.append("device")
        self.recovery.driver = threading.Thread()

    def _call(self, what: str, then: Callable[[], None]) -> None:
        self.calls.append(what)
        then()

    def _repair(self) -> None:
        self.calls.append("repair")
        self.waits.set()
        if self.stopped.wait(PATIENCE_S):
            raise RuntimeError("FORCE STOP")

    def stop(self) -> None:
        """Stop, as the control thread does when another rank has failed."""
        recovery: Any = SimpleNamespace(default=lambda: None)
        self.recovery._stop(recovery)

    def stop_when_it_waits(self, times: int) -> threading.Thread:
        """Stop so often in a thread of its own, once the handler waits."""

        def run() -> None:
            self.waits.wait(PATIENCE_S)
            for _ in range(times):
                self.stop()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def test_a_handler_that_waits_for_a_lost_peer_is_woken_and_the_device_cleaned_before_the_next_attempt() -> None:
    """It raises in the driver thread, as an attempt that others have ended, and no fault of this rank."""
    played = Played()
    control = played.stop_when_it_waits(1)

    with pytest.raises(CommunicatorAborted, match="the repair handler was stopped: FORCE STOP"):
        played.recovery._handle(HandlerKind.REPAIR)

    control.join(PATIENCE_S)
    assert played.calls == ["repair", "device", "stop"]
    played.recovery._clean_again()
    played.recovery._clean_again()
    assert played.calls == ["repair", "device", "stop", "clean"]


def test_two_faults_at_once_stop_the_device_once() -> None:
    """Each of them has the control thread stop what is in flight."""
    played = Played()
    control = played.stop_when_it_waits(2)

    with pytest.raises(CommunicatorAborted):
        played.recovery._handle(HandlerKind.REPAIR)

    control.join(PATIENCE_S)
    assert played.calls.count("stop") == 1


def test_a_fault_while_no_handler_runs_leaves_the_device_to_the_driver() -> None:
    """The train function may be inside an update, which nothing interrupts."""
    played = Played()

    played.stop()
    played.recovery._clean_again()

    assert played.calls == []


def test_a_handler_that_fails_by_itself_is_a_fault_of_its_rank() -> None:
    """What it raises is not taken for the consequence of a stop."""
    played = Played()
    played.stopped.set()

    with pytest.raises(RuntimeError, match="FORCE STOP"):
        played.recovery._handle(HandlerKind.REPAIR)
