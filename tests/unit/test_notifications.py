"""Notices to people: decided from the job's status, owed until taken, and known to the next controller."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from midstep.controller.endpoints import notifier as notifier_module
from midstep.controller.endpoints.notifier import Notifier, newest_in
from midstep.controller.endpoints.webhooks import Told
from midstep.controller.journaled import ConditionChanged, Notice, NoticeEvent, NoticeSettled
from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.metrics import Observation
from midstep.controller.notifications import MOST_OWED, NewestCheckpoint, NoticeBook, changes, duration_text
from midstep.controller.recovery.events import ControllerStarted, StopRequested
from midstep.controller.recovery.state import Phase
from midstep.controller.routes import Routes
from midstep.policies.schema import NotifyPolicy, Policy, WebhookPolicy
from midstep.protocol.incidents import NoticeKind
from midstep.protocol.messages import NodeLost
from midstep.protocol.time_spent import TimeCategory, TimeSpent
from midstep.protocol.types import Assertion, FaultKind, FaultLevel
from midstep.testing.fake_cluster import FakeCluster, job

HOOK = WebhookPolicy("oncall", "/etc/url")


class ToldCluster(FakeCluster):
    """A cluster with the book of its notices."""

    def __init__(self, spares: int = 1, **notify: object) -> None:
        settings = msgspec.convert({"webhooks": [msgspec.to_builtins(HOOK)], **notify}, NotifyPolicy)
        super().__init__(job(spares=spares), Policy(notify=settings))
        self.book = NoticeBook()
        self.began_s = self.now

    def feed(self, *events: object) -> list[object]:
        """Hand events to machine and book."""
        bodies: list[object] = []
        for event in events:
            if not isinstance(event, ConditionChanged | NoticeSettled):
                bodies += super().feed(event)  # type: ignore[arg-type]
            self.book.follow(self.machine.state, event, self.now)  # type: ignore[arg-type]
        return bodies

    def seen(self, lately: tuple[TimeSpent, ...] = ()) -> Observation:
        """The job as its controller sees it."""
        time = TimeSpent(self.began_s, self.now, None, {})
        return Observation(self.now, self.machine.state, 5, time, lately, {}, 1)

    def look(self, newest: NewestCheckpoint | None = None, lately: tuple[TimeSpent, ...] = ()) -> list[str]:
        """Look at the job, take in what has changed, and return what is told now."""
        found = changes(self.seen(lately), self.book, newest)
        self.feed(*found)
        return [each.notice.text for each in found if each.notice is not None]


def started(spares: int = 1, **notify: object) -> ToldCluster:
    """A job that trains, and was looked at."""
    cluster = ToldCluster(spares, **notify)
    cluster.start()
    assert cluster.look() == []
    return cluster


def test_nothing_is_told_of_a_job_that_trains() -> None:
    cluster = started()
    cluster.now += 86_400.0
    assert cluster.look() == []
    assert not cluster.book.owed


def test_without_a_webhook_the_book_stays_empty() -> None:
    """And so do journal and snapshot."""
    cluster = ToldCluster(webhooks=[])
    cluster.start()
    cluster.feed(StopRequested("enough"))
    assert cluster.book == NoticeBook()


def test_a_budget_is_told_of_once_when_four_fifths_are_spent() -> None:
    """Also when it is spent further; and again when it was below that in between."""
    cluster = started(again_s=60.0)
    told: list[str] = []
    for _ in range(3):  # of per_rank 3, the narrowest
        cluster.feed(cluster.exited(1))
        cluster.recover(5)
        told += cluster.look()
    assert told == [
        "budget recover_in_place per rank: 3 of 3 are spent. Then a coarser rung is taken; `midstep report` says what "
        "spent it"
    ]
    cluster.now += 4000.0  # beyond the window
    assert cluster.look() == []
    for _ in range(3):
        cluster.feed(cluster.exited(1))
        cluster.recover(5)
    assert len(cluster.look()) == 1


def test_the_loss_of_the_last_spare_node_is_told_of() -> None:
    cluster = started()
    cluster.feed(NodeLost("node2", "silent", cluster.now))
    (text,) = cluster.look()
    assert text.startswith("no spare node is left: ")
    assert cluster.look() == []


def test_a_job_that_never_had_a_spare_lacks_none() -> None:
    assert started(spares=0).look() == []


def test_what_is_told_of_again_waits_for_its_time() -> None:
    cluster = started(again_s=600.0)
    cluster.feed(NodeLost("node2", "silent", cluster.now))
    assert len(cluster.look()) == 1
    for later_s, told in ((10.0, 0), (600.0, 1)):
        cluster.now += later_s
        cluster.feed(cluster.node("node9"))
        assert cluster.look() == []
        cluster.feed(NodeLost("node9", "silent", cluster.now))
        assert len(cluster.look()) == told


def test_a_person_is_asked_when_nothing_is_trained_for_long() -> None:
    """The text says what is waited for. Afterwards the same can be told again."""
    cluster = ToldCluster(asked_after_s=600.0)
    cluster.feed(ControllerStarted(1))
    cluster.feed(cluster.node("node0"))
    cluster.now += 599.0
    assert cluster.look() == []
    cluster.now += 2.0
    (text,) = cluster.look()
    assert text == (
        "nothing has been trained for 10 min: it waits for nodes, and has 1 of the 2 that it needs (node node0). "
        "`midstep status` says more"
    )
    cluster.start()
    cluster.look()
    assert cluster.book.standing["asked:training"] is False


def test_a_script_that_never_calls_midstep_is_no_reason_to_ask() -> None:
    """Its ranks are starting for as long as they live."""
    cluster = ToldCluster()
    for name in ("node0", "node1", "node2"):
        cluster.feed(cluster.node(name))
    for rank in range(4):
        cluster.feed(cluster.started(rank))
    cluster.expect(Phase.STARTING)
    cluster.now += 86_400.0
    assert cluster.look() == []


def test_a_person_is_asked_to_look_at_a_device_that_was_separated_for_good() -> None:
    cluster = started()
    cluster.feed(
        cluster.fault(
            None, FaultKind.DEVICE, node="elsewhere", device=3, level=FaultLevel.MANUALLY_SEPARATE_NPU,
            assertion=Assertion.OCCUR, detail="80E18005", fault_id="one",
        )
    )  # fmt: skip
    assert cluster.look() == [
        "elsewhere, device 3 has failed too often and is left until a person has looked: 80E18005"
    ]


def test_the_next_controller_says_for_how_long_there_was_none() -> None:
    cluster = started(unguarded_s=30.0)
    cluster.now += 100.0
    cluster.feed(ControllerStarted(2, cluster.now - 10.0))
    assert not cluster.book.owed
    cluster.now += 100.0
    cluster.feed(ControllerStarted(3, cluster.now - 45.0))
    (owed,) = cluster.book.owed.values()
    assert owed.notice.text == "the job was without a controller for 45 s; it has one again, in term 3"


def test_an_old_checkpoint_and_its_absence_are_told_of() -> None:
    cluster = started(checkpoint_age_s=3600.0)
    assert cluster.look(NewestCheckpoint(40, 3599.0)) == []
    (text,) = cluster.look(NewestCheckpoint(40, 7500.0))
    assert text.startswith("the newest checkpoint, of step 40, is 2 h 5 min old")
    assert cluster.look(NewestCheckpoint(80, 1.0)) == []
    other = started(checkpoint_age_s=3600.0)
    other.now = other.began_s + 3500.0
    other.feed(ControllerStarted(2))
    other.now += 200.0
    (text,) = other.look(NewestCheckpoint(None))
    assert text.startswith("there is no complete checkpoint, 62 min after the job began"), "not the controller"


def test_a_low_goodput_of_the_last_hour_is_told_of() -> None:
    cluster = started(goodput_under=0.9)
    day = TimeSpent(0.0, 86_400.0, 0.1, {TimeCategory.TRAINING: 8640.0})
    assert cluster.look(lately=(day,)) == []
    (text,) = cluster.look(lately=(TimeSpent(0.0, 3600.0, 0.83, {}), day))
    assert text.startswith("only 83.0 % of the last hour were training")


def test_the_end_is_owed_to_those_who_want_it_and_spares_that_leave_then_are_no_news() -> None:
    quiet = WebhookPolicy("tickets", "/etc/other", events=(NoticeKind.BUDGET,))
    cluster = started(webhooks=[msgspec.to_builtins(HOOK), msgspec.to_builtins(quiet)])
    cluster.feed(StopRequested("enough"), StopRequested("enough"))
    assert cluster.finish is not None
    cluster.feed(NodeLost("node2", "gone", cluster.now))
    assert cluster.look() == []
    (owed,) = cluster.book.owed.values()
    assert owed.notice.kind is NoticeKind.ENDED
    assert owed.notice.text.startswith("the job has ended with exit code 130: enough")
    assert owed.webhooks == ("oncall",)
    cluster.feed(NoticeSettled(owed.notice.id, "oncall", delivered=True))
    assert not cluster.book.owed


def test_no_flood_of_notices_is_kept() -> None:
    cluster = started()
    for number in range(MOST_OWED + 7):
        notice = Notice(f"budget:{number}@1", NoticeKind.BUDGET, str(number), "text", cluster.now)
        cluster.feed(ConditionChanged(f"budget:{number}", notice))
    assert len(cluster.book.owed) == MOST_OWED
    assert next(iter(cluster.book.owed)) == "budget:7@1"


def test_the_next_controller_owes_what_the_last_one_owed() -> None:
    """From the events, from a snapshot, and from one that was written before there were notices."""
    cluster = started(again_s=60.0)
    cluster.feed(NodeLost("node2", "silent", cluster.now))
    (change,) = changes(cluster.seen(), cluster.book)
    machine = cluster.new_machine()
    first = Learned(machine, Routes(), Liveness(cluster.policy.heartbeat))
    for event, at_s in cluster.journal:
        first.take(event, at_s)
    first.take(ConditionChanged("no_spare:"), cluster.now)
    first.take(change, cluster.now)
    next_one = Learned(cluster.new_machine(), Routes(), Liveness(cluster.policy.heartbeat))
    next_one.restore(first.snapshot())
    assert next_one.notices == first.notices
    assert [each.notice for each in next_one.notices.owed.values()] == [change.notice]
    assert changes(cluster.seen(), next_one.notices) == ()


@pytest.mark.parametrize(("duration_s", "text"), [(45.4, "45 s"), (720.0, "12 min"), (11_100.0, "3 h 5 min")])
def test_durations_are_in_words(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text


# --- beside the loop --------------------------------------------------------------------------------------------------


class ListThread:
    """Takes notices as a thread does, as long as there is room, and hands nothing over."""

    def __init__(self, taken: list[Notice], room: int) -> None:
        self._taken, self._room = taken, room

    def start(self) -> None:
        """There is nothing to start."""

    def take(self, notice: Notice) -> bool:
        """Take a notice if there is room."""
        if len(self._taken) < self._room:
            self._taken.append(notice)
            return True
        return False

    def hurry(self) -> None:
        """It is in no hurry."""

    def close(self) -> None:
        """There is nothing to close."""


class Hooked:
    """A notifier whose threads are lists."""

    def __init__(self, cluster: ToldCluster, monkeypatch: pytest.MonkeyPatch, room: int = 100) -> None:
        self.taken: list[Notice] = []
        self.told: list[NoticeEvent] = []
        self.writable = True

        def thread(*_: object) -> ListThread:
            return ListThread(self.taken, room)

        monkeypatch.setattr(notifier_module, "WebhookThread", thread)
        self.notifier = Notifier(
            cluster.job,
            cluster.policy,
            observe=lambda: msgspec.structs.replace(cluster.seen(), writable=self.writable),
            book=lambda: cluster.book,
            tell=self.told.append,
            now=lambda: cluster.now,
        )
        asyncio.run(self._begin())

    async def _begin(self) -> None:
        running = asyncio.create_task(self.notifier.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])


def test_a_change_is_journaled_once_and_handed_over_once_it_is_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = started()
    hooked = Hooked(cluster, monkeypatch)
    cluster.feed(NodeLost("node2", "silent", cluster.now))
    for _ in range(3):
        hooked.notifier.look()
    assert len(hooked.told) == 1
    assert hooked.taken == []
    cluster.feed(*hooked.told)
    for _ in range(3):
        hooked.notifier.look()
    (notice,) = hooked.taken
    assert notice.kind is NoticeKind.NO_SPARE
    assert [each.waiting for each in hooked.notifier.webhooks()] == [1]
    hooked.notifier._take(Told("oncall", notice.id))
    cluster.feed(*hooked.told[1:])
    assert hooked.told[1:] == [NoticeSettled(notice.id, "oncall", delivered=True)]
    assert [each.waiting for each in hooked.notifier.webhooks()] == [0]


def test_what_finds_no_room_is_handed_over_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = started()
    hooked = Hooked(cluster, monkeypatch, room=0)
    cluster.feed(NodeLost("node2", "silent", cluster.now))
    cluster.look()
    hooked.notifier.look()
    assert not hooked.notifier._handed
    assert hooked.notifier.webhooks()[0].waiting == 1


def test_a_dead_webhook_is_told_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cluster = started()
    hooked = Hooked(cluster, monkeypatch)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            hooked.notifier._take(Told("oncall", "id", "it answers 500", settled=False))
        assert hooked.notifier.webhooks()[0].trouble == "it answers 500"
        hooked.notifier._take(Told("oncall", "id"))
    assert [record.message for record in caplog.records] == [
        "webhook oncall: it answers 500; it is tried again",
        "webhook oncall takes notices again",
    ]
    assert hooked.notifier.webhooks()[0].trouble == ""


def test_that_the_journal_cannot_be_written_is_told_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; and nothing is put on the way into the journal for it."""
    cluster = started()
    hooked = Hooked(cluster, monkeypatch)
    hooked.writable = False
    for _ in range(3):
        hooked.notifier.look()
    (notice,) = hooked.taken
    assert notice.text.startswith("the journal cannot be written")
    hooked.notifier._take(Told("oncall", notice.id))
    assert hooked.told == []


def test_the_newest_complete_checkpoint_is_looked_for(tmp_path: Path) -> None:
    """A directory that is not there has none, as one that is empty."""
    for directory in (tmp_path / "none", tmp_path):
        assert newest_in(str(directory), 1000.0) == NewestCheckpoint(None)
