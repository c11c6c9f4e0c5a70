"""Peers' repetitions tell which rank has computed a wrong gradient, in whatever order ranks hear of them."""

import pytest

from midstep.processor.evidence import Computed, Evidence, Findings

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
