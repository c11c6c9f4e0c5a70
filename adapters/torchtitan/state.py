"""The train state of torchtitan's trainer, and where in its train step an update begins and is committed.

A step as torchtitan makes it, in all versions that are known:

    optimizers.zero_grad                  the step begins
    batches, token count, forward, backward, gradient norm, staging of a checkpoint
    optimizers.step                       hooks before it, then the commit barrier, then the update
    lr_schedulers.step                    the last of the update: committed
    metrics, checkpoint, validation       after the commit
"""

from typing import Any

from ...processor.values import Value
from ..fsdp import ShardedTrainState
from ..quiet_loader import QuietLoader
from .checkpoints import Checkpoints


class TitanState(ShardedTrainState):
    """Everything that a trainer of torchtitan changes. Between two steps it is made, after its checkpoint was read."""

    def __init__(self, trainer: Any) -> None:
        """Raise ConfigurationError or UnsupportedState for what cannot be brought back."""
        self._trainer = trainer
        self._first = trainer.step  # of torchtitan's steps that were done before this job
        self._begun: int | None = None
        self.is_cut_off = False  # what comes after an update, so that it is to be made up for
        self.checkpoints = Checkpoints(trainer)
        super().__init__(
            model=list(trainer.model_parts),
            optimizer=list(trainer.optimizers.optimizers),
            scheduler=list(trainer.lr_schedulers.schedulers),
            data=trainer.dataloader,
            values={"torchtitan": Value(get=self._counts, set=self._set_counts)},
        )

    def audit(self) -> tuple[str, ...]:
        """Return what other sharded states do, but for the functions of torchtitan's schedulers: they keep nothing."""
        return tuple(finding for finding in super().audit() if "computes with functions" not in finding)

    def bind(self, ledger: Any) -> None:
        """Hook the trainer's optimizers and schedulers, so that its own train step makes midstep's."""
        super().bind(ledger)
        optimizers, schedulers = self._trainer.optimizers, self._trainer.lr_schedulers
        zero_grad, update, schedule = optimizers.zero_grad, optimizers.step, schedulers.step
        ahead: dict[int, Any] = optimizers._optimizer_step_pre_hooks

        def begin(*args: Any, **options: Any) -> Any:
            if self._begun != ledger.count:
                self._begun = ledger.begin()
            return zero_grad(*args, **options)

        def step(*args: Any, **options: Any) -> Any:
            for hook in list(ahead.values()):  # balancing experts is a collective, and the update may have none
                hook(optimizers, args, options)
            ledger.enter_update(ledger.count)
            held = dict(ahead)
            ahead.clear()
            try:
                return update(*args, **options)
            finally:
                ahead.update(held)

        def scheduled(*args: Any, **options: Any) -> Any:
            result = schedule(*args, **options)
            ledger.leave_update(ledger.count)
            return result

        optimizers.zero_grad, optimizers.step, schedulers.step = begin, step, scheduled
        batches = self._trainer.batch_generator

        def generate(data: Any) -> Any:
            quiet = QuietLoader(data, lambda: ledger.count > 0)
            return map(ledger.batch, batches(quiet))  # in an audited step another rank may be repeated, with its batch

        self._trainer.batch_generator = generate

    def clean(self) -> None:
        """Clear away what an interrupted step has left, and what an asynchronous checkpoint has."""
        super().clean()
        self.checkpoints.end_interrupted()

    def step_left(self, step: int) -> None:
        """Drop what a step leaves that is left for an audit, between two steps that no fault has cut off."""
        super().step_left(step)
        self.is_cut_off = False

    def rolled_back(self, step: int) -> None:
        """Drop gradients, and set the trainer's step."""
        super().rolled_back(step)
        self._begun = None
        self.is_cut_off = True
        self._trainer.step = self._first + step

    def _counts(self) -> dict[str, int]:
        return {"first": self._first, "ntokens_seen": self._trainer.ntokens_seen}

    def _set_counts(self, counts: dict[str, int]) -> None:
        self._first, self._trainer.ntokens_seen = counts["first"], counts["ntokens_seen"]
