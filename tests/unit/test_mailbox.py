"""Every message is delivered at most once, and exactly once as long as some of its copies get through."""

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from midstep.protocol.errors import ConfigurationError, MailboxFull
from midstep.protocol.mailbox import DETECTOR_QUIET_S, WINDOW, Mailbox, Refusal, SenderMemory, Taken
from midstep.protocol.messages import Ack, Envelope, ProbeProgress, Quiesce, RankFinished
from midstep.protocol.types import CONTROLLER

QUIESCE = Quiesce(rank=0, generation=1)
RANK = "rank/0"


def mailbox(
    address: str, session: int = 1, *, give_up_s: float = 600.0, capacity: int = 10_000, job: str = "job"
) -> Mailbox:
    return Mailbox(job=job, address=address, session=session, give_up_s=give_up_s, capacity=capacity)


def pair() -> tuple[Mailbox, Mailbox]:
    return mailbox(CONTROLLER), mailbox(RANK)


def again(box: Mailbox, now: float) -> list[Envelope]:
    """What is sent again, but for its age."""
    return [replace(envelope, age_s=0.0) for envelope in box.due(now)]


def test_a_message_is_delivered_and_its_acknowledgement_ends_the_resends() -> None:
    controller, rank = pair()
    sent = controller.post(QUIESCE, RANK, 0.0)
    assert rank.take(sent, 0.0) == Taken(True, new_session=True)
    answer = rank.acknowledge(sent)
    assert answer.body == Ack(session=1, number=1)
    assert not controller.take(answer, 0.1).deliver
    assert controller.due(100.0) == []
    assert controller.next_due() is None


def test_resends_come_at_doubling_intervals_up_to_the_limit() -> None:
    box = mailbox(CONTROLLER)
    box.post(QUIESCE, RANK, 0.0)
    times = []
    for _ in range(7):
        now = box.next_due()
        assert now is not None
        assert len(box.due(now)) == 1
        assert box.due(now) == []
        times.append(now)
    assert times == [0.5, 1.5, 3.5, 7.5, 12.5, 17.5, 22.5]


@pytest.mark.parametrize(("ranks", "first_s"), [(4, 0.5008), (10_000, 2.5), (100_000, 20.5)])
def test_in_a_large_job_the_first_resend_comes_later(ranks: int, first_s: float) -> None:
    """All of its ranks report at once, and each is answered in its turn."""
    box = mailbox(CONTROLLER)
    box.expect_ranks(ranks)
    box.post(QUIESCE, RANK, 0.0)
    assert box.next_due() == pytest.approx(first_s)
    assert len(box.due(first_s)) == 1
    again_s = box.next_due()
    assert again_s is not None
    assert first_s < again_s <= first_s + max(5.0, first_s)


def test_a_resend_is_the_envelope_that_was_posted_with_its_age() -> None:
    box = mailbox(CONTROLLER)
    box.generation = 3
    sent = box.post(QUIESCE, RANK, 0.0)
    box.generation = 4
    assert box.due(1.0) == [replace(sent, age_s=1.0)]
    assert box.due(9.0) == [replace(sent, age_s=9.0)]


def test_a_duplicate_is_answered_only_after_the_first_was_taken_in() -> None:
    controller, rank = pair()
    sent = controller.post(QUIESCE, RANK, 0.0)
    assert rank.take(sent, 0.0).deliver
    early = rank.take(sent, 0.1)
    assert (early.deliver, early.reply) == (False, None)
    answer = rank.acknowledge(sent)
    assert rank.take(sent, 0.2) == Taken(False, Refusal.DUPLICATE, answer)
    assert rank.refused == {Refusal.DUPLICATE: 2}


def test_a_heartbeat_has_no_number_and_is_never_repeated() -> None:
    controller, rank = pair()
    sent = rank.post(RankFinished(0, 1, 0, 5), CONTROLLER, 0.0, reliable=False)
    assert sent.number == 0
    assert rank.next_due() is None
    assert controller.take(sent, 0.0).deliver
    assert controller.take(sent, 0.0).deliver


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"job": "another"}, Refusal.WRONG_JOB),
        ({"receiver": "rank/1"}, Refusal.WRONG_RECEIVER),
        ({"sender": RANK}, Refusal.OWN_ADDRESS),
        ({"number": -1}, Refusal.NEGATIVE),
        ({"session": -1}, Refusal.NEGATIVE),
        ({"term": 4}, Refusal.OLD_TERM),
        ({"session": 0}, Refusal.STALE_SESSION),
    ],
)
def test_what_is_wrong_is_refused_counted_and_leaves_no_trace(change: dict[str, int | str], reason: Refusal) -> None:
    controller, rank = pair()
    controller.term = 5
    rank.take(controller.post(QUIESCE, RANK, 0.0), 0.0)
    sent = controller.post(QUIESCE, RANK, 0.0)
    assert rank.take(replace(sent, **change), 0.0) == Taken(False, reason)
    assert rank.refused == {reason: 1}
    assert rank.take(sent, 0.0).deliver


def test_a_command_of_an_older_term_is_refused_and_so_is_its_acknowledgement() -> None:
    old, new, rank = mailbox(CONTROLLER, 1), mailbox(CONTROLLER, 2), mailbox(RANK)
    old.term, new.term = 1, 2
    report = rank.post(RankFinished(0, 1, 0, 5), CONTROLLER, 0.0)
    assert old.take(report, 0.0).deliver
    assert rank.take(new.post(QUIESCE, RANK, 0.0), 0.0).deliver
    assert rank.take(old.post(QUIESCE, RANK, 0.0), 0.0).refused == Refusal.OLD_TERM
    assert rank.take(old.acknowledge(report), 0.0).refused == Refusal.OLD_TERM
    assert again(rank, 1.0) == [report]  # the new controller must get it
    assert (rank.term, rank.generation) == (2, 0)


def test_a_standby_that_was_started_long_ago_takes_over_by_its_term() -> None:
    active, standby, rank = mailbox(CONTROLLER, 9), mailbox(CONTROLLER, 3), mailbox(RANK)
    active.term, standby.term = 1, 2
    assert rank.take(active.post(QUIESCE, RANK, 0.0), 0.0).deliver
    taken = rank.take(standby.post(QUIESCE, RANK, 0.0), 0.0)
    assert taken.deliver
    assert taken.new_session
    assert not rank.take(active.post(QUIESCE, RANK, 0.0), 0.0).deliver


def test_only_the_controller_raises_term_and_generation() -> None:
    controller, rank = pair()
    rank.term, rank.generation = 7, 9
    assert controller.take(rank.post(RankFinished(0, 1, 0, 5), CONTROLLER, 0.0), 0.0).deliver
    assert (controller.term, controller.generation) == (0, 0)
    controller.term, controller.generation = 8, 10
    assert rank.take(controller.post(QUIESCE, RANK, 0.0), 0.0).deliver
    assert (rank.term, rank.generation) == (8, 10)


def test_a_restarted_sender_replaces_its_earlier_life() -> None:
    controller = mailbox(CONTROLLER)
    first, second = mailbox(RANK, 1), mailbox(RANK, 2)
    body = RankFinished(0, 1, 0, 5)
    assert controller.take(first.post(body, CONTROLLER, 0.0), 0.0).new_session
    assert controller.take(second.post(body, CONTROLLER, 0.0), 0.0) == Taken(True, new_session=True)
    assert controller.take(first.post(body, CONTROLLER, 0.0), 0.0).refused == Refusal.STALE_SESSION


def test_an_acknowledgement_counts_only_from_the_receiver_and_for_this_session() -> None:
    controller = mailbox(CONTROLLER, 2)
    sent = controller.post(QUIESCE, RANK, 0.0)
    stranger, rank = mailbox("rank/1"), mailbox(RANK)
    assert not controller.take(stranger.acknowledge(sent), 0.0).deliver
    assert controller.take(rank.acknowledge(replace(sent, session=1)), 0.0).refused == Refusal.UNKNOWN_ACK
    assert again(controller, 1.0) == [sent]


def test_a_new_session_of_a_receiver_gets_what_waits_without_the_long_backoff() -> None:
    controller = mailbox(CONTROLLER)
    sent = controller.post(QUIESCE, RANK, 0.0)
    for now in (0.5, 1.5, 3.5, 7.5):
        controller.due(now)
    assert controller.next_due() == 12.5
    controller.take(mailbox(RANK).post(RankFinished(0, 1, 0, 5), CONTROLLER, 9.0), 9.0)
    assert again(controller, 9.0) == [sent]
    assert again(controller, 12.5) == [sent]


def test_an_earlier_session_of_a_detector_is_believed_again_when_the_later_one_has_been_quiet() -> None:
    """Its clock was ahead once; nodes are not started again under their name."""
    controller = mailbox(CONTROLLER)
    for name in ("detector/dcgm", "node/a"):
        ahead, later = mailbox(name, session=9), mailbox(name, session=5)
        assert controller.take(ahead.post(QUIESCE, CONTROLLER, 0.0), 0.0).deliver
        assert controller.take(later.post(QUIESCE, CONTROLLER, 1.0), 1.0).refused == Refusal.STALE_SESSION
        (resent,) = later.due(DETECTOR_QUIET_S + 1.0)
        assert controller.take(resent, DETECTOR_QUIET_S + 1.0).deliver == name.startswith("detector/")


def test_what_nobody_acknowledges_is_given_up_once_and_never_sent_again() -> None:
    box = mailbox(CONTROLLER, give_up_s=10.0)
    first = box.post(QUIESCE, RANK, 0.0)
    second = box.post(QUIESCE, RANK, 5.0)
    assert box.undeliverable(9.9) == []
    assert again(box, 10.0) == [second]
    assert box.undeliverable(10.0) == [first]
    assert box.undeliverable(10.0) == []
    assert box.undeliverable(15.0) == [second]
    assert box.due(1000.0) == []
    assert box.next_due() is None


def test_a_forgotten_receiver_is_sent_nothing_more_and_its_numbers_go_on() -> None:
    box = mailbox(CONTROLLER)
    box.post(QUIESCE, RANK, 0.0)
    kept = box.post(QUIESCE, "rank/1", 0.0)
    box.forget(RANK)
    box.forget("rank/99")
    assert again(box, 1.0) == [kept]
    assert box.post(QUIESCE, RANK, 2.0).number == 2


def test_orders_of_a_later_generation_replace_those_that_were_not_acknowledged() -> None:
    """For the same rank only, and nothing that holds in every generation."""
    box = mailbox(CONTROLLER)
    kept = {each.receiver: each for each in (box.post(ProbeProgress(1), RANK, 0.0), box.post(QUIESCE, "rank/1", 0.0))}
    for generation in range(1, 10):
        box.generation = generation
        last = box.post(Quiesce(0, generation), RANK, 0.0)
    assert sorted(again(box, 1.0), key=lambda each: (each.receiver, each.number)) == [kept[RANK], last, kept["rank/1"]]


def test_a_full_mailbox_says_so_and_posts_nothing() -> None:
    box = mailbox(CONTROLLER, capacity=2)
    box.post(QUIESCE, "rank/0", 0.0)
    box.post(QUIESCE, "rank/1", 0.0)
    with pytest.raises(MailboxFull, match="rank/2"):
        box.post(QUIESCE, "rank/2", 0.0)
    box.post(QUIESCE, "rank/2", 0.0, reliable=False)
    box.forget("rank/0")
    assert box.post(QUIESCE, "rank/2", 0.0).number == 1


def test_nothing_in_flight_ever_falls_out_of_the_receivers_memory() -> None:
    controller, rank = mailbox(CONTROLLER, capacity=10 * WINDOW), mailbox(RANK)
    oldest = controller.post(QUIESCE, RANK, 0.0)
    for _ in range(WINDOW - 1):
        newest = controller.post(QUIESCE, RANK, 0.0)
        assert rank.take(newest, 0.0).deliver
        controller.take(rank.acknowledge(newest), 0.0)
    with pytest.raises(MailboxFull, match="behind"):
        controller.post(QUIESCE, RANK, 0.0)
    assert rank.take(oldest, 0.0).deliver
    assert not rank.take(oldest, 0.0).deliver


def test_a_restarted_controller_remembers_from_its_journal() -> None:
    rank, before, after = mailbox(RANK), mailbox(CONTROLLER, 1), mailbox(CONTROLLER, 2)
    first, second = (rank.post(RankFinished(0, 1, 0, 5), CONTROLLER, 0.0) for _ in range(2))
    for sent in (first, second):
        assert before.take(sent, 0.0).deliver
    after.remember(second.sender, second.session, second.number)
    after.remember(second.sender, second.session - 1, 77)  # an earlier life: no matter
    again = after.take(second, 1.0)
    assert again.reply is not None
    assert not again.deliver
    assert after.take(first, 1.0).deliver  # was not durable: it must be delivered


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        Mailbox(job="job", address=RANK, session=1, retry_s=0.0)


def test_the_timetable_does_not_grow_with_what_has_been_acknowledged() -> None:
    controller, rank = pair()
    for _ in range(20_000):
        sent = controller.post(QUIESCE, RANK, 0.0)
        rank.take(sent, 0.0)
        controller.take(rank.acknowledge(sent), 0.0)
    assert len(controller._timetable) < 200


@pytest.mark.parametrize("seed", range(50))
def test_the_memory_of_a_sender_answers_as_an_unbounded_one_would(seed: int) -> None:
    chance = random.Random(seed)
    memory, seen, highest = SenderMemory(1), set[int](), 0
    for _ in range(3000):
        number = max(1, highest + chance.choice([1, 1, 1, 2, 5, -1, -3, -50, -WINDOW + 1, 300]))
        highest = max(highest, number)
        assert memory.mark_taken(number) == (number not in seen)
        seen.add(number)
    assert memory.taken.bit_length() <= WINDOW


class LossyWire:
    """Two mailboxes on a wire that loses, doubles and reorders, in simulated time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.ends = {CONTROLLER: mailbox(CONTROLLER, 1), RANK: mailbox(RANK, 1)}
        self.in_flight: list[tuple[float, float, Envelope]] = []
        self.delivered: Counter[tuple[str, int]] = Counter()
        self.loss = self.chance.choice([0.0, 0.1, 0.5, 0.8])

    def send(self, envelope: Envelope, now: float) -> None:
        for _ in range(self.chance.choice([1, 1, 1, 2, 3])):
            if self.chance.random() >= self.loss:
                self.in_flight.append((now + self.chance.expovariate(2.0), self.chance.random(), envelope))

    def step(self, now: float) -> None:
        arrived = sorted(item for item in self.in_flight if item[0] <= now)
        self.in_flight = [item for item in self.in_flight if item[0] > now]
        for _, _, envelope in arrived:
            box = self.ends[envelope.receiver]
            taken = box.take(envelope, now)
            if taken.reply is not None:
                self.send(taken.reply, now)
            if taken.deliver:
                self.delivered[envelope.sender, envelope.number] += 1
                self.send(box.acknowledge(envelope), now)
        for box in self.ends.values():
            for envelope in box.due(now):
                self.send(envelope, now)


@pytest.mark.parametrize("seed", range(100))
def test_on_a_lossy_wire_everything_is_delivered_exactly_once(seed: int) -> None:
    wire = LossyWire(seed)
    posted: set[tuple[str, int]] = set()
    now = 0.0
    while now < 550.0 and (now < 20.0 or any(box.next_due() is not None for box in wire.ends.values())):
        now += 0.1
        if now < 20.0:
            sender = wire.chance.choice([CONTROLLER, RANK])
            receiver = RANK if sender == CONTROLLER else CONTROLLER
            envelope = wire.ends[sender].post(ProbeProgress(len(posted)), receiver, now)
            posted.add((sender, envelope.number))
            wire.send(envelope, now)
        wire.step(now)
    assert wire.delivered == dict.fromkeys(posted, 1)
    assert all(box.next_due() is None for box in wire.ends.values())


def test_what_could_not_be_sent_is_due_when_its_receiver_can_be_reached() -> None:
    """And not only when its wait is over."""
    box = Mailbox(job="demo", address="controller", session=1, retry_s=0.5)
    posted = box.post(Ack(1, 1), "node/a", 10.0)
    box.post(Ack(1, 2), "node/b", 10.0)
    assert box.due(10.1) == []
    box.reached("node/a", 10.1)
    assert [each.number for each in box.due(10.1)] == [posted.number]
    assert box.due(10.2) == []
    assert {each.receiver for each in box.due(10.7)} == {"node/b"}
