"""Actions of ranks that are held between two steps: what the machine orders and writes down, and what a rank calls."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from midstep.controller.recovery.events import ControllerStarted
from midstep.controller.recovery.state import Phase
from midstep.devices.npu import NpuDevice
from midstep.processor import actions
from midstep.processor.actions import ActionCalls, register_action
from midstep.protocol import controls as c
from midstep.protocol.bounds import LONGEST_NAME
from midstep.protocol.errors import ConfigurationError, RecoveryError
from midstep.protocol.messages import ActionEnded, CallAction, Rejoin
from midstep.testing.fake_cluster import FakeCluster, only

from .test_controls import RANKS, answered, ask, paused
from .test_draining import BOUNDARY

SWITCH = c.PerformAction("switch_nic", {"ranks": "0", "use_backup": "1"}, None, 60.0)
NUMBER = 2  # of the control: the pause is the first


def standing(cluster: FakeCluster) -> c.StandingAction:
    """The action as the status has it."""
    action = cluster.machine.status(cluster.now).controls.action
    assert action is not None
    return action


def said(rank: int, text: str = "switched", *, succeeded: bool = True, number: int = NUMBER) -> ActionEnded:
    """The answer of a rank."""
    return ActionEnded(rank, number, succeeded, text)


def outcome(cluster: FakeCluster) -> str:
    """What the record of the action says has become of it."""
    return cluster.machine.status(cluster.now).controls.records[NUMBER - 1].outcome


# --- the machine ------------------------------------------------------------------------------------------------------


def test_all_ranks_that_are_held_call_an_action_and_the_record_says_what_they_answered(cluster: FakeCluster) -> None:
    paused(cluster)
    calls = only(ask(cluster, SWITCH), CallAction)
    assert calls == [CallAction(NUMBER, "switch_nic", SWITCH.arguments)] * len(RANKS)
    assert answered(cluster) == ("4 ranks perform it, for 60 s at most", False)
    cluster.feed(said(0), said(1), said(3))
    assert standing(cluster).waiting == {2}
    cluster.feed(said(2, "no link", succeeded=False))
    assert standing(cluster).outcome == outcome(cluster) == "performed by 3 of 4 ranks; rank 2: no link"
    assert only(ask(cluster, c.EndPause()), Rejoin)


def test_ranks_that_are_named_alone_are_asked(cluster: FakeCluster) -> None:
    paused(cluster)
    ask(cluster, msgspec.structs.replace(SWITCH, ranks=(1, 3)))
    assert standing(cluster).waiting == {1, 3}
    cluster.feed(said(1), said(0), said(3), said(3))
    assert [result.rank for result in standing(cluster).results] == [1, 3]
    assert outcome(cluster) == "performed by 2 of 2 ranks"


@pytest.mark.parametrize(
    ("before", "control", "why"),
    [
        ([], SWITCH, "the ranks do not stand still"),
        ([c.PauseTraining(600.0)], SWITCH, "the ranks do not stand still"),  # not yet
        (None, msgspec.structs.replace(SWITCH, ranks=(4,)), "there is no rank 4: the world has ranks 0 to 3"),
        (None, SWITCH, "4 ranks still perform switch_nic"),
    ],
)
def test_an_action_that_cannot_be_performed_is_refused(
    cluster: FakeCluster, before: list[c.Control] | None, control: c.Control, why: str
) -> None:
    if before is None:
        paused(cluster)
        ask(cluster, SWITCH)
    for each in before or []:
        ask(cluster, each)
    assert not only(ask(cluster, control), CallAction)
    text, refused = answered(cluster)
    assert refused
    assert text.startswith(why)


def test_the_pause_lasts_as_long_as_an_action_may_take(cluster: FakeCluster) -> None:
    """A rank that has not answered in time has failed; then the pause ends by itself, as it would have."""
    paused(cluster, 5.0)
    ask(cluster, SWITCH)
    began_s = cluster.now
    ask(cluster, c.EndPause())
    assert answered(cluster)[1]
    cluster.feed(said(0), said(1), said(2))
    sent: list[Any] = []
    while not sent:
        assert standing(cluster).waiting
        sent = only(cluster.overdue(), Rejoin)
    assert 60.0 <= cluster.now - began_s < 61.0
    assert outcome(cluster) == "performed by 3 of 4 ranks; rank 3: no answer within 60 s"


def test_a_longer_pause_goes_on_when_the_time_of_an_action_is_over(cluster: FakeCluster) -> None:
    paused(cluster, 600.0)
    ask(cluster, SWITCH)
    began_s = cluster.now
    while standing(cluster).waiting:
        assert not only(cluster.overdue(), Rejoin)
    assert 60.0 <= cluster.now - began_s < 61.0
    assert cluster.machine.status(cluster.now).held


def test_a_fault_ends_an_action(cluster: FakeCluster) -> None:
    """Its ranks may have another process by then; late answers are dropped."""
    paused(cluster)
    ask(cluster, SWITCH)
    cluster.feed(said(0))
    cluster.feed(cluster.exited(1))
    cluster.recover(BOUNDARY)
    assert outcome(cluster) == "performed by 1 of 4 ranks; rank 1: a fault came between"
    cluster.feed(said(1))
    assert len(standing(cluster).results) == len(RANKS)


def test_the_next_controller_asks_those_again_that_have_not_answered(cluster: FakeCluster) -> None:
    paused(cluster)
    ask(cluster, SWITCH)
    cluster.feed(said(0), said(2))
    memory = cluster.machine.memory()
    cluster.machine = cluster.new_machine()
    cluster.machine.restore(memory)
    assert len(only(cluster.feed(ControllerStarted(2)), CallAction)) == 2
    cluster.feed(said(1), said(3))
    assert outcome(cluster) == "performed by 4 of 4 ranks"
    cluster.expect(Phase.PAUSING)


# --- a rank -----------------------------------------------------------------------------------------------------------


class Rank:
    """The calls of one rank, and what it has answered."""

    def __init__(self, of_device: Mapping[str, Callable[[Mapping[str, str]], object]] | None = None) -> None:
        self.answers: list[ActionEnded] = []
        self.answered = threading.Semaphore(0)
        self.calls = ActionCalls(1, lambda: of_device or {}, self._post)

    def _post(self, answer: ActionEnded) -> None:
        self.answers.append(answer)
        self.answered.release()

    def ask(self, number: int, action: str, *, held: bool = True, **arguments: str) -> ActionEnded:
        """Have an action called, and return the answer."""
        self.calls.call(CallAction(number, action, arguments), held=held)
        assert self.answered.acquire(timeout=10.0)
        return self.answers[-1]


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "_registered", {})


def test_an_action_is_called_with_its_arguments_and_its_words_are_the_answer() -> None:
    """One of the script comes before the device's own."""
    rank = Rank({"test": lambda _: "of the device", "other": lambda _: None})
    assert rank.ask(1, "test").text == "of the device"
    register_action("test", lambda arguments: sorted(arguments.items()))
    assert rank.ask(2, "test", b="2", a="1") == ActionEnded(1, 2, True, "[('a', '1'), ('b', '2')]")
    assert rank.ask(3, "other").text == ""


def test_an_action_that_raises_has_failed_whatever_it_raises() -> None:
    def leave(_: Mapping[str, str]) -> None:
        raise SystemExit("no")

    def fail(_: Mapping[str, str]) -> None:
        raise RecoveryError("2-find fault rank")

    register_action("leave", leave)
    register_action("fail", fail)
    rank = Rank()
    assert rank.ask(1, "leave") == ActionEnded(1, 1, False, "SystemExit: no")
    assert rank.ask(2, "fail") == ActionEnded(1, 2, False, "2-find fault rank")


def test_an_action_that_is_not_there_is_told_with_those_that_are() -> None:
    register_action("b", lambda _: None)
    answer = Rank({"a": lambda _: None}).ask(1, "c")
    assert answer.text == "there is no action 'c'; this rank has: a, b"
    assert not answer.succeeded


def test_a_rank_that_is_not_held_performs_nothing() -> None:
    called: list[Any] = []
    register_action("a", called.append)
    answer = Rank().ask(1, "a", held=False)
    assert (answer.succeeded, answer.text) == (False, "the rank is not held between two steps any more")
    assert called == []


def test_a_command_that_comes_again_is_answered_and_not_repeated() -> None:
    called: list[Any] = []
    register_action("a", called.append)
    rank = Rank()
    first = rank.ask(1, "a")
    assert rank.ask(1, "a") == first
    assert len(called) == 1


def test_an_action_is_not_called_while_another_one_runs() -> None:
    go = threading.Event()
    register_action("slow", lambda _: go.wait(10.0))
    rank = Rank()
    rank.calls.call(CallAction(1, "slow", {}), held=True)
    assert rank.ask(2, "slow").text == "the rank still performs slow"
    go.set()
    assert rank.answered.acquire(timeout=10.0)
    assert rank.answers[-1] == ActionEnded(1, 1, True, "True")


@pytest.mark.parametrize("name", ["", "x" * (LONGEST_NAME + 1)])
def test_a_name_that_no_operator_could_write_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="allowed: 1 to"):
        register_action(name, print)


# --- the actions of an NPU --------------------------------------------------------------------------------------------


class Npu:
    """The two calls of torch_npu, which write down what they are given."""

    def __init__(self, *, switches: bool = True, code: int = 0) -> None:
        self.switches, self.code = switches, code
        self.given: list[Any] = []

    def current_device(self) -> int:
        return 3

    def set_device(self, device: int) -> None:
        self.given.append(device)

    def _comm_switch_nic(self, ranks: list[int], use_backup: list[bool]) -> bool:
        self.given.append((ranks, use_backup))
        return self.switches

    def stress_detect(self) -> int:
        return self.code


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Npu], NpuDevice]:
    """Make the device of a library that has nothing but these calls."""
    monkeypatch.setattr("midstep.devices.npu.require", lambda library, version: None)

    def make(npu: Npu) -> NpuDevice:
        return NpuDevice(type("library", (), {"npu": npu}))

    return make


def test_network_cards_are_switched_on_the_ranks_that_are_named(device_of: Callable[[Npu], NpuDevice]) -> None:
    npu = Npu()
    assert device_of(npu).actions()["switch_nic"]({"ranks": "0,2", "use_backup": "1,0"}) == "switched"
    assert npu.given == [3, ([0, 2], [True, False])]
    with pytest.raises(RecoveryError, match="not switched"):
        device_of(Npu(switches=False)).actions()["switch_nic"]({"ranks": "0", "use_backup": "1"})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"ranks": "0,1", "use_backup": "1"}, "2 ranks and 1 value"),
        ({"ranks": "0", "use_backup": "yes"}, "use_backup='yes'"),
        ({"use_backup": "1"}, "ranks=''"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    device_of: Callable[[Npu], NpuDevice], arguments: Mapping[str, str], why: str
) -> None:
    npu = Npu()
    with pytest.raises(ConfigurationError, match=why):
        device_of(npu).actions()["switch_nic"](arguments)
    assert npu.given == []


def test_a_stress_test_tells_the_code_that_mindcluster_reads(device_of: Callable[[Npu], NpuDevice]) -> None:
    assert device_of(Npu()).actions()["stress_test"]({}) == "0-OK"
    with pytest.raises(RecoveryError, match=r"^2-find fault rank$"):
        device_of(Npu(code=2)).actions()["stress_test"]({"operation": "aic"})
    with pytest.raises(ConfigurationError, match="use operation=aic"):
        device_of(Npu()).actions()["stress_test"]({"operation": "hccs"})
