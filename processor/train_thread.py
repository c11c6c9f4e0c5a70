"""The train thread of a process: it carries out what the loop of its rank asks for, and waits.

What comes next is said by `rank_loop.py`, which waits for nothing.
"""

import logging
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..protocol.errors import CallbackFailed, Interrupted, MidstepError
from ..protocol.messages import RankJoined, StepCommitted
from ..protocol.rank_logs import show_once
from ..protocol.rules import OUT_OF_MEMORY
from ..protocol.types import Activity, FaultKind, InjectionPoint
from . import built_ahead, exceptions
from . import rank_loop as act
from .audits import Audits
from .callbacks import Callbacks, Lifecycle
from .checkpoints.entries import JOINING_PATIENCE_S, PARKED_PATIENCE_S
from .checkpoints.writer import CheckpointWriter
from .framework import Comparable, Informed, Rehearsing, Staged
from .gathered import Together
from .host_copies import HostCopies
from .ledger import Ledger, Surroundings
from .local_state import LocalState
from .rank_loop import Action, Actions, Ended, RankLoop
from .recovery_phases import RecoveryPhases
from .replays import Replays
from .rules import Breach, judge_of, worst
from .runtime import Runtime
from .session import Order, SessionStage
from .shard import refuse_differing
from .step_order import StepState
from .votes import Votes

if TYPE_CHECKING:
    from .bit_flips import BitFlips
    from .framework import Framework

COMPARED_AT = 2  # of which the rank-local state is swapped: one update is committed
WATCHED_STEPS = 2  # the first steps of a process, after which the state is audited again
Result = TypeVar("Result")
_log = logging.getLogger("midstep")


class TrainThread(Surroundings):
    """Runs one resilient call in the train thread."""

    def __init__(self, runtime: Runtime, framework: "Framework", lifecycle: Lifecycle | None = None) -> None:
        if isinstance(framework, Rehearsing) and built_ahead.is_waiting():
            framework.rehearse()
        runtime.await_rank()
        self._runtime = runtime
        self._framework = framework
        self._step_state = step_state = StepState(clean=runtime.connected)
        self._ledger = Ledger(self, framework, runtime.injection_points, runtime.step_clock, step_state=step_state)
        runtime.callbacks = Callbacks(runtime.rank, lifecycle, lambda: step_state.count)
        runtime.report_values = partial(self._ledger.report, adds=True)
        self._own = LocalState(framework, runtime.device, counts=runtime.settings.skips_out_of_memory)
        self._votes = Votes(runtime, framework, step_state)
        self._copies = HostCopies(runtime, framework, self._votes)
        _arm_flips(runtime, framework)
        self._audits = Audits(runtime)
        self._replays = Replays(runtime, framework, self._own, self._audits)
        self._phases = RecoveryPhases(runtime, framework, self._own, step_state, self._copies)
        self._checkpoints = CheckpointWriter(runtime, framework)
        self._exception_policy = ExceptionPolicy(runtime)
        self._judge = judge_of(runtime.settings.rules, framework)
        self._loop = RankLoop(runtime.session, step_state, self._ledger.order, early=runtime.early)
        self._train_function: Callable[[], Any] | None = None
        self._result: Any = None  # of the train function
        self._warned: set[str] = set()
        self._steps_over = 0
        self._ordered_s = self._phase_began_s = runtime.started_s
        self._carry_out = self._ways_to_carry_out()

    def run(self, train: Callable[[], Result]) -> Result:
        """Join the world, train, recover as often as ordered, and return what the train function returned."""
        runtime = self._runtime
        self._train_function = train
        self._framework.bind(self._ledger)
        if isinstance(self._framework, Staged):
            runtime.step_clock.of_stage(self._framework.stage)
        if "torch" in sys.modules:
            from .data import time_loaders

            time_loaders(runtime.step_clock.loading)
        self._warn()
        if runtime.connected or not runtime.black_box.copies():
            # A newcomer keeps what its predecessor left: it may be the last copy.
            runtime.local_states.keep(0, self._own.capture())
        runtime.injection_points.reached(InjectionPoint.JOIN, 0)
        self._drive(self._loop.run())
        return self._result  # type: ignore[no-any-return]

    def _warn(self) -> None:
        """Log what the state finds that a recovery could not bring back, each once."""
        for finding in self._framework.audit():
            if finding not in self._warned:
                self._warned.add(finding)
                _log.warning("%s", finding)

    def _drive(self, actions: Actions[Result]) -> Result:
        """Carry out what the loop asks for, one action after the other, and return what it returns."""
        try:
            action = next(actions)
            while True:
                try:
                    outcome = self._carry_out[type(action)](action)
                except Exception as error:
                    action = actions.throw(error)
                else:
                    action = actions.send(outcome)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    # --- what the ledger asks for ------------------------------------------------------------------------------

    def interrupted(self) -> bool:
        """Return whether the controller wants the train thread to stop."""
        return self._runtime.interrupted()

    def step_done(self) -> None:
        """Wait for the device: after that the gradients are final."""
        self._runtime.finish_step()

    def update_done(self) -> None:
        """Wait for the device: after that the update is applied. It may be stopped again."""
        self._runtime.device.finish()
        self._runtime.unshield()

    def begins(self, step: int) -> bool:
        """Return whether a step may be begun; False at a boundary at which all ranks stop."""
        begins = self._runtime.begins(step)
        if begins:
            self._replays.begins(step)
        if begins and not self._replays.repeats:
            self._votes.begins(step, wanted=self._checkpoints.due(step) or self._audits.is_due(step))
        return begins

    def inputs(self, given: Any) -> Any:
        """Return the inputs of the step: those that are given, or those of the rank whose step is repeated here."""
        return self._replays.inputs(given)

    def compares(self, now: bool, *, has_batch: bool = True) -> None:
        """Begin or end to listen to what is given to collectives."""
        self._replays.compares(now, has_batch=has_batch)

    def replay_ends(self) -> None:
        """Raise Interrupted if this was no step of this rank."""
        self._replays.ends()

    def loop_begins(self) -> None:
        """Have the first step after a recovery draw the random numbers that it drew without one.

        A train function that is called again may have drawn some on its way to its loop: `iter` of a data loader draws
        a seed.
        """
        self._own.recall_random()

    def keep_local(self, step: int, blob: bytes) -> bytes:
        """Write the rank-local state, with the device's part, to the black box."""
        whole = self._own.whole(blob)
        self._runtime.local_states.keep(step, whole)
        return whole

    def swap_local(self, step: int, blob: bytes) -> None:
        """Send the rank-local state to the buddy, and keep the peer copy.

        Before its second update the job makes sure that copies are copies: its state is all there. Only a rank that was
        lost before has been repaired from another one.
        """
        if step == COMPARED_AT and isinstance(self._framework, Comparable):
            self._runtime.step_clock.doing(Activity.PAUSED)  # hashing takes its time, and is no stall
            refuse_differing({name: each.whole for name, each in self._framework.digests().items()}, self._runtime)
            self._runtime.step_clock.doing(Activity.COMMITTING)
        self._runtime.local_states.swap(step, blob)

    def meet(self, index: int) -> None:
        """Pass the commit barrier with all ranks. From then on the update must not end halfway.

        Raises Interrupted where a vote is lost: no rank applies the update.
        """
        step_s = self._ledger.median_step_s
        agrees = self._copies.agrees(index + 1, step_s)
        breaches = () if self._judge is None else self._judge.judge(index, self._ledger.reported(), time.monotonic())
        ballot, evidence = self._votes.ballot(step_s), self._audits.evidence(index)
        gathering = ballot if evidence is None else Together(ballot, evidence)
        met = self._runtime.communicator.barrier(agrees=agrees, verdict=worst(breaches), gathering=gathering)
        if ballot is not None:
            self._votes.counted(index, ballot)
        if evidence is not None:
            self._audits.counted(index, evidence)
        self._copies.agreed(by_all=met.agrees and not met.verdict)
        if breaches or met.verdict:
            self._report_breaches(index, breaches, met.verdict)
        self._runtime.shield()
        self._exception_policy.update_begins(index)

    def _report_breaches(self, index: int, breaches: Sequence[Breach], verdict: int) -> None:
        """Report the broken rules; raise Interrupted if the update is not to be applied, on any rank.

        A verdict for all ranks is reported by each, so that it is heard of whichever is lost now.
        """
        assert self._judge is not None
        runtime, own = self._runtime, {each.number: each for each in breaches}
        told = [(each.rule, each.detail) for each in breaches if not each.number]
        if verdict:
            rule = self._judge.acting[verdict - 1]
            told.append((rule, own[verdict].detail if verdict in own else ""))
        for rule, detail in told:
            runtime.report_fault(FaultKind.RULE, detail, mendable=True, trusted_step=index, code=rule.name)
        if verdict:
            self.barrier_passed()
            raise Interrupted

    def barrier_passed(self) -> None:
        """Complete the last checkpoint: every rank has written its part."""
        self._checkpoints.publish_pending()

    def committed(self, committed: int, median_step_s: float) -> None:
        """Report the first step after a resume."""
        runtime = self._runtime
        if self._loop.commits_first_step():
            runtime.post(
                StepCommitted(
                    runtime.rank, runtime.generation, runtime.incarnation, committed, time.time(), median_step_s
                )
            )

    def step_over(self, committed: int, *, saves: bool) -> None:
        """Keep what the script has changed since its update; copy and write what is due."""
        runtime = self._runtime
        trailing = self._own.with_trailing()
        if trailing is not None:
            runtime.local_states.keep(committed, trailing)
        self._steps_over += 1
        if trailing is not None or self._steps_over <= WATCHED_STEPS:
            self._warn()
        if saves:
            self._copies.take(committed)
        if saves and self._checkpoints.due(committed) and not self._copies.replace_checkpoint(committed):
            runtime.step_clock.doing(Activity.CHECKPOINTING)
            runtime.injection_points.reached(InjectionPoint.CHECKPOINT, committed - 1)
            self._checkpoints.save(committed)
            runtime.step_clock.doing(Activity.COMPUTING)

    def hold_at_barrier(self) -> bool:
        """Report that the commit barrier broke while this rank held final gradients; return whether to apply them."""
        applies = self._drive(self._loop.hold())
        if applies:
            self._votes.passed_elsewhere(self._step_state.count)
        return applies

    # --- what the loop of the rank asks for ----------------------------------------------------------------------

    def _ways_to_carry_out(self) -> dict[type[Action], Callable[[Any], object]]:
        runtime, rejoining, checkpoints = self._runtime, self._phases, self._checkpoints
        return {
            act.AwaitOrder: lambda _: self._await_order(),
            act.IgnoreOrder: lambda each: _log.warning(
                "%s has no meaning while parked; ignored", type(each.order).__name__
            ),
            act.Train: lambda _: self._train(),
            act.FindFailure: lambda _: runtime.communicator.failed,
            act.StopInFlight: lambda each: self._stop(each.reason),
            act.Inspect: lambda _: self._not_trusted(rejoining.inspect()),
            act.Clean: lambda _: self._clean(),
            act.Survey: lambda each: rejoining.survey(JOINING_PATIENCE_S if each.joining else PARKED_PATIENCE_S),
            act.Join: self._join,
            act.Post: lambda each: runtime.post(each.body),
            act.ReportFault: lambda each: runtime.report_fault(each.kind, each.detail),
            act.JudgeFailure: lambda each: self._exception_policy.in_recovery(each.error),
            act.SetActivity: lambda each: runtime.step_clock.doing(each.activity),
            act.BeginPhase: self._begin_phase,
            act.EndPhase: lambda _: time.monotonic() - self._phase_began_s,
            act.Rebuild: lambda each: rejoining.rebuild(each.order),
            act.Repair: self._repair,
            act.RecallLocalState: lambda each: rejoining.recall_local_state(each.step),
            act.RollBack: lambda each: rejoining.roll_back(each.order),
            act.Halt: lambda _: self._halt(),
            act.PublishCheckpoint: lambda _: self._publish(),
            act.ClaimCheckpoints: lambda each: checkpoints.take_over(each.generation),
            act.Save: self._save,
            act.Flush: lambda _: runtime.flush(),
        }

    def _await_order(self) -> Order:
        order = self._runtime.wait_order()
        self._ordered_s = time.monotonic()
        return order

    def _join(self, action: act.Join) -> None:
        runtime = self._runtime
        began_s = self._ordered_s if runtime.early else runtime.started_s
        join_s = max(0.0, time.monotonic() - began_s)
        runtime.post(
            RankJoined(
                runtime.rank, runtime.generation, runtime.incarnation, os.getpid(), report=action.report, join_s=join_s
            )
        )

    def _train(self) -> Ended:
        """Call the train function once, and say how it was left."""
        assert self._train_function is not None
        self._runtime.former_size = self._runtime.world_size
        rejoined = self._phases.rejoined
        if rejoined is not None:
            self._runtime.trained_generation = rejoined.generation
        self._copies.resumed(rejoined)
        self._votes.resumed(self._step_state.count)
        self._replays.resumed()
        if self._step_state.count:  # before the first step of all, an undisturbed run draws them, too
            self._own.remember_random()
        try:
            self._call_train_function()
        except Interrupted:
            self._ledger.abandon_step()
            return Ended.INTERRUPTED
        except Exception as error:
            self._ledger.abandon_step()
            # Only texts are kept: the traceback would keep the dead step's tensors and groups alive.
            skips = self._own.can_skip and not self._step_state.updating
            what_now = self._exception_policy.in_training(error, self._step_state.count if skips else None)
            if what_now is exceptions.Reaction.LEAVE:
                self._runtime.flush()
                raise
            return Ended.FAILED if what_now is exceptions.Reaction.REPORT else Ended.INTERRUPTED
        finally:
            self._replays.left()
        return Ended.RETURNED

    def _call_train_function(self) -> None:
        """Call it, and again as often as it is left to repeat a step of another rank, and to come back from there."""
        assert self._train_function is not None
        while True:
            try:
                self._result = self._train_function()
                self._ledger.end_step()
                return
            except Interrupted:
                if self.interrupted() or not self._replays.goes_on(self._step_state.count):
                    raise
            except Exception as error:
                self._replays.failed(error)
                raise

    def _begin_phase(self, action: act.BeginPhase) -> None:
        self._phase_began_s = time.monotonic()
        self._runtime.injection_points.reached(action.point, self._step_state.count)

    def _stop(self, reason: str | None) -> None:
        if reason is not None:
            self._checkpoints.forget_pending()
        with self._or_leave():
            self._runtime.unshield()
            self._runtime.stop(reason)

    def _clean(self) -> list[str]:
        with self._or_leave():
            return self._not_trusted(self._phases.clean())

    def _not_trusted(self, corrupted: list[str]) -> list[str]:
        """Return those of the device, else what has changed: memory that the device says is lost is not read."""
        return [*corrupted, *self._votes.changed_since_begun(readable=not corrupted)]

    def _repair(self, action: act.Repair) -> "act.ReceivedBytes":
        with self._votes.repairing(action.order.part):
            return self._phases.repair(action.order)

    def _publish(self) -> None:
        """Complete what this rank has written; when training is over, wait for what its agent writes."""
        self._checkpoints.publish_pending()
        if self._runtime.session.stage is SessionStage.RELEASED:
            self._copies.written(self._step_state.count)

    def _halt(self) -> None:
        """Stop what a failed attempt has left: a thread that moves shards, then the device."""
        with self._or_leave():
            self._phases.give_up()
        self._runtime.device.stop()

    @contextmanager
    def _or_leave(self) -> Iterator[None]:
        """End the process if the device, a thread, or a callback of the script cannot be stopped or cleaned."""
        try:
            yield
        except MidstepError as error:
            self._runtime.report_not_stopped(error)
            self._runtime.flush()
            raise

    def _save(self, action: act.Save) -> tuple[str, str]:
        order = action.order
        if isinstance(self._framework, Informed):
            return self._framework.save_emergency(order)
        return self._checkpoints.save_emergency(
            order.step, order.generation, publish=order.publish, shards=order.shards
        )


def _arm_flips(runtime: "Runtime", framework: "Framework") -> None:
    """Have bits flip in this process where that is injected: others each time, from the same dice."""

    @cache
    def flips() -> "BitFlips":
        from .bit_flips import BitFlips  # of use to few, and MindSpore has no torch

        return BitFlips(framework, runtime.rank, runtime.incarnation, runtime.settings.checkpoint_directory)

    runtime.injection_points.flip = lambda fault: flips().flip(fault)
    runtime.injection_points.spoil = lambda shards, fault: flips().spoil(shards, fault)


class ExceptionPolicy:
    """Classifies exceptions, and reports the fault behind each. Used by the train thread."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._patterns = (*runtime.settings.exceptions, *exceptions.patterns_here())  # the job's own first
        self._updates: deque[tuple[int, int]] = deque(
            maxlen=exceptions.HISTORY_UPDATES
        )  # step, and when by the device's clock

    def update_begins(self, step: int) -> None:
        """Remember when the update of a step begins, if the device time-stamps its errors."""
        now_us = self._runtime.device.now_us()
        if now_us is not None:
            self._updates.append((step, now_us))

    def in_training(self, error: Exception, skipping: int | None = None) -> exceptions.Reaction:
        """Return what to do about an exception of the train function; report it unless another fault caused it.

        `skipping`: the step whose batches may be left out where there is too little memory for them.
        """
        runtime = self._runtime
        retry_unknown = runtime.settings.retry_unknown_exceptions
        finding, spread = self._with_window(
            exceptions.classify(exceptions.chain_of(error), self._patterns, retry_unknown=retry_unknown)
        )
        if finding.locate:
            runtime.device.memory_error_raised()
        if finding.kind is FaultKind.OUT_OF_MEMORY and skipping is not None:
            show_once(error)
            detail = f"{finding.text} ({finding.meaning})"
            runtime.report_fault(FaultKind.RULE, detail, mendable=True, trusted_step=skipping, code=OUT_OF_MEMORY.name)
            return exceptions.Reaction.REPORT
        collateral = runtime.interrupted() or runtime.communicator.failed is not None
        what_now = exceptions.reaction(finding, collateral=collateral)
        if what_now is exceptions.Reaction.WAIT:
            runtime.debug_log.note("an exception that follows from being interrupted; it is not reported", error)
            return what_now
        detail = f"{finding.text} ({finding.meaning})" if finding.known else "".join(traceback.format_exception(error))
        if finding.kind is FaultKind.REFUSED:
            detail = finding.text
        if what_now is exceptions.Reaction.REPORT:
            runtime.debug_log.note(f"reported, and this process stays alive: {finding.text} ({finding.meaning})", error)
        if what_now is exceptions.Reaction.LEAVE or not finding.known or finding.kind is FaultKind.REFUSED:
            show_once(error)  # before it is reported: a process that is to be replaced may be killed at once
        kind = finding.kind or FaultKind.COMMUNICATION  # stopped, and not by midstep
        runtime.report_fault(kind, detail, finding.level, mendable=finding.mendable, trusted_step=spread)
        return what_now

    def in_recovery(self, error: Exception) -> None:
        """Report why rebuild, repair or rollback failed; raise `error` again if this process has to end."""
        kind = exceptions.fault_in_recovery(error, self._patterns)
        if kind is None:
            if self.in_training(error) is exceptions.Reaction.LEAVE:
                self._runtime.flush()
                raise error
            return
        if isinstance(error, CallbackFailed):
            _log.error("%s", error, exc_info=error)
        if not self._runtime.interrupted():
            self._runtime.report_fault(kind, str(error))

    def _with_window(self, finding: exceptions.Finding) -> tuple[exceptions.Finding, int | None]:
        """Decide whether an error that was noticed late has spread, and up to which step nothing has.

        What was read between the error and its discovery was wrong. If an update began after it, its gradients may have
        been made of that, on all ranks. If the error is younger than the last one, only this rank's memory is wrong.
        """
        if finding.kind is not FaultKind.MEMORY_MULTI_BIT:
            return finding, None
        spread = exceptions.spread_since(self._updates, finding.time_us)
        if spread is None:
            return finding, None
        when = "at an unknown time" if finding.time_us is None else f"before the update of step {spread} began"
        meaning = f"{finding.meaning}; it came {when}, so all ranks may have used it"
        return msgspec.structs.replace(finding, mendable=False, meaning=meaning), spread
