"""Judge what ranks have computed in audited steps, their own gradients and those that they repeat for others.

What a rank has computed goes round with the commit barrier (`evidence.py`), so that all ranks draw the same conclusion
before any of them applies the update. Where gradients differ all leave the step and repeat it; the rank that is wrong
says so, or one that speaks for those of which one is.

The first audited steps find out whether a step can be repeated at all: each rank repeats its own as well. Until that
has gone well twice no rank is blamed.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import xxhash

from ..protocol.errors import ConfigurationError, Interrupted
from ..protocol.faults import EACH_TIME
from ..protocol.types import Assertion, FaultKind, FaultLevel, IntegrityAction
from ..protocol.wording import ranks_text
from .evidence import Computed, Contribution, Evidence, Findings, united, without

if TYPE_CHECKING:
    from .runtime import Runtime

FIRST_AUDIT = 2  # updates: by then the layout of DDP's buckets is the final one
SELF_TESTS = 2  # in which repetitions have to be equal before a rank is blamed
_log = logging.getLogger("midstep")


class Pass:
    """One pass over a step: what it gives to collectives. `subject`: the rank whose gradient is computed.

    `inherited`: what differs in it follows from what other ranks of the replica have given.
    """

    def __init__(self, subject: int) -> None:
        self.subject = subject
        self.contributions: list[Contribution] = []
        self.inherited = False

    @property
    def hashes(self) -> list[int]:
        """The hashes of all that was given, in its order."""
        return [each.hash for each in self.contributions]

    @property
    def hash(self) -> int:
        """The hash of all that was given."""
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(self.hashes))


class Audits:
    """The verdicts of one rank. Used by the train thread; without `integrity.audit_steps` it does nothing."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._every_steps = runtime.settings.integrity_audit_steps
        self._report_only = runtime.settings.integrity_then is IntegrityAction.REPORT
        self.proven = False  # repetitions have been equal: a rank can be blamed where they are not
        self._done: list[Pass] = []  # in this step
        self._tests = {True: 0, False: 0}  # first audits, by whether all was equal
        self._doubtful = -1  # the step that is repeated since its gradients differed
        self._before: Computed = {}  # of that step, in the attempts until now
        # What was computed in the last audited attempt of a step, until this rank has heard what all say.
        self._unheard: tuple[int, Computed] = (-1, {})
        self._reported: set[FaultKind] = set()  # that stand, where training goes on all the same

    @property
    def is_on(self) -> bool:
        """True if steps are audited: a rank that is alone has no peer."""
        return self._every_steps > 0 and self._runtime.world_size > 1

    def is_due(self, step: int) -> bool:
        """Return whether a step is audited: the same on all ranks."""
        first = FIRST_AUDIT <= step < FIRST_AUDIT + SELF_TESTS
        return self.is_on and step >= FIRST_AUDIT and (first or step % self._every_steps == 0)

    def subjects(self, before: int) -> list[int]:
        """Return the ranks whose gradients this one computes before its own: a neighbour's, and for a test its own.

        `before`: the rank that has this one's place in the replica before its own.
        """
        return [before, *([] if self.proven else [self._runtime.rank])]

    def begin(self) -> None:
        """Forget what was computed in an attempt of a step that has come to no verdict."""
        self._done = []

    def add(self, done: Pass) -> None:
        """Take in a pass that is over."""
        self._done.append(done)

    def computed(self, subject: int) -> Pass | None:
        """Return the first pass of this attempt over a rank's step."""
        return next((each for each in self._done if each.subject == subject), None)

    def evidence(self, step: int) -> Evidence | None:
        """Return what this rank says in the commit barrier; None without audits.

        A rank that has applied an update because others had has not heard that the step before is over.
        """
        if not self.is_on:
            return None
        if step != self._doubtful:
            self._doubtful, self._before = -1, {}
        now: Computed = {}
        for each in self._done:
            now = united(now, {each.subject: {self._runtime.rank: [each.hash]}})
        inherited = [each.subject for each in self._done if each.inherited]
        (last_step, unheard), self._unheard = self._unheard, (step, without(now, inherited))
        unheard = unheard if step == last_step else {}
        return Evidence(now, self._before, proven=self.proven, unheard=unheard, inherited=inherited)

    def counted(self, step: int, evidence: Evidence) -> None:
        """Follow from what all ranks have computed. After the barrier, before the update.

        Raises Interrupted on all ranks if the step has to be repeated, and ConfigurationError if that is of no use.
        """
        findings, done, self._done = evidence.findings(), self._done, []
        self._unheard = (-1, {})
        self.proven = self.proven or findings.proven
        if not findings.known:
            return
        if not self.proven:
            self._tested(step, findings, done)
        elif findings.equal:
            self._passed(step, findings)
        elif self._report_only:
            self._note_wrong(step, findings)
        else:
            self._lost(step, findings, evidence)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _tested(self, step: int, findings: Findings, done: Sequence[Pass]) -> None:
        """Count one of the first audits: of a computation that does not repeat itself no rank can be blamed."""
        self._tests[findings.equal] += 1
        if findings.equal:
            self.proven = self._tests[True] >= SELF_TESTS
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


def _first_difference(rank: int, done: Sequence[Pass]) -> str:
    """Say where two passes of this rank over its own step differ."""
    own = [each.contributions for each in done if each.subject == rank]
    if len(own) < 2:
        return ""
    first, second = own[:2]
    for number, (one, other) in enumerate(zip(first, second, strict=False), start=1):
        if one != other:
            return f"collective {number} of {len(second)} ({other.text})"
    return "" if len(first) == len(second) else f"the number of collectives ({len(first)} and {len(second)})"


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
