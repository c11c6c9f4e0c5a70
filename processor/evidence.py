"""Find who has computed a wrong gradient, as far as repetitions of a step can tell: pure.

In an audited step each rank computes its own gradient and repeats that of the rank before it. What it has given to the
reductions is hashed, before it is reduced. The hashes go round with the commit barrier, so all ranks draw the same
conclusion before any applies the update. Of one gradient there are two computations then. Where they differ the step is
repeated, and what is known of it is kept: the third and fourth computation decide.

A hash that more ranks have than any other is the right one. Where there is none, a rank that differs from itself is
wrong; else one that has a part in all differences of the step: a rank that is wrong every time differs in its own
gradient and in the one that it repeats.

Where several ranks compute a gradient together, what one of them gets wrong reaches the others through the collectives
between them, and all of their gradients differ. Only the ranks are in question that gave something else to a collective
before they had taken part in one to which another rank had given something else. What the others have is inherited.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from .gathered import Gathered, Hash

MOST_HASHES = 8  # of one gradient by one rank

By = dict[int, Annotated[list[Hash], Meta(max_length=MOST_HASHES)]]  # by whom it was computed
Computed = dict[int, By]  # by the rank whose gradient it is


class Contribution(NamedTuple):
    """A collective of a step, with the hash of what this rank has given to it. `text`: the collective, for people.

    `within`: which one it is, if it is between the ranks of one replica, equal on all of them; 0: it reduces gradients,
    or is between replicas otherwise.
    """

    text: str
    hash: int
    within: int = 0


class Difference(NamedTuple):
    """Where two computations of one gradient begin to differ, and by which collective other ranks are the first to see.

    `within`: the first one within the replica to which something else was given; 0: there is none.
    """

    place: int
    within: int


def first_difference(ours: Sequence[Contribution], theirs: Sequence[int]) -> Difference | None:
    """Compare all that was given in two computations of one gradient. `theirs`: hashes of the other one."""
    differing = [place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one.hash != other]
    if not differing and len(ours) == len(theirs):
        return None
    seen = [ours[place].within for place in differing if ours[place].within]
    return Difference(differing[0] if differing else min(len(ours), len(theirs)), seen[0] if seen else 0)


def is_inherited(ours: Sequence[Contribution], found: Difference, first: Container[int]) -> bool:
    """Return whether what differs follows from what another rank of the replica gave before.

    Args:
        ours: All that this rank has given.
        found: Where it begins to differ.
        first: The collectives within the replica to which ranks gave something else first, in the same computation.
    """
    return any(each.within in first for each in ours[: found.place] if each.within not in {0, found.within})


class Findings(msgspec.Struct, frozen=True):
    """The same on all ranks, once the barrier is passed.

    `known`: some rank has computed something. `equal`: nothing that was computed in this attempt differs. `wrong`: how
    often each rank to blame was wrong in this step, earlier attempts included. `undecided`: ranks one of which is
    wrong. `proven`: repetitions have been equal before. `differing`: whose gradients are not the same in this attempt.
    `unsteady`: who has computed one gradient twice in it, and not the same.
    """

    known: bool
    equal: bool
    wrong: dict[int, int]
    undecided: tuple[int, ...]
    proven: bool
    differing: tuple[int, ...]
    unsteady: tuple[int, ...]


class _Said(msgspec.Struct, frozen=True, array_like=True):
    proven: bool
    now: Computed
    before: Computed
    unheard: Computed = {}
    inherited: list[int] = []


class Evidence(Gathered[_Said]):
    """One rank's part of what is known of a step; it goes through a commit barrier, and gathers what all ranks say."""

    about = "of a repeated step"

    def __init__(
        self,
        now: Computed,
        before: Computed,
        *,
        proven: bool,
        unheard: Computed | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """`now`: what was computed here in this attempt; `before`: in earlier ones, in which gradients differed.

        `unheard`: in the last one, where its barrier broke before this rank had heard what all say. It counts if
        gradients differed for another rank: else the step was left for another reason, and may have other inputs now.
        `inherited`: whose gradients differ in this attempt for what other ranks of the replica had given.
        """
        self._own, self._unheard = without(now, inherited), unheard or {}
        super().__init__(_Said(proven, now, before, self._unheard, sorted(inherited)))

    @property
    def own(self) -> Computed:
        """The hashes that count as evidence, of those computed here in this attempt, and in the last if that counts."""
        return united(self._own, self._unheard) if self._known.before else self._own

    def _united(self, theirs: _Said) -> _Said:
        ours = self._known
        return _Said(
            ours.proven or theirs.proven,
            united(ours.now, theirs.now),
            united(ours.before, theirs.before),
            united(ours.unheard, theirs.unheard),
            sorted({*ours.inherited, *theirs.inherited}),
        )

    def findings(self) -> Findings:
        """Return what follows."""
        now, before = self._known.now, self._known.before
        before = united(before, self._known.unheard) if before else before
        causes = without(now, self._known.inherited)
        wrong, taken_part, undecided = _judged(united(causes, before))
        differing = list(_differing(now))
        for rank in taken_part:
            wrong[rank] = max(wrong[rank], sum(rank in by for _, by in (*_differing(causes), *_differing(before))))
        if not wrong and not undecided:  # all is inherited: it came in on the way between two ranks
            undecided = set(chain.from_iterable(by for _, by in differing))
        return Findings(
            known=bool(now),
            equal=not differing,
            wrong=dict(sorted(wrong.items())),
            undecided=tuple(sorted(undecided)),
            proven=self._known.proven,
            differing=tuple(subject for subject, _ in differing),
            unsteady=tuple(sorted({rank for _, by in differing for rank, hashes in by.items() if len(hashes) > 1})),
        )


class _First(msgspec.Struct, frozen=True, array_like=True):
    collectives: list[Hash]


class FirstDifferences(Gathered[_First]):
    """The collectives to which ranks gave something else first, gathered before the commit barrier."""

    about = "of where a repeated step differs"

    def __init__(self, collectives: Sequence[int]) -> None:
        """`collectives`: of this rank's computations, as far as they are within its replica."""
        super().__init__(_First(sorted(collectives)))

    @property
    def collectives(self) -> frozenset[int]:
        """Those of all ranks, once the barrier is passed."""
        return frozenset(self._known.collectives)

    def _united(self, theirs: _First) -> _First:
        return _First(sorted({*self._known.collectives, *theirs.collectives}))


def without(computed: Mapping[int, By], subjects: Container[int]) -> Computed:
    """Return what was computed of all ranks' gradients but these."""
    return {subject: by for subject, by in computed.items() if subject not in subjects}


def united(ours: Mapping[int, By], theirs: Mapping[int, By]) -> Computed:
    """Return what is known together."""
    found = {subject: {rank: list(hashes) for rank, hashes in by.items()} for subject, by in ours.items()}
    for subject, by in theirs.items():
        here = found.setdefault(subject, {})
        for rank, hashes in by.items():
            here[rank] = sorted({*here.get(rank, ()), *hashes})[:MOST_HASHES]
    return found


def _differing(computed: Mapping[int, By]) -> Iterator[tuple[int, By]]:
    for subject, by in sorted(computed.items()):
        if len(_hashes(by)) > 1:
            yield subject, by


def _hashes(by: By) -> set[int]:
    return set(chain.from_iterable(by.values()))


def _judged(computed: Computed) -> tuple[Counter[int], set[int], set[int]]:
    """Return how often ranks were wrong where it is known what is right, those that are wrong for what they differ in.

    And those among which one is wrong that cannot be told.
    """
    counted, wrong, open_ = Counter[int](), set[int](), list[set[int]]()
    for _, by in _differing(computed):
        held = sorted((sum(each in hashes for hashes in by.values()), each) for each in _hashes(by))
        (fewer, _), (most, right) = held[-2:]
        unsteady = {rank for rank, hashes in by.items() if len(set(hashes)) > 1}
        if most > fewer:
            counted.update({rank: len(others) for rank, hashes in by.items() if (others := {*hashes} - {right})})
        elif len(unsteady) == 1:
            wrong |= unsteady
        else:
            open_.append(set(by))
    for ranks in open_:  # what is not told apart is explained by a rank that is known to be wrong
        counted.update(ranks & counted.keys())
    left = [ranks for ranks in open_ if not ranks & (wrong | counted.keys())]
    common = set.intersection(*left) if len(left) > 1 else set()
    if len(common) == 1:
        return counted, wrong | common, set()
    return counted, wrong, set(chain.from_iterable(left))
