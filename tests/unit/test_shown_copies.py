"""`midstep status` says how old the copies in host memory are, what they take and what a loss would cost."""

import io
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console

from midstep.cli.views.status_view import status_view
from midstep.controller.liveness import MOST_TOLD, ProgressBoard, single_copies, with_single_copies
from midstep.protocol.host_copies import copied_bytes, copied_steps, create_copy_files
from midstep.protocol.incidents import JobStatus
from midstep.protocol.messages import NodeHeartbeat
from midstep.protocol.types import Activity, GuestCopy, RankProgress
from midstep.testing.fake_cluster import FakeCluster


def shown(status: JobStatus) -> str:
    """Return what is printed."""
    console = Console(file=io.StringIO(), width=1000)
    with console.capture() as captured:
        console.print(status_view(status))
    return captured.get()


def with_copies(status: JobStatus, *steps: tuple[int, ...]) -> JobStatus:
    """Return the status when ranks have copies of these steps, and stand at step 12."""
    clocks = []
    for rank, copied in zip(status.ranks, steps, strict=True):
        clock = RankProgress(rank.rank, rank.incarnation, 1, 12, Activity.COMPUTING, 0, 0.0, 0.0, 0.1)
        clocks.append(msgspec.structs.replace(clock, copied_steps=copied, copied_bytes=3_000_000))
    return heard(status, clocks)


def heard(status: JobStatus, clocks: Sequence[RankProgress]) -> JobStatus:
    """Return the status when each node has said how its ranks stand, with one heartbeat for all of them."""
    board = ProgressBoard(world_size=len(status.ranks))
    for node in {rank.node for rank in status.ranks}:
        theirs = (clock for rank, clock in zip(status.ranks, clocks, strict=True) if rank.node == node)
        board.take(NodeHeartbeat(node, 1.0, tuple(theirs)))
    return board.overlay(status)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (((8, 10), (8, 10), (8, 10), (8,)), "host copies: of step 8, 4 steps ago; 12 MB on 2 nodes; a lost process"),
        (((8,), (8,), (9,), (8,)), "host copies: no step of which all ranks have one; 12 MB on 2 nodes"),
    ],
)
def test_status_says_which_copy_all_ranks_have(
    cluster: FakeCluster, steps: tuple[tuple[int, ...], ...], words: str
) -> None:
    """Its age is in steps since."""
    assert words in shown(with_copies(cluster.machine.status(cluster.now), *steps))


GUESTS = {0: (2, 10), 1: (3, 10), 2: (0, 10), 3: (1, 10)}  # of which rank each keeps a copy, and of which step


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (
            (),
            "of step 10, 2 steps ago; 12 MB on 2 nodes; a lost process without a replica costs these, a lost node too",
        ),
        ((0,), "of step 10, 2 steps ago; 12 MB on 2 nodes; a lost process without a replica costs these, node"),
        ((0, 2), "a lost process without a replica costs these, a lost node goes back to a checkpoint"),
    ],
)
def test_status_says_what_a_lost_node_costs(cluster: FakeCluster, without: tuple[int, ...], words: str) -> None:
    """No more than a process, if each copy is on two nodes."""
    status = with_copies(cluster.machine.status(cluster.now), *[(8, 10)] * 4)
    ranks = tuple(
        msgspec.structs.replace(rank, guest_copies=() if rank.rank in without else (GuestCopy(*GUESTS[rank.rank], 1),))
        for rank in status.ranks
    )
    assert words in shown(msgspec.structs.replace(status, ranks=ranks))


def test_status_says_nothing_of_copies_where_there_are_none(cluster: FakeCluster) -> None:
    """They are off unless the policy asks for them."""
    assert "host copies" not in shown(cluster.machine.status(cluster.now))


def test_files_without_a_copy_take_nothing() -> None:
    """The agent makes them before it is known how much they will hold."""
    fds = create_copy_files(0)
    assert (copied_steps(fds, 0), copied_bytes(fds)) == ((), 0)


def voted(status: JobStatus, agreed: tuple[int, ...], unchecked: tuple[int, ...]) -> JobStatus:
    """Return the status when ranks say which state has passed a vote, and how many shards none can check."""
    clocks = []
    for rank, step, alone in zip(status.ranks, agreed, unchecked, strict=True):
        clock = RankProgress(rank.rank, rank.incarnation, 1, 12, Activity.COMPUTING, 0, 0.0, 0.0, 0.1)
        clocks.append(msgspec.structs.replace(clock, agreed_step=step, unchecked=alone))
    return heard(status, clocks)


@pytest.mark.parametrize(
    ("agreed", "words"),
    [
        ((10, 10, 10, 10), "votes: the copies of step 10 are equal, 2 steps ago\n"),
        ((10, 0, 10, 10), "votes: not yet on all ranks"),
    ],
)
def test_status_says_which_state_has_passed_a_vote(cluster: FakeCluster, agreed: tuple[int, ...], words: str) -> None:
    told = voted(cluster.machine.status(cluster.now), agreed, (0, 0, 0, 0))
    assert words in "\n".join(line.rstrip() for line in shown(told).splitlines())


def needing(*shards: tuple[str, ...]) -> FakeCluster:
    """A running job whose ranks have to hold these shards."""
    cluster = FakeCluster()
    cluster.join()
    for rank, needs in enumerate(shards):
        report = cluster.holder(rank).report
        cluster.holder(rank).reported(msgspec.structs.replace(report, needs=needs))
    cluster.pass_barrier_two(0)
    return cluster


@pytest.mark.parametrize(
    ("needs", "unchecked", "words"),
    [
        (  # FSDP on one dimension
            (("piece0",), ("piece1",), ("piece2",), ("piece3",)),
            (1, 1, 1, 1),
            "not checked: shards piece0, piece1, piece2 and 1 more of ranks 0-3, of which there is no other copy",
        ),
        (  # two ranks have each piece, and one rank's is its own
            (("a",), ("a",), ("b", "c"), ("b",)),
            (0, 0, 1, 0),
            "not checked: shard c of rank 2, of which there is no other copy\n",
        ),
        (  # what is wrong with it was said when it was left out of the votes
            (("a",), ("a",), ("a",), ("a",)),
            (1, 1, 1, 1),
            "not checked: shards of ranks 0-3 whose copies have not been equal in any vote\n",
        ),
        (
            (("a",), ("a", "c"), ("a",), ("a",)),
            (1, 2, 1, 1),
            "not checked: shard c of ranks 0-3, of which there is no other copy, and shards of ranks 0-3 "
            "whose copies have not been equal in any vote",
        ),
    ],
)
def test_status_names_the_shards_that_no_vote_checks(
    needs: tuple[tuple[str, ...], ...], unchecked: tuple[int, ...], words: str
) -> None:
    """By the names that the ranks have for them, the first three."""
    cluster = needing(*needs)
    told = voted(cluster.machine.status(cluster.now), (10, 10, 10, 10), unchecked)
    told = with_single_copies(told, cluster.machine.state)
    assert words in "\n".join(line.rstrip() for line in shown(told).splitlines())


def test_of_a_large_world_some_single_copies_are_named_and_all_are_counted() -> None:
    """A status does not grow with them."""
    ranks = range(1000)
    names = single_copies([*ranks], {rank: ("everywhere", f"piece{rank}") for rank in ranks})
    assert (len(names), names[7]) == (1000, "piece7")
    cluster = needing(*[tuple(f"{rank}-{each}" for each in range(10)) for rank in range(4)])
    told = voted(cluster.machine.status(cluster.now), (10,) * 4, (10,) * 4)
    told = with_single_copies(told, cluster.machine.state)
    assert (len(told.single_copies), told.single_copies_left_out) == (MOST_TOLD, 40 - MOST_TOLD)
    assert "shards 0-0, 0-1, 0-2 and 37 more of ranks" in shown(told)
