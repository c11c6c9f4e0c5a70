"""A rank's line to its agent

A rank that is deaf cannot be stopped, and what becomes of a mute one is not known.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from midstep.processor import client as client_module
from midstep.processor.client import Client
from midstep.protocol.codec import envelopes_of, frame_of
from midstep.protocol.errors import MailboxFull, RecoveryError
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import Ack, Envelope, RankFinished, Resume
from midstep.protocol.transport import RouterSocket
from midstep.protocol.types import CONTROLLER, rank_address

from .attack import attack

LONG_S = 30.0
DEAF = """
import sys, time
from midstep.processor.client import Client
Client(job="job", rank=3, incarnation=1, agent_socket="nonsense://nowhere", hear=print)
time.sleep(30)
print("trained on")
"""


class Agent:
    """The other end of the line, and the controller behind it."""

    def __init__(self, folder: Path) -> None:
        self.router = RouterSocket(f"ipc://{folder}/agent.sock", curve=None)
        self._mailbox = Mailbox(job="job", address=CONTROLLER, session=1)
        self._mailbox.term = 1
        self.heard: list[Envelope] = []

    def command(self, generation: int) -> int:
        """Send a command; return its number."""
        envelope = self._mailbox.post(Resume(0, generation, 1), rank_address(0), time.monotonic())
        self.send(frame_of(envelope))
        return envelope.number

    def send(self, data: bytes) -> None:
        self.until(lambda: self.router.send(rank_address(0), data))

    def until(self, holds: Callable[[], bool]) -> None:
        """Take in what comes until something holds."""
        deadline = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < deadline
            for received in self.router.receive():
                for envelope in envelopes_of(received.data):
                    self._take(envelope)
            time.sleep(0.005)

    def _take(self, envelope: Envelope) -> None:
        self.heard.append(envelope)
        if envelope.number:
            self._mailbox.take(envelope, time.monotonic())
            self.router.send(rank_address(0), frame_of(self._mailbox.acknowledge(envelope)))

    def until_acknowledged(self, number: int) -> None:
        self.until(lambda: any(isinstance(each.body, Ack) and each.body.number == number for each in self.heard))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.router.close()


@pytest.fixture
def line(agent: Agent) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connect(hear: Callable[[Envelope], None] = lambda _: None, **options: Any) -> Client:
        made = Client(job="job", rank=0, incarnation=1, agent_socket=agent.router.endpoint, hear=hear, **options)
        clients.append(made)
        return made

    yield connect
    for made in clients:
        made.close()


def finished(committed: int) -> RankFinished:
    return RankFinished(0, 1, 1, committed)


@attack(
    "a command makes the device, a callback or a library raise in the control thread",
    holds="the next command is heard, and reports still leave",
    reads="which command failed, with the error",
)
def test_a_command_that_fails_leaves_the_line_as_it_was(agent: Agent, line: Callable[..., Client]) -> None:
    """Whatever is raised."""
    errors = [
        ValueError("no such device"),
        KeyError("rank"),
        RuntimeError("ACL stream"),
        MemoryError(),
        OSError(5, "I/O"),
    ]
    heard: list[int] = []

    def hear(envelope: Envelope) -> None:
        heard.append(envelope.generation)
        if errors:
            raise errors.pop()

    made = line(hear)
    for generation in range(1, 8):
        number = agent.command(generation)
        agent.until_acknowledged(number)
    assert len(heard) == 7
    made.post(finished(3), 1)
    agent.until(lambda: any(isinstance(each.body, RankFinished) for each in agent.heard))
    assert made.failures.total() == 5


@attack("sends bytes that are no command", holds="the next command is heard")
def test_bytes_that_are_no_command_are_passed_over(agent: Agent, line: Callable[..., Client]) -> None:
    """The rank's own socket is its agent's alone; what comes is checked all the same."""
    heard: list[Envelope] = []
    line(heard.append)
    for data in (b"", b"\xc1", b"\x93" * 1000, bytes(100_000)):
        agent.send(data)
    agent.until_acknowledged(agent.command(1))
    assert len(heard) == 1


@attack(
    "a report cannot be posted or encoded",
    holds="those behind it arrive",
    reads="which report was not sent, and why",
)
def test_a_report_that_cannot_be_sent_keeps_none_back(
    agent: Agent, line: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full mailbox, a body that the format cannot carry."""
    made = line()
    post, refusals = made._mailbox.post, [MailboxFull("10000 messages are unacknowledged")]

    def full(*arguments: Any, **options: Any) -> Envelope:
        if refusals:
            raise refusals.pop()
        return post(*arguments, **options)

    monkeypatch.setattr(made._mailbox, "post", full)
    for committed in (1, 1 << 70, 3):
        made.post(finished(committed), 1)
    agent.until(lambda: any(isinstance(each.body, RankFinished) and each.body.committed == 3 for each in agent.heard))
    assert made.failures.total() >= 2


@attack(
    "the control thread cannot go on",
    holds="the process ends at once, and does not train on without a line to its agent",
    reads="in the rank's log: the line to the agent is lost, with the error",
)
def test_a_rank_without_a_control_thread_ends() -> None:
    """With a status that its agent reports as a fault."""
    ended = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 70
    assert "the line of rank/3 to its agent is lost" in ended.stderr
    assert "trained on" not in ended.stdout


@attack(
    "every turn of the control thread fails",
    holds="it tries a few times, then the process ends",
    reads="in the rank's log: the line to the agent is lost, with the error",
)
def test_a_line_that_fails_again_and_again_is_given_up(
    agent: Agent, line: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text names the error."""
    died: list[str] = []
    over = threading.Event()

    def die(text: str) -> None:
        died.append(text)
        over.set()

    def broken() -> float | None:
        raise OSError(9, "Bad file descriptor")

    made = line(die=die)
    monkeypatch.setattr(made._mailbox, "next_due", broken)
    made.post(finished(1), 1)
    assert over.wait(LONG_S)
    assert "Bad file descriptor" in died[0]


@attack(
    "more reports are posted than the control thread takes",
    holds="posting waits for a bounded time and then raises an error of midstep's",
    reads="how many reports wait, and since when none was taken",
)
def test_a_report_that_is_not_taken_is_an_error_in_time(
    agent: Agent, line: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control thread itself does not wait for itself."""
    monkeypatch.setattr(client_module, "OUTBOX", 2)
    monkeypatch.setattr(client_module, "IDLE_S", 0.2)
    inside, on = threading.Event(), threading.Event()
    refused: list[str] = []

    def hear(_: Envelope) -> None:
        inside.set()
        on.wait(LONG_S)
        with pytest.raises(RecoveryError) as caught:
            made.post(finished(9), 1)
        refused.append(str(caught.value))

    made = line(hear)
    agent.command(1)
    agent.until(inside.is_set)
    try:
        for _ in range(2):
            made.post(finished(1), 1)
        with pytest.raises(RecoveryError, match="2 reports wait"):
            made.post(finished(2), 1)
    finally:
        on.set()
    agent.until(lambda: bool(refused))
    agent.until(lambda: sum(isinstance(each.body, RankFinished) for each in agent.heard) >= 2)
