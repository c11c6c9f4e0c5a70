"""A training process in an exploration: the product's own loop of a rank, carried out without devices, sockets or time.

Session, standing, step order and loop are those of `processor/`. What they ask for is done here on what the process
holds (`holdings.py`), and whatever it says is held against that.
"""

from collections.abc import Generator
from contextlib import nullcontext
from typing import Any, Final

from midstep.processor import rank_loop as act
from midstep.processor.exceptions import fault_in_recovery
from midstep.processor.rank_loop import Action, Ended, RankLoop
from midstep.processor.session import Session
from midstep.processor.step_order import Act, StepOrder, StepState
from midstep.protocol.errors import CommunicatorAborted, Interrupted, LinkUpFailed, MidstepError
from midstep.protocol.messages import (
    FaultReported,
    Message,
    RankJoined,
    RankReady,
    Report,
    SaveCheckpoint,
    StepCommitted,
)
from midstep.protocol.types import (
    Activity,
    CheckpointTrace,
    FaultKind,
    FaultReport,
    RepairPart,
    ShardHold,
    StepReport,
    rank_address,
)

from .holdings import Holdings
from .inputs import Birth, Happened, Heard, Input, Linked, Voted, Wait, What, pid_of
from .voting import Voting

STEP_S = 0.1
SHARD_BYTES = 1000
_WAITS: Final = object()


class Life:
    """One process, from its start on. `said` and `published`: what has come of what it took in last."""

    def __init__(self, birth: Birth) -> None:
        order = birth.order
        self.birth = birth
        self.rank = order.rank
        self.session = Session(order.rank, order.incarnation, order.generation)
        self.step_state = StepState(clean=order.connected)
        self.steps = StepOrder(self.step_state, self)
        self.loop = RankLoop(self.session, self.step_state, self.steps, early=order.early)
        self.holdings = Holdings(order.rank, birth.ward, birth.box, connected=order.connected)
        self.linked = 0  # the generation whose links it has
        self.failed: str | None = None
        self.activity = Activity.STARTING
        self.wait = Wait.NOTHING
        self.part: RepairPart | None = None
        self.barrier = Act.SWAP  # what it does at the commit barrier
        self.to_publish = 0
        self.met = self.entered = self.torn = False
        self.checkpoints = birth.checkpoints
        self.arriving = Linked()
        self.voting = Voting(self) if birth.votes else None
        self.heard: tuple[bytes, ...] = ()  # what others hold
        self.said: list[Report] = []
        self.published: list[int] = []
        if order.connected or not any(copy.rank == order.rank for copy in birth.box):
            self.holdings.keep(order.rank, 0)
        self.stack: list[Generator[Any, Any, Any]] = [self.loop.run()]
        self._go_on(None)

    # --- what comes ---------------------------------------------------------------------------------------------

    def take(self, given: Input) -> None:
        """Take in what has come, and do what follows, up to the next wait."""
        self.said, self.published, self.holdings.broken = [], [], []
        match given:
            case Heard():
                self._hear(given)
            case Linked():
                self.checkpoints, self.arriving = given.checkpoints, given
                self.linked, self.failed = self.session.generation, None
                self._go_on(None)
            case Happened(what=What.BREAK):
                self.failed = "a peer is gone"
                self._fail(LinkUpFailed(self.failed))
            case Happened(what=What.RAISE):
                self._report(FaultKind.EXCEPTION)
                self._go_on(self._left(Ended.FAILED))
            case Happened(what=What.FLIP):
                self.holdings.wrong = self.holdings.flipped = True
            case Voted():
                self.met, self.torn, self.heard = True, False, given.said
                self._go_on(self._pass(self.barrier))
            case Happened(what=What.GRADIENTS):
                self.holdings.gradients = self.step_state.count + 1
                self.stack.append(self.steps.end(self.step_state.count))
                self._go_on(None)
            case Happened(what=what):
                self.met, self.torn = True, what is What.TEAR
                self._go_on(self._pass(self.barrier))

    def interrupted(self) -> bool:
        """Whether the controller wants the train thread to stop."""
        return self.session.quiescing

    def begins(self, step: int) -> bool:
        """Whether a step may be begun."""
        return self.session.begins(step)

    def _hear(self, heard: Heard) -> None:
        self.checkpoints, self.torn = heard.checkpoints, heard.torn
        abort = self.session.hear(heard.order).abort
        if abort:
            self.linked, self.failed = 0, self.failed or "aborted"
        if abort and self.wait is not Wait.ORDERS:
            self._fail(CommunicatorAborted("aborted"))
        elif self.wait is Wait.ORDERS:
            order = self.session.take_order()
            if order is not None:
                self._go_on(order)

    def _fail(self, error: MidstepError) -> None:
        """Have fail what the process waits for."""
        if self.wait is Wait.COLLECTIVES:
            self._go_on(self._left(Ended.INTERRUPTED))
        elif self.wait is Wait.BARRIER:
            self._go_on(False)
        elif self.wait is Wait.LINKS:
            self._go_on(None, error)

    # --- the loop -----------------------------------------------------------------------------------------------

    def _go_on(self, outcome: object, error: MidstepError | None = None) -> None:
        """Go on with an outcome, or an error, up to the next wait or the end."""
        while self.stack:
            try:
                top = self.stack[-1]
                asked = top.send(outcome) if error is None else top.throw(error)
                outcome, error = self._do(asked), None
            except StopIteration as end:
                self.stack.pop()
                # The end of a step is followed by its update; what was done at a broken barrier, by what it returns.
                outcome, error = self._update() if len(self.stack) == 1 else end.value, None
            except Interrupted:  # out of the end of a step
                outcome, error = self._left(Ended.INTERRUPTED), None
            except MidstepError as failure:
                outcome, error = None, failure
            if outcome is _WAITS:
                return
        self.wait = Wait.NOTHING

    def _left(self, ended: Ended) -> Ended:
        """Leave the train function."""
        del self.stack[1:]
        return ended

    def _do(self, asked: Action | Act) -> object:  # noqa: PLR0911, PLR0912 - one case for each action
        match asked:
            case Act():
                return self._end_of_step(asked)
            case act.AwaitOrder():
                self.wait = Wait.ORDERS
                return self.session.take_order() or _WAITS
            case act.Train(order=order):
                connected = self.linked == self.session.generation
                self.holdings.judge_training(order.step, self.step_state.count, linked=connected)
                if self.voting is not None:
                    self.voting.resumed()
                return self._step()
            case act.FindFailure():
                return self.failed
            case act.StopInFlight(reason=reason):
                self.linked, self.to_publish = 0, self.to_publish if reason is None else 0
            case act.Halt():
                self.linked = 0
            case act.Inspect():
                return self._struck()
            case act.Clean():
                self.holdings.gradients = None
                return self._struck()
            case act.Survey():
                return self._survey()
            case act.Join(report=report):
                head = (self.rank, self.session.generation, self.session.incarnation, pid_of(self.birth.order))
                self.said.append(RankJoined(*head, report, STEP_S))
            case act.Post(body=body):
                self._post(body)
            case act.ReportFault(kind=kind):
                self._report(kind)
            case act.JudgeFailure(error=error):
                self._report(fault_in_recovery(error, ()))
            case act.SetActivity(activity=activity):
                self.activity = activity
            case act.EndPhase():
                return 0.0
            case act.Rebuild(order=order):
                self.part, self.wait = order.part, Wait.LINKS
                return _WAITS
            case act.Repair(order=order):
                with nullcontext() if self.voting is None else self.voting.votes.repairing(order.part):
                    self.holdings.repair(order.part, self.arriving)
                return act.NOTHING
            case act.RecallLocalState(step=step):
                self.holdings.recall(step, self.part, self.arriving)
            case act.RollBack(order=order):
                self.holdings.roll_back(order.part.target_step)
            case act.PublishCheckpoint():
                self._publish()
            case act.Save(order=order):
                return self._save(order)
        return None

    def _survey(self) -> StepReport:
        shards = [ShardHold(self.birth.shard, SHARD_BYTES)]
        report = self.step_state.report(shards, self.holdings.box, self.checkpoints, CheckpointTrace("/checkpoints"))
        self.holdings.judge_report(report)
        return report

    def _post(self, body: Message) -> None:
        assert isinstance(body, Report)
        if isinstance(body, RankReady):
            self.holdings.judge_ready(body, self.linked)
        self.said.append(body)

    def _struck(self) -> tuple[str, ...]:
        """Return what the device says is lost."""
        lost = (self.birth.shard,) if self.holdings.struck else ()
        return lost if self.voting is None else (*lost, *self.voting.votes.changed_since_begun(readable=not lost))

    def _report(self, kind: FaultKind | None, *, mendable: bool = False) -> None:
        assert kind is not None
        self.report(kind, mendable=mendable)

    def report(self, kind: FaultKind, **more: Any) -> None:
        """Report a fault of this process. `more`: of FaultReport."""
        self.said.append(
            FaultReported(
                FaultReport(
                    kind=kind,
                    at_s=0.0,  # when it is sent
                    seen_by=rank_address(self.rank),
                    detail="seen",
                    rank=self.rank,
                    node=self.birth.node,
                    generation=self.session.generation,
                    incarnation=self.session.incarnation,
                    **more,
                )
            )
        )

    # --- a step -------------------------------------------------------------------------------------------------

    def _step(self) -> object:
        if self.step_state.count >= self.birth.steps:
            return self._left(Ended.RETURNED)
        try:
            self.steps.begin()
        except Interrupted:
            return self._left(Ended.INTERRUPTED)
        if self.voting is not None:
            self.voting.begins()
        self.wait, self.met, self.entered = Wait.COLLECTIVES, False, False
        return _WAITS

    def _end_of_step(self, asked: Act) -> object:
        match asked:
            case Act.CAPTURE:
                self.holdings.keep(self.rank, self.step_state.count + 1)
            case Act.SWAP | Act.MEET if not self.met:
                self.barrier, self.wait = asked, Wait.BARRIER
                if self.voting is not None:
                    self.voting.enters()
                return _WAITS
            case Act.SWAP | Act.MEET:
                return self._pass(asked)
            case Act.HOLD:
                self.stack.append(self.loop.hold())
                return None
            case Act.PUBLISH:
                self._publish()
        return True

    def _pass(self, asked: Act) -> bool:
        """All others have come to the commit barrier."""
        step = self.step_state.count + 1
        if asked is Act.SWAP:
            self.holdings.keep(self.birth.ward, step)
            return True
        self.holdings.judge_barrier(step)
        if self.voting is not None:
            self.voting.hears(self.heard)
        self.entered = True
        return True

    def _update(self) -> object:
        """Apply the update of the step that has ended."""
        step, held = self.step_state.count + 1, self.loop._held
        told = held is not None and held.part.finish_update
        self.holdings.update(step, allowed=self.entered or told, torn=self.torn)
        if self.torn:
            self.torn = False
            self._report(FaultKind.MEMORY, mendable=True)
            return self._left(Ended.FAILED)
        if self.steps.commit():
            if self.loop.commits_first_step():
                head = (self.rank, self.session.generation, self.session.incarnation)
                self.said.append(StepCommitted(*head, step, 0.0, STEP_S))
            if self.birth.every_steps and step % self.birth.every_steps == 0:
                self.to_publish = step
        return self._step()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self.to_publish and self.rank == 0:
            self.published.append(self.to_publish)
        self.to_publish = 0

    def _save(self, order: SaveCheckpoint) -> tuple[str, str]:
        self.holdings.judge_saving(order)
        if order.publish:
            self.published.append(order.step)
        return "/checkpoint", ""
