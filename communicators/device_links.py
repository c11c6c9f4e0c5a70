"""The first use of every group after a resume or rebuild: only then does the library build a communicator.

It checks no link before. So every group is used at once, in order, timed and checked: a link that does not come up is
seen in this phase, and not in the middle of a step.

Sends and receives outside of a batch have a communicator for each pair of ranks, as stages of a pipeline have. Which
pairs those are is known from before: each rank tells to whom it has sent, so that a newcomer knows, too.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..protocol.errors import CommunicatorFailed
from ..protocol.wording import ranks_text
from .background import BackgroundTask
from .device_group import DeviceGroup
from .handshake import DeviceMember


class FirstUse(NamedTuple):
    """How a device's library is used for the first time.

    `synchronize` waits for the device. `persist` makes attempts to use a group until one succeeds: most libraries need
    no more than one.
    """

    synchronize: Callable[[], None]
    persist: Callable[[BackgroundTask[Any], DeviceGroup, Callable[[], float]], float] = lambda task, group, use: use()


def link_up(first: FirstUse, task: BackgroundTask[Any], groups: Sequence[tuple[DeviceGroup, str]]) -> dict[str, float]:
    """Use every group once; return how long each took. In all ranks the order of the groups that they share is one.

    Runs in the task's thread. Raises Abandoned, CommunicatorFailed, and what the library does.
    """
    times_s = {}
    for group, name in groups:
        if len(group.members) < 2:
            continue
        task.stage = f"the links of group {name} ({ranks_text(group.members)}) are not up"
        task.remaining_s()  # raises Abandoned when no time is left
        began_s = time.monotonic()
        _use(first, task, group)
        times_s[name] = time.monotonic() - began_s
        for low, high in _in_order(group):
            task.stage = (
                f"the link between ranks {group.members[low]} and {group.members[high]} of group {name} is not up"
            )
            task.remaining_s()
            began_s = time.monotonic()
            _use_pair(first, group, low, high)
            times_s[f"{name}/{low}-{high}"] = time.monotonic() - began_s
    return times_s


def tell_peers(groups: Sequence[tuple[DeviceGroup, str]], members: Sequence[DeviceMember]) -> None:
    """Have each group know every pair that this rank is in, whichever of the two has told it."""
    told = [(rank, name, place) for rank, member in enumerate(members) for name, place in member.pairs]
    by_name = {name: group for group, name in groups}
    for rank, name, place in told:
        group = by_name.get(name)
        if group is None or rank not in group.members or place >= len(group.members):
            continue
        if group.members[place] == group.members[group.group_rank]:
            group.peers.add(group.members.index(rank))


def _in_order(group: DeviceGroup) -> list[tuple[int, int]]:
    """Return this rank's pairs, in an order that all ranks keep, so that no two wait for each other in a circle.

    Even places first: along a pipeline half of the links come up at once, then the other half.
    """
    own = group.group_rank
    pairs = [(min(own, peer), max(own, peer)) for peer in group.peers if peer != own]
    return sorted(pairs, key=lambda pair: (pair[0] % 2, pair))


def _use_pair(first: FirstUse, group: DeviceGroup, low: int, high: int) -> None:
    place, work = group.pair_check(high if group.group_rank == low else low)
    work.wait()
    first.synchronize()
    if place.item() != low:
        ranks = f"{group.members[low]} and {group.members[high]}"
        raise CommunicatorFailed(f"link check between ranks {ranks} gave {place.item():g}")


def _use(first: FirstUse, task: BackgroundTask[Any], group: DeviceGroup) -> None:
    """Add up ones in the group."""

    def use() -> float:
        ones, work = group.link_check()
        work.wait()
        first.synchronize()
        return float(ones.item())

    total = first.persist(task, group, use)
    if total != len(group.members):
        raise CommunicatorFailed(f"link check of {ranks_text(group.members)} gave {total:g}")
