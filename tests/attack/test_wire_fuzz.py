"""Damaged, forged and senseless messages on the controller's wire"""

import random
import resource
import time
from collections import Counter
from typing import cast

import msgspec
import pytest

from midstep.controller.journaled import Journaled, decided, each_event
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.routes import Routes
from midstep.controller.wire import Wire
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol import codec
from midstep.protocol import codec as frames
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    Ack,
    Command,
    Envelope,
    NodeHeartbeat,
    NodeJoined,
    RankReport,
    RanksReported,
    RankWord,
    Report,
)
from midstep.protocol.transport import Received, RouterSocket
from midstep.protocol.types import JobSpec, StoreEndpoint

from .attack import attack
from .binary_mutation import Maker, damaged, wrong_somewhere
from .fuzzing import CASES, LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)

IDENTITIES = ("node/a", "node/b", "platform", "detector/d")
SENDERS = (*IDENTITIES, "rank/0", "rank/1", "rank/2", "rank/3", "controller")
NAMES = ("a", "b", "node/a", "rank/0", "rank/1", "detector/d", "all", "C1", "stop", "")
MEMBERS = (*[*Report.__args__, RanksReported] * 2, *Command.__args__, Ack)
LATER = 0.9  # of all cases: before, nobody is started again
SLOWEST_S = 5.0  # of one case, on a machine that is busy with something else
MOST_GROWTH_KIB = 400 * 1024
JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))


class Router:
    """Stands for the socket."""

    endpoint = ""
    pending = False

    def __init__(self) -> None:
        self.arrived: list[Received] = []
        self.refused: Counter[str] = Counter()

    def receive(self, limit: int) -> list[Received]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def knows(self, identity: str) -> bool:
        return True

    def send(self, identity: str, data: bytes) -> bool:
        return True


class Fuzzed:
    """The controller's way from bytes to the recovery machine, without socket and journal."""

    def __init__(self) -> None:
        self.router, self.routes = Router(), Routes()
        mailbox = Mailbox(job="demo", address="controller", session=1)
        self.wire = Wire(cast(RouterSocket, self.router), mailbox, self.routes, JOB.world_size)
        self.machine = RecoveryMachine(default_policy(), JOB)
        self.number = 0
        self.now = 0.0
        self.believed: set[type] = set()

    def envelope(self, sender: str, body: object, session: int) -> Envelope:
        self.number += 1
        return Envelope(codec.PROTOCOL_VERSION, "demo", sender, "controller", 1, 1, session, self.number, body)  # type: ignore[arg-type]

    def joins(self, node: str) -> int:
        """Let a node say that it is there."""
        joined = NodeJoined(node, node, StoreEndpoint("127.0.0.1", 1))
        return self.hear(f"node/{node}", frames.frame_of(self.envelope(f"node/{node}", joined, 1)))

    def hear(self, identity: str, data: bytes) -> int:
        """Take bytes in, as the driver does; return how many messages were believed."""
        self.now += 0.01
        self.router.arrived.append(Received(identity, identity, data))
        arrivals = self.wire.receive(self.now)
        for arrival in arrivals:
            body = arrival.envelope.body
            self.believed.add(type(body))
            if not isinstance(body, NodeHeartbeat):
                event: Journaled = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=Journaled)
                assert event == body  # as from the journal
                self.believed.update(map(type, each_event(event)))
                self.routes.learn(event, decided(self.machine, event, self.now))
            self.wire.acknowledge(arrival)
        self.wire.flush()
        return len(arrivals)


def framed(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return a frame with a message alone or among others, or, which is none, the message without a frame."""
    how = chance.random()
    if how < 0.1:
        return data
    return next(frames.pack([data] if how < 0.6 else [*others, data, *others]))


def fitting(body: object, chance: random.Random) -> tuple[str, str, object]:
    """Return sender, connection and a message about one rank or the agent of its node: to be believed."""
    rank = chance.randrange(4)
    node = "a" if rank < 2 else "b"
    sender = chance.choice((f"rank/{rank}", f"node/{node}"))
    fits = {"rank": rank, "node": node, "incarnation": 1, "seen_by": sender}

    def fitted(value: object) -> object:
        if isinstance(value, dict):
            return {key: fits.get(key, fitted(inner)) for key, inner in value.items()}
        return [fitted(inner) for inner in value] if isinstance(value, list | tuple) else value

    def made(body: object) -> object:
        return msgspec.convert(fitted(msgspec.to_builtins(body)), type(body), strict=False)

    agent = f"node/{node}"
    if isinstance(body, RanksReported):
        fits["seen_by"] = f"rank/{rank}"
        body = RanksReported(node, tuple(RankReport(rank, 1, made(each.word)) for each in body.reports))  # type: ignore[arg-type]
    elif sender != agent and isinstance(body, RankWord):
        body = RanksReported(node, (RankReport(rank, 1, made(body)),))  # type: ignore[arg-type]
    else:
        body = made(body)
    return agent if isinstance(body, RanksReported) else sender, agent, body


@attack(
    "every kind of message arrives with flipped bits, cut, spliced, with false lengths and values of wrong sorts",
    holds="it is refused and counted within bounded time and memory, or it is a message; the next good one is taken",
    reads="refused: MalformedMessage, and why others were not believed",
)
def test_whatever_arrives_the_next_good_message_is_taken() -> None:
    """What is believed can be journaled, and the recovery machine takes it; what is not is counted."""
    chance = random.Random(20_28)
    fuzzed, maker = Fuzzed(), Maker(chance, NAMES)
    assert (fuzzed.joins("a"), fuzzed.joins("b")) == (1, 1)  # the ranks are started
    slowest_s, good, before = 0.0, 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ack = codec.encode(fuzzed.envelope("node/a", Ack(1, 1), 1))
    last = next(frames.pack([ack]))
    for case in range(CASES):
        sender, body = chance.choice(SENDERS), maker.make(chance.choice(MEMBERS))
        identity = sender if sender in IDENTITIES and chance.random() < 0.9 else chance.choice(IDENTITIES)
        if chance.random() < 0.5:
            sender, identity, body = fitting(body, chance)
        session = 1 if chance.random() < 0.9 or case < LATER * CASES else 2  # the earlier one is stale from then on
        envelope = fuzzed.envelope(sender, body, session)
        data = msgspec.msgpack.encode(envelope)
        how = chance.randrange(4)
        if how == 1:
            data = msgspec.msgpack.encode(wrong_somewhere(msgspec.to_builtins(envelope), chance))
        data = framed(data, [ack] * chance.randrange(4), chance)
        if how == 0:
            data, last = damaged(data, last, chance), data
        began_s = time.perf_counter()
        fuzzed.hear(identity, data)
        slowest_s = max(slowest_s, time.perf_counter() - began_s)
        if case % 10 == 0:
            good += fuzzed.joins("c")
    assert good == -(-CASES // 10)
    assert slowest_s < SLOWEST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH_KIB
    assert fuzzed.wire.refused["MalformedMessage"] > CASES / 10
    assert len(fuzzed.believed) > 6  # so some of it is believed
    assert RanksReported in fuzzed.believed
    assert len(fuzzed.believed.intersection(RankWord.__args__)) > 1
