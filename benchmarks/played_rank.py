"""The process of a rank as its controller sees it: it answers every order at once, and trains nothing."""

import time
from typing import Protocol

import msgspec

from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import (
    Envelope,
    FaultReported,
    Quiesce,
    RankJoined,
    RankQuiesced,
    RankReady,
    Rejoin,
    Report,
    Resume,
    StartProcess,
    StepCommitted,
)
from midstep.protocol.types import (
    CONTROLLER,
    Activity,
    FaultKind,
    FaultReport,
    LocalStateCopy,
    RankProgress,
    RunningProcess,
    ShardHold,
    StepReport,
    rank_address,
)

SHARDS = 8  # every rank has a replica of its shard in each node
SHARD_BYTES = 2_000_000_000
STEP_S = 0.5
FIRST_PID = 1000


class Setting(msgspec.Struct, frozen=True):
    """The settings that the played nodes of one process share. `nodes`: their names."""

    job: str
    world_size: int
    ranks_per_node: int
    heartbeat_s: float
    endpoint: str
    keys: str
    nodes: tuple[str, ...]


class Node(Protocol):
    """The carrier of a rank's words."""

    name: str

    def hear(self, envelope: Envelope) -> None:
        """Take in what a rank says."""

    def saw(self, kind: str, generation: int) -> None:
        """Note that an order has arrived."""


class PlayedRank:
    """The process of a rank. `say` sends its envelopes over its node's connection."""

    def __init__(self, order: StartProcess, setting: Setting, node: Node) -> None:
        self.rank, self.incarnation, self.generation = order.rank, order.incarnation, order.generation
        self.committed = 0
        self.mailbox = Mailbox(job=setting.job, address=rank_address(self.rank), session=order.incarnation)
        self.mailbox.expect_ranks(setting.world_size)
        self._node, self._setting = node, setting
        # In place of a process id: what no other process of the job has.
        self._pid = FIRST_PID + self.rank + self.incarnation * setting.world_size
        self._clean = order.connected  # others hold nothing of their own yet

    @property
    def running(self) -> RunningProcess:
        """Return its numbers, as its agent knows them."""
        return RunningProcess(self.rank, self._pid, self.incarnation, self.generation)

    def join(self) -> None:
        """Say that the train function is reached."""
        self.say(RankJoined(self.rank, self.generation, self.incarnation, self._pid, self._report(), 0.0))

    def take(self, envelope: Envelope) -> None:
        """Acknowledge what has come, and answer it once."""
        taken = self.mailbox.take(envelope, time.monotonic())
        if taken.reply is not None:
            self._node.hear(taken.reply)
        if not taken.deliver:
            return
        if envelope.number:
            self._node.hear(self.mailbox.acknowledge(envelope))
        self._obey(envelope)

    def complain(self) -> None:
        """Report a broken collective."""
        kind, address = FaultKind.COMMUNICATION, rank_address(self.rank)
        self.say(
            FaultReported(
                FaultReport(
                    kind, time.time(), address, "connection closed by peer",
                    self.rank, self._node.name, self.generation, self.incarnation,
                )
            )
        )  # fmt: skip

    def say(self, report: Report) -> None:
        """Report to the controller, until it acknowledges."""
        self._node.hear(self.mailbox.post(report, CONTROLLER, time.monotonic()))

    def resend(self, now: float) -> None:
        """Send again what the controller has not acknowledged."""
        for envelope in self.mailbox.due(now):
            self._node.hear(envelope)

    def progress(self) -> RankProgress:
        """Read the step clock."""
        return RankProgress(
            self.rank, self.incarnation, self.generation, self.committed, Activity.COMPUTING, 2, 0.1, 0.1, STEP_S
        )

    def _obey(self, envelope: Envelope) -> None:
        match envelope.body:
            case Quiesce(generation=generation):
                self.generation = generation
                self._node.saw("quiesce", generation)
                phases_s = {"stop": 0.0, "clean": 0.0}
                self.say(RankQuiesced(self.rank, generation, self.incarnation, self._report(), phases_s))
            case Rejoin(generation=generation, part=part):
                self.generation, self.committed, self._clean = generation, part.target_step, True
                self._node.saw("rejoin", generation)
                phases_s = {"rebuild": 0.0, "repair": 0.0, "rollback": 0.0}
                self.say(RankReady(self.rank, generation, self.incarnation, part.target_step, phases_s))
            case Resume(generation=generation, step=step):
                self.committed = step + 1
                self._node.saw("resume", generation)
                self.say(StepCommitted(self.rank, generation, self.incarnation, step + 1, time.time(), STEP_S))

    def _report(self) -> StepReport:
        shard = f"shard{self.rank % SHARDS}"
        size, shift = self._setting.world_size, self._setting.ranks_per_node
        copies = [LocalStateCopy(rank, self.committed) for rank in (self.rank, (self.rank - shift) % size)]
        holds = (ShardHold(shard, SHARD_BYTES),) if self._clean else ()
        return StepReport(self.committed, False, self._clean, holds, (shard,), tuple(copies) if self._clean else ())
