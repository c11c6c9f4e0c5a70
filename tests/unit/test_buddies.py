"""Which rank keeps the copy of another one's local state, from where the ranks are."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstep.controller.recovery.buddies import Location, buddies, distance, paired
from midstep.controller.recovery.repair import plan_repair
from midstep.protocol.types import LocalStateCopy, ShardHold, StepReport


def world(domains: str, ranks_per_node: int = 1) -> dict[int, Location]:
    """Return the places of a world: a letter for each node, which is its failure domain."""
    return {
        rank: Location(f"n{rank // ranks_per_node}", domains[rank // ranks_per_node])
        for rank in range(len(domains) * ranks_per_node)
    }


def apart(places: Mapping[int, Location], least: int) -> int:
    """Return how many ranks have a buddy that is at least so far away: 1, another node; 2, another domain."""
    return sum(distance(places[rank], places[buddy]) >= least for rank, buddy in buddies(places).items())


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@pytest.mark.parametrize("domains", ["aabb", "abab", "abba", "aaabbb", "abcabc", "aabc", "aabbcc", "abbaab", "ab"])
def test_every_copy_is_in_another_domain_where_none_has_more_than_half(domains: str, ranks_per_node: int) -> None:
    places = world(domains, ranks_per_node)

    assert apart(places, 2) == len(places)


def test_where_each_node_is_its_own_domain_the_buddy_is_the_same_place_on_the_next_node() -> None:
    assert buddies(world("abc", 2)) == {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}


def test_where_all_are_in_one_domain_copies_are_on_another_node() -> None:
    places = world("aaa", 2)

    assert apart(places, 1) == 6
    assert buddies(places) == {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}


def test_on_one_node_the_buddy_is_the_next_rank_and_a_rank_that_is_alone_has_none() -> None:
    assert buddies(world("a", 3)) == {0: 1, 1: 2, 2: 0}
    assert buddies(world("a", 1)) == {}
    assert buddies({}) == {}


def test_a_domain_with_most_of_the_ranks_has_as_many_copies_outside_as_there_is_room_for() -> None:
    places = world("aaaab", 2)

    assert apart(places, 2) == 4  # two ranks outside, and their own copies inside
    assert apart(places, 1) == 10


def test_a_node_that_hosts_the_ranks_of_two_has_no_copy_of_its_own() -> None:
    """Ranks of a lost node have moved to one that has ranks: the next node by number may be the same one."""
    places = {0: Location("a", "a"), 1: Location("a", "a"), 2: Location("b", "b"), 3: Location("c", "c")}

    assert apart(places, 1) == 4


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=16))
def test_each_rank_is_the_buddy_of_one_other_and_the_domains_are_used(where: list[tuple[int, int]]) -> None:
    places = {rank: Location(f"{domain}.{node}", str(domain)) for rank, (domain, node) in enumerate(where)}
    pairs = buddies(places)
    largest = max(sum(place.failure_domain == each for place in places.values()) for each in "0123")

    assert sorted(pairs) == sorted(pairs.values()) == list(places)
    assert all(rank != buddy for rank, buddy in pairs.items())
    if 2 * largest <= len(places):
        assert apart(places, 2) == len(places)


def test_the_plan_says_each_rank_who_its_buddy_is_and_whose_buddy_it_is() -> None:
    places = world("aabb")
    reports = {
        rank: StepReport(3, False, True, (ShardHold("p", 8),), ("p",), (LocalStateCopy(rank, 3),)) for rank in range(4)
    }
    plan = plan_repair(reports, places)

    assert {rank: (part.buddy, part.copied_rank) for rank, part in plan.parts.items()} == {
        0: (2, 2), 1: (3, 3), 2: (0, 0), 3: (1, 1),
    }  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz")), min_size=1, max_size=9))
def test_copies_in_host_memory_are_kept_on_another_node_and_of_one_rank_each(where: list[tuple[str, str]]) -> None:
    """As many as can be in another domain; a rank without such a buddy has no keeper."""
    places = {rank: Location(node + domain, domain) for rank, (node, domain) in enumerate(where)}
    pairs = paired(places)
    keepers = {rank: names["copy_holder"] for rank, names in pairs.items() if "copy_holder" in names}
    assert {rank: names["copy_guest"] for rank, names in pairs.items() if "copy_guest" in names} == {
        keeper: rank for rank, keeper in keepers.items()
    }
    assert len(set(keepers.values())) == len(keepers)
    assert all(places[rank].node != places[keeper].node for rank, keeper in keepers.items())
    most = max(Counter(place.node for place in places.values()).values())
    assert len(keepers) == len(places) or 2 * most > len(places) or len({p.failure_domain for p in places.values()}) > 1
