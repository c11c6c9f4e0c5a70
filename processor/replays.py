"""A rank repeats a step of its neighbour, to see whether both compute the same gradient from the same inputs.

Gradients differ by rank, so a wrong one goes into the sum and is equal everywhere then: no vote sees it. In an audited
step (`integrity.audit_steps`) each rank first runs the script's step for the rank before it: what `step.inputs` is
given goes to the next rank, with the random numbers, buffers and values as they are there. Its collectives end at once,
without peers; what it gives to reductions is hashed. At its update block the train function is left, the rank-local
state put back, and the step begins again, now with the rank's own inputs and real collectives, hashed as well. The
hashes are compared in the commit barrier (`evidence.py`), before the update.

The first audited steps find out whether a step can be repeated at all: each rank repeats its own as well. Until that
has gone well twice no rank is blamed.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from ..communicators.base import Listening
from ..communicators.host_memory import dtype_name, memory_of
from ..protocol.errors import CommunicatorError, ConfigurationError, Interrupted
from ..protocol.faults import EACH_TIME
from ..protocol.types import Activity, Assertion, FaultKind, FaultLevel, IntegrityAction
from ..protocol.wording import ranks_text
from . import tree
from .evidence import Computed, Evidence, Findings, united
from .framework import Repeatable

if TYPE_CHECKING:
    from .framework import Framework
    from .local_state import LocalState
    from .runtime import Runtime

FIRST_AUDIT = 2  # updates: by then the layout of DDP's buckets is the final one
SELF_TESTS = 2  # in which repetitions have to be equal before a rank is blamed
_log = logging.getLogger("midstep")


class _Contribution(NamedTuple):
    """A reduction, and the hash of what this rank has given to it."""

    text: str
    hash: int


class _Pass:
    """One pass over a step. It listens to the collectives."""

    def __init__(self, *, subject: int, alone: bool) -> None:
        """`subject`: the rank whose gradient is computed. `alone`: no collective is done."""
        self.subject = subject
        self.alone = alone
        self.contributions: list[_Contribution] = []
        self.has_inputs = False

    @property
    def hash(self) -> int:
        """The hash of all that was given."""
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([each.hash for each in self.contributions]))

    def given(self, op: str, args: Sequence[Any]) -> bool:
        """Hash what a reduction gets. Return whether the collective is to be done."""
        for tensor in _reduced(op, args):
            found = xxhash.xxh3_64_intdigest(memory_of(tree.tensor_bytes(tensor)))
            self.contributions.append(_Contribution(f"{op} of {tensor.numel()} {dtype_name(tensor.dtype)}", found))
        return not self.alone


class _Handed(msgspec.Struct, frozen=True, array_like=True):
    inputs: bytes
    framework: bytes
    device: bytes


class Replays:
    """The audits of one rank. Used by the train thread; without `integrity.audit_steps` it does nothing."""

    def __init__(self, runtime: "Runtime", framework: "Framework", own: "LocalState") -> None:
        """Raise ConfigurationError where a step of this framework cannot be repeated by another rank."""
        self._runtime = runtime
        self._framework = framework
        self._own = own
        self._every_steps = runtime.settings.integrity_audit_steps
        self._report_only = runtime.settings.integrity_then is IntegrityAction.REPORT
        self.is_on = self._every_steps > 0 and runtime.world_size > 1
        if self.is_on:
            _refuse_others(runtime, framework)
        self._proven = False
        self._tests = {True: 0, False: 0}  # first audits, by whether all was equal
        self._doubtful = -1  # the step that is repeated since its gradients differed
        self._before: Computed = {}  # of that step, in the attempts until now
        self._reported: set[FaultKind] = set()  # that stand, where training goes on all the same
        self.resumed()

    def resumed(self) -> None:
        """Begin to train, at the start or after a recovery."""
        self._left = False  # the train function was left on purpose
        self._ahead: list[int] = []  # whose gradients this rank computes before its own
        self._replayed = -1  # the step for which that is done
        self._done: list[_Pass] = []
        self._listen(None)

    def is_due(self, step: int) -> bool:
        """Return whether a step is audited: the same on all ranks."""
        first = FIRST_AUDIT <= step < FIRST_AUDIT + SELF_TESTS
        return self.is_on and step >= FIRST_AUDIT and (first or step % self._every_steps == 0)

    @property
    def repeats(self) -> bool:
        """True while the step is one of another rank, or is repeated for a test."""
        return self._pass is not None and self._pass.alone

    def begins(self, step: int) -> None:
        """Begin a step; leave the train function where others are to be repeated first. Raises Interrupted."""
        if self.repeats or not self.is_due(step):
            return
        if self._replayed == step:
            self._listen(_Pass(subject=self._runtime.rank, alone=False))
            return
        rank, world_size = self._runtime.rank, self._runtime.world_size
        self._ahead = [(rank - 1) % world_size, *([] if self._proven else [rank])]
        self._replayed, self._done, self._left = step, [], True
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
        self._own.restore(own, step)
        self._own.remember_random()
        self._listen(_Pass(subject=self._ahead.pop(0), alone=True) if self._ahead else None)
        return True

    def inputs(self, given: Any) -> Any:
        """Return the inputs of the step; in a replay those of the rank before this one, which gets none of its own."""
        if self._pass is None:
            return given
        self._pass.has_inputs = True
        if self._pass.subject == self._runtime.rank:
            return given
        runtime, rank = self._runtime, self._runtime.rank
        assert isinstance(self._framework, Repeatable)
        handed = _Handed(
            tree.pack(given, "step.inputs"), self._framework.capture_conditions(), runtime.device.capture_random()
        )
        runtime.step_clock.doing(Activity.COMMITTING)  # it waits for the others
        arrived = runtime.communicator.swap(
            _encode(handed), (rank + 1) % runtime.world_size, (rank - 1) % runtime.world_size
        )
        runtime.step_clock.doing(Activity.COMPUTING)
        theirs = _decode(arrived)
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
                "integrity.audit_steps is set, and the script does not take its batch by `batch = step.inputs(batch)`: "
                "another rank cannot repeat its step. Add that line, or set audit_steps: 0 (docs/integrity.md)"
            )
        if not done.contributions:
            raise ConfigurationError(
                "integrity.audit_steps is set, and no gradient is reduced in the steps of this script before its "
                "update block: there is nothing to compare. Set audit_steps: 0 (docs/integrity.md)"
            )
        self._done.append(done)
        self._listen(None)
        if done.alone:
            self._left = True
            raise Interrupted

    def failed(self, error: Exception) -> None:
        """Raise ConfigurationError if a step cannot be repeated at all; else do nothing, as the error is a fault."""
        if self.repeats and not self._proven and not isinstance(error, CommunicatorError | ConfigurationError):
            subject = self._pass.subject if self._pass is not None else -1
            raise ConfigurationError(
                f"integrity.audit_steps is set, and rank {self._runtime.rank} cannot repeat a step of rank {subject}: "
                f"{type(error).__name__}: {error}. What step.inputs(...) gets must be all that a step needs of its "
                "rank; or set audit_steps: 0 (docs/integrity.md)"
            ) from error

    def evidence(self) -> Evidence | None:
        """Return what this rank says in the commit barrier; None without audits."""
        if not self.is_on:
            return None
        now: Computed = {}
        for each in self._done:
            now = united(now, {each.subject: {self._runtime.rank: [each.hash]}})
        return Evidence(now, self._before, proven=self._proven)

    def counted(self, step: int, evidence: Evidence) -> None:
        """Follow from what all ranks have computed. After the barrier, before the update.

        Raises Interrupted on all ranks if the step has to be repeated, and ConfigurationError if that is of no use.
        """
        findings, done, self._done = evidence.findings(), self._done, []
        self._proven = self._proven or findings.proven
        if not findings.known:
            return
        if not self._proven:
            self._tested(step, findings, done)
        elif findings.equal:
            self._passed(step, findings)
        elif self._report_only:
            self._note_wrong(step, findings)
        else:
            self._lost(step, findings, evidence)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _listen(self, each: _Pass | None) -> None:
        self._pass = each
        self._runtime.injection_points.replaying = self.repeats
        if isinstance(self._runtime.communicator, Listening):
            self._runtime.communicator.listener = each

    def _tested(self, step: int, findings: Findings, done: Sequence[_Pass]) -> None:
        """Count one of the first audits: of a computation that does not repeat itself no rank can be blamed."""
        self._tests[findings.equal] += 1
        if findings.equal:
            self._proven = self._tests[True] >= SELF_TESTS
            return
        why = _why_not_equal(findings, _first_difference(self._runtime.rank, done))
        _log.warning("step %d: %s", step, why)
        if self._tests[False] >= SELF_TESTS:
            raise ConfigurationError(f"integrity.audit_steps is set, and {why}. Or set audit_steps: 0")

    def _passed(self, step: int, findings: Findings) -> None:
        rank = self._runtime.rank
        if rank in findings.wrong:
            detail = f"rank {rank} computed a wrong gradient in step {step}, and the right one when it was repeated"
            _log.error("%s", detail)
            self._runtime.report_fault(
                FaultKind.WRONG_GRADIENT,
                detail,
                FaultLevel.NOT_HANDLE,
                fault_id=f"wrong gradient of step {step}",
                assertion=Assertion.OCCUR,
            )
        self._doubtful, self._before = -1, {}
        for kind in self._reported:
            self._note(kind, "gradients are equal again", Assertion.RECOVER)
        self._reported.clear()

    def _lost(self, step: int, findings: Findings, evidence: Evidence) -> None:
        """Leave the step with all other ranks, and say why if that is for this rank to say."""
        rank, report = self._runtime.rank, self._runtime.report_fault
        self._before = united(self._before if self._doubtful == step else {}, evidence.own)
        self._doubtful = step
        if rank in findings.wrong:
            code = EACH_TIME if findings.wrong[rank] > 1 else None
            report(FaultKind.WRONG_GRADIENT, _what(rank, step, findings), mendable=True, code=code)
        elif not findings.wrong and rank == min(findings.undecided):
            report(FaultKind.GRADIENTS_DIFFER, _undecided(step, findings), mendable=True)
        raise Interrupted

    def _note_wrong(self, step: int, findings: Findings) -> None:
        rank = self._runtime.rank
        if rank in findings.wrong:
            self._note(FaultKind.WRONG_GRADIENT, _what(rank, step, findings), Assertion.OCCUR)
        elif not findings.wrong and rank == min(findings.undecided):
            self._note(FaultKind.GRADIENTS_DIFFER, _undecided(step, findings), Assertion.OCCUR)

    def _note(self, kind: FaultKind, detail: str, assertion: Assertion) -> None:
        """Have something shown, for as long as it stands."""
        if assertion is Assertion.OCCUR:
            self._reported.add(kind)
        fault_id = f"{kind} {self._runtime.rank}"
        self._runtime.report_fault(kind, detail, FaultLevel.NOT_HANDLE, fault_id=fault_id, assertion=assertion)


def _refuse_others(runtime: "Runtime", framework: "Framework") -> None:
    able = isinstance(framework, Repeatable) and framework.repeats_others
    if able and isinstance(runtime.communicator, Listening):
        return
    raise ConfigurationError(
        f"integrity.audit_steps is set, and a step of a {type(framework).__name__} on {runtime.communicator.name} "
        "cannot be repeated by another rank: its gradients are computed from what collectives bring, or are not seen. "
        "Train with midstep.TrainState and DistributedDataParallel, or set audit_steps: 0 (docs/integrity.md)"
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


def _first_difference(rank: int, done: Sequence[_Pass]) -> str:
    """Say where two passes of this rank over its own step differ."""
    own = [each.contributions for each in done if each.subject == rank]
    if len(own) < 2:
        return ""
    first, second = own[:2]
    for number, (one, other) in enumerate(zip(first, second, strict=False), start=1):
        if one != other:
            return f"reduction {number} of {len(second)} ({other.text})"
    return "" if len(first) == len(second) else f"the number of reductions ({len(first)} and {len(second)})"


def _why_not_equal(findings: Findings, here: str) -> str:
    if findings.unsteady:
        where = f", here first in {here}" if here else ""
        return (
            f"{ranks_text(findings.unsteady)} computed another gradient when repeating a step of its own{where}: "
            "something in the training is not deterministic (torch.use_deterministic_algorithms(True) names it), or "
            "depends on what a collective brings"
        )
    return (
        f"another rank that repeats a step of {ranks_text(findings.differing)} computes another gradient: what "
        "step.inputs(...) gets, with random numbers, buffers and registered values, must be all that a step needs of "
        "its rank"
    )


def _what(rank: int, step: int, findings: Findings) -> str:
    times = findings.wrong[rank]
    often = f", {times} times in this step: each time that it computes" if times > 1 else ""
    return f"rank {rank} computed another gradient than the repetitions of step {step}{often}"


def _undecided(step: int, findings: Findings) -> str:
    return (
        f"{ranks_text(findings.undecided)} computed different gradients of the same inputs in step {step}, and one of "
        "them is wrong: the repetition tells which"
    )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Handed).decode
