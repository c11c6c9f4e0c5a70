"""A Megatron job says at its start what it has, and what it cannot do."""

import pytest

from ..jobs import ONE_NODE
from .conftest import PATIENCE_S, POLICY, StartMegatron, run_to_its_end
from .training import Shape

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_a_policy_that_would_make_the_world_smaller_is_refused(start_megatron: StartMegatron) -> None:
    """Before anything is started, with what to do instead: the script itself says that it trains with Megatron."""
    job = start_megatron(Shape(steps=2), policy={**POLICY, "scale": {"min_nodes": 1}}, **ONE_NODE)
    assert job.wait(PATIENCE_S) != 0
    assert "a world of another size is not possible with Megatron" in job.said()
    assert "have spare nodes instead (--spares)" in job.said()
    assert not job.directory.exists()


@pytest.mark.soak
def test_where_copies_share_a_node_another_order_of_ranks_is_named(start_megatron: StartMegatron) -> None:
    """Two pipeline stages on two nodes: each node has all replicas of its stage."""
    job = start_megatron(Shape(pipeline=2, steps=2))
    run_to_its_end(job)
    assert "all copies of dense parameters are on one node (ranks 0, 1)" in job.said()
    assert "initialize_model_parallel(order='tp-cp-ep-pp-dp')" in job.said()


def test_what_copies_cost_is_said(start_megatron: StartMegatron) -> None:
    """Device and host memory apart, what is sent, and after the first steps how long it takes."""
    job = start_megatron(Shape(distributed=True, bf16=True, replica="buddy_host", steps=13), **ONE_NODE)
    run_to_its_end(job)
    said = job.said()
    assert "replica buddy_host: about" in said
    assert "more host memory on this rank, which are the same memory here" in said
    assert "ms for the peer copy's update (medians of 10)" in said
