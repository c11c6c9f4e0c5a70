"""One rank's verdicts on audited steps, where it has not heard all that the others have."""

from collections.abc import Sequence
from typing import Any

import pytest

from midstep.processor.audits import Audits, Pass
from midstep.processor.evidence import Contribution, Evidence
from midstep.protocol.errors import Interrupted
from midstep.protocol.types import FaultKind, JobSettings

EVERY = 5


class Rank:
    """A rank of three, in the place of its runtime."""

    world_size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.settings = JobSettings(integrity_audit_steps=EVERY)
        self.said: list[FaultKind] = []
        self.audits = Audits(self)  # type: ignore[arg-type]
        self.audits.proven = True

    def report_fault(self, kind: FaultKind, *_: object, **__: object) -> None:
        """Report."""
        self.said.append(kind)

    def computes(self, step: int, wrong: frozenset[int] = frozenset()) -> Evidence:
        """Compute its own gradient and that of the rank before it; `wrong`: of those ranks not as it should."""
        for subject in (*self.audits.subjects((self.rank - 1) % self.world_size), self.rank):
            done = Pass(subject)
            done.contributions.append(Contribution("", 1000 * step + 10 * subject + (subject in wrong)))
            self.audits.add(done)
        evidence = self.audits.evidence(step)
        assert evidence is not None
        return evidence


def audited(ranks: list[Rank], step: int, *, wrong: Any = None, unheard: Sequence[Rank] = ()) -> int:
    """Audit a step; return how many ranks have left it. `wrong`: a rank, and whose gradients it gets wrong.

    `unheard`: those whose barrier breaks before they have heard what all say.
    """
    all_evidence = [each.computes(step, wrong[1] if wrong and each is wrong[0] else frozenset()) for each in ranks]
    said, left = [each.said() for each in all_evidence], 0
    for each, evidence in zip(ranks, all_evidence, strict=True):
        if each in unheard:
            each.audits.begin()
            continue
        for heard in said:
            evidence.heard(heard)
        try:
            each.audits.counted(step, evidence)
        except Interrupted:
            left += 1
    return left


@pytest.mark.parametrize("unheard", [None, 0, 1, 2])
def test_what_was_computed_in_an_earlier_step_is_no_evidence_in_a_later_one(unheard: int | None) -> None:
    """Also at a rank that has applied the update of the repeated step because others had, and heard no verdict."""
    ranks = [Rank(rank) for rank in range(3)]
    assert audited(ranks, 5, wrong=(ranks[1], {1})) == 3
    assert [each.said for each in ranks] == [[], [FaultKind.GRADIENTS_DIFFER], []]
    assert audited(ranks, 5, unheard=[] if unheard is None else [ranks[unheard]]) == 0
    for each in ranks:
        each.said.clear()
    assert audited(ranks, 10) == 0
    assert not any(each.said for each in ranks)


def test_a_rank_that_was_stopped_before_it_heard_that_it_was_wrong_is_blamed_all_the_same() -> None:
    """Another rank, which speaks for both, was faster: the controller stops all as soon as it has spoken."""
    ranks = [Rank(rank) for rank in range(3)]
    assert audited(ranks, 5, wrong=(ranks[2], {2}), unheard=[ranks[2]]) == 2
    assert [each.said for each in ranks] == [[FaultKind.GRADIENTS_DIFFER], [], []]
    ranks[0].said.clear()
    assert audited(ranks, 5) == 0
    assert [each.said for each in ranks] == [[], [], [FaultKind.WRONG_GRADIENT]]


def test_what_was_computed_in_an_attempt_that_ended_for_another_reason_is_no_evidence() -> None:
    """No rank has found gradients that differ: the next attempt may have other inputs, or another state."""
    ranks = [Rank(rank) for rank in range(3)]
    assert audited(ranks, 5, wrong=(ranks[2], {2}), unheard=ranks) == 0
    assert audited(ranks, 5, wrong=(ranks[1], {0})) == 3
    assert audited(ranks, 5) == 0
    assert [each.said for each in ranks] == [[FaultKind.GRADIENTS_DIFFER], [FaultKind.WRONG_GRADIENT], []]
