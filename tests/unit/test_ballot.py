"""A vote: who is odd among the copies of a shard, whatever the order in which ranks hear of each other."""

import random

import pytest

from midstep.processor.ballot import MOST_RANKS, Ballot, VoteResult

EVERY = frozenset({"a", "b"})


def held(ballots: list[Ballot]) -> list[VoteResult]:
    """Pass what is said as a barrier does; return what each rank makes of it."""
    size, distance = len(ballots), 1
    while distance < size:
        said = [ballot.said() for ballot in ballots]
        for rank, ballot in enumerate(ballots):
            ballot.heard(said[(rank - distance) % size])
        distance *= 2
    return [ballot.result(size) for ballot in ballots]


def voted(*hashes: int, agreed: int = 4, proven: frozenset[str] = EVERY) -> VoteResult:
    """Return what all make of a vote on one shard, of which rank 0 holds the first hash, and so on."""
    ballots = [Ballot(rank, {"a": each}, agreed=agreed, proven=proven) for rank, each in enumerate(hashes)]
    first, *others = held(ballots)
    assert all(other == first for other in others)
    return first


def test_equal_copies_pass() -> None:
    """And the state before that had passed is known to all."""
    result = voted(7, 7, 7)
    assert result.passed
    assert (result.agreed, result.to_blame, result.single) == (4, {}, ())


@pytest.mark.parametrize("odd", range(5))
def test_the_odd_one_is_blamed(odd: int) -> None:
    """Whoever it is."""
    result = voted(*(9 if rank == odd else 7 for rank in range(5)))
    assert result.to_blame == {odd: ("a",)}


@pytest.mark.parametrize("hashes", [(1, 2), (1, 1, 2, 2), (1, 2, 3), (1, 1, 2, 3)])
def test_without_a_strict_majority_no_rank_is_blamed(hashes: tuple[int, ...]) -> None:
    """All who hold the shard are in doubt."""
    result = voted(*hashes)
    assert (result.to_blame, result.undecided) == ({}, {"a": tuple(range(len(hashes)))})
    assert not result.passed


def test_in_a_large_world_two_odd_ones_are_counted_among_few_that_are_named() -> None:
    """A message names no more ranks than are needed."""
    hashes = [7] * 100
    hashes[13] = hashes[77] = 9
    ballots = [Ballot(rank, {"a": each}, agreed=4, proven=EVERY) for rank, each in enumerate(hashes)]
    assert {frozenset(result.to_blame) for result in held(ballots)} == {frozenset({13, 77})}
    assert max(len(ballot.said()) for ballot in ballots) < 100


def test_two_halves_of_a_large_world_name_no_rank() -> None:
    """Of more ranks than are named it is not known which hash has more."""
    result = voted(*[1] * (3 * MOST_RANKS), *[2] * (2 * MOST_RANKS))
    assert (result.to_blame, list(result.undecided)) == ({}, ["a"])


def test_each_shard_is_voted_on_by_its_holders() -> None:
    """As with HSDP: two rows of two, and one shard that a rank alone holds."""
    pieces = [{"a": 1}, {"b": 2, "c": 5}, {"a": 1}, {"b": 3}]
    proven = frozenset({"a", "b", "c"})
    results = held([Ballot(rank, each, agreed=4, proven=proven) for rank, each in enumerate(pieces)])
    assert all(result == results[0] for result in results)
    assert (results[0].undecided, results[0].single) == ({"b": (1, 3)}, ("c",))


def test_copies_that_were_never_equal_raise_no_alarm() -> None:
    """A newcomer does not know that they were: any rank that does is enough."""
    assert voted(1, 2, proven=frozenset()).never_equal == ("a",)
    assert voted(1, 2, proven=frozenset()).passed
    newcomer, other = Ballot(0, {"a": 1}), Ballot(1, {"a": 2}, agreed=4, proven=EVERY)
    assert {tuple(result.undecided) for result in held([newcomer, other])} == {("a",)}


def test_memory_that_has_changed_is_blamed_without_a_majority() -> None:
    """Two ranks are enough. Where most have changed the script has done it."""
    calm, struck = Ballot(0, {"a": 1}, proven=EVERY), Ballot(1, {"a": 1}, proven=EVERY, changed=("a",))
    assert {tuple(result.to_blame) for result in held([calm, struck])} == {(1,)}
    all_changed = [Ballot(rank, {"a": 1}, proven=EVERY, changed=("a",)) for rank in range(3)]
    assert all(result.passed for result in held(all_changed))


@pytest.mark.parametrize(("agreed", "exact"), [(9, True), (8, False)])
def test_a_majority_is_exact_where_the_state_before_has_passed(agreed: int, exact: bool) -> None:
    """Earlier on, the odd one has computed gradients with what was wrong, and they are in all copies."""
    assert voted(1, 1, 2, agreed=agreed).is_exact(10) is exact


def test_memory_that_changed_since_the_vote_has_spoilt_nothing() -> None:
    """The gradients of this step are not applied; so votes need not be held in each step for that."""
    ballots = [Ballot(rank, {"a": 1}, agreed=3, proven=EVERY, changed=("a",) * (rank == 1)) for rank in range(3)]
    assert held(ballots)[0].is_exact(10)


def test_what_no_rank_says_is_a_broken_connection() -> None:
    """It is not taken for a vote."""
    with pytest.raises(ConnectionError, match="cannot be understood"):
        Ballot(0, {"a": 1}).heard(b"\x93\x01")


def test_any_order_of_hearing_gives_one_result() -> None:
    """Twice the same changes nothing."""
    dice = random.Random(1)
    for _ in range(200):
        hashes = [dice.choice([1, 1, 1, 2, 3]) for _ in range(dice.randrange(2, 7))]
        ballots = [Ballot(rank, {"a": each}, proven=EVERY) for rank, each in enumerate(hashes)]
        said = [ballot.said() for ballot in ballots] * 2
        results = []
        for ballot in ballots:
            dice.shuffle(said)
            for each in said:
                ballot.heard(each)
            results.append(ballot.result(len(hashes)))
        assert all(result == results[0] for result in results)


def with_copies(*hashes: int, received: tuple[int, ...], agreed: int = 4) -> VoteResult:
    """Return what all make of a vote in which these ranks have their copy from another one."""
    a = frozenset({"a"})
    ballots = [
        Ballot(rank, {"a": each}, agreed=agreed, proven=EVERY, received=a if rank in received else frozenset())
        for rank, each in enumerate(hashes)
    ]
    first, *others = held(ballots)
    assert all(other == first for other in others)
    return first


def test_a_copy_that_was_sent_has_no_voice() -> None:
    """One that was wrong and was a source makes no majority with the rank that it has served."""
    result = with_copies(9, 9, 7, received=(0,))
    assert (result.to_blame, result.undecided) == ({}, {"a": (0, 1, 2)})


def test_who_was_sent_a_wrong_copy_is_mended_and_not_blamed() -> None:
    """The one that was odd before is."""
    result = with_copies(9, 9, 7, 7, received=(0,))
    assert (result.wrong, result.to_blame) == ({0: ("a",), 1: ("a",)}, {1: ("a",)})


def test_a_copy_that_was_changed_on_its_way_has_spoilt_nothing() -> None:
    """It is sent again, however long ago the last vote was; two copies are enough for that."""
    for result in (with_copies(9, 7, 7, received=(0,), agreed=1), with_copies(9, 7, received=(0,), agreed=1)):
        assert result.to_blame == {0: ("a",)}
        assert result.is_exact(10)


def test_one_voice_among_three_does_not_say_what_the_others_were_sent() -> None:
    """It may have gone wrong since, or in place of one that is gone."""
    for copies in ((9, 7, 9), (9, 7, 7), (9, 7, 8)):
        result = with_copies(*copies, received=(1, 2), agreed=3)
        assert (result.to_blame, result.undecided) == ({}, {"a": (0, 1, 2)})


def test_without_a_vote_that_passed_no_copy_of_the_majority_is_exact() -> None:
    """Not before the second update either."""
    assert not with_copies(9, 7, 7, received=(), agreed=0).is_exact(1)
    assert with_copies(9, 7, 7, received=(), agreed=1).is_exact(2)


def test_where_all_have_loaded_their_copies_each_has_a_voice() -> None:
    """There is no other that could say more."""
    assert with_copies(9, 7, 7, received=(0, 1, 2)).to_blame == {0: ("a",)}
