"""On which machine of a Ray cluster the next node goes, and what is remembered of a job's nodes."""

from pathlib import Path

import pytest

from midstep.platforms.ray.cluster import Bundle, Elsewhere, InBundle, place_for
from midstep.platforms.ray.platform import BookKeeper, Drains
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.messages import NodeGoing, NodeStaying


def test_a_reserved_place_whose_machine_is_gone_is_taken_first() -> None:
    """Ray looks for another machine for it by itself, and its autoscaler sees that."""
    bundles = (Bundle(0, "a", busy=True), Bundle(1, None, busy=False))
    assert place_for(bundles, alive={"a", "c"}, used={"a"}, given_back=()) == InBundle(1)


def test_a_reserved_place_is_taken_again_on_a_machine_that_was_not_left() -> None:
    """The agent ended, the machine is well."""
    assert place_for((Bundle(0, "a", busy=False),), alive={"a"}, used=(), given_back=()) == InBundle(0)


def test_a_machine_that_the_job_has_left_is_avoided_where_there_is_another() -> None:
    """The request names all machines that will not do."""
    bundles = (Bundle(0, "a", busy=True), Bundle(1, "b", busy=False))
    assert place_for(bundles, alive={"a", "b", "c"}, used={"a"}, given_back={"b"}) == Elsewhere(("a", "b"))


def test_a_machine_that_the_job_has_left_is_better_than_none() -> None:
    """In a cluster that has no more, all nodes of a rescheduled job go where they were."""
    bundles = (Bundle(0, "a", busy=True), Bundle(1, "b", busy=False))
    assert place_for(bundles, alive={"a", "b"}, used={"a"}, given_back={"b"}) == InBundle(1)


def test_with_all_places_taken_another_machine_is_asked_for() -> None:
    """Also where there is none now: the autoscaler may bring one."""
    assert place_for((Bundle(0, "a", busy=True),), alive={"a"}, used={"a"}, given_back=()) == Elsewhere(("a",))


def test_the_machine_of_a_node_whose_actor_has_not_answered_yet_is_not_shared() -> None:
    """It may have room for two; losing it would take both."""
    bundles = (Bundle(0, "a", busy=True), Bundle(1, "b", busy=True))
    assert place_for(bundles, alive={"a", "b"}, used={"a"}, given_back=()) == Elsewhere(("a", "b"))


def test_no_place_is_taken_on_a_machine_on_which_a_node_of_the_job_lives() -> None:
    """A node that went elsewhere may live where a reserved place is free."""
    bundles = (Bundle(0, "a", busy=False), Bundle(1, "b", busy=False))
    assert place_for(bundles, alive={"a", "b"}, used={"a"}, given_back=()) == InBundle(1)


def test_the_books_are_the_same_after_a_restart_on_another_machine(tmp_path: Path) -> None:
    """Sessions rise even where the clock of the next machine is behind."""
    keeper = BookKeeper(tmp_path)
    first = keeper.next_session()
    keeper.found(("node0", "node1"))
    keeper.place("node0")
    keeper.add("node2")
    keeper.remove("node1")
    keeper.give_back("machine")

    again = BookKeeper(tmp_path)

    assert again.books == keeper.books
    assert (again.books.nodes, again.books.placed) == (("node0", "node2"), ("node0",))
    assert again.next_session() > first


def test_books_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """To begin again with none would place nodes twice."""
    (tmp_path / "ray.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        BookKeeper(tmp_path)


def test_two_nodes_do_not_look_for_a_machine_elsewhere_at_once() -> None:
    """Both could get the same one. A reserved place is taken all the same."""
    bundles = (Bundle(0, "a", busy=True), Bundle(1, None, busy=False))
    assert place_for(bundles[:1], alive={"a"}, used={"a"}, given_back=(), searching=True) is None
    assert place_for(bundles, alive={"a"}, used={"a"}, given_back=(), searching=True) == InBundle(1)


def test_a_reserved_place_is_remembered_until_its_node_is_gone(tmp_path: Path) -> None:
    """Also where the node has no machine yet."""
    keeper = BookKeeper(tmp_path)
    keeper.found(("node0", "node1"))
    keeper.bind("node0", 0)
    keeper.bind("node1", 1)
    keeper.remove("node0")
    assert BookKeeper(tmp_path).books.bundles == {"node1": 1}


def test_a_drained_machine_is_said_once_and_again_when_it_stays() -> None:
    """A node that is gone is forgotten."""
    drains = Drains()
    machines = {"node0": "a", "node1": "b"}
    assert drains.changes(machines, {"a": 110.0}, 100.0) == [NodeGoing("node0", "Ray drains its machine", 10.0)]
    assert drains.changes(machines, {"a": 110.0}, 101.0) == []
    assert drains.changes(machines, {}, 102.0) == [NodeStaying("node0")]
    assert drains.changes(machines, {"b": 0}, 103.0) == [NodeGoing("node1", "Ray drains its machine", None)]
    assert drains.changes({"node0": "a"}, {}, 104.0) == []
