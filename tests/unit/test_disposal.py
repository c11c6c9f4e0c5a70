"""A gloo group in which something is stuck is destroyed beside the recovery, and never waited for."""

import gc
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from midstep.communicators.background import Disposal
from midstep.communicators.fake import ALL, FakeHcclGroup
from midstep.devices.fake_chip import CHIP

LONG_S = 20.0


class Stuck:
    """What a gloo group is while a collective waits in it: its destruction lasts until that has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.destroyed = threading.Event()

    def __del__(self) -> None:
        self.ended.wait(LONG_S)
        self.destroyed.set()


def test_a_stuck_group_is_destroyed_once_it_can_be_and_nobody_waits() -> None:
    disposal, group = Disposal(), Stuck()
    ended, destroyed = group.ended, group.destroyed
    groups = [None, group]
    del group
    disposal.dispose(groups)
    disposal.wait(time.monotonic())
    assert not destroyed.is_set()
    ended.set()
    assert destroyed.wait(LONG_S)
    disposal.wait(time.monotonic() + LONG_S)
    assert not groups


@pytest.mark.parametrize("renew", [lambda g: g.resume_hccl_comm(CHIP.index), lambda g: g.abort_hccl_comm("test")])
def test_the_fake_device_resumes_and_drops_a_communicator_in_which_something_is_stuck(renew: object) -> None:
    options = SimpleNamespace(store=HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=LONG_S))
    group, comm = FakeHcclGroup(options), Stuck()
    ended, destroyed = comm.ended, comm.destroyed
    group._comms[ALL] = comm
    del comm
    renew(group)  # type: ignore[operator]
    assert not destroyed.is_set()
    assert not group._comms
    ended.set()
    assert destroyed.wait(LONG_S)


def test_a_group_that_a_script_has_dropped_holds_up_no_collector_of_garbage() -> None:
    """MindIO's scripts destroy their groups in a recovery, and the train thread collects what is left of them."""
    options = SimpleNamespace(store=HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=LONG_S))
    group, comm = FakeHcclGroup(options), Stuck()
    ended, destroyed = comm.ended, comm.destroyed
    group._comms[ALL], group.given = comm, group  # as a task of its own refers to it
    del comm, group
    gc.collect()
    assert not destroyed.is_set()
    ended.set()
    assert destroyed.wait(LONG_S)
