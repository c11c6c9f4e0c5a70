"""Damaged and senseless requests to the control socket and the detectors' socket"""

import asyncio
import contextlib
import json
import random
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from midstep.controller.endpoints import remote_operators
from midstep.controller.endpoints.control_requests import (
    Accepted,
    Refused,
    Reply,
    ReportFaultRequest,
    Request,
    StatusReply,
    StatusRequest,
)
from midstep.controller.endpoints.local_sockets import DETECTORS_SOCKET, ControlServer, LineServer, socket_path
from midstep.controller.endpoints.request_handler import RequestHandler
from midstep.controller.recovery.events import Event
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.switchover import Switchover
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.compat import within
from midstep.protocol.messages import NodeJoined
from midstep.protocol.transport import DealerSocket, Received, wait
from midstep.protocol.types import JobSpec, StoreEndpoint

from .attack import attack
from .binary_mutation import Maker, damaged, wrong_somewhere
from .fuzzing import CASES, LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)

PATIENCE_S = 30.0
REQUESTS_OF_ONE = 500  # connections end when they have carried their share; the command line makes one a request
NAMES = ("a", "b", "n0", "all", "C1", "stop", "x y", "")
JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
LINE = {"code": "C1", "node": "a", "device": 1, "kind": "device", "assertion": "occur", "at_s": 1.0, "detail": "hot"}


class Controller:
    """The machine behind the controller's endpoints, with two nodes."""

    def __init__(self) -> None:
        self.machine, self.now = RecoveryMachine(default_policy(), JOB), 0.0
        self.handler = RequestHandler(JOB, Switchover())
        for node in ("a", "b"):
            self.machine.handle(NodeJoined(node, node, StoreEndpoint("127.0.0.1", 1)), 0.0)

    def take(self, event: Event) -> Reply:
        """Let an event happen, as the driver does when it is durable."""
        self.now += 0.01
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event) == event
        return self.handler.answer(event, self.machine.handle(event, self.now))

    def reply(self, request: Request) -> Reply:
        """Answer a request."""
        answers: list[Reply] = []
        event = self.handler.begin(request, "owner", lambda: self.machine.status(self.now), answers.append)
        return answers[0] if event is None else self.take(event)


@attack(
    "a local program sends damaged requests, requests of wrong sorts and of impossible values to the control socket",
    holds="each is answered, by a refusal if it is none, and the next good one as ever",
    reads="refused: control request of another version",
)
def test_every_request_is_answered_and_the_next_good_one_as_ever(tmp_path: Path) -> None:
    """Whatever was sent before, a question about the status is answered by the status."""
    chance = random.Random(20_281)
    maker, controller = Maker(chance, NAMES), Controller()
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    server = ControlServer(folder)
    answers = []

    def ask(data: bytes, dealer: DealerSocket) -> Reply:
        """Send bytes and return the answer to them."""
        give_up = time.monotonic() + PATIENCE_S
        dealer.send(data)
        while time.monotonic() < give_up:
            for asker, request in server.requests():
                server.answer(asker, controller.reply(request))
            wait([dealer], (), 0.002)
            for received in dealer.receive():
                reply: Reply = msgspec.msgpack.decode(received.data, type=Reply)
                return reply
        raise AssertionError(f"no answer to {data[:100]!r}")

    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        connection = stack.enter_context(contextlib.ExitStack())
        last = msgspec.msgpack.encode(StatusRequest())
        for case in range(CASES):
            if case % REQUESTS_OF_ONE == 0:
                connection.close()
                dealer = DealerSocket(f"ipc://{socket_path(folder)}", identity="fuzzer", curve=None)
                connection.callback(dealer.close)
            data = msgspec.msgpack.encode(maker.make(Request))
            how = chance.randrange(3)
            if how == 0:
                data, last = damaged(data, last, chance) or b"\xc1", data
            elif how == 1:
                plain = msgspec.msgpack.decode(data)
                data = msgspec.msgpack.encode(wrong_somewhere(plain, chance))
            answers.append(type(ask(data, dealer)))
            if case % 10 == 0:
                assert isinstance(ask(msgspec.msgpack.encode(StatusRequest()), dealer), StatusReply)
        assert server.refused["control request of another version"] > CASES / 10
        assert {Refused, Accepted, StatusReply} <= set(answers)


class OfViewers:
    """The wire, as far as operators go: what a viewer has sent, and what it is answered."""

    def __init__(self) -> None:
        self.sent: list[Received] = []
        self.answers: list[Reply] = []

    def from_operators(self) -> list[Received]:
        sent, self.sent = self.sent, []
        return sent

    def answer_operator(self, connection: str, data: bytes) -> None:
        self.answers.append(msgspec.msgpack.decode(data, type=Reply))


@attack(
    "somebody with a viewer's token sends damaged requests, and requests that change the job, to the controller's port",
    holds="each is answered; only questions get to the machine, and the next good one is answered as ever",
    reads="refused: operators: viewer may not stop the job",
)
def test_a_viewer_gets_answers_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its bytes are, they are no event of the machine."""
    monkeypatch.setattr(remote_operators, "SHARE", 1.0)  # without pauses
    monkeypatch.setattr(remote_operators, "ANSWERED_BYTES", 2**40)
    chance = random.Random(20_282)
    maker, controller, wire = Maker(chance, NAMES), Controller(), OfViewers()
    operators = remote_operators.RemoteOperators(wire)
    last = msgspec.msgpack.encode(StatusRequest())
    for case in range(CASES):
        data = msgspec.msgpack.encode(maker.make(Request))
        if chance.randrange(2):
            data, last = damaged(data, last, chance) or b"\xc1", data
        for sent in (data, msgspec.msgpack.encode(StatusRequest())):
            wire.sent.append(Received("operator/viewer/fuzzer", "operator/viewer/", sent))
            for asker, request in operators.requests():
                answers: list[Reply] = []
                status = partial(controller.machine.status, 0.0)
                event = controller.handler.begin(request, "viewer", status, answers.append)
                assert event is None, f"a viewer's {request} in case {case}"
                operators.answer(asker, *answers)
        assert len(wire.answers) == 2 * (case + 1)
        assert isinstance(wire.answers[-1], StatusReply)
    assert operators.refused["operators: viewer may not stop the job"] > 0
    assert operators.refused["operators: no request of this version"] > 0


@attack(
    "a program sends damaged lines, lines without end and lines of impossible values to the detectors' socket",
    holds="each is answered by what is wrong with it, and the next good one is taken",
    reads="nothing; the program reads why its line is refused",
)
def test_every_line_is_answered_and_the_next_good_one_is_taken(tmp_path: Path) -> None:
    """Whatever was sent before on the same connection, a good line is answered with ok."""
    chance = random.Random(20_282)
    controller = Controller()
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)

    async def scenario() -> None:
        server = LineServer(
            folder,
            lambda report, answer: answer(controller.reply(ReportFaultRequest(report))),
        )
        await server.open()
        reader, writer = await asyncio.open_unix_connection(str(folder / DETECTORS_SOCKET))
        good, refused, last = 0, 0, json.dumps(LINE).encode()
        try:
            for case in range(CASES):
                line = json.dumps({**LINE, "code": f"C{case % 7}"}).encode()
                if chance.random() < 0.5:
                    line, last = damaged(line, last, chance), line
                else:
                    line = json.dumps(wrong_somewhere(LINE, chance), default=str).encode()
                line = line.replace(b"\n", b" ")
                if not line.strip():
                    continue  # an empty line is no question
                writer.write(line + b"\n")
                refused += not json.loads(await within(PATIENCE_S, reader.readline()))["ok"]
                if case % 10 == 0:
                    writer.write(json.dumps(LINE).encode() + b"\n")
                    good += json.loads(await within(PATIENCE_S, reader.readline()))["ok"]
        finally:
            writer.close()
            await server.close()
        assert good > CASES // 11
        assert refused > CASES / 3

    asyncio.run(scenario())
