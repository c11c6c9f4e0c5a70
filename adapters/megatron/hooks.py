"""Report the progress of a Megatron train function to the step ledger, from the calls that each step makes.

    zero_grad, zero_grad_buffer                       the step begins; here orders are followed
    forward, backward, gradient reduction
    optimizer.step()
        loss scale, found-inf, gradient norm, clipping            collectives
        gradients to the buddy, if any; the peer copy's arrive before rank-local state is captured
        commit barrier                                            <- ledger.enter_update
        inner optimizer, main to model parameters                 local
        committed                                                 <- ledger.leave_update
        parameter all-gather                                      collective
    scheduler.step(), iteration and samples counted               computed at the commit barrier, see RankLocalState

The calls are those of the objects that were found; no class of Megatron's is changed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...protocol.types import InjectionPoint
from .buddy import Buddies
from .parts import Parts
from .rank_local_state import RankLocalState
from .step_cleanup import NoSyncContexts, bucket_groups

if TYPE_CHECKING:
    from ...processor.ledger import Ledger


class StepHooks:
    """The hooks on one set of parts, and the faults that are armed in the middle of a step."""

    def __init__(self, parts: Parts, rank_local: RankLocalState, buddies: Buddies | None) -> None:
        self._parts = parts
        self._buddies = buddies
        self._rank_local = rank_local
        self._ledger: Ledger | None = None
        self._begun: int | None = None
        self._updated = False
        self._gathers: list[Callable[[], None]] | None = None  # those of an update that is under way
        self._armed: dict[InjectionPoint, Callable[[], None]] = {}
        self._no_sync = NoSyncContexts()

    def attach(self, ledger: "Ledger") -> None:
        """Hook the calls, for good. Runs once, before the first step."""
        self._ledger = ledger
        optimizer, scheduler = self._parts.optimizer, self._parts.scheduler
        optimizer.step = self._around_step(optimizer.step)
        optimizer.step_with_ready_grads = self._around_update(optimizer.step_with_ready_grads)
        optimizer.zero_grad = self._before(optimizer.zero_grad)
        self._no_sync.watch(self._parts.chunks)
        for chunk in self._parts.chunks:
            chunk.zero_grad_buffer = self._before(chunk.zero_grad_buffer)
            chunk.start_param_sync = self._after_commit(chunk.start_param_sync)
            chunk.finish_grad_sync = self._at(InjectionPoint.REDUCTION, chunk.finish_grad_sync)
        for group in bucket_groups(self._parts):
            group.start_param_sync = self._at(InjectionPoint.GATHER, group.start_param_sync)
        if scheduler is not None:
            scheduler.step = self._after_scheduler(scheduler.step)

    def arm(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        """Call `fire` once, when this step's reduction or gather begins, to inject a fault there."""
        self._armed[point] = fire

    def forget_step(self) -> None:
        """Drop what is known of a step that is rolled back."""
        self._begun, self._updated, self._gathers = None, False, None
        self._armed.clear()
        self._no_sync.leave()
        if self._buddies is not None:
            self._buddies.forget_step()

    def _begin(self) -> None:
        ledger = self._ledger
        assert ledger is not None
        if self._begun != ledger.count:
            self._begun = ledger.begin()
            self._updated = False

    def _before(self, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._begin()
            return plain(*args, **options)

        return call

    def _around_step(self, plain: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            self._begin()
            result = plain(*args, **options)
            if not self._updated:  # inf or nan was found: a step that changes nothing but the loss scale
                self._update(skipped=True, apply=lambda: None)
            return result

        return step

    def _around_update(self, plain: Any) -> Any:
        def step_with_ready_grads(*args: Any, **options: Any) -> Any:
            return self._update(skipped=False, apply=lambda: plain(*args, **options))

        return step_with_ready_grads

    def _update(self, *, skipped: bool, apply: Callable[[], Any]) -> Any:
        ledger = self._ledger
        assert ledger is not None
        self._rank_local.updating(skipped=skipped)
        index = ledger.count
        if self._buddies is not None and not skipped:
            self._buddies.send()
        ledger.enter_update(index)
        self._gathers = []
        result = apply()
        if self._buddies is not None:
            self._buddies.update()
        gathers, self._gathers = self._gathers, None
        self._updated = True
        ledger.leave_update(index)
        for gather in gathers:
            gather()
        return result

    def _after_commit(self, plain: Any) -> Any:
        """Put off a gather of parameters to after the commit: inside the update there is no collective."""

        def start_param_sync(*args: Any, **options: Any) -> None:
            if self._gathers is None:
                plain(*args, **options)
            elif plain not in self._gathers:  # a chained optimizer asks once for each of its parts
                self._gathers.append(plain)

        return start_param_sync

    def _at(self, point: InjectionPoint, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._fire(point)
            return plain(*args, **options)

        return call

    def _fire(self, point: InjectionPoint) -> None:
        fire = self._armed.pop(point, None)
        if fire is not None:
            fire()

    def _after_scheduler(self, plain: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            self._rank_local.scheduler_stepped(int(options.get("increment", args[0] if args else 1)))
            return plain(*args, **options)

        return step
