"""The groups of the survivors, and those of a newcomer, are one world again after a reconnect."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.contract.makers import Setup
from torch.nn.parallel import DistributedDataParallel

from midstep.protocol.errors import CommunicatorAborted, CommunicatorError, CommunicatorFailed, LinkUpFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.gloo.conftest import Rank, Ranks

    from midstep.communicators.gloo.communicator import GlooCommunicator

WORLD = 4
VICTIM = 3
ON_ALL = pytest.mark.makers("gloo", "fake", "npu")
LINK_UP_S = 20.0
CYCLES = 30


def make_model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    return DistributedDataParallel(layers, broadcast_buffers=False, find_unused_parameters=True)


def reconnect_until_up(communicator: GlooCommunicator, rank: Rank, orders: Callable[[], int]) -> None:
    """Reconnect as often as the test opens another generation."""
    while True:
        try:
            communicator.reconnect(orders(), rank.store, LINK_UP_S)
        except LinkUpFailed as error:
            rank.say(("not up", str(error)))
        else:
            rank.say(("up", None))
            return


def check(rank: Rank, model: DistributedDataParallel, groups: list[Any]) -> None:
    """Use everything that was made."""
    tensor = torch.full((100,), float(rank.number + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [10.0] * 100
    for group in groups:
        if rank.number in dist.get_process_group_ranks(group):
            ones = torch.ones(3)
            dist.all_reduce(ones, group=group)
            assert ones[0] == dist.get_world_size(group)
    model.zero_grad()
    model(torch.full((1, 8), float(rank.number))).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert gradients[0] is not None
    mean = gradients[0].clone()
    dist.broadcast(mean, 0)
    assert torch.equal(mean, gradients[0])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def train(rank: Rank, *, newcomer: bool) -> None:
    """Train, be interrupted, be connected again, and so on. A newcomer makes its model and groups unconnected."""
    communicator = rank.join(connected=not newcomer)
    groups = [dist.new_group([0, VICTIM]), dist.new_group([1, 2, 3]), dist.new_group([0, VICTIM])]
    members = [group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
    model = make_model()
    if newcomer:
        reconnect_until_up(communicator, rank, rank.hear)
    while True:
        check(rank, model, members)
        rank.say((open_files(), threads()))
        if rank.hear() == "end":
            communicator.close()
            return
        try:
            while True:
                dist.all_reduce(torch.ones(1000))
        except CommunicatorError as error:
            rank.say(type(error).__name__)
        communicator.abort("a peer died")
        reconnect_until_up(communicator, rank, rank.hear)


def survive(rank: Rank) -> None:
    train(rank, newcomer=False)


def join_late(rank: Rank) -> None:
    train(rank, newcomer=True)


def recover(ranks: Ranks, generation: int) -> int:
    """Have all ranks connected; open another generation as long as the links do not come up."""
    while True:
        ranks.say(generation)
        answers = ranks.hear_all()
        if all(word == "up" for word, _ in answers):
            return generation
        assert all(word == "not up" for word, _ in answers), answers
        generation += 1


def test_a_killed_rank_is_replaced_thirty_times_and_nothing_piles_up(ranks: Ranks) -> None:
    ranks.start_all(WORLD, survive)
    usage = [ranks.hear_all()]
    generation = 0
    for _ in range(CYCLES):
        ranks.say("go on")
        ranks.signal(VICTIM, signal.SIGKILL)
        assert set(ranks.hear_all()) == {"CommunicatorFailed"}
        ranks.start(VICTIM, WORLD, join_late)
        generation = recover(ranks, generation + 1)
        usage.append(ranks.hear_all())
    for number in range(WORLD - 1):
        files = [cycle[number][0] for cycle in usage]
        tasks = [cycle[number][1] for cycle in usage]
        # What the last cycles dispose of is still being destroyed; growth would be about ten of each per cycle.
        assert min(files[-5:]) <= max(files[:5]) + 20, files
        assert min(tasks[-5:]) <= max(tasks[:5]) + 20, tasks
    ranks.say("end")


def miss_one(rank: Rank) -> None:
    setup = Setup(rank)
    communicator = setup.communicator
    while True:
        generation, link_up_s = rank.hear()
        setup.stop_and_clean()
        began = time.monotonic()
        try:
            communicator.reconnect(generation, rank.store, link_up_s)
        except LinkUpFailed as error:
            rank.say((time.monotonic() - began, str(error), communicator.failed))
            continue
        dist.all_reduce(torch.ones(1))
        rank.say((time.monotonic() - began, "up", communicator.failed))


@ON_ALL
def test_a_missing_rank_is_named_within_the_deadline_and_the_next_generation_works(ranks: Ranks) -> None:
    ranks.start_all(3, miss_one)
    link_up_s = 8.0  # a tenth of it has to suffice for finding out which rank it is, also on busy cores
    ranks.say((1, link_up_s), 0, 1)
    for number in (0, 1):
        took_s, text, failed = ranks.hear(number)
        assert took_s < link_up_s + 2.0
        assert "rank 2" in text
        assert failed is not None
    ranks.say((2, LINK_UP_S))
    assert [(text, failed) for _, text, failed in ranks.hear_all()] == [("up", None)] * 3


def abort_while_connecting(rank: Rank) -> None:
    setup = Setup(rank)
    communicator = setup.communicator
    rank.hear()
    if rank.number == 0:
        began: list[float] = []

        def abort() -> None:
            began.append(time.monotonic())
            setup.stop("enough")

        timer = threading.Timer(0.3, abort)
        timer.start()
        try:
            communicator.reconnect(1, rank.store, LINK_UP_S)
        except CommunicatorAborted as error:
            rank.say((time.monotonic() - began[0], str(error)))
        timer.join()
        setup.device.clean()
        rank.hear()
    communicator.reconnect(2, rank.store, LINK_UP_S)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    rank.say(ones.item())
    rank.hear()


@ON_ALL
def test_an_abort_ends_a_reconnect_and_the_next_generation_works(ranks: Ranks) -> None:
    ranks.start_all(2, abort_while_connecting)
    ranks.say("go", 0)
    woken_s, text = ranks.hear(0)
    assert woken_s < 2.0
    assert "enough" in text
    ranks.say("go")
    assert ranks.hear_all() == [2.0, 2.0]


def be_slow_to_the_links(rank: Rank) -> None:
    """Meet the others, but stop before the links are connected."""
    communicator = rank.join()
    rank.hear()
    communicator.abort("the test said so")
    if rank.number == 2:
        from midstep.communicators.gloo import connections

        connections.connect_group = lambda *_, **__: signal.pause()  # type: ignore[assignment]
    began = time.monotonic()
    try:
        communicator.reconnect(1, rank.store, 1.0)
    except LinkUpFailed:
        rank.say(time.monotonic() - began)
    rank.hear()


def test_a_rank_that_dies_between_meeting_and_connecting_holds_nobody_up(ranks: Ranks) -> None:
    ranks.start_all(3, be_slow_to_the_links)
    ranks.say("go")
    assert all(took_s < 3.0 for took_s in ranks.hear_all())


def make_groups_in_the_loop(rank: Rank, *, newcomer: bool) -> None:
    setup = Setup(rank, connected=not newcomer)
    communicator = setup.communicator
    generation = 0
    if newcomer:
        generation = rank.hear()
        communicator.reconnect(generation, rank.store, LINK_UP_S)
    earlier: list[Any] = []
    while True:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups:
            ones = torch.ones(1)
            dist.all_reduce(ones, group=group)
            assert ones.item() == 2.0
        orphans = []
        for group in earlier:
            with pytest.raises(CommunicatorFailed, match="has not made this group") as caught:
                dist.all_reduce(torch.ones(1), group=group)
            orphans.append(str(caught.value))
        rank.say(len(orphans))
        earlier.extend(groups)
        generation = rank.hear()
        setup.stop_and_clean()
        communicator.reconnect(generation, rank.store, LINK_UP_S)


@ON_ALL
def test_groups_that_a_newcomer_lacks_are_refused_and_new_ones_work(ranks: Ranks) -> None:
    ranks.start_all(2, lambda rank: make_groups_in_the_loop(rank, newcomer=False))
    assert ranks.hear_all() == [0, 0]
    for generation in (1, 2):
        ranks.signal(1, signal.SIGKILL)
        ranks.start(1, 2, lambda rank: make_groups_in_the_loop(rank, newcomer=True))
        ranks.say(generation)
        assert ranks.hear_all() == [2 * generation, 0]
