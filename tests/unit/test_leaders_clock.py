"""When the leader's clock is told and looked at in etcd, and how much is left open. With a real etcd: tests/etcd."""

import time
from collections.abc import Sequence

import msgspec
import pytest

from midstep.controller.clock import Clock
from midstep.controller.election.presence import LOOK_S, TELL_S, LeadersClock
from midstep.controller.etcd.client import Condition, Kept, Operation, holds
from midstep.controller.etcd.place import parse_place

PLACE = parse_place("etcd://a", "demo")
HOLDS = holds(PLACE.term, b"1")
TTL_S = 2.0


class _Store:
    """One key. `reads` and `writes` count the requests."""

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self.reads = 0
        self.writes: list[tuple[Sequence[Condition], Sequence[Operation]]] = []

    def put(self, value: bytes) -> None:
        revision = self.kept.revision + 1 if self.kept else 1
        self.kept = Kept(PLACE.clock, value, revision)

    def get(self, key: str) -> Kept | None:
        assert key == PLACE.clock
        self.reads += 1
        return self.kept

    def change(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> int:
        self.writes.append((conditions, operations))
        return 1


class _Controller:
    """A controller whose thread looks after the clock at times that a test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.store, self.clock = _Store(), LeadersClock(PLACE)

    def look_after(self, *, later_s: float = 0.0) -> None:
        self.now_s += later_s
        self.clock.look_after(self.store, 7, TTL_S)  # type: ignore[arg-type]


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> _Controller:
    return _Controller(monkeypatch)


def test_a_leader_tells_its_clock_at_once_and_then_now_and_then_while_its_term_holds(controller: _Controller) -> None:
    controller.clock.lead(Clock(), HOLDS)
    for later_s in (0.0, TELL_S / 2, TELL_S / 2, 0.1):
        controller.look_after(later_s=later_s)
    assert len(controller.store.writes) == 2
    assert [conditions for conditions, _ in controller.store.writes] == [[HOLDS], [HOLDS]]
    assert all(operation["request_put"]["lease"] == 7 for _, (operation,) in controller.store.writes)
    assert not controller.store.reads


def test_what_is_there_at_the_first_look_may_be_as_old_as_a_living_leader_lets_it_be(controller: _Controller) -> None:
    controller.store.put(msgspec.msgpack.encode(5.0))
    controller.look_after()
    controller.look_after(later_s=LOOK_S / 2)
    assert controller.store.reads == 1
    heard = controller.clock.heard
    assert heard is not None
    assert (heard.at_s, heard.monotonic_s, heard.slack_s) == (5.0, 100.0, TELL_S + TTL_S)


def test_what_is_told_later_is_as_old_as_the_look_before_at_most(controller: _Controller) -> None:
    controller.look_after()
    assert controller.clock.heard is None
    controller.store.put(msgspec.msgpack.encode(5.0))
    controller.look_after(later_s=3 * LOOK_S)
    controller.look_after(later_s=LOOK_S)  # the same value says nothing new
    heard = controller.clock.heard
    assert heard is not None
    assert (heard.at_s, heard.monotonic_s, heard.slack_s) == (5.0, 100.0 + 3 * LOOK_S, 3 * LOOK_S)


def test_a_value_that_no_controller_has_written_is_said_once_and_passed_over(controller: _Controller) -> None:
    controller.store.put(b"nonsense")
    with pytest.raises(msgspec.DecodeError):
        controller.look_after()
    controller.look_after(later_s=LOOK_S)
    assert controller.clock.heard is None
