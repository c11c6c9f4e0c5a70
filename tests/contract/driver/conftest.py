"""A real driver with real journal, sockets and keys, around a machine that does as the test says; and fake peers."""

import asyncio
import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from midstep.controller.driver import Driver
from midstep.controller.endpoints.control_requests import Reply, Request
from midstep.controller.endpoints.discovery_files import write_endpoint
from midstep.controller.endpoints.local_sockets import ControlServer, ask
from midstep.controller.enroller import open_wire
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.journaled import Journaled, each_event
from midstep.controller.keepalive import KeepAlive
from midstep.controller.liveness import Liveness, ProgressBoard
from midstep.controller.recovery.events import Action, Event, Send
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import JobState
from midstep.controller.routes import Routes
from midstep.controller.service import bind
from midstep.policies.rules import job_settings
from midstep.policies.schema import HeartbeatPolicy, default_policy
from midstep.protocol import codec as frames
from midstep.protocol.incidents import JobStatus, NodeStatus, RankStatus
from midstep.protocol.keys import JobKeys
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    Ack,
    Envelope,
    Message,
    OrderRanks,
    RankReport,
    RanksReported,
    RankWord,
    StartProcess,
    StartProcesses,
)
from midstep.protocol.transport import DealerSocket
from midstep.protocol.types import JobSpec, Rendezvous, rank_of

PATIENCE_S = 20.0
HEARTBEAT_S = 0.1
MISSED = 1000
FIRST_LIVES = [
    Send("node/a", StartProcess(rank, rank, 0, 1, 1, 0, True, Rendezvous("127.0.0.1", 1, "secret")), 1)
    for rank in range(4)
]
JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
_decode = msgspec.msgpack.Decoder(Journaled).decode


class StubMachine:
    """Does what the test laid down for each type of event, and checks that the event is durable before it does."""

    def __init__(self, journal_file: Path) -> None:
        self.events: list[tuple[Event, float]] = []
        self.answers: dict[type, list[Action]] = {}
        self.deadline: float | None = None
        self._journal_file = journal_file

    def handle(self, event: Event, now: float, *more: Event) -> list[Action]:
        self.events += [(each, now) for each in (event, *more)]
        with contextlib.closing(sqlite3.connect(f"file:{self._journal_file}?mode=ro", uri=True)) as other:
            journaled = [_decode(payload) for (payload,) in other.execute("SELECT payload FROM events ORDER BY seq")]
        durable = [event for entry in journaled for event in each_event(entry)]
        assert durable[: len(self.events)] == [event for event, _ in self.events]
        return self.answers.get(type(event), [])

    def next_deadline(self) -> float | None:
        return self.deadline

    def status(self, now: float) -> JobStatus:
        ranks = tuple(RankStatus(rank, "a", 100 + rank, 1, "training", 0, "") for rank in range(4))
        nodes = (NodeStatus("a", "rack", "active", (0, 1)),)
        return JobStatus("demo", now, "running", 1, 0, 0, 0.0, ranks, nodes, (), ())

    @property
    def is_quiet(self) -> bool:
        return True

    @property
    def state(self) -> JobState:
        return RecoveryMachine(default_policy(), JOB).state

    def memory(self) -> bytes:
        return b""

    def restore(self, memory: bytes) -> None:
        """Nothing is remembered."""

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event, _ in self.events]


class Peer:
    """An agent, or the platform: says what it is told to, and acknowledges what it hears if `polite`."""

    def __init__(self, rig: "Rig", identity: str, polite: bool = True) -> None:
        keys = JobKeys.load_client(rig.keys, identity)
        self.socket = DealerSocket(rig.endpoint, identity=identity, curve=keys)
        self.identity = identity
        self.polite = polite
        self.heard: list[Envelope] = []
        self.acks: list[int] = []
        self.life = 1  # of the ranks that it speaks for: their incarnation
        self.mailboxes: dict[str, Mailbox] = {}

    def mailbox(self, sender: str) -> Mailbox:
        if sender not in self.mailboxes:
            self.mailboxes[sender] = Mailbox(job="demo", address=sender, session=time.time_ns())
        return self.mailboxes[sender]

    def say(self, body: Message, sender: str | None = None, *, reliable: bool = True) -> Envelope:
        """Say something; what a rank says goes into a report of its node."""
        rank = rank_of(sender or self.identity)
        if rank is None:
            return self.say_as(sender or self.identity, body, reliable=reliable)
        assert isinstance(body, RankWord)
        reported = RanksReported(self.identity.partition("/")[2], (RankReport(rank, self.life, body),))
        return self.say_as(self.identity, reported, reliable=reliable)

    def say_as(self, sender: str, body: Message, *, reliable: bool = True) -> Envelope:
        """Say something in the name of any sender."""
        envelope = self.mailbox(sender).post(body, "controller", 0.0, reliable=reliable)
        self.socket.send(frames.frame_of(envelope))
        return envelope

    def listen(self) -> None:
        for received in self.socket.receive():
            for envelope in frames.envelopes_of(received.data):
                self.take(envelope)

    def take(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, Ack):
            self.acks.append(envelope.body.number)
            return
        self.heard.append(envelope)
        if self.polite and envelope.number:
            mailbox = self.mailbox(envelope.receiver)
            self.socket.send(frames.frame_of(mailbox.acknowledge(envelope)))

    def commands(self) -> list[Message]:
        """What was heard, each once, in order: orders for ranks, too."""
        firsts = {(e.receiver, e.number): e for e in reversed(self.heard)}
        bodies = [envelope.body for envelope in reversed(firsts.values())]
        return [command for body in bodies for command in _commands(body)]


def _commands(body: Message) -> list[Message]:
    if isinstance(body, StartProcesses):
        return [*body.starts]
    return [order.command for order in body.orders] if isinstance(body, OrderRanks) else [body]


class Rig:
    """One job's directories; `controller()` runs a controller on them, one after the other."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ms-"))
        self.job_directory = self.root / "job"
        self.job_directory.mkdir()
        self.run_directory = self.root / "run"
        self.run_directory.mkdir(mode=0o700)
        self.keys = self.run_directory / "keys"
        JobKeys.create(self.keys, ["node/a", "node/b", "platform"])
        found_journal(journal_path(self.job_directory), JOB, default_policy())
        self.endpoint = ""
        self.machine = StubMachine(journal_path(self.job_directory))
        self.peers: list[Peer] = []
        self.patience_s = 600.0
        self.missed = MISSED
        self.hold_s = HeartbeatPolicy().hold_s
        self.alive = KeepAlive()
        self.stop: str | None = None

    def peer(self, identity: str, *, polite: bool = True) -> Peer:
        self.peers.append(Peer(self, identity, polite))
        return self.peers[-1]

    @contextlib.asynccontextmanager
    async def controller(self, machine: StubMachine | None = None) -> AsyncIterator[tuple[Driver, asyncio.Task[int]]]:
        self.machine = machine or self.machine
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(open_sqlite(journal_path(self.job_directory)))
            router = bind("tcp://127.0.0.1:0", self.run_directory, JobKeys.load_server(self.keys))
            stack.callback(router.close)
            control = ControlServer(self.run_directory)
            stack.callback(control.close)
            self.endpoint = router.endpoint
            write_endpoint(self.run_directory, router.endpoint)
            mailbox = Mailbox(job="demo", address="controller", session=journal.session, retry_s=0.1)
            mailbox.term = journal.term
            routes = Routes()
            routes.placement.learn(FIRST_LIVES)
            liveness = Liveness(HeartbeatPolicy(HEARTBEAT_S, self.missed, hold_s=self.hold_s))
            wire, enroller = open_wire(
                router, mailbox, routes, liveness=liveness, world_size=JOB.world_size, keys=self.keys
            )
            driver = Driver(
                machine=self.machine,
                journal=journal,
                wire=wire,
                enroller=enroller,
                routes=routes,
                board=ProgressBoard(world_size=JOB.world_size),
                liveness=liveness,
                control=control,
                job_directory=self.job_directory,
                patience_s=self.patience_s,
                alive=self.alive,
                stop=self.stop,
            )
            task = asyncio.get_running_loop().create_task(driver.run())
            try:
                yield driver, task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def until(self, condition: Callable[[], object]) -> None:
        """Let everybody talk until the condition holds."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up, f"waited {PATIENCE_S} s; machine has {self.machine.kinds()}"
            for peer in self.peers:
                peer.listen()
            await asyncio.sleep(0.005)

    async def quiet(self, for_s: float) -> None:
        """Let everybody talk for a while."""
        until = time.monotonic() + for_s
        await self.until(lambda: time.monotonic() > until)

    async def ask(self, request: Request) -> Reply:
        return await asyncio.to_thread(ask, self.run_directory, request, PATIENCE_S)

    def journaled(self) -> list[str]:
        with contextlib.closing(sqlite3.connect(journal_path(self.job_directory))) as other:
            return [kind for (kind,) in other.execute("SELECT kind FROM events ORDER BY seq")]

    def close(self) -> None:
        for peer in self.peers:
            peer.socket.close()
        shutil.rmtree(self.root)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        rig.close()
