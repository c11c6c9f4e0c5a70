"""The journal in a real etcd: what is acknowledged stays, what is damaged is refused, and one controller writes."""

import base64
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from midstep.controller import clock
from midstep.controller.election import presence as presences
from midstep.controller.election.presence import LOOP_ALIVE_S, EtcdPresence
from midstep.controller.election.succession import PREFERRED_S, EtcdSuccession
from midstep.controller.endpoints.story import StoryOrder, story_of
from midstep.controller.etcd.client import Condition, Etcd, Operation, delete, put
from midstep.controller.etcd.place import EtcdPlace, numbered, parse_place
from midstep.controller.journal import etcd_store, records
from midstep.controller.journal.etcd_store import open_in_etcd, submit
from midstep.controller.journal.journal import Journal, Limits
from midstep.controller.journal.reading import read_founding, read_status, read_story
from midstep.controller.journal.records import JournalEntry
from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.recovery.events import StopRequested
from midstep.controller.routes import Routes
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.errors import ConfigurationError, JournalDamaged, JournalError, JournalSuperseded
from midstep.protocol.incidents import ControllerPhase, ControllerStatus
from midstep.protocol.types import JobSpec

from .conftest import StartServer

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]

JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
LEASE_S = 2.0
PATIENCE_S = 60.0
Open = Callable[..., Journal]


@pytest.fixture
def lead() -> Iterator[Open]:
    """Lead a job: `lead(place, "first")`; further ones wait until they may."""
    with ExitStack() as opened:

        def open_journal(place: EtcdPlace, name: str, **options: Any) -> Journal:
            presence = EtcdPresence(place, name, LEASE_S)
            opened.callback(presence.close)
            journal = open_in_etcd(place, presence, lease_s=LEASE_S, **{"wait_s": PATIENCE_S, **options})
            opened.callback(journal.close)
            return journal

        yield open_journal


@pytest.fixture
def job(place: EtcdPlace) -> EtcdPlace:
    """A job in the etcd of all tests."""
    submit(place, JOB, default_policy())
    return place


def say(journal: Journal, *words: str, first: int = 0, at_s: float = 1.0) -> tuple[bool, ...]:
    """Append events, numbered from `first` on where that is given."""
    numbers = range(first, first + len(words)) if first else [0] * len(words)
    entries = [
        JournalEntry(StopRequested(word), "node/a", 1, number) for word, number in zip(words, numbers, strict=True)
    ]
    return journal.append(entries, at_s)


def told(journal: Journal) -> list[str]:
    return [event.reason for event, _ in journal.load(lambda state: None) if isinstance(event, StopRequested)]


def leave(journal: Journal) -> None:
    """End a controller in order, as far as others can see."""
    journal._leadership._presence.close()  # type: ignore[attr-defined]
    journal.close()


def until(holds: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, f"still waiting for {what}"
        time.sleep(0.02)


def test_the_next_controller_reads_what_was_written_in_a_later_term_and_session(job: EtcdPlace, lead: Open) -> None:
    first = lead(job, "first")
    assert (first.term, told(first)) == (1, [])
    assert say(first, "a", "b", first=1) == (True, True)
    assert say(first, "c") == (True,)
    leave(first)
    second = lead(job, "second")
    assert (second.term, told(second)) == (2, ["a", "b", "c"])
    assert second.session > first.session
    assert second.clock.now() >= first.clock.now() - 1
    assert [name for name, _ in second.taken_in()] == ["node/a"]


def test_a_repetition_is_marked_and_not_written(job: EtcdPlace, lead: Open) -> None:
    first = lead(job, "first")
    told(first)
    assert say(first, "a", "b", first=1) == (True, True)
    assert say(first, "b", "c", first=2) == (False, True)
    leave(first)
    second = lead(job, "second")
    assert told(second) == ["a", "b", "c"]
    assert say(second, "c", first=3) == (False,)


def test_a_controller_whose_loop_hangs_is_replaced_and_can_write_nothing(job: EtcdPlace, lead: Open) -> None:
    first = lead(job, "first")
    told(first)
    say(first, "a")
    second = lead(job, "second")  # the first one does not beat any more
    assert (second.term, told(second)) == (2, ["a"])
    for harm in (lambda: say(first, "late"), first.require_lead):
        with pytest.raises(JournalSuperseded, match="another controller leads"):
            until(lambda harm=harm: bool(harm()), "the first one to be told")  # type: ignore[misc]
    first._growth.grown(100_000, 0)
    with pytest.raises(JournalSuperseded):
        first.compact(lambda: b"late", quiet=True)
    say(second, "b")
    leave(second)
    assert told(lead(job, "third")) == ["a", "b"]


def test_a_leader_that_shows_signs_of_life_is_left_alone(job: EtcdPlace, lead: Open) -> None:
    first = lead(job, "first")
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(LOOP_ALIVE_S / 4):
            first.require_lead()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(JournalError, match=r"another controller is active \(first, pid"):
            lead(job, "second", wait_s=2 * LEASE_S)
        told(first)
        assert say(first, "a") == (True,)
    finally:
        ended.set()
        thread.join(PATIENCE_S)


def test_of_several_that_stand_one_leads(job: EtcdPlace, lead: Open) -> None:
    led: list[Journal] = []
    refused: list[JournalError] = []

    def stand(number: int) -> None:
        try:
            journal = lead(job, f"c{number}", wait_s=1.0)
            led.append(journal)
            until(lambda: journal.require_lead() or len(refused) == 3, "the others")  # type: ignore[func-returns-value]
        except JournalError as error:
            refused.append(error)

    threads = [threading.Thread(target=stand, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert ([journal.term for journal in led], len(refused)) == ([1], 3), refused


def test_an_etcd_that_was_frozen_for_longer_than_a_lease_changes_nothing(start_server: StartServer, lead: Open) -> None:
    """Meanwhile nothing can be written; afterwards the same one leads in the same term."""
    server = start_server()
    place = parse_place(server.url, "demo")
    submit(place, JOB, default_policy())
    journal = lead(place, "first")
    told(journal)
    waiting: list[Journal] = []
    rival = threading.Thread(target=lambda: waiting.append(lead(place, "second")))
    rival.start()
    until(lambda: Etcd(place).get(f"{place.controllers}second") is not None, "the second one to stand by")
    server.members[0].send(signal.SIGSTOP)
    ended_s = time.monotonic() + 2 * LEASE_S
    with pytest.raises(JournalError, match="cannot write"):
        say(journal, "a", first=1)
    while time.monotonic() < ended_s:
        journal.require_lead()
        time.sleep(0.1)
    server.members[0].send(signal.SIGCONT)

    until(lambda: _written(journal, "a", 1), "etcd")
    since_s = time.monotonic()
    while time.monotonic() < since_s + LEASE_S:
        journal.require_lead()
        time.sleep(0.1)
    assert not waiting
    leave(journal)
    rival.join(PATIENCE_S)
    assert (waiting[0].term, told(waiting[0])) == (2, ["a"])


def test_a_member_that_is_killed_is_not_needed(start_server: StartServer, lead: Open) -> None:
    server = start_server(3)
    place = parse_place(server.url, "demo")
    until(lambda: _reachable(place), "a quorum")
    submit(place, JOB, default_policy())
    journal = lead(place, "first")
    told(journal)
    say(journal, "a", first=1)
    server.members[0].kill()

    until(lambda: _written(journal, "b", 2), "the other members")
    leave(journal)
    assert told(lead(place, "second")) == ["a", "b"]


def _written(journal: Journal, word: str, number: int) -> bool:
    """Try once more, as the driver does; it must not be deposed meanwhile."""
    journal.require_lead()
    try:
        return say(journal, word, first=number) == (True,)
    except JournalSuperseded:
        raise
    except JournalError:
        return False


def _reachable(place: EtcdPlace) -> bool:
    try:
        Etcd(place).get("x")
    except JournalError:
        return False
    return True


def test_an_etcd_that_dies_and_comes_back_has_all_that_it_acknowledged(start_server: StartServer, lead: Open) -> None:
    server = start_server()
    place = parse_place(server.url, "demo")
    submit(place, JOB, default_policy())
    journal = lead(place, "first")
    told(journal)
    say(journal, "a", first=1)
    server.members[0].kill()
    with pytest.raises(JournalError, match="can be reached from here"):
        say(journal, "b", first=2)
    server.members[0].start()
    server.members[0].wait()
    until(lambda: _reachable(place), "etcd")
    assert say(journal, "b", first=2) == (True,)
    assert told(journal) == ["a", "b"]


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_write_whose_answer_was_lost_counts_once(
    job: EtcdPlace, lead: Open, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    """What comes in its place has more events by then, at a later time."""
    journal = lead(job, "first")
    told(journal)
    say(journal, "a", first=1)
    change, writer = Etcd.change, threading.current_thread()

    def lossy(self: Etcd, conditions: Sequence[Condition], operations: Sequence[Operation]) -> int | None:
        looks_after_the_lease = threading.current_thread() is not writer
        if looks_after_the_lease:
            return change(self, conditions, operations)
        if carried_out:
            change(self, conditions, operations)
        raise JournalError("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(Etcd, "change", lossy)
        with pytest.raises(JournalError, match="no answer"):
            say(journal, "b", first=2, at_s=2.0)
    assert say(journal, "b", "c", first=2, at_s=3.0) == (True, True)
    assert say(journal, "d", first=4, at_s=4.0) == (True,)
    leave(journal)
    second = lead(job, "second")
    assert [at_s for _, at_s in second.load(lambda state: None)] == [1.0, 3.0, 3.0, 4.0]
    assert told(second) == ["a", "b", "c", "d"]


def test_events_that_are_larger_than_a_request_are_written_all_or_none(
    job: EtcdPlace, lead: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that nothing names count for nothing."""
    noise = [base64.b64encode(random.Random(seed).randbytes(1_200_000)).decode() for seed in (1, 2)]
    journal = lead(job, "first")
    told(journal)
    say(journal, "a", first=1)
    parts: list[Sequence[Operation]] = []
    change, writer = Etcd.change, threading.current_thread()

    def dies(self: Etcd, conditions: Sequence[Condition], operations: Sequence[Operation]) -> int | None:
        looks_after_the_lease = threading.current_thread() is not writer
        if looks_after_the_lease:
            return change(self, conditions, operations)
        if parts:
            raise JournalError("dead")
        parts.append(operations)
        return change(self, conditions, operations)

    with monkeypatch.context() as broken:
        broken.setattr(Etcd, "change", dies)
        with pytest.raises(JournalError, match="dead"):
            say(journal, *noise, first=2)
    leave(journal)
    second = lead(job, "second")
    assert told(second) == ["a"]
    assert say(second, *noise, first=2) == (True, True)
    assert len(list(Etcd(job).list(job.batches))) > 3, "it was cut into parts"
    leave(second)
    third = lead(job, "third")
    assert told(third) == ["a", *noise]
    say(third, "b", first=4)
    assert told(third) == ["a", *noise, "b"]


def _snapshot(place: EtcdPlace, at_s: float) -> bytes:
    founding = default_policy()
    learned = Learned(_machine(place), Routes(), Liveness(founding.heartbeat))
    learned.at_s = at_s
    return learned.snapshot()


def _machine(place: EtcdPlace) -> Any:
    return read_founding(place).machine()


def test_a_takeover_reads_a_snapshot_and_what_came_after_it(job: EtcdPlace, lead: Open) -> None:
    """And what is in front of the one before is deleted, so that the size is bounded."""
    journal = lead(job, "first", limits=Limits(events=10))
    told(journal)
    for number in range(1, 36):
        say(journal, f"e{number}", first=number, at_s=float(number))
        journal.compact(lambda at_s=number: _snapshot(job, at_s), quiet=True)  # type: ignore[misc]
    kept = [head.key for head in Etcd(job).list(job.batches)]
    assert kept[0] == numbered(job.batches, 21)
    assert len(list(Etcd(job).list(job.snapshots))) == 2
    leave(journal)
    second = lead(job, "second")
    restored: list[bytes] = []
    events = [event.reason for event, _ in second.load(restored.append) if isinstance(event, StopRequested)]
    assert (len(restored), events) == (1, [f"e{number}" for number in range(31, 36)])
    assert say(second, "e7", "e36", first=36) == (True, True)
    assert say(second, "again", first=7) == (False,), "what is in the snapshot was taken in, too"
    assert read_status(job).job == "demo"
    assert next(read_story(job)).number == 21
    assert next(story_of(StoryOrder("/none", job, None))).number == 21


def test_a_snapshot_that_is_not_what_was_written_is_passed_over(job: EtcdPlace, lead: Open) -> None:
    journal = lead(job, "first", limits=Limits(events=10))
    told(journal)
    for number in range(1, 26):
        say(journal, f"e{number}", first=number)
        journal.compact(lambda: _snapshot(job, 1.0), quiet=True)
    newest = Etcd(job).last(job.snapshots)
    assert newest is not None
    Etcd(job).change([], [put(newest.key, newest.value[:-40] + bytes(40))])
    assert told(journal) == [f"e{number}" for number in range(11, 26)]
    for head in list(Etcd(job).list(job.snapshots)):
        Etcd(job).change([], [delete(head.key)])
    with pytest.raises(JournalError, match="are not kept any more"):
        told(journal)


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda job: [delete(numbered(job.batches, 2))], "event 2 is missing"),
        (lambda job: [delete(numbered(job.batches, 3))], "its end is lost: 3 events were in it, and 2 are"),
        (lambda job: [put(numbered(job.batches, 2), b"nonsense")], "is not what was written"),
        (lambda job: [delete(numbered(job.terms, 1))], "term 1 is missing"),
        (lambda job: [delete(job.term)], "its last term is not the one that was written"),
    ],
    ids=["an event", "the end", "a value", "a term", "the present term"],
)
def test_what_was_changed_by_others_is_refused(
    job: EtcdPlace, lead: Open, harm: Callable[[EtcdPlace], list[Operation]], complaint: str
) -> None:
    for name in ("first", "second"):
        journal = lead(job, name)
        told(journal)
        for number in (1, 2, 3):
            say(journal, f"e{number}", first=number)
        leave(journal)
    Etcd(job).change([], harm(job))
    with pytest.raises(JournalDamaged, match=complaint):
        told(lead(job, "third"))


def test_a_term_that_begins_while_another_controller_reads_the_last_one_is_no_damage(
    job: EtcdPlace, lead: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one goes on standing by, and leads when the quicker one has left."""
    read_terms = records.read_terms
    quicker: list[Journal] = []

    def read_slowly(*arguments: Any) -> records.TermRecord | None:
        if not quicker:
            monkeypatch.setattr(etcd_store, "read_terms", read_terms)
            quicker.append(lead(job, "quicker"))
            threading.Timer(LEASE_S, partial(leave, quicker[0])).start()
        return read_terms(*arguments)

    monkeypatch.setattr(etcd_store, "read_terms", read_slowly)
    assert lead(job, "slower").term == quicker[0].term + 1


def test_a_controller_whose_last_events_are_changed_stops_writing(job: EtcdPlace, lead: Open) -> None:
    journal = lead(job, "first")
    told(journal)
    say(journal, "a")
    Etcd(job).change([], [put(numbered(job.batches, 1), b"nonsense")])
    with pytest.raises(JournalDamaged, match="after event 1 it was changed by another program"):
        say(journal, "b")


def test_of_a_job_that_is_over_its_report_is_left(job: EtcdPlace, lead: Open) -> None:
    journal = lead(job, "first", limits=Limits(events=10))
    told(journal)
    for number in range(1, 26):
        say(journal, f"e{number}", first=number)
        journal.compact(lambda: _snapshot(job, 1.0), quiet=True)
    journal.conclude(lambda: _snapshot(job, 25.0))
    leave(journal)
    assert read_status(job).job == "demo"
    until(lambda: Etcd(job).get(job.leader) is None, "the lease to end")
    keys = [kept.key.removeprefix(job.root).partition("/")[0] for kept in Etcd(job).list(job.root)]
    assert keys == ["founding", "snapshots", "term", "terms"]
    second = lead(job, "second")
    assert (second.term, told(second)) == (2, [])


def test_a_job_is_submitted_once_and_a_name_is_used_once(job: EtcdPlace, lead: Open) -> None:
    assert not submit(job, JOB, default_policy())
    lead(job, "first")
    with pytest.raises(ConfigurationError, match="another controller is called first: choose another --name"):
        EtcdPresence(job, "first", LEASE_S)


def test_a_job_that_is_not_there_and_an_etcd_that_is_not_there_are_said_so(place: EtcdPlace, lead: Open) -> None:
    with pytest.raises(JournalError, match="there is no such job"):
        lead(place, "first")
    with pytest.raises(JournalError, match=r"etcd at 127.0.0.1:1 cannot .* Check that it runs"):
        EtcdPresence(parse_place("etcd://127.0.0.1:1", "demo"), "first", LEASE_S)


def test_the_controllers_of_a_job_are_listed_with_their_phases(job: EtcdPlace) -> None:
    first, second = EtcdPresence(job, "first", LEASE_S), EtcdPresence(job, "second", LEASE_S)
    try:
        first.enter(ControllerPhase.HOT, 1)

        def listed() -> bool:
            first.beat()
            second.beat()
            entries = [(each.name, each.phase, each.term) for each in second.controllers()]
            return entries == [("first", ControllerPhase.HOT, 1), ("second", ControllerPhase.COLD, 0)]

        until(listed, "both")
        first.close()

        def left() -> bool:
            second.beat()
            return [each.name for each in second.controllers()] == ["second"]

        until(left, "the first one to leave")
    finally:
        first.close()
        second.close()


def test_a_lease_is_kept_beside_an_entry_that_cannot_be_read_and_a_hanging_loop_costs_no_time(job: EtcdPlace) -> None:
    presence = EtcdPresence(job, "first", LEASE_S)
    try:
        Etcd(job).change([], [put(f"{job.controllers}foreign", b"nonsense")])
        lease, ended_s = presence.lease, time.monotonic() + 2 * LEASE_S
        while time.monotonic() < ended_s:
            presence.beat()
            time.sleep(0.1)
        assert presence.lease == lease
        time.sleep(1.5 * LOOP_ALIVE_S)  # the loop hangs
        looks: list[ControllerStatus] = []
        presence._look_after = looks.append  # type: ignore[assignment, method-assign]
        presence.enter(ControllerPhase.HOT, 1)
        time.sleep(LEASE_S)
        assert 1 <= len(looks) <= 10
    finally:
        presence.close()


def test_the_next_controller_continues_the_clock_that_it_heard_whatever_its_own_says(
    job: EtcdPlace, lead: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, whose wall clock is an hour ahead."""
    monkeypatch.setattr(clock, "_boot", lambda: secrets.token_hex(4))
    monkeypatch.setattr(presences, "TELL_S", 1.0)
    first = lead(job, "first")
    told(first)
    second = EtcdPresence(job, "second", LEASE_S)
    try:

        def heard() -> bool:
            first._leadership.beat()
            second.beat()
            return second.heard is not None

        until(heard, "the leader's clock to be heard")
        wall = time.time
        monkeypatch.setattr(time, "time", lambda: wall() + 3600.0)
        leave(first)
        journal = open_in_etcd(job, second, lease_s=LEASE_S, wait_s=PATIENCE_S)
        known = second.heard
        assert known is not None
        least_s = known.at_s + time.monotonic() - known.monotonic_s  # what it heard had been under way for a moment
        assert least_s <= journal.clock.now() <= first.clock.now() + presences.TELL_S + LEASE_S
        journal.close()
    finally:
        second.close()


def test_a_promoted_controller_leads_next_and_a_pause_keeps_a_standby_out(job: EtcdPlace, lead: Open) -> None:
    succession = EtcdSuccession(job)
    first = lead(job, "first")
    told(first)
    succession.prefer("third")
    leave(first)
    with pytest.raises(JournalError, match="another controller is active"):
        lead(job, "second", wait_s=0.5, admitted=partial(succession.admits, "second", standby=True))
    third = lead(job, "third", admitted=partial(succession.admits, "third", standby=True))
    assert third.term == 2

    succession.pause("third", 600)
    assert succession.paused_until_s() > time.time()
    leave(third)
    with pytest.raises(JournalError):
        lead(job, "fourth", wait_s=PREFERRED_S + 1, admitted=partial(succession.admits, "fourth", standby=True))
    assert succession.admits("third", standby=True)
    assert succession.admits("fourth", standby=False)
    succession.pause("third", 0)
    assert lead(job, "fifth", admitted=partial(succession.admits, "fifth", standby=True)).term == 3
    succession.close()


def test_a_promotion_is_forgotten_when_the_promoted_one_does_not_come(job: EtcdPlace, lead: Open) -> None:
    succession = EtcdSuccession(job)
    succession.prefer("gone")
    assert not succession.admits("second", standby=False)
    assert lead(job, "second", admitted=partial(succession.admits, "second", standby=True)).term == 1
    succession.close()
