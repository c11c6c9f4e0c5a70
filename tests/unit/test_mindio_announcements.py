"""How MindSpore's updates are announced by the C library, and what is done about those that are not."""

import contextlib
import ctypes
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from midstep.adapters.mindio import package, processor
from midstep.adapters.mindio.driver import Ask, Conversation, HandlerDriver, Question
from midstep.adapters.mindio.handlers import HandlerKind, Handlers
from midstep.adapters.mindio.recovery import HandlerRecovery
from midstep.protocol.errors import Interrupted

WITH_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@WITH_COMPILER
def test_a_call_of_the_library_from_any_thread_asks_whether_the_update_may_begin(tmp_path: Path) -> None:
    """It is found, opened and called as MindSpore's kernel does it: by two files, and from a thread of its own."""
    asked: list[str] = []

    def update_begins() -> bool:
        asked.append(threading.current_thread().name)
        return len(asked) == 1

    place = package.build(tmp_path)
    package.load(place, update_begins)
    ctypes.CDLL(str(place / "framework_ttp" / "libttp_framework.so"))
    library = ctypes.CDLL(str(place / "mindspore_api" / "libttp_c_api.so"))
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(library.MindioTtpSetOptimStatusUpdating(-1)))
    thread.start()
    thread.join(10)
    answers.append(library.MindioTtpSetOptimStatusUpdating(-1))

    assert answers == [0, 1]
    assert asked[1] == threading.main_thread().name != asked[0]


@WITH_COMPILER
def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all ranks of a machine, whichever is the first; the others need no compiler."""
    threads = [threading.Thread(target=package.build, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.setenv("PATH", "")

    place = package.build(tmp_path)

    assert list(tmp_path.iterdir()) == [place]


def test_without_a_compiler_it_is_said_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes its way."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    with caplog.at_level(logging.WARNING, "midstep"):
        package.offer(lambda: True)

    assert "updates of compiled graphs are not announced" in caplog.text
    assert "no C compiler (cc)" in caplog.text


@WITH_COMPILER
def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind that would be taken for a library."""
    source = tmp_path / "wrong.c"
    source.write_text("int wrong(void) { return nothing; }\n")
    monkeypatch.setattr(package, "SOURCE", source)

    with pytest.raises(OSError, match="nothing"):
        package.build(tmp_path / "cache")

    assert not list((tmp_path / "cache").iterdir())


# --- updates that are not announced -----------------------------------------------------------------------------------


class Update:
    """Passes the commit barrier, or is told there to repeat the step."""

    def __init__(self, committed: list[int], *, passes: bool) -> None:
        self._committed, self._passes = committed, passes

    def __enter__(self) -> None:
        if not self._passes:
            raise Interrupted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._committed.append(1)


class Ledger:
    """Steps, of which all but the last pass their barrier, or all do."""

    def __init__(self, steps: int, *, last_passes: bool) -> None:
        self._steps, self._last_passes = steps, last_passes
        self.committed: list[int] = []
        self.voided = 0

    def void_update(self) -> None:
        """Count."""
        self.voided += 1

    def steps(self, total: int) -> Iterator[Any]:
        """Yield steps."""
        for index in range(self._steps):
            passes = index < self._steps - 1 or self._last_passes
            yield SimpleNamespace(index=index, update=lambda passes=passes: Update(self.committed, passes=passes))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HandlerDriver:
    """A driver whose ledger is played, in a process that follows MindSpore's conventions."""
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    runtime: Any = SimpleNamespace(rank=0, world_size=1, device=SimpleNamespace(name="cpu"), connected=True)
    driver = HandlerDriver(runtime, Handlers(), None)
    monkeypatch.setattr(processor._Process, "driver", driver)
    return driver


def drive(driver: HandlerDriver, ledger: Any) -> list[BaseException]:
    """Run the driver's part, as its thread does, and return with what it ended."""
    driver._state._ledger = ledger
    ended: list[BaseException] = []

    def run() -> None:
        try:
            driver._drive()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert driver.await_go()
    driver.joined = lambda: thread.join(10)  # type: ignore[attr-defined]
    return ended


@pytest.mark.parametrize("switches", ["{TTP:1,UCE:1,ARF:1}", "{TTP:1,UCE:1}"])
def test_each_update_that_was_not_announced_is_committed_once(
    switches: str, driver: HandlerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At `tft_pause_train`; at `tft_end_updating_os` where MindSpore makes no pause."""
    monkeypatch.setenv("MS_ENABLE_TFT", switches)
    ledger = Ledger(4, last_passes=True)
    drive(driver, ledger)
    for step in range(1, 4):
        processor.tft_end_updating_os(step)
        if "ARF" in switches:
            assert len(ledger.committed) == step - 1
            processor.tft_pause_train(step)
        assert len(ledger.committed) == step
    assert driver._state.sure_offset == 0


@pytest.mark.parametrize("before", [0, 5000])
def test_a_bracket_with_the_number_of_the_last_step_commits_nothing(before: int, driver: HandlerDriver) -> None:
    """MindSpeed-LLM brackets changes of the parameters' form, too, before and after the update.

    It says 1 in the first one, wherever training begins. Only from the second step on is it known how it counts.
    """
    ledger = Ledger(9, last_passes=True)
    drive(driver, ledger)
    sure = []
    counted = 0
    for step in (before + 1, before + 2, before + 3):
        for ends in (max(counted, 1), step, step):
            assert driver.update_begins()
            driver.update_ended(ends)
        counted = step
        sure.append(driver._state.sure_offset)

    extra = 1 if before else 0  # the first bracket was taken for a step
    assert len(ledger.committed) == 3 + extra
    assert ledger.voided == 9 - len(ledger.committed)
    assert sure == [None, before - extra, before - extra]


def test_an_applied_update_that_others_do_not_follow_ends_the_process(driver: HandlerDriver) -> None:
    """Its step would be applied a second time when it is repeated."""
    ledger = Ledger(2, last_passes=False)
    ended = drive(driver, ledger)
    processor.tft_pause_train(1)

    with pytest.raises(SystemExit, match="was applied, but cannot be committed"):
        processor.tft_pause_train(2)

    driver.joined()  # type: ignore[attr-defined]
    assert [type(error) for error in ended] == [SystemExit]
    assert len(ledger.committed) == 1


def test_an_update_that_is_applied_after_a_stop_ends_the_process(driver: HandlerDriver) -> None:
    """The driver has left its steps by then, and the plan of the recovery counts on the state before."""
    drive(driver, Ledger(1, last_passes=True))
    driver._conversation.leave()

    with pytest.raises(SystemExit, match="was applied, but cannot be committed"):
        processor.tft_pause_train(1)


def test_a_commit_waits_for_an_announcement_from_beside_its_thread(driver: HandlerDriver) -> None:
    """A device may be late to say that an update has begun which its host has seen ending."""
    ledger = Ledger(3, last_passes=True)
    drive(driver, ledger)
    assert driver.update_begins()
    processor.tft_pause_train(1)
    late = threading.Timer(0.2, driver.update_begins)
    late.start()

    processor.tft_pause_train(2)

    late.join(10)
    assert len(ledger.committed) == 2
    assert not driver._conversation._announced


def test_two_threads_ask_one_after_the_other() -> None:
    """The second question does not take the place of the first one."""
    conversation = Conversation()
    conversation.go()
    answers: list[bool] = []
    asking = [
        threading.Thread(target=lambda ask=ask: answers.append(conversation.ask(Question(ask))), daemon=True)
        for ask in (Ask.UPDATE, Ask.COMMIT)
    ]
    for thread in asking:
        thread.start()
    taken = []
    for _ in asking:
        taken.append(conversation.next().ask)
        conversation.answer(allowed=True)
    for thread in asking:
        thread.join(10)

    assert set(taken) == {Ask.UPDATE, Ask.COMMIT}
    assert answers == [True, True]


@pytest.mark.parametrize(("switches", "calls"), [("{TTP:1,UCE:1}", 3), ("{TTP:1,ARF:1}", 1)])
def test_a_stop_handler_that_refuses_is_asked_again_only_where_the_flag_is_reset_after_the_commit(
    switches: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the flag is as it was when an update is committed, and a refusal means what it says."""
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    monkeypatch.setenv("MS_ENABLE_TFT", switches)
    asked: list[Any] = []

    def stop(args: Any, ctx: Any) -> None:
        asked.append(args)
        if len(asked) < 3:
            raise RuntimeError("Can't stop device, because training parameters are left in inconsistent state!")

    handlers = Handlers()
    handlers.register(HandlerKind.STOP, stop)
    parts: Any = SimpleNamespace()
    recovery = HandlerRecovery(parts, handlers=handlers, state=parts, device=parts, conversation=parts, names=parts)

    with contextlib.nullcontext() if calls == 3 else pytest.raises(RuntimeError, match="inconsistent"):
        recovery._call_stop_handler()

    assert len(asked) == calls
