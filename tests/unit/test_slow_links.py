"""Slow links, and the machines that explain all of them: rings, single directions, two at once, unequal loads."""

from collections.abc import Mapping
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstep.controller.slow_links import (
    ALIKE,
    LEAST_FACTOR,
    LEAST_OTHERS,
    LEAST_TRAFFIC,
    Carried,
    ComparedLink,
    Ends,
    blamed,
    carried,
    compared,
)
from midstep.protocol.types import LinkUse

STEP_S = 0.1
LEAST_S = 0.1 * STEP_S
USUAL_S, SLOW_S = 0.002, 0.06
SENT = 1e6


def ring(machines: int, slow: Mapping[Ends, float] = {}, sent: float = SENT) -> dict[Ends, Carried]:
    """Links from each machine to the next, some of them slow."""
    ends = [(f"m{number}", f"m{(number + 1) % machines}") for number in range(machines)]
    return {each: Carried(slow.get(each, USUAL_S), sent) for each in ends}


def around(machine: int, machines: int) -> dict[Ends, float]:
    """Both links of a ring that a machine has are slow."""
    before, after = (machine - 1) % machines, (machine + 1) % machines
    return {(f"m{before}", f"m{machine}"): SLOW_S, (f"m{machine}", f"m{after}"): SLOW_S}


def found(links: Mapping[Ends, Carried], factor: float = LEAST_FACTOR) -> set[str]:
    """Return the machines to blame."""
    return set(blamed(slow(links, factor)))


def slow(links: Mapping[Ends, Carried], factor: float = LEAST_FACTOR) -> list[ComparedLink]:
    """Return the links that are slow."""
    return [link for link in compared(links) if link.is_slow(factor, LEAST_S)]


@pytest.mark.parametrize("machines", [3, 4, 8, 100])
@pytest.mark.parametrize("slow", [0, 2])
def test_a_machine_whose_links_are_slow_in_a_ring_is_blamed_and_no_neighbour(machines: int, slow: int) -> None:
    assert found(ring(machines, around(slow, machines))) == {f"m{slow}"}


def test_of_two_machines_none_can_be_blamed() -> None:
    assert found(ring(2, around(0, 2))) == set()


def test_links_that_are_all_slow_blame_none() -> None:
    assert found({ends: Carried(SLOW_S, SENT) for ends in ring(8)}) == set()


def test_a_single_slow_link_is_its_senders() -> None:
    (sender,) = (found := blamed(slow(ring(8, {("m3", "m4"): SLOW_S})))).keys()
    assert sender == "m3"
    assert not found[sender].both_ways


def test_two_slow_machines_are_both_blamed() -> None:
    assert found(ring(8, around(1, 8) | around(5, 8))) == {"m1", "m5"}


def test_what_costs_less_than_its_share_of_a_step_is_not_slow() -> None:
    assert found(ring(8, {("m3", "m4"): USUAL_S + LEAST_S / 2})) == set()


def test_a_link_that_carries_much_more_is_not_held_against_those_that_carry_little() -> None:
    links = ring(8) | {("m0", "m4"): Carried(SLOW_S, 5 * SENT)}
    assert found(links) == set()


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(1.0, 16.0)), max_size=30))
def test_a_link_is_held_against_the_low_third_of_all_others_that_carry_half_to_twice_as_much(
    loads: list[tuple[float, float]],
) -> None:
    links = {(f"m{number}", "x"): Carried(busy_s, sent) for number, (busy_s, sent) in enumerate(loads)}
    usual = {link.ends: link.usual_s for link in compared(links)}
    most = max((each.sent_bytes for each in links.values()), default=0.0)
    used = {ends: each for ends, each in links.items() if each.sent_bytes > LEAST_TRAFFIC * most}
    for ends, each in used.items():
        others = sorted(
            other.busy_s
            for of_other, other in used.items()
            if of_other != ends and each.sent_bytes / ALIKE <= other.sent_bytes <= each.sent_bytes * ALIKE
        )
        assert usual.get(ends) == (others[(len(others) - 1) // 3] if len(others) >= LEAST_OTHERS else None)


def test_of_three_machines_the_slow_one_is_blamed_where_all_send_in_both_directions() -> None:
    """Four of the six links are its own."""
    links = {(f"m{here}", f"m{there}"): Carried(USUAL_S, SENT) for here, there in permutations(range(3), 2)}
    for ends in links:
        if "m1" in ends:
            links[ends] = Carried(SLOW_S, SENT)
    assert found(links) == {"m1"}


def test_links_that_hardly_carry_anything_are_not_looked_at() -> None:
    """Their delays are those of a few small messages."""
    links = ring(8) | {(f"m{number}", "store"): Carried(0.0, SENT / 1000) for number in range(8)}
    links["m1", "store"] = Carried(SLOW_S, SENT / 1000)
    assert found(links) == set()
    assert slow(links) == []


def test_what_explains_a_machine_is_its_slowest_link() -> None:
    links = ring(8, around(2, 8))
    links["m2", "m3"].busy_s = 2 * SLOW_S
    found = blamed(slow(links))["m2"]
    link = found.slowest
    assert found.both_ways
    assert (link.ends, link.busy_s, link.usual_s) == (("m2", "m3"), 2 * SLOW_S, USUAL_S)


def test_processes_of_a_machine_add_up_and_new_links_wait_for_the_next_round() -> None:
    before = (LinkUse("m0", "m1", 1_000_000, 500),)
    after = (LinkUse("m0", "m1", 3_000_000, 900), LinkUse("m0", "m2", 9_000_000, 900))
    links = carried([(before, after, 4), (before, after, 4)])
    assert links.keys() == {("m0", "m1")}
    assert links["m0", "m1"] == Carried(1.0, 200.0)
