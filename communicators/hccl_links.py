"""The first use of every group after a resume or rebuild: HCCL builds a communicator then, and checks no link before.

So every group is used at once, in order, timed and checked. A link that does not come up is seen in this phase, and not
in the middle of a step.
"""

import time
from collections.abc import Sequence
from typing import Any

from ..devices.device_busy import while_busy
from ..protocol.errors import CommunicatorFailed
from .background import BackgroundTask
from .hccl_group import HcclGroup

_BUSY = "the device is still in use by the process before"


def link_up(calls: Any, task: BackgroundTask[Any], groups: Sequence[tuple[HcclGroup, str]]) -> dict[str, float]:
    """Use every group once; return how long each took. In all ranks the order of the groups that they share is one.

    `calls` are torch-npu's. Runs in the task's thread. Raises Abandoned, CommunicatorFailed, and what the library does.
    """
    times_s = {}
    for group, name in groups:
        if len(group.members) < 2:
            continue
        task.stage = f"the links of group {name} (ranks {ranks_text(group.members)}) are not up"
        task.remaining_s()  # raises Abandoned when no time is left
        began_s = time.monotonic()
        _use(calls, task, group)
        times_s[name] = time.monotonic() - began_s
    return times_s


def _use(calls: Any, task: BackgroundTask[Any], group: HcclGroup) -> None:
    """Add up ones in the group, as soon as the device is free."""

    def attempt() -> float:
        ones, work = group.link_check()
        work.wait()
        calls.npu.synchronize()
        return float(ones.item())

    def before_next() -> None:
        # The library numbers the communicators of a group; this has it count from the beginning, as the peers do.
        # Not reinit_process_group: that would delete what the peers have left in the store.
        group.backend.abort_hccl_comm(_BUSY)
        task.remaining_s()

    total = while_busy(attempt, before_next)
    if total != len(group.members):
        raise CommunicatorFailed(f"link check of ranks {ranks_text(group.members)} gave {total:g}")


def ranks_text(members: Sequence[int]) -> str:
    """Return the ranks, for a message."""
    return ", ".join(str(member) for member in members)
