"""The rank-local state of a Megatron rank, and other small state: captured in every step, restored in every rollback.

Random numbers (Megatron's tracker too), the scheduler, loss scales, the micro-batch calculator, consumed samples,
positions in the data, buffers that change, and how often each gradient becomes ready.

It is captured right before the update, but says how things stand *after* it. All of it is final by then except the
scheduler and the consumed samples, which the train function moves on after the update. By how much is known: the
scheduler by the step's global batch size, and not at all when the update was skipped. `restore` moves it on by that.
"""

from array import array
from collections.abc import Mapping
from typing import Any

from ...processor import tree
from ...processor.buffers import BufferWatch
from ...processor.local_state import RandomState
from ...protocol.errors import ConfigurationError, ProtocolViolation, RecoveryError
from .data import FromSample, Hand, PositionedIterator
from .parts import Parts, bucket_groups, flat

BATCHES = "batches"  # of the whole job: one for each step
_COUNT = "H"  # unsigned, two bytes
_GROUP_KEYS_NOT_OURS = frozenset({"params", "step"})  # fused optimizers count their steps in the group


class RankLocalState:
    """Captures and restores the rank-local state."""

    def __init__(self, parts: Parts, increment: int | None) -> None:
        self._parts = parts
        self._increment = increment
        self._buffers = BufferWatch({f"model{index}": chunk.module for index, chunk in enumerate(parts.chunks)})
        self._random = RandomState()
        self.first = parts.first  # a newcomer may have begun at another iteration than the job
        self.consumed = parts.first_consumed
        self._expected: int | None = None
        self._expects = False
        self._batches = 0  # of the whole job, that this process has consumed
        _check_iterators(parts.iterators)

    # --- around the update ----------------------------------------------------------------------------------------

    def updating(self, *, skipped: bool) -> None:
        """Note that this step's update is about to be applied, or skipped: later captures are of the state after it."""
        self.consumed += batch_size()
        self._batches += 1
        self._expected = None if skipped else self._scheduler_increment()
        self._expects = True

    def scheduler_stepped(self, increment: int) -> None:
        """Check a step of the scheduler by the train function. Raises ProtocolViolation if it is not as expected."""
        if increment == self._expected and self._expects:
            self._expects = False
            return
        foreseen = "not at all, as its update was skipped" if self._expected is None else f"by {self._expected}"
        if not self._expects:
            foreseen = "once, after its optimizer.step()"
        raise ProtocolViolation(
            f"the learning rate scheduler was moved on by {increment}; in this step midstep expects it to move "
            f"{foreseen}. Call scheduler.step(increment=...) once per step and only if optimizer.step() said that "
            "it was successful, with the global batch size as increment; if yours is another one, name it: "
            "resilient(scheduler_increment=...)"
        )

    def _scheduler_increment(self) -> int:
        if self._increment is not None:
            return self._increment
        return batch_size() or 1 if hasattr(self._parts.scheduler, "num_steps") else 1

    # --- capture and restore --------------------------------------------------------------------------------------

    def capture(self) -> bytes:
        """Return the rank-local state as it will be when this step's update is applied."""
        parts = self._parts
        return tree.pack(
            {
                **self._conditions(),
                "scalers": [_scaler_state(leaf) for leaf in parts.leaves],
                "groups": [_scalars(leaf) for leaf in parts.leaves],
                "scheduler": _scheduler_state(parts.scheduler),
                "advance": self._expected if self._expects else None,
                "calculator": _calculator_state(),
                "first": self.first,
                "consumed": self.consumed,
                "iterators": {name: _positions(item) for name, item in parts.iterators.items()},
                "rerun": _rerun_state(),
                "ready_counts": _ready_counts(parts),
            },
            "state",
        )

    def restore(self, blob: bytes) -> None:
        """Restore what `capture` returned, here or in this rank's earlier process."""
        own, parts = tree.unpack(blob), self._parts
        if [len(groups) for groups in own["groups"]] != [len(leaf.param_groups) for leaf in parts.leaves]:
            raise RecoveryError(
                "the optimizer has other param groups than in this rank's earlier process. Param groups that only some "
                "pipeline stages have (a decoupled learning rate, say) are not supported"
            )
        self._buffers.restore(own["buffers"])
        for leaf, scaler, groups in zip(parts.leaves, own["scalers"], own["groups"], strict=True):
            if scaler is not None:
                leaf.grad_scaler.load_state_dict(scaler)
            for group, scalars in zip(leaf.param_groups, groups, strict=True):
                group.update(scalars)
        _restore_scheduler(parts.scheduler, own["scheduler"], own["advance"])
        self._expected, self._expects = None, False
        _restore_calculator(own["calculator"])
        self.first, self.consumed = own["first"], own["consumed"]
        for name, item in parts.iterators.items():
            _put(item, own["iterators"][name], self.consumed)
        _restore_rerun(own["rerun"])
        _restore_ready_counts(parts, own["ready_counts"])
        _tracker().set_states(own["tracker"])
        self._random.restore(own["random"])  # last: restoring the others may have drawn numbers

    # --- a step that another rank repeats -------------------------------------------------------------------------

    def hand_batches(self, hand: Hand) -> None:
        """Have each micro-batch of midstep's own iterators pass through `hand`."""
        for single in flat(self._parts.iterators.values()):
            inner = _unwrapped(single)
            if isinstance(inner, FromSample | PositionedIterator):
                inner.hand = hand

    def capture_conditions(self) -> bytes:
        """Return what a computation draws from beside its batch: random numbers, and buffers that change."""
        return tree.pack(self._conditions(), "state")

    def _conditions(self) -> dict[str, Any]:
        return {
            "random": self._random.capture(),
            "tracker": _tracker().get_states(),
            "buffers": self._buffers.capture(),
        }

    def take_conditions(self, blob: bytes) -> None:
        """Compute under what another rank has captured."""
        theirs = tree.unpack(blob)
        self._buffers.restore(theirs["buffers"])
        _tracker().set_states(theirs["tracker"])
        self._random.restore(theirs["random"])

    # --- batches that are left out --------------------------------------------------------------------------------

    @property
    def handed_out(self) -> dict[str, int] | None:
        """How many global batches were consumed; None where `advanced` would not know where the next one begins."""
        known = all(map(_follows_samples, self._parts.iterators.values()))
        return {BATCHES: self._batches} if known and self._parts.iterators and batch_size() else None

    def advanced(self, blob: bytes, batches: Mapping[str, int]) -> bytes:
        """Return what `capture` returned with its samples so many global batches further on."""
        own = tree.unpack(blob)
        before = own["consumed"]
        own["consumed"] += batches[BATCHES] * batch_size()
        own["iterators"] = {
            name: _moved(positions, before, own["consumed"]) for name, positions in own["iterators"].items()
        }
        return tree.pack(own, "state")

    def leaving_out(self, blob: bytes, later: bytes) -> bytes:
        """Return what `capture` returned with the samples of a later one; without iterators, its random numbers."""
        own, after = tree.unpack(blob), tree.unpack(later)
        for part in ("iterators", "consumed") if self._parts.iterators else ("random", "tracker", "consumed"):
            own[part] = after[part]
        return tree.pack(own, "state")


def batch_size() -> int:
    """Return the global batch size of the current step, 0 where Megatron's micro-batch calculator is not used."""
    from megatron.core import num_microbatches_calculator as calculator

    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return 0
    return int(calculator.get_current_running_global_batch_size())


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _scaler_state(leaf: Any) -> Any:
    scaler = getattr(leaf, "grad_scaler", None)
    return None if scaler is None else scaler.state_dict()


def _scalars(leaf: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in _GROUP_KEYS_NOT_OURS} for group in leaf.param_groups
    ]


def _scheduler_state(scheduler: Any) -> Any:
    if scheduler is None:
        return None
    return scheduler.num_steps if hasattr(scheduler, "num_steps") else scheduler.state_dict()


def _restore_scheduler(scheduler: Any, state: Any, advance: int | None) -> None:
    if scheduler is None:
        return
    step = type(scheduler).step.__get__(scheduler)  # the class's: the instance's is hooked to watch the user's calls
    if hasattr(scheduler, "num_steps"):
        scheduler.num_steps = state
        step(increment=advance or 0)
        return
    scheduler.load_state_dict(state)
    if advance:
        step()


def _calculator_state() -> Any:
    from megatron.core import num_microbatches_calculator as calculator

    held = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if held is None:
        return None
    return {key: value for key, value in vars(held).items() if isinstance(value, int | float | None)}


def _restore_calculator(state: Any) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    if state is not None:
        vars(calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR).update(state)


def _rerun_state() -> Any:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    return {
        "current_iteration": machine.current_iteration,
        "large_value_counts": dict(machine.large_value_counts),
        "max_values": dict(machine.max_values),
    }


def _restore_rerun(state: dict[str, Any]) -> None:
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

    machine = get_rerun_state_machine()
    vars(machine).update(state)
    machine.state = RerunState.NOT_RUNNING_YET
    machine.rerun_requested = machine.checkpoint_requested = False
    machine.restart_again_requested = machine.continue_requested = False
    machine.saved_state = machine.failed_validation_call = machine.initial_result = None
    machine.validation_counts.clear()


def _ready_counts(parts: Parts) -> list[bytes]:
    """Return how often each parameter's gradient becomes ready in a step, as it is known after this step.

    From its second step on DDP starts a reduction when these counts are reached. A rank that did not know them would
    start its reductions in another order than the others. Each count is packed as two bytes: there are as many of them
    as parameters, and this is on the path of every step.
    """
    counts = []
    for group in bucket_groups(parts):
        known = getattr(group, "golden_per_param_grad_ready_counts", {}) or getattr(
            group, "per_param_grad_ready_counts", {}
        )
        ordered = [known.get(p, 0) for bucket in group.buckets for p in bucket.params_list] if known else []
        counts.append(array(_COUNT, ordered).tobytes())
    return counts


def _restore_ready_counts(parts: Parts, counts: list[bytes]) -> None:
    for group, packed in zip(bucket_groups(parts), counts, strict=True):
        known = array(_COUNT, packed)
        if not hasattr(group, "golden_per_param_grad_ready_counts"):
            continue
        parameters = [p for bucket in group.buckets for p in bucket.params_list]
        group.golden_per_param_grad_ready_counts = dict(zip(parameters, known, strict=True)) if known else {}
        group.is_first_batch = not known
        group.per_param_grad_ready_counts = {}


def _check_iterators(iterators: dict[str, Any]) -> None:
    for name, item in iterators.items():
        for single in flat([item]):
            inner = _unwrapped(single)
            if single is None or hasattr(inner, "rebuild"):
                continue
            if not (hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")):
                raise ConfigurationError(
                    f"argument `{name}` is a {type(inner).__name__}, which cannot be put back to the sample where "
                    "training resumes. Give midstep.adapters.megatron.FromSample(build), where build(consumed_samples) "
                    "returns the iterator, or an object with state_dict and load_state_dict"
                )


def _unwrapped(item: Any) -> Any:
    from megatron.core.rerun_state_machine import RerunDataIterator

    return item.iterable if isinstance(item, RerunDataIterator) else item


def _follows_samples(item: Any) -> bool:
    """Return whether the position of an iterator is the samples that the job has consumed, and nothing else."""
    if isinstance(item, list | tuple):
        return all(map(_follows_samples, item))
    inner = _unwrapped(item)
    return inner is None or hasattr(inner, "rebuild") or isinstance(inner, PositionedIterator)


def _moved(position: Any, before: int, after: int) -> Any:
    """Return positions with those that stand at so many samples moved; others are not of the training data."""
    if isinstance(position, list):
        return [_moved(single, before, after) for single in position]
    return {"consumed_samples": after} if position == {"consumed_samples": before} else position


def _positions(item: Any) -> Any:
    if isinstance(item, list | tuple):
        return [_positions(single) for single in item]
    inner = _unwrapped(item)
    return inner.state_dict() if inner is not None and not hasattr(inner, "rebuild") else None


def _put(item: Any, position: Any, consumed: int) -> None:
    if isinstance(item, list | tuple):
        for single, one in zip(item, position, strict=True):
            _put(single, one, consumed)
        return
    inner = _unwrapped(item)
    if inner is not item:
        item.advance()
    if hasattr(inner, "rebuild"):
        inner.rebuild(consumed)
    elif inner is not None:
        inner.load_state_dict(position)
