"""The train thread of a simulated process: it carries out in virtual time what the product's rank loop asks for.

Rebuild, repair and rollback move state between ranks, and some of it is lost on the way (`RankRecovery`).
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...processor import rank_loop as act
from ...processor.exceptions import fault_in_recovery
from ...processor.rank_loop import NOTHING, Action, Ended, ReceivedBytes
from ...processor.session import Order
from ...protocol.errors import (
    CheckpointError,
    ChecksumMismatch,
    MidstepError,
    StateLost,
)
from ...protocol.messages import (
    NewcomerWaiting,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    Rejoin,
    StartProcess,
)
from ...protocol.types import (
    FaultKind,
    InjectionPoint,
    LocalStateTransfer,
    RestoreSource,
    ShardHold,
    ShardTransfer,
    StepReport,
)
from ..invariants import Invariant
from ..played_agent import drive
from .network import Group, Key, Thread
from .process_faults import OneShot
from .scripts import EXIT_RAISED, TrainFunction, plain_script

if TYPE_CHECKING:
    from .network import Group
    from .process import Process


START_LINK_UP_S = 60.0
CLEAN_S = PHASE_S = 0.01
SHARD_BYTES = 40_000_000
LINK_UP_S = 1.5
Incoming = list[tuple[Key, Callable[[int], None]]]


class RankRecovery:
    """Carries out one Rejoin at a time. Until it is over the thread counts as in a collective: any abort ends it."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._world = process.world
        self._own: int | None = None
        self._arrived: dict[str, int] = {}  # shards, adopted when all else has come, too
        self._pieces: dict[str, list[Key]] = {}  # of each of them

    def rebuild(self, order: Rejoin) -> Thread[None]:
        """Connect; a world that started together is connected already."""
        process = self._process
        process.in_collective = True
        process.world_size = order.part.world_size or process.world_size
        process.former_size = order.part.former_size or process.world_size
        if not order.connected:
            process.collectives = 0
            group = self._world.group(order.generation, process.world_size)
            yield from process.link_up(group, order.store, LINK_UP_S)

    def repair(self, order: Rejoin) -> Thread[ReceivedBytes]:
        """Get what is lost, and hand out what others have lost."""
        process, part = self._process, order.part
        process.copies.part = part
        if part.restore is RestoreSource.HOST_COPY:
            yield from process.copies.bring(part)
            process.copies.load(part.target_step)
            process.integrity.loads(part.target_step, part.restore)
            self._own = part.target_step
            yield process.sleep(0.01)
            return NOTHING
        if part.restore is RestoreSource.CHECKPOINT:
            self._load(part.target_step)
            process.integrity.loads(part.target_step, part.restore)
            yield process.sleep(0.05)
            return NOTHING
        incoming: Incoming = []
        self._arrived, self._pieces = {}, {}
        for transfer in part.transfers:
            self._move_shard(transfer, part.target_step, incoming)
        self._own = process.place.copy_of(process.rank, part.target_step)
        for move in part.local_states:
            self._move_local(move, part.target_step, incoming)
        self._world.reached("repair")
        if incoming:
            yield lambda go: self._receive(incoming, go)
            process.memory.shards |= self._arrived
            process.integrity.arrives(self._group, self._pieces)
        else:
            yield process.sleep(0.001)
        return NOTHING

    def recall_local_state(self, step: int) -> None:
        """Raise StateLost where there is no copy of this rank's rank-local state."""
        if self._own is None:
            raise StateLost(f"no copy of the rank-local state as of step {step}")

    def roll_back(self, order: Rejoin) -> Thread[None]:
        """Be as of the target step, and hand the rank-local state to the buddy."""
        process, group, step, own = self._process, self._group, order.part.target_step, self._own
        assert own is not None
        process.memory.own = own
        process.place.keep_local(step, own)
        self._world.reached("rollback")
        process.copied_rank = peer = order.part.copied_rank
        if peer is not None:
            group.post(("rolled back", process.rank), own)
            blob: int = yield lambda go: group.receive(("rolled back", peer), go)
            process.place.keep_peer(peer, step, blob)
        process.in_collective = False
        process.memory.restored(step)

    # --- inside -------------------------------------------------------------------------------------------------

    def _move_shard(self, transfer: ShardTransfer, step: int, incoming: Incoming) -> None:
        process, shard = self._process, transfer.shard_id
        key: Key = ("shard", shard, transfer.offset_bytes, transfer.source, transfer.destination)
        if transfer.source == process.rank:
            held = process.memory.shards[shard]
            if held != step:
                what = f"rank {process.rank} is a source of step {step} and holds {held}"
                self._world.fail(Invariant.SAME_NUMBERS, what)
            process.integrity.sends(self._group, key, shard)
            self._group.post(key, held)
        else:
            self._pieces.setdefault(shard, []).append(key)
            process.memory.overwrite(shard)
            incoming.append((key, lambda value: self._arrived.update({shard: value})))

    def _move_local(self, move: LocalStateTransfer, step: int, incoming: Incoming) -> None:
        process, key = self._process, ("rank-local state", move.rank)
        if move.source != process.rank:
            incoming.append((key, self._take_local))
            return
        origin = move.rank if move.origin is None else move.origin
        blob = process.place.copy_of(origin, step)
        if blob is None:
            what = f"rank {process.rank} has no rank-local state of rank {origin} as of step {step}"
            self._world.fail(Invariant.NOTHING_LOST, what)
        elif move.rank != process.rank:
            self._group.post(key, blob)

    def _take_local(self, blob: int) -> None:
        self._own = blob

    def _receive(self, incoming: Incoming, go: Callable[[Any], None]) -> None:
        """Take what arrives, in whatever order; go on with the last."""
        missing = len(incoming)

        def once(take: Callable[[int], None]) -> Callable[[int], None]:
            def arrived(value: int) -> None:
                nonlocal missing
                if self._world.fires(OneShot.TRANSFER):
                    self._process.raise_now(ChecksumMismatch("wrong checksum"))
                    return
                take(value)
                missing -= 1
                if missing == 0:
                    go(None)

            return self._process.still(arrived)

        for key, take in incoming:
            self._group.receive(key, once(take))

    def _load(self, step: int) -> None:
        process, disk = self._process, self._world.disk
        if step not in disk.steps:
            if disk.damaged:
                raise CheckpointError(f"the checkpoint of step {step} is damaged")
            what = f"rank {process.rank} is told to load step {step}, which no checkpoint has"
            self._world.fail(Invariant.NOTHING_LOST, what)
        process.memory.load(step)
        self._own = step

    @property
    def _group(self) -> Group:
        assert self._process.group is not None
        return self._process.group


def thread_of(process: "Process", order: StartProcess) -> Thread[None]:
    """Start, link up with the others of a world that starts together, and do what the script does."""
    world = process.world
    yield process.sleep(world.chance.uniform(0.01, 0.3))
    try:
        if order.connected:
            group = world.group(process.session.generation, process.world_size)
            yield from process.link_up(group, order.store, START_LINK_UP_S)
            process.in_collective = False
        if order.connected and world.setting.plain:
            yield from plain_script(process)
            return
        if order.connected or process.place.local_is_empty:
            process.place.keep_local(0, 0)
        if order.early:
            process.agent.say(NewcomerWaiting(process.agent.name, process.running))
        yield from RankThread(process).run()
        process.end(0)
    except MidstepError:
        process.end(EXIT_RAISED)


class RankThread:
    """Carries out the actions of the loop."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._world = process.world
        self._rejoined: act.Rebuild | None = None
        self._recovery = recovery = RankRecovery(process)
        self._train_function = train = TrainFunction(process, lambda: self._drive(process.loop.hold()))
        self._at_once: Mapping[type[Action], Callable[[Any], object]] = {
            act.IgnoreOrder: self._complain,
            act.FindFailure: lambda _: process.failed,
            act.StopInFlight: self._stop,
            act.Inspect: lambda _: process.integrity.not_trusted(process.memory.lost),
            act.Survey: lambda _: self._survey(),
            act.Join: self._join,
            act.Post: self._post,
            act.ReportFault: lambda each: process.report_fault(each.kind, each.detail),
            act.JudgeFailure: self._judge,
            act.SetActivity: lambda each: process.doing(each.activity),
            act.BeginPhase: self._begin_phase,
            act.EndPhase: lambda _: PHASE_S,
            act.RecallLocalState: lambda each: recovery.recall_local_state(each.step),
            act.Halt: lambda _: None,
            act.PublishCheckpoint: lambda _: train.publish(),
            act.ClaimCheckpoints: lambda _: None,
            act.Save: self._save,
        }
        self._in_time: Mapping[type[Action], Callable[[Any], Thread[Any]]] = {
            act.AwaitOrder: lambda _: self._await_order(),
            act.Train: self._train,
            act.Clean: lambda _: self._clean(),
            act.Rebuild: self._rebuild,
            act.Repair: self._repair,
            act.RollBack: lambda each: recovery.roll_back(each.order),
            act.Flush: lambda _: process.flush(),
        }

    def run(self) -> Thread[None]:
        """Be the train thread of a resilient script, up to its release."""
        yield from self._drive(self._process.loop.run())

    def _drive(self, actions: act.Actions[Any]) -> Thread[Any]:
        return drive(actions, self._at_once, self._in_time, fails=MidstepError)

    # --- what takes no time -------------------------------------------------------------------------------------

    def _complain(self, action: act.IgnoreOrder) -> None:
        what = f"rank {self._process.rank} can do nothing with a {type(action.order).__name__}"
        self._world.fail(Invariant.UNDERSTOOD, what)

    def _stop(self, action: act.StopInFlight) -> None:
        if action.reason is not None:
            self._train_function.forget_checkpoint()
            self._process.abort(action.reason)

    def _survey(self) -> StepReport:
        process = self._process
        shards, copies = [ShardHold(each, SHARD_BYTES) for each in process.memory.shards], process.place.copies()
        checkpoints, trace = self._world.disk.survey()
        report = process.standing.report(shards, copies, checkpoints, trace)
        report = process.copies.reported(report)
        self._world.rank_watch.reports(process, report)
        return report

    def _join(self, action: act.Join) -> None:
        process, generation = self._process, self._process.session.generation
        process.post(RankJoined(process.rank, generation, process.incarnation, process.pid, action.report, 0.1))
        self._world.reached("joined")

    def _post(self, action: act.Post) -> None:
        process, body = self._process, action.body
        if isinstance(body, RankFinished):
            self._world.rank_watch.finished(process)
        elif isinstance(body, RankReady) and self._rejoined is not None:
            self._world.rank_watch.ready(process, self._rejoined.order)
        process.post(body)
        if isinstance(body, RankQuiesced):
            self._world.reached("quiesced")

    def _judge(self, action: act.JudgeFailure) -> None:
        """Report why a recovery has failed: always midstep's own error."""
        process, kind = self._process, fault_in_recovery(action.error, ())
        assert kind is not None
        process.in_collective = False
        process.faulty = process.faulty or kind is FaultKind.CORRUPTION
        if not process.interrupted():
            process.report_fault(kind, str(action.error))

    def _begin_phase(self, action: act.BeginPhase) -> None:
        if action.point is InjectionPoint.REBUILD:
            self._process.repeat_itself()
            self._world.reached("rebuild")

    def _save(self, action: act.Save) -> tuple[str, str]:
        disk, fails = self._world.disk, self._world.fires(OneShot.SAVE)
        disk.failures += fails
        return "/checkpoints", "no space left on device" if fails else disk.write(self._process, action.order)

    # --- what takes time ----------------------------------------------------------------------------------------

    def _await_order(self) -> Thread[Order]:
        order: Order = yield self._process.await_order
        return order

    def _train(self, action: act.Train) -> Thread[Ended]:
        self._process.former_size = self._process.world_size
        self._world.rank_watch.resumed(self._process, action.order)
        self._process.copies.resumed()
        self._process.integrity.resumed()
        return (yield from self._train_function.run())

    def _clean(self) -> Thread[list[str]]:
        yield self._process.sleep(CLEAN_S)
        memory = self._process.memory
        memory.gradients = None
        return self._process.integrity.not_trusted(memory.lost)

    def _repair(self, action: act.Repair) -> Thread[ReceivedBytes]:
        with self._process.integrity.repairing(action.order.part):
            return (yield from self._recovery.repair(action.order))

    def _rebuild(self, action: act.Rebuild) -> Thread[None]:
        self._rejoined = action
        yield from self._recovery.rebuild(action.order)
