"""The process of a rank as its controller sees it: it answers every order at once, and trains nothing."""

import time
from collections.abc import Mapping

import msgspec

from midstep.protocol.messages import (
    FaultReported,
    OrderRanks,
    Quiesce,
    RankCommand,
    RankJoined,
    RankQuiesced,
    RankReady,
    RankReport,
    RankWord,
    Rejoin,
    Resume,
    StartProcess,
    StepCommitted,
)
from midstep.protocol.types import (
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
    """The settings that the played nodes of one process share. `nodes`: their names; `proxies`: of those before them.

    Without proxies each node has its own connection to the controller.
    """

    job: str
    world_size: int
    ranks_per_node: int
    heartbeat_s: float
    endpoint: str
    keys: str
    nodes: tuple[str, ...]
    proxies: tuple[str, ...] = ()


class PlayedRank:
    """The process of a rank, whose words its node carries."""

    def __init__(self, order: StartProcess, setting: Setting, node: str) -> None:
        self.rank, self.incarnation, self.generation = order.rank, order.incarnation, order.generation
        self.committed = 0
        self._node, self._setting = node, setting
        # In place of a process id: what no other process of the job has.
        self._pid = FIRST_PID + self.rank + self.incarnation * setting.world_size
        self._clean = order.connected  # others hold nothing of their own yet

    @property
    def running(self) -> RunningProcess:
        """Return its numbers, as its agent knows them."""
        return RunningProcess(self.rank, self._pid, self.incarnation, self.generation)

    def joined(self) -> RankReport:
        """Say that the train function is reached."""
        return self._said(RankJoined(self.rank, self.generation, self.incarnation, self._pid, self._report(), 0.0))

    def complaint(self) -> RankReport:
        """Report a broken collective."""
        kind, address = FaultKind.COMMUNICATION, rank_address(self.rank)
        return self._said(
            FaultReported(
                FaultReport(
                    kind, time.time(), address, "connection closed by peer",
                    self.rank, self._node, self.generation, self.incarnation,
                )
            )
        )  # fmt: skip

    def progress(self) -> RankProgress:
        """Read the step clock."""
        return RankProgress(
            self.rank, self.incarnation, self.generation, self.committed, Activity.COMPUTING, 2, 0.1, 0.1, STEP_S
        )

    def answer(self, command: RankCommand) -> RankReport | None:
        """Carry out an order, and say so at once."""
        match command:
            case Quiesce(generation=generation):
                self.generation = generation
                phases_s = {"stop": 0.0, "clean": 0.0}
                return self._said(RankQuiesced(self.rank, generation, self.incarnation, self._report(), phases_s))
            case Rejoin(generation=generation, part=part):
                self.generation, self.committed, self._clean = generation, part.target_step, True
                phases_s = {"rebuild": 0.0, "repair": 0.0, "rollback": 0.0}
                return self._said(RankReady(self.rank, generation, self.incarnation, part.target_step, phases_s))
            case Resume(generation=generation, step=step):
                self.committed = step + 1
                word = StepCommitted(self.rank, generation, self.incarnation, step + 1, time.time(), STEP_S)
                return self._said(word)
        return None

    def _said(self, word: RankWord) -> RankReport:
        return RankReport(self.rank, self.incarnation, word)

    def _report(self) -> StepReport:
        shard = f"shard{self.rank % SHARDS}"
        size, shift = self._setting.world_size, self._setting.ranks_per_node
        copies = [LocalStateCopy(rank, self.committed) for rank in (self.rank, (self.rank - shift) % size)]
        holds = (ShardHold(shard, SHARD_BYTES),) if self._clean else ()
        return StepReport(self.committed, False, self._clean, holds, (shard,), tuple(copies) if self._clean else ())


def answers_of(ranks: Mapping[int, PlayedRank], message: OrderRanks) -> list[RankReport]:
    """Return what the ranks of a node say when they have carried out their orders."""
    answers = (ranks[each.rank].answer(each.command) for each in message.orders if each.rank in ranks)
    return [answer for answer in answers if answer is not None]
