"""A real controller process, killed for real; the agents and processors of two nodes of two ranks are played here."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstep.controller.endpoints.control_requests import Request, StatusReply, StatusRequest
from midstep.controller.endpoints.local_sockets import NoController, ask
from midstep.controller.journal.reading import read_status
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol import codec as frames
from midstep.protocol.discovery import read_endpoint
from midstep.protocol.incidents import JobStatus, Outcome
from midstep.protocol.keys import JobKeys
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    Ack,
    ArmFault,
    CommandToRank,
    EndJob,
    Envelope,
    Message,
    NodeHeartbeat,
    NodeJoined,
    OrderRanks,
    ProcessesStarted,
    ProcessExited,
    ProcessStarted,
    Quiesce,
    RankJoined,
    RankQuiesced,
    RankReady,
    RankReport,
    RanksReported,
    RankWord,
    Rejoin,
    Resume,
    StartProcess,
    StartProcesses,
    StepCommitted,
)
from midstep.protocol.transport import DealerSocket
from midstep.protocol.types import (
    JobSpec,
    LocalStateCopy,
    RunningProcess,
    ShardHold,
    StepReport,
    StoreEndpoint,
)

PATIENCE_S = 40.0
HOLDS = (ShardHold("replicated", 1000),)


class Rank:
    """A processor that does as it is told, unless its answers are held back."""

    def __init__(self, order: StartProcess, own_step: int) -> None:
        """`own_step`: as of when the agent's black box has this rank's local state."""
        self.rank, self.incarnation, self.pid = order.rank, order.incarnation, 1000 * order.incarnation + order.rank
        self.generation = order.generation
        self.committed = 0
        self.own_step = own_step
        self.whole = order.connected
        self.done: set[tuple[str, int]] = set()

    def report(self) -> StepReport:
        holds = HOLDS if self.whole else ()
        own = (LocalStateCopy(self.rank, self.own_step),)
        return StepReport(self.committed, False, self.whole, holds, ("replicated",), own)

    def answers(self, command: Message) -> list[RankWord]:
        """Do a command at most once, and say so."""
        if not isinstance(command, Quiesce | Rejoin | Resume):
            return []
        key = (type(command).__name__, command.generation)
        if key in self.done or command.generation < self.generation:
            return []
        self.done.add(key)
        self.generation = command.generation
        head = (self.rank, self.generation, self.incarnation)
        if isinstance(command, Quiesce):
            return [RankQuiesced(*head, self.report(), {"stop": 0.0})]
        if isinstance(command, Rejoin):
            self.committed = self.own_step = command.part.target_step
            self.whole = True
            return [RankReady(*head, self.committed, {"rebuild": 0.0})]
        self.committed = self.own_step = command.step + 1
        return [StepCommitted(*head, self.committed, time.time(), 0.1)]


class Node:
    """An agent and its ranks."""

    def __init__(self, name: str, keys: Path, endpoint: str) -> None:
        self.name = name
        self.address = f"node/{name}"
        self.socket = DealerSocket(endpoint, identity=self.address, curve=JobKeys.load_client(keys, self.address))
        self.mailbox = Mailbox(job="demo", address=self.address, session=time.time_ns(), retry_s=0.1)
        self.ranks: dict[int, Rank] = {}
        self.boxes: dict[int, int] = {}  # what outlives a rank's process
        self.started: list[tuple[int, int]] = []
        self.held: tuple[type, ...] = ()
        self.waiting: list[tuple[Rank, RankWord]] = []
        self.ended = self.armed = False
        self.beat_s = 0.0
        self.say(self.joined())

    def joined(self) -> NodeJoined:
        processes = tuple(RunningProcess(r.rank, r.pid, r.incarnation, r.generation) for r in self.ranks.values())
        return NodeJoined(self.name, self.name, StoreEndpoint("127.0.0.1", 1), processes)

    def say(self, body: Message) -> None:
        envelope = self.mailbox.post(body, "controller", time.monotonic())
        self.socket.send(frames.frame_of(envelope))

    def say_of(self, rank: Rank, word: RankWord) -> None:
        """Report what a rank says, unless it is held back."""
        if isinstance(word, self.held):
            self.waiting.append((rank, word))
            return
        self.say(RanksReported(self.name, (RankReport(rank.rank, rank.incarnation, word),)))

    def release(self) -> None:
        """Say what was held back."""
        waiting, self.waiting, self.held = self.waiting, [], ()
        for rank, word in waiting:
            self.say_of(rank, word)

    def kill(self, rank: int) -> None:
        """A training process dies, and its agent says so."""
        gone = self.ranks.pop(rank)
        self.boxes[rank] = gone.own_step
        process = RunningProcess(rank, gone.pid, gone.incarnation, gone.generation)
        self.say(ProcessExited(self.name, process, -9, time.time(), expected=False))

    def turn(self) -> None:
        now = time.monotonic()
        for received in self.socket.receive():
            for envelope in frames.envelopes_of(received.data):
                self.take(envelope, now)
        for envelope in self.mailbox.due(now):
            self.socket.send(frames.frame_of(envelope))
        if now - self.beat_s > 0.3:
            self.beat_s = now
            beat = self.mailbox.post(NodeHeartbeat(self.name, time.time(), ()), "controller", now, reliable=False)
            self.socket.send(frames.frame_of(beat))

    def take(self, envelope: Envelope, now: float) -> None:
        taken = self.mailbox.take(envelope, now)
        if taken.reply is not None:
            self.socket.send(frames.frame_of(taken.reply))
        if taken.new_session and envelope.term > 1:
            self.say(self.joined())
        if not taken.deliver or isinstance(envelope.body, Ack):
            return
        if envelope.number:
            self.socket.send(frames.frame_of(self.mailbox.acknowledge(envelope)))
        self.obey(envelope.body)

    def obey(self, body: Message) -> None:
        if isinstance(body, StartProcesses):
            for start in body.starts:
                self.start(start)
        elif isinstance(body, EndJob):
            self.ended = True
        elif isinstance(body, ArmFault):
            self.armed = True
        elif isinstance(body, OrderRanks):
            for order in body.orders:
                self.hand(order)

    def hand(self, order: CommandToRank) -> None:
        """Have a rank obey, if its process is there."""
        rank = self.ranks.get(order.rank)
        self.armed |= isinstance(order.command, ArmFault)
        if rank is not None:
            for answer in rank.answers(order.command):
                self.say_of(rank, answer)

    def start(self, order: StartProcess) -> None:
        held = self.ranks.get(order.rank)
        if held is not None and held.incarnation >= order.incarnation:
            return
        rank = self.ranks[order.rank] = Rank(order, self.boxes.get(order.rank, 0))
        self.started.append((order.rank, order.incarnation))
        process = RunningProcess(rank.rank, rank.pid, rank.incarnation, rank.generation)
        self.say(ProcessesStarted(self.name, (ProcessStarted(self.name, process, warm=True),)))
        report = rank.report()
        self.say_of(rank, RankJoined(rank.rank, rank.generation, rank.incarnation, rank.pid, report, 0.1))


class Cluster:
    """One job: its directories, its controller process, its nodes."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ms-"))
        self.job_directory, self.run_directory = self.root / "job", self.root / "run"
        self.job_directory.mkdir()
        self.run_directory.mkdir(mode=0o700)
        self.keys = self.run_directory / "keys"
        JobKeys.create(self.keys, ["node/node0", "node/node1", "platform"])
        settings = job_settings(default_policy(), self.job_directory)
        directory = str(self.job_directory)
        self.found(JobSpec("demo", ("t.py",), False, False, {}, directory, directory, 4, 2, 2, 0, 0, settings))
        self.log = (self.root / "controller.log").open("w+")
        self.controllers: list[subprocess.Popen[bytes]] = []
        self.nodes: list[Node] = []

    def found(self, job: JobSpec) -> None:
        """Put the job where its controllers find it."""
        found_journal(journal_path(self.job_directory), job, default_policy())

    def command(self, *options: str) -> list[str]:
        directories = ["--job-dir", str(self.job_directory), "--run-dir", str(self.run_directory)]
        return [sys.executable, "-m", "midstep.cli.main", "controller", *directories, *options]

    def start_controller(self, *options: str) -> None:
        self.controllers.append(subprocess.Popen(self.command(*options), stderr=self.log))

    def kill_controller(self) -> None:
        self.controllers[-1].kill()
        self.controllers[-1].wait(10)

    def start(self) -> None:
        """Controller and nodes up, all ranks past their first step."""
        self.start_controller()
        self.until(lambda: read_endpoint(self.run_directory))
        endpoint = read_endpoint(self.run_directory)
        assert endpoint is not None
        self.nodes = [Node(f"node{number}", self.keys, endpoint) for number in range(2)]
        self.until(lambda: self.phase() == "running")

    def hold(self, *kinds: type) -> None:
        for node in self.nodes:
            node.held = kinds

    def release(self) -> None:
        for node in self.nodes:
            node.release()

    def host(self, rank: int) -> Node:
        return next(node for node in self.nodes if rank in node.ranks)

    def ranks(self) -> dict[int, Rank]:
        return {number: rank for node in self.nodes for number, rank in node.ranks.items()}

    def starts(self) -> list[tuple[int, int]]:
        return sorted(start for node in self.nodes for start in node.started)

    def ask(self, request: Request) -> object:
        """Ask the live controller; None while there is none."""
        try:
            return ask(self.run_directory, request, 0.5)
        except NoController:
            return None

    def phase(self) -> str:
        reply = self.ask(StatusRequest())
        return reply.status.phase if isinstance(reply, StatusReply) else "nobody"

    def status(self) -> JobStatus:
        """The status as the journal has it."""
        return read_status(self.job_directory)

    def recovered(self) -> bool:
        """Whether there has been an incident, and the last one is closed."""
        incidents = self.status().incidents
        return bool(incidents) and incidents[-1].outcome is not Outcome.OPEN

    def until(self, condition: Callable[[], object]) -> None:
        """Let the nodes do their work until the condition holds."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > give_up:
                raise AssertionError(f"waited {PATIENCE_S} s, phase {self.phase()}; controllers said:\n{self.said()}")
            endpoint = read_endpoint(self.run_directory)
            for node in self.nodes:
                if endpoint is not None and endpoint != node.socket.endpoint:
                    node.socket.move_to(endpoint)
                node.turn()
            time.sleep(0.01)

    def said(self) -> str:
        """Return what the controllers have printed."""
        self.log.seek(0)
        return self.log.read()

    def play(self, for_s: float) -> None:
        """Let the nodes do their work for a while."""
        end = time.monotonic() + for_s
        self.until(lambda: time.monotonic() >= end)

    def close(self) -> None:
        for controller in self.controllers:
            if controller.poll() is None:
                os.kill(controller.pid, signal.SIGKILL)
            controller.wait(10)
        for node in self.nodes:
            node.socket.close()
        self.log.close()
        shutil.rmtree(self.root)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        made.close()
