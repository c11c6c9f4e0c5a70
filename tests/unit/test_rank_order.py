"""Which ranks hold copies of the same, and in which order of ranks no node holds all of them."""

import random

import pytest

pytest.importorskip("megatron.core")

from megatron.core.parallel_state import RankGenerator

from midstep.adapters.megatron.rank_order import (
    ACROSS,
    MEGATRONS,
    ORDERS,
    SearchOutcome,
    Sizes,
    advice,
    copies,
    current_order,
    find_members,
    neighbours,
    on_one_node,
    propose_order,
    propose_placement,
)

PLAIN = Sizes(
    tensor=2, context=1, pipeline=2, data=2, expert=1, expert_tensor=2, expert_data=2, instances=0
)  # eight ranks
TWO_NODES = [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ways", [(2, 1, 2, 2), (2, 2, 1, 2), (1, 2, 2, 4), (1, 1, 3, 2)])
def test_groups_are_those_that_megatron_makes(order: str, ways: tuple[int, int, int, int]) -> None:
    """Its own generator of ranks gives the same data and context parallel groups, and tensor parallel ones."""
    tensor, context, pipeline, data = ways
    world = Sizes(tensor, context, pipeline, data, 1, 1, tensor * context * data, 0)
    generator = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
    assert sorted(map(list, copies(world, order))) == sorted(generator.get_ranks("dp-cp"))
    assert sorted(map(list, neighbours(world, order))) == sorted(generator.get_ranks("tp"))


def test_experts_are_copied_over_their_own_data_parallel_groups() -> None:
    """With four experts' ranks out of eight, two ranks hold each."""
    world = Sizes(1, 1, 1, 8, 4, 1, 2, 0)
    generator = RankGenerator(tp=1, ep=4, dp=2, pp=1, cp=1, order=MEGATRONS)
    assert set(map(tuple, generator.get_ranks("dp"))) <= set(copies(world, MEGATRONS))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ways", [(2, 1, 2, 2), (2, 2, 1, 2), (1, 2, 2, 4), (1, 1, 3, 2)])
def test_a_copy_of_the_model_is_held_by_ranks_that_no_data_parallel_group_joins(
    order: str, ways: tuple[int, int, int, int]
) -> None:
    """All of them together hold all parameters once, whatever the order in which Megatron counts ranks."""
    tensor, context, pipeline, data = ways
    world = Sizes(tensor, context, pipeline, data, 1, 1, tensor * context * data, 0)
    generator = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
    for members in generator.get_ranks("tp-cp-pp"):
        for rank in members:
            (peers,) = (each for each in generator.get_ranks("dp") if rank in each)
            kinds = [generator.get_ranks(kind) for kind in ("tp", "cp", "pp")]
            together = {other for kind in kinds for each in kind if rank in each for other in each}
            assert find_members(world, rank, tuple(peers), together) == tuple(sorted(members))


def test_with_expert_parallelism_a_copy_has_several_data_parallel_ranks() -> None:
    """As many as the experts are spread over: each of them computes a batch of its own with the experts of all."""
    world = Sizes(1, 1, 1, 8, 4, 1, 2, 0)
    assert find_members(world, 5, (1, 5), {4, 5, 6, 7}) == (4, 5, 6, 7)
    tensor_too = Sizes(2, 1, 1, 4, 2, 2, 2, 0)
    assert find_members(tensor_too, 5, (1, 5), {4, 5, 7}) == (4, 5, 6, 7)


def test_ranks_that_are_counted_otherwise_hold_no_known_copy() -> None:
    """Where the experts' ranks are not those that compute together."""
    assert find_members(Sizes(1, 1, 1, 8, 4, 1, 2, 0), 5, (1, 5), {1, 4, 5}) == ()
    assert find_members(PLAIN, 0, (0, 7), {0, 1}) == ()


def test_with_several_optimizer_instances_each_has_a_copy_of_each_piece() -> None:
    """Of four data parallel ranks in two instances the first and the third have the same piece."""
    world = Sizes(1, 1, 1, 4, 1, 1, 4, 2)
    assert copies(world, MEGATRONS) == [(0, 2), (1, 3)]


def test_where_data_parallel_ranks_share_a_node_another_order_of_megatrons_is_proposed() -> None:
    """With pipelines counted before replicas no node has two of the same."""
    assert on_one_node(copies(PLAIN, MEGATRONS), TWO_NODES) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert propose_order(PLAIN, TWO_NODES) == ACROSS
    assert not on_one_node(copies(PLAIN, ACROSS), TWO_NODES)
    assert "--use-tp-pp-dp-mapping" in advice(PLAIN, TWO_NODES)


def test_where_no_order_of_megatrons_helps_a_placement_is_proposed() -> None:
    """The launcher has dealt ranks out in turn, so both instances of a piece came to one node."""
    world = Sizes(1, 1, 1, 4, 1, 1, 4, 2)
    dealt = [0, 1, 0, 1]
    assert propose_order(world, dealt) is None
    assert propose_placement(copies(world, MEGATRONS), neighbours(world, MEGATRONS), dealt).ranks_of == {
        0: (0, 1),
        1: (2, 3),
    }
    assert "0, 1 on node 0; 2, 3 on node 1" in advice(world, dealt)


@pytest.mark.parametrize(
    ("world", "node_of", "why"),
    [
        (PLAIN, [0] * 8, "there is one node"),
        (Sizes(1, 1, 2, 2, 1, 1, 2, 0), [0, 0, 0, 1], "no order of ranks puts them"),  # two pairs, one rank elsewhere
        (Sizes(2, 1, 2, 1, 1, 2, 1, 0), [0, 0, 1, 1], "held by one rank only"),
    ],
)
def test_where_nothing_helps_it_says_so(world: Sizes, node_of: list[int], why: str) -> None:
    """One node, too few ranks on other nodes, or no second copy."""
    assert why in advice(world, node_of)


@pytest.mark.parametrize("seed", range(30))
def test_a_proposed_placement_keeps_copies_apart_and_neighbours_together(seed: int) -> None:
    """For any world: all ranks have a node, nodes keep their room, and no group is on one node."""
    draw = random.Random(seed)
    tensor, pipeline, data = draw.choice([1, 2]), draw.choice([1, 2, 3]), draw.choice([2, 3, 4])
    world = Sizes(tensor, 1, pipeline, data, 1, tensor, data, 0)
    node_of = [rank // tensor % draw.choice([2, 3]) for rank in range(world.world)]
    draw.shuffle(node_of)
    groups, together = copies(world, MEGATRONS), neighbours(world, MEGATRONS)
    outcome, ranks_of = propose_placement(groups, together, node_of)
    if outcome is not SearchOutcome.FOUND:
        assert not ranks_of
        return
    placed = {rank: node for node, ranks in ranks_of.items() for rank in ranks}
    assert sorted(placed) == list(range(world.world))
    assert {node: len(ranks) for node, ranks in ranks_of.items()} == {node: node_of.count(node) for node in ranks_of}
    assert not on_one_node(groups, [placed[rank] for rank in range(world.world)])
    assert all(len({placed[rank] for rank in group}) == 1 for group in together)


def test_a_thousand_ranks_are_placed_without_a_long_search() -> None:
    """The first try of each rank fits."""
    world = Sizes(1, 1, 64, 16, 1, 1, 16, 0)
    node_of = [rank // 16 for rank in range(world.world)]
    assert len(on_one_node(copies(world, MEGATRONS), node_of)) == 64
    assert (
        propose_placement(copies(world, MEGATRONS), neighbours(world, MEGATRONS), node_of).outcome
        is SearchOutcome.FOUND
    )


@pytest.mark.parametrize("order", [MEGATRONS, ACROSS])
def test_the_order_of_a_world_is_known_from_the_groups_of_one_rank(order: str) -> None:
    """Rank 0's copies are enough to tell Megatron's own order from the other."""
    assert current_order(PLAIN, [copies(PLAIN, order)[0]]) == order
