"""A device that the process before still holds is asked again, for a while, and nothing else is."""

import sys
import time
from types import ModuleType

import pytest

from midstep.adapters.mindio.device import await_free_device
from midstep.devices import fake
from midstep.devices.device_busy import BUSY_S, HELD_S, LONGEST_PAUSE_S, held_s, is_busy, pauses, while_busy
from midstep.devices.fake_chip import BUSY, RETRY_FAILED, told
from midstep.processor.exceptions import chain_of, classify, known_patterns
from midstep.protocol.environment import INCARNATION, STARTED_S


class Device:
    """Busy for some attempts."""

    def __init__(self, times: int, text: str = BUSY) -> None:
        self.attempts = 0
        self._times = times
        self._text = text

    def take(self) -> str:
        self.attempts += 1
        if self.attempts <= self._times:
            raise RuntimeError(told(self._text))
        return "taken"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    waits: list[float] = []
    monkeypatch.setattr("midstep.devices.device_busy.time.sleep", waits.append)
    return waits


def test_a_busy_device_is_asked_again_less_and_less_often(slept: list[float]) -> None:
    device = Device(times=4)
    assert while_busy(device.take) == "taken"
    assert slept == [0.1, 0.2, 0.4, 0.8]


def test_a_device_that_stays_busy_is_given_up_with_what_it_said(slept: list[float]) -> None:
    device = Device(times=1000)
    with pytest.raises(RuntimeError, match="EJ0001"):
        while_busy(device.take)
    assert sum(slept) == pytest.approx(BUSY_S)
    assert max(slept) == LONGEST_PAUSE_S


def test_any_other_error_is_raised_at_once(slept: list[float]) -> None:
    device = Device(times=1, text=RETRY_FAILED)
    with pytest.raises(RuntimeError, match="RETRY FAILED"):
        while_busy(device.take)
    assert (device.attempts, slept) == (1, [])


def test_who_asks_may_stop_asking_in_between(slept: list[float]) -> None:
    def stop() -> None:
        raise TimeoutError("no time is left")

    with pytest.raises(TimeoutError):
        while_busy(Device(times=5).take, stop)
    assert len(slept) == 1


def test_the_patterns_of_exceptions_know_the_same_texts() -> None:
    """For a group that the user's own code links: there it is a fault of communication, which hands over by itself."""
    for text in (BUSY, "EJ0001: x", "HCCL function error: HcclCommInitRootInfo(4, &i, 0, &c), error code is 7"):
        error = RuntimeError(told(text))
        assert is_busy(error)
        assert classify(chain_of(error), known_patterns()).pattern == "device_busy"
    for text in ("hcclCommInitRootInfoConfig(x), error code is 77", "HcclAllReduce, error code is 7"):
        assert not is_busy(RuntimeError(f"HCCL function error: {text}"))


def test_the_waits_end() -> None:
    assert sum(pauses(1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("incarnation", "started_s_ago", "left_s"),
    [("1", 0.0, 0.0), ("2", 0.0, HELD_S), ("2", HELD_S - 1.0, 1.0), ("2", HELD_S + 1.0, 0.0)],
    ids=["the first process of the rank", "just started", "it took long to import", "long ago"],
)
def test_a_device_is_free_for_sure_some_time_after_its_process_was_replaced(
    monkeypatch: pytest.MonkeyPatch, incarnation: str, started_s_ago: float, left_s: float
) -> None:
    monkeypatch.setenv(INCARNATION, incarnation)
    monkeypatch.setenv(STARTED_S, str(time.monotonic() - started_s_ago))
    assert held_s(ModuleType("torch_npu")) == pytest.approx(left_s, abs=0.5)


def test_what_stands_in_the_place_of_torch_npu_may_hold_the_device_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INCARNATION, "2")
    monkeypatch.setenv(STARTED_S, str(time.monotonic()))
    assert held_s(fake) == pytest.approx(fake.HELD_S, abs=0.5)


def test_handlers_of_mindio_find_the_device_free(monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    """They build communicators without expecting that they fail. Without an NPU nothing is waited for."""
    monkeypatch.setenv(INCARNATION, "2")
    monkeypatch.setenv(STARTED_S, str(time.monotonic()))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    await_free_device()
    assert slept == []
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    await_free_device()
    assert slept == [pytest.approx(HELD_S, abs=0.5)]
