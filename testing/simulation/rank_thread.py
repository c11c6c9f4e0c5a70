"""The train thread of a simulated process: it carries out in virtual time what the product's rank loop asks for."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...processor import rank_actions as act
from ...processor.exceptions import fault_in_recovery
from ...processor.rank_actions import Action, Ended
from ...processor.session import Order
from ...protocol.errors import MidstepError
from ...protocol.messages import NewcomerWaiting, RankFinished, RankJoined, RankQuiesced, RankReady, StartProcess
from ...protocol.types import FaultKind, InjectionPoint, ShardHold, StepReport
from .fake_process import drive
from .invariants import Invariant
from .played_thread import Thread
from .process_faults import OneShot
from .recovery import RankRecovery
from .scripts import EXIT_RAISED, TrainFunction, plain_script

if TYPE_CHECKING:
    from .process import Process

START_LINK_UP_S = 60.0
CLEAN_S = PHASE_S = 0.01
SHARD_BYTES = 40_000_000


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
            act.Inspect: lambda _: process.memory.lost,
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
            act.Repair: lambda each: recovery.repair(each.order),
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
        process, kind = self._process, fault_in_recovery(action.error)
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
        self._world.rank_watch.resumed(self._process, action.order)
        return (yield from self._train_function.run())

    def _clean(self) -> Thread[list[str]]:
        yield self._process.sleep(CLEAN_S)
        memory = self._process.memory
        memory.gradients = None
        return memory.lost

    def _rebuild(self, action: act.Rebuild) -> Thread[None]:
        self._rejoined = action
        yield from self._recovery.rebuild(action.order)
