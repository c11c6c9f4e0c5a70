"""Peers' repetitions tell which rank has computed a wrong gradient, in whatever order ranks hear of them."""

import pytest

from midstep.processor.evidence import (
    Computed,
    Contribution,
    Difference,
    Evidence,
    Findings,
    FirstDifferences,
    first_difference,
    is_inherited,
)

RIGHT, WRONG, OTHER = 7, 8, 9


def findings(size: int, *attempts: Computed, proven: bool = True) -> Findings:
    """Pass what each rank has computed in the last attempt through a barrier; return what all make of it."""
    parts = []
    for rank in range(size):
        own = [{subject: {rank: by[rank]} for subject, by in each.items() if rank in by} for each in attempts]
        before: Computed = {}
        for each in own[:-1]:
            for subject, by in each.items():
                before.setdefault(subject, {}).setdefault(rank, []).extend(by[rank])
        parts.append(Evidence(own[-1], before, proven=proven))
    distance = 1
    while distance < size:
        said = [part.said() for part in parts]
        for rank, part in enumerate(parts):
            part.heard(said[(rank - distance) % size])
        distance *= 2
    first, *others = [part.findings() for part in parts]
    assert all(other == first for other in others)
    return first


def ring(size: int, **wrong: int) -> Computed:
    """Return a step in which each rank is repeated by the next; `own1=8`: rank 1's own is wrong, `by1=8`: as a peer."""
    return {
        rank: {
            rank: [wrong.get(f"own{rank}", RIGHT + 10 * rank)],
            (rank + 1) % size: [wrong.get(f"by{(rank + 1) % size}", RIGHT + 10 * rank)],
        }
        for rank in range(size)
    }


@pytest.mark.parametrize("size", [2, 3, 5])
def test_equal_repetitions_blame_nobody(size: int) -> None:
    """And it is known that they were."""
    found = findings(size, ring(size))
    assert (found.known, found.equal, found.wrong, found.undecided) == (True, True, {}, ())


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("role", ["own1", "by1"])
def test_one_difference_is_decided_by_the_repetition(size: int, role: str) -> None:
    """Of two computations none can be blamed; the next attempt has the third and the fourth."""
    first = ring(size, **{role: WRONG})
    pair = (0, 1) if role == "by1" else (1, 2 % size)
    assert findings(size, first).undecided == tuple(sorted(pair))
    found = findings(size, first, ring(size))
    assert (found.equal, found.wrong, found.undecided) == (True, {1: 1}, ())


@pytest.mark.parametrize("size", [3, 5])
def test_two_neighbours_that_are_wrong_once_each_are_not_wrong_each_time(size: int) -> None:
    """One in the step, the other in its repetition: both have a part in both differences."""
    found = findings(size, ring(size, own1=WRONG), ring(size, by2=OTHER), ring(size))
    assert (found.equal, found.wrong, found.undecided) == (True, {1: 1, 2: 1}, ())


@pytest.mark.parametrize("size", [3, 5])
def test_a_rank_that_begins_to_be_wrong_in_the_middle_of_a_step_is_so_each_time(size: int) -> None:
    """It has repeated its neighbour rightly, and got its own gradient wrong in the same way since."""
    found = findings(size, ring(size, own1=WRONG), ring(size, own1=WRONG, by1=OTHER))
    assert (found.equal, found.wrong, found.undecided) == (False, {1: 2}, ())


@pytest.mark.parametrize("size", [3, 5])
def test_a_rank_that_is_wrong_each_time_is_known_at_once(size: int) -> None:
    """It differs in its own gradient, and in the one that it repeats; no other has a part in both."""
    found = findings(size, ring(size, own1=WRONG, by1=OTHER))
    assert (found.equal, found.wrong, found.undecided) == (False, {1: 2}, ())


def test_of_two_ranks_the_one_that_differs_from_itself_is_wrong() -> None:
    """In the second attempt it is wrong in another way, and the other one is not."""
    assert findings(2, ring(2, own1=WRONG, by1=OTHER)).undecided == (0, 1)
    found = findings(2, ring(2, own1=WRONG, by1=OTHER), ring(2, own1=100, by1=200))
    assert (found.equal, found.undecided) == (False, ())
    assert list(found.wrong) == [1]
    assert found.wrong[1] >= 2


def test_two_ranks_one_of_which_is_wrong_in_the_same_way_cannot_be_told_apart() -> None:
    """However often the step is repeated."""
    same = ring(2, own1=WRONG, by1=OTHER)
    found = findings(2, same, same, same)
    assert (found.wrong, found.undecided) == ({}, (0, 1))


def test_what_a_replaced_process_had_computed_is_missed_and_blames_nobody_else() -> None:
    """Its memory of the first attempt is gone with it."""
    first = ring(3, own1=WRONG)
    del first[1][1]
    found = findings(3, first, ring(3))
    assert (found.equal, found.wrong, found.undecided) == (True, {}, ())


def test_a_step_that_nobody_repeats_says_only_whether_repetitions_were_equal_once() -> None:
    """A process that is new hears it from the others."""
    found = findings(3, {})
    assert (found.known, found.equal, found.proven) == (False, True, True)
    assert not findings(3, {}, proven=False).proven


def test_what_no_rank_says_is_a_broken_connection() -> None:
    """As in a vote."""
    with pytest.raises(ConnectionError, match="cannot be understood"):
        Evidence({}, {}, proven=False).heard(b"\xc1")


# --- replicas of several ranks ----------------------------------------------------------------------------------------

FIRST, SECOND = 11, 12  # collectives within a replica


def given(*hashes: int) -> list[Contribution]:
    """Return what a rank gives: to two collectives within its replica, and to a reduction behind each."""
    return [Contribution("", each, within) for each, within in zip(hashes, (FIRST, 0, SECOND, 0), strict=False)]


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ((1, 2, 3, 4), None),
        ((9, 2, 3, 9), Difference(0, FIRST)),
        ((1, 9, 9, 9), Difference(1, SECOND)),  # reduced first, and seen by others later
        ((1, 2, 3, 9), Difference(3, 0)),
        ((1, 2, 3), Difference(3, 0)),  # one of the two has done less
        ((1, 2, 3, 4, 5), Difference(4, 0)),
    ],
)
def test_computations_begin_to_differ_with_the_first_collective_that_gets_something_else(
    theirs: tuple[int, ...], found: Difference | None
) -> None:
    """Others of the replica see it with the first one that they take part in."""
    assert first_difference(given(1, 2, 3, 4), theirs) == found


@pytest.mark.parametrize(
    ("found", "first", "inherited"),
    [
        (Difference(3, 0), {FIRST}, True),
        (Difference(3, 0), {SECOND}, True),
        (Difference(1, SECOND), {SECOND}, False),  # what was wrong in a later collective has no part in it
        (Difference(0, FIRST), {FIRST}, False),  # both ranks gave something else to the same one: neither knew
        (Difference(2, SECOND), {SECOND, 99}, False),
        (Difference(4, 0), {FIRST}, True),
    ],
)
def test_a_rank_inherits_what_another_one_gave_to_an_earlier_collective(
    found: Difference, first: set[int], *, inherited: bool
) -> None:
    """Of the same replica: no other rank has its collectives."""
    assert is_inherited(given(1, 2, 3, 4), found, first) is inherited


def test_of_a_collective_of_several_tensors_one_may_be_equal() -> None:
    """A rank does not inherit from itself what is wrong with the other one."""
    ours = [Contribution("", each, FIRST) for each in (1, 2)]
    assert not is_inherited(ours, Difference(1, FIRST), {FIRST})


def test_all_ranks_know_the_collectives_to_which_another_one_gave_something_else_first() -> None:
    """Once a barrier is passed."""
    ours, theirs = FirstDifferences([SECOND]), FirstDifferences([FIRST])
    ours.heard(theirs.said())
    assert ours.collectives == {FIRST, SECOND}


def in_rows(*attempts: dict[tuple[int, int], int], inherited: tuple[tuple[int, int], ...] = ()) -> Findings:
    """Pass what two rows of two ranks compute through a barrier each, and return what all make of the last.

    Ranks 0 and 1 are repeated by 2 and 3, and these by them. Attempts: the hashes that are wrong, by whose gradient it
    is and who computes it. `inherited`: those of the first attempt that follow from what another rank of the row gave.
    """
    befores: list[Computed] = [{} for _ in range(4)]
    found: list[Findings] = []
    for number, wrong in enumerate(attempts):
        parts = []
        for rank in range(4):
            subjects = (rank, (rank + 2) % 4)
            now: Computed = {each: {rank: [wrong.get((each, rank), RIGHT + 10 * each)]} for each in subjects}
            spread = [subject for subject, by in inherited if by == rank] if number == 0 else []
            parts.append(Evidence(now, befores[rank], proven=True, inherited=spread))
        for part in parts:
            for other in parts:
                part.heard(other.said())
        found = [part.findings() for part in parts]
        assert all(each == found[0] for each in found)
        befores = [part.own for part in parts]
    return found[0]


SPREAD = {(0, 0): WRONG, (1, 1): WRONG + 1}  # rank 0 was wrong, and rank 1 of its row has computed with it
KNOWN = ((1, 1), (1, 3))  # both ranks that have computed rank 1's gradient see that


def test_what_a_rank_of_a_row_got_wrong_is_blamed_on_no_other_one() -> None:
    """Though the gradients of all in the row differ."""
    found = in_rows(SPREAD, inherited=KNOWN)
    assert (found.equal, found.wrong, found.undecided, found.differing) == (False, {}, (0, 2), (0, 1))
    found = in_rows(SPREAD, {}, inherited=KNOWN)
    assert (found.equal, found.wrong, found.undecided) == (True, {0: 1}, ())


def test_of_what_came_in_between_two_ranks_of_a_row_none_is_blamed() -> None:
    """All that differs is inherited: a rank speaks for those that have computed it."""
    inherited = ((0, 0), (0, 2), (1, 1), (1, 3))
    found = in_rows(SPREAD, inherited=inherited)
    assert (found.equal, found.wrong, found.undecided) == (False, {}, (0, 1, 2, 3))
    found = in_rows(SPREAD, {}, inherited=inherited)
    assert (found.equal, found.wrong, found.undecided) == (True, {}, ())
