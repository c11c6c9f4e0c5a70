"""A rank repeats a step of its neighbour, to see whether both compute the same gradient from the same inputs.

Gradients differ by rank, so a wrong one goes into the sum and is equal everywhere then: no vote sees it. In an audited
step (`integrity.audit_steps`) each rank first runs the script's step for the rank before it: what `step.inputs` is
given goes to the next rank, with the random numbers, buffers and values as they are there. Its collectives end at once,
without peers; what it gives to reductions is hashed. At its update block the train function is left, the rank-local
state put back, and the step begins again, now with the rank's own inputs and real collectives, hashed as well. The
hashes are compared in the commit barrier, before the update (`audits.py`).

Where ranks compute a gradient together (a row of a sharded model, the tensor and pipeline parallel ranks of Megatron),
all of a replica repeat the step of the replica before it, each that of the rank that has its place there. Collectives
within a replica are done, and what they are given is hashed as well: from that follows which rank was wrong first.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from ..communicators.base import Listening
from ..communicators.host_memory import dtype_name
from ..protocol.errors import CommunicatorError, ConfigurationError, Interrupted
from ..protocol.types import Activity
from . import tree
from .audits import Pass
from .evidence import Contribution, Difference, FirstDifferences, first_difference, is_inherited
from .framework import ModelReplica, Repeatable
from .tensor_hash import hashes

if TYPE_CHECKING:
    from ..communicators.base import Met
    from .audits import Audits
    from .framework import Framework
    from .local_state import LocalState
    from .runtime import Runtime


class _Kind(NamedTuple):
    """Collectives within a replica that are counted together. `members`: of a message its source and destination."""

    op: str
    members: tuple[int, ...]
    own: bool


class _Pass(Pass):
    """One pass over a step. It listens to the collectives."""

    def __init__(self, rank: int, replica: ModelReplica, *, subject: int, alone: bool) -> None:
        """`alone`: no collective is done in which other replicas take part."""
        super().__init__(subject)
        self.alone = alone
        self.thread = threading.get_ident()
        self.has_inputs = False
        self.listens = True  # not yet behind the reduction of its gradients, from which other things follow
        self._rank = rank
        self._replica = frozenset(replica.members)
        self._counts = Counter[_Kind]()  # of collectives within the replica

    def given(self, op: str, args: Sequence[Any], members: tuple[int, ...]) -> bool:
        """Hash what a collective gets. Return whether it is to be done."""
        inside = self._replica.issuperset(members)
        if self.listens and inside and len(members) > 1:
            self._note(op, _given(op, args, members.index(self._rank)), self._next(op, args, members))
        elif self.listens and not inside:
            self._note(op, _reduced(op, args))
        return inside or not self.alone or _counts(op, args)

    def _note(self, op: str, tensors: Sequence[Any], within: int = 0) -> None:
        for tensor in tensors:
            (found,) = hashes([[tensor]])
            text = f"{op} of {tensor.numel()} {dtype_name(tensor.dtype)}"
            self.contributions.append(Contribution(text, found, within))
        if within and not tensors:
            self.contributions.append(Contribution(op, 0, within))

    def _next(self, op: str, args: Sequence[Any], members: tuple[int, ...]) -> int:
        """Return a number for a collective within the replica that all ranks give it that take part, and no other has.

        The own step of a replica and the one that it repeats are counted apart.
        """
        if op in _ONE_WAY:
            here, other = members.index(self._rank), int(args[1])
            members = tuple(members[place] for place in ((here, other) if op == "send" else (other, here)))
        kind = _Kind(_ONE_WAY.get(op, op), members, own=self.subject == self._rank)
        self._counts[kind] += 1
        return xxhash.xxh3_64_intdigest(_encode((*kind, self._counts[kind]))) or 1


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
        self._audits.begin()
        rank, framework = self._runtime.rank, self._framework
        found = framework.model_replica() if self._audits.is_on and isinstance(framework, Repeatable) else None
        self._replica = found or ModelReplica((rank,), (rank,))
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
        rank, replica = self._runtime.rank, self._replica
        if self._replayed == step:
            self._listen(_Pass(rank, replica, subject=rank, alone=False))
            return
        self._audits.begin()
        # A newcomer learns that the self-test is over: what is repeated has collectives, so all repeat the same.
        self._audits.proven = self._met(verdict=int(self._audits.proven)).verdict > 0
        self._ahead = self._audits.subjects(replica.before(rank))
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
        rank, ahead = self._runtime.rank, self._ahead
        self._listen(_Pass(rank, self._replica, subject=ahead.pop(0), alone=True) if ahead else None)
        return True

    def inputs(self, given: Any) -> Any:
        """Return the inputs of the step; in a replay those of the rank before this one, which gets none of its own."""
        if self._pass is None:
            return given
        first, self._pass.has_inputs = not self._pass.has_inputs, True
        if self._pass.subject == self._runtime.rank:
            return given
        runtime, rank, replica = self._runtime, self._runtime.rank, self._replica
        assert isinstance(self._framework, Repeatable)
        # Behind the first micro-batch this rank draws the other one's numbers.
        conditions = (self._framework.capture_conditions(), runtime.device.capture_random()) if first else (b"", b"")
        handed = _Handed(tree.pack(given, "step.inputs"), *conditions)
        # Of a pipeline not all ranks take as many batches, or any.
        theirs = _decode(self._swapped(_encode(handed), replica.after(rank), replica.before(rank), apart=True))
        if first:
            self._framework.take_conditions(theirs.framework)
        if theirs.device:
            runtime.device.restore_random(theirs.device)
        return _moved(tree.unpack(theirs.inputs), _device_of(given))

    def compares(self, now: bool, *, has_batch: bool = True) -> None:
        """Begin to listen, as the model computes, or end that: of reduced gradients a replay computes something else.

        `has_batch`: all ranks take one before; else some in the midst of a pipeline, say, take none.
        """
        if self._pass is None:
            return
        self._pass.listens = now
        if now and not has_batch and not self._pass.has_inputs:
            self.inputs(None)

    def ends(self) -> None:
        """End a replay where the update would begin. Raises Interrupted, or ConfigurationError if it is of no use."""
        done = self._pass
        if done is None:
            return
        if not done.has_inputs:
            raise ConfigurationError(
                "integrity.audit_steps is set, and the script does not take its batch by `batch = step.inputs(batch)`, "
                "or, with Megatron, by a midstep.adapters.megatron.FromSample behind the step's zero_grad: another "
                "rank cannot repeat its step. Change that, or set audit_steps: 0 (docs/integrity.md)"
            )
        if all(each.within for each in done.contributions):
            raise ConfigurationError(
                "integrity.audit_steps is set, and no gradient is reduced in the steps of this script before its "
                "update block: there is nothing to compare. Set audit_steps: 0 (docs/integrity.md)"
            )
        self._audits.add(done)
        self._listen(None)
        if done.alone:
            self._left = True
            raise Interrupted
        if len(self._replica.members) > 1:
            self._find_causes(done)

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

    def _find_causes(self, own: Pass) -> None:
        """Compare all that ranks have given, and note what differs only as another rank of the replica was wrong.

        Each rank sees its own step and the one that it has repeated beside what the rank with its place in the replicas
        after and before it has computed. All ranks do this in an audited step. Raises as a collective does.
        """
        rank, replica = self._runtime.rank, self._replica
        before, after = replica.before(rank), replica.after(rank)
        repeated = self._audits.computed(before)
        assert repeated is not None, f"rank {rank} has repeated no step of rank {before}"
        seen = [
            (own, self._swapped(_encode(repeated.hashes), before, after)),
            (repeated, self._swapped(_encode(own.hashes), after, before)),
        ]
        found: list[tuple[Pass, Difference]] = []
        for each, theirs in seen:
            difference = first_difference(each.contributions, _decode_hashes(theirs))
            if difference is not None:
                found.append((each, difference))
        gathered = FirstDifferences([difference.within for _, difference in found if difference.within])
        self._met(gathering=gathered)
        for each, difference in found:
            each.inherited = is_inherited(each.contributions, difference, gathered.collectives)

    def _met(self, **said: Any) -> "Met":
        """Return what all ranks have in common, as their barrier does."""
        self._runtime.step_clock.doing(Activity.COMMITTING)
        met = self._runtime.communicator.barrier(**said)
        self._runtime.step_clock.doing(Activity.COMPUTING)
        return met

    def _swapped(self, blob: bytes, to: int, source: int, *, apart: bool = False) -> bytes:
        """Return what a rank of another replica has sent, and send it to one of a third."""
        self._runtime.step_clock.doing(Activity.COMMITTING)  # it waits for the others
        arrived = self._runtime.communicator.swap(blob, to, source, apart=apart)
        self._runtime.step_clock.doing(Activity.COMPUTING)
        return arrived

    def _listen(self, each: _Pass | None) -> None:
        self._pass = each
        self._runtime.injection_points.replaying = self.repeats
        if isinstance(self._runtime.communicator, Listening):
            self._runtime.communicator.listener = each


def _refuse_others(runtime: "Runtime", framework: "Framework") -> None:
    able = isinstance(framework, Repeatable) and framework.model_replica() is not None
    if able and isinstance(runtime.communicator, Listening):
        return
    raise ConfigurationError(
        f"integrity.audit_steps is set, and a step of a {type(framework).__name__} on {runtime.communicator.name} "
        "cannot be repeated by other ranks: there is no second replica of the model, what another replica has computed "
        "is needed within a step, or gradients are not seen. Train with midstep.TrainState and DistributedDataParallel "
        "or HSDP, or with Megatron and at least two data parallel replicas (no overlap_param_gather, one optimizer "
        "instance); or set audit_steps: 0 (docs/integrity.md)"
    )


_ONE_WAY = {"send": "message", "recv": "message"}


def _given(op: str, args: Sequence[Any], here: int) -> list[Any]:
    """Return the tensors that this rank, the `here`th of the group, gives to a collective."""
    if op in {"barrier", "recv", "recv_anysource"}:
        return []
    if op == "broadcast" and getattr(args[1], "rootRank", here) != here:
        return []
    first = op in {"allreduce", "allreduce_coalesced", "reduce", "broadcast", "send"}
    return [tensor for tensor in _flat(args[0] if first else args[1]) if tensor.numel()]


def _reduced(op: str, args: Sequence[Any]) -> list[Any]:
    """Return what a reduction gets of this rank, as far as it is of floating point."""
    if op in {"allreduce", "allreduce_coalesced", "reduce"}:
        given = args[0]
    elif "reduce_scatter" in op:
        given = args[1]
    else:
        return []
    return [tensor for tensor in _flat(given) if tensor.is_floating_point()]


def _counts(op: str, args: Sequence[Any]) -> bool:
    """Return whether a collective gives the same when all ranks compute each other's steps: a sum of whole numbers.

    The number of tokens in a batch of all ranks, say, by which each divides its loss.
    """
    given = _flat(args[0]) if op in {"allreduce", "allreduce_coalesced"} else []
    return bool(given) and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in given)


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
_decode_hashes = msgspec.msgpack.Decoder(list[int]).decode
