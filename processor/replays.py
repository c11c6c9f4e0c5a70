"""A rank repeats a step of its neighbour, to see whether both compute the same gradient from the same inputs.

Gradients differ by rank, so a wrong one goes into the sum and is equal everywhere then: no vote sees it. In an audited
step (`integrity.audit_steps`) each rank first runs the script's step for the rank before it: what `step.inputs` is
given goes to the next rank, with the random numbers, buffers and values as they are there. Its collectives end at once,
without peers; what it gives to reductions is hashed. At its update block the train function is left, the rank-local
state put back, and the step begins again, now with the rank's own inputs and real collectives, hashed as well. The
hashes are compared in the commit barrier, before the update (`audits.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..communicators.base import Listening
from ..communicators.host_memory import dtype_name
from ..protocol.errors import CommunicatorError, ConfigurationError, Interrupted
from ..protocol.types import Activity
from . import tree
from .audits import Contribution, Pass
from .framework import Repeatable
from .tensor_hash import hashes

if TYPE_CHECKING:
    from .audits import Audits
    from .framework import Framework
    from .local_state import LocalState
    from .runtime import Runtime


class _Pass(Pass):
    """One pass over a step. It listens to the collectives."""

    def __init__(self, *, subject: int, alone: bool) -> None:
        """`alone`: no collective is done."""
        super().__init__(subject)
        self.alone = alone
        self.has_inputs = False

    def given(self, op: str, args: Sequence[Any]) -> bool:
        """Hash what a reduction gets. Return whether the collective is to be done."""
        for tensor in _reduced(op, args):
            (found,) = hashes([[tensor]])
            self.contributions.append(Contribution(f"{op} of {tensor.numel()} {dtype_name(tensor.dtype)}", found))
        return not self.alone


class _Handed(msgspec.Struct, frozen=True, array_like=True):
    inputs: bytes
    framework: bytes
    device: bytes


class Replays:
    """The repetitions of one rank for its audits. In the train thread; without `audit_steps` it does nothing."""

    def __init__(self, runtime: "Runtime", framework: "Framework", own: "LocalState", audits: "Audits") -> None:
        """Raise ConfigurationError where a step of this framework cannot be repeated by another rank."""
        self._runtime = runtime
        self._framework = framework
        self._own = own
        self._audits = audits
        if audits.is_on:
            _refuse_others(runtime, framework)
        self.resumed()

    def resumed(self) -> None:
        """Begin to train, at the start or after a recovery."""
        self._left = False  # the train function was left on purpose
        self._ahead: list[int] = []  # whose gradients this rank computes before its own
        self._replayed = -1  # the step for which that is done
        self._audits.done = []
        self._listen(None)

    def left(self) -> None:
        """End what is under way, as the train function was left: what a recovery sends over the devices' links is sent.

        In a replay it would be taken for a collective of the step, which ends at once without peers.
        """
        self._listen(None)

    @property
    def repeats(self) -> bool:
        """True while the step is one of another rank, or is repeated for a test."""
        return self._pass is not None and self._pass.alone

    def begins(self, step: int) -> None:
        """Begin a step; leave the train function where others are to be repeated first. Raises Interrupted."""
        if self.repeats or not self._audits.is_due(step):
            return
        if self._replayed == step:
            self._listen(_Pass(subject=self._runtime.rank, alone=False))
            return
        self._ahead, self._audits.done = self._audits.subjects, []
        self._replayed, self._left = step, True
        raise Interrupted

    def goes_on(self, step: int) -> bool:
        """Return whether the train function was left here on purpose, and is to be called again: with what follows.

        Raises what putting back the rank-local state raises.
        """
        if not self._left:
            return False
        self._left = False
        own = self._runtime.local_states.read(self._runtime.rank, step)
        assert own is not None, f"rank {self._runtime.rank} trains, and its local state of step {step} is not kept"
        self._own.restore(own, step, repeats=True)
        self._own.remember_random()
        self._listen(_Pass(subject=self._ahead.pop(0), alone=True) if self._ahead else None)
        return True

    def inputs(self, given: Any) -> Any:
        """Return the inputs of the step; in a replay those of the rank before this one, which gets none of its own."""
        if self._pass is None:
            return given
        first, self._pass.has_inputs = not self._pass.has_inputs, True
        if self._pass.subject == self._runtime.rank:
            return given
        runtime, rank = self._runtime, self._runtime.rank
        assert isinstance(self._framework, Repeatable)
        # Behind the first micro-batch this rank draws the other one's numbers.
        conditions = (self._framework.capture_conditions(), runtime.device.capture_random()) if first else (b"", b"")
        handed = _Handed(tree.pack(given, "step.inputs"), *conditions)
        runtime.step_clock.doing(Activity.COMMITTING)  # it waits for the others
        arrived = runtime.communicator.swap(
            _encode(handed), (rank + 1) % runtime.world_size, (rank - 1) % runtime.world_size
        )
        runtime.step_clock.doing(Activity.COMPUTING)
        theirs = _decode(arrived)
        if first:
            self._framework.take_conditions(theirs.framework)
        if theirs.device:
            runtime.device.restore_random(theirs.device)
        return _moved(tree.unpack(theirs.inputs), _device_of(given))

    def ends(self) -> None:
        """End a replay where the update would begin. Raises Interrupted, or ConfigurationError if it is of no use."""
        done = self._pass
        if done is None:
            return
        if not done.has_inputs:
            raise ConfigurationError(
                "integrity.audit_steps is set, and the script does not take its batch by `batch = step.inputs(batch)`, "
                "or, with Megatron, by a midstep.adapters.megatron.FromSample: another rank cannot repeat its step. "
                "Change that, or set audit_steps: 0 (docs/integrity.md)"
            )
        if not done.contributions:
            raise ConfigurationError(
                "integrity.audit_steps is set, and no gradient is reduced in the steps of this script before its "
                "update block: there is nothing to compare. Set audit_steps: 0 (docs/integrity.md)"
            )
        self._audits.done.append(done)
        self._listen(None)
        if done.alone:
            self._left = True
            raise Interrupted

    def failed(self, error: Exception) -> None:
        """Raise ConfigurationError if a step cannot be repeated at all; else do nothing, as the error is a fault."""
        if self.repeats and not self._audits.proven and not isinstance(error, CommunicatorError | ConfigurationError):
            subject = self._pass.subject if self._pass is not None else -1
            raise ConfigurationError(
                f"integrity.audit_steps is set, and rank {self._runtime.rank} cannot repeat a step of rank {subject}: "
                f"{type(error).__name__}: {error}. What step.inputs(...) gets must be all that a step needs of its "
                "rank; or set audit_steps: 0 (docs/integrity.md)"
            ) from error

    # --- inside -------------------------------------------------------------------------------------------------------

    def _listen(self, each: _Pass | None) -> None:
        self._pass = each
        self._runtime.injection_points.replaying = self.repeats
        if isinstance(self._runtime.communicator, Listening):
            self._runtime.communicator.listener = each


def _refuse_others(runtime: "Runtime", framework: "Framework") -> None:
    able = isinstance(framework, Repeatable) and framework.repeats_others
    if able and isinstance(runtime.communicator, Listening):
        return
    raise ConfigurationError(
        f"integrity.audit_steps is set, and a step of a {type(framework).__name__} on {runtime.communicator.name} "
        "cannot be repeated by another rank: its gradients are computed from what collectives bring, or are not seen. "
        "Train with midstep.TrainState and DistributedDataParallel, or with Megatron and data parallelism alone (no "
        "overlap_param_gather, one optimizer instance); or set audit_steps: 0 (docs/integrity.md)"
    )


def _reduced(op: str, args: Sequence[Any]) -> list[Any]:
    """Return what a reduction gets of this rank, as far as it is of floating point."""
    if op in {"allreduce", "allreduce_coalesced", "reduce"}:
        given = args[0]
    elif "reduce_scatter" in op:
        given = args[1]
    else:
        return []
    return [tensor for tensor in _flat(given) if tensor.is_floating_point()]


def _flat(given: Any) -> list[Any]:
    if isinstance(given, list | tuple):
        return [tensor for each in given for tensor in _flat(each)]
    return [given]


def _device_of(given: Any) -> Any:
    """Return the device of the first tensor among the inputs; None: there is none."""
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list | tuple):
        return next((found for each in given if (found := _device_of(each)) is not None), None)
    return getattr(given, "device", None)


def _moved(given: Any, device: Any) -> Any:
    """Return inputs that have arrived in host memory with all tensors on a device."""
    if device is None:
        return given
    if isinstance(given, dict):
        return type(given)((key, _moved(each, device)) for key, each in given.items())
    if isinstance(given, list | tuple):
        return type(given)(_moved(each, device) for each in given)
    return given.to(device) if hasattr(given, "is_floating_point") else given


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Handed).decode
