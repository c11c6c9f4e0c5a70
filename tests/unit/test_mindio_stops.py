"""When the stop handler may run: never in the middle of an update, however a stop and the training fall together.

MindSpore's handler refuses while a flag of its optimizer is not reset, which happens after `tft_end_updating_os` and
before `tft_pause_train`.
"""

import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from midstep.adapters.mindio import processor
from midstep.adapters.mindio.driver import HandlerDriver
from midstep.adapters.mindio.handlers import Handlers
from midstep.protocol.errors import Interrupted

STOPS, STOPS_OF_A_SOAK = 300, 10_000


class Update:
    """The commit barrier is passed at once."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Ledger:
    """Steps without end; the driver is interrupted between two of them as by the real ledger."""

    def __init__(self) -> None:
        self.stopping = False

    def steps(self, total: int) -> Iterator[Any]:
        """Yield steps."""
        for index in range(total):
            if self.stopping:
                raise Interrupted
            yield SimpleNamespace(index=index, update=Update)


@pytest.fixture
def driver() -> HandlerDriver:
    """A driver whose ledger is played."""
    runtime: Any = SimpleNamespace(rank=0, world_size=1, device=SimpleNamespace(name="cpu"), connected=True)
    return HandlerDriver(runtime, Handlers(), None)


@pytest.mark.parametrize("stops", [STOPS, pytest.param(STOPS_OF_A_SOAK, marks=pytest.mark.soak)])
def test_no_stop_comes_while_an_optimizer_s_flag_is_not_reset(
    stops: int, driver: HandlerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver leaves its steps, after which the handler runs, only where the flag is as it was."""
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1,UCE:1,ARF:1}")
    monkeypatch.setattr(processor._Process, "driver", driver)
    chance = random.Random(7)
    flag_is_reset, left_in_update, over = True, 0, False

    def train() -> None:
        nonlocal flag_is_reset
        step = 0
        while not over:
            try:
                processor.tft_start_updating_os()
            except RuntimeError:
                driver.await_go()
                continue
            flag_is_reset = False
            step += 1
            processor.tft_end_updating_os(step)
            flag_is_reset = True
            processor.tft_pause_train(step)

    thread = threading.Thread(target=train, daemon=True)
    for number in range(stops):
        ledger: Any = Ledger()
        driver._state._ledger = ledger

        def stop(ledger: Any = ledger) -> None:
            time.sleep(chance.random() * 1e-4)
            ledger.stopping = True
            driver._conversation.interrupt()

        stopper = threading.Thread(target=stop, daemon=True)
        if number == 0:
            thread.start()
        stopper.start()
        with pytest.raises(Interrupted):
            driver._drive()
        left_in_update += not flag_is_reset
        stopper.join(10)
    over = True
    driver._conversation.end("the test is over")
    thread.join(10)
    assert not thread.is_alive()
    assert left_in_update == 0
