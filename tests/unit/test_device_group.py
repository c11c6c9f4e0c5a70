"""Requests of torch-npu to a group in front of HCCL's, beyond the collectives, reach HCCL's."""

import ast
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from midstep.communicators import device_group
from midstep.communicators.device_communicator import DeviceCommunicator
from midstep.communicators.device_group import DeviceGroup
from midstep.communicators.generation_scope import GenerationScope
from midstep.protocol.errors import CommunicatorAborted


class Library:
    """Takes note of what is called on its group."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.called.append("start")

    def send(self, *_: Any) -> dist.Work:
        self.called.append("send")
        return dist.Work()

    def _end_coalescing(self, device: torch.device) -> "Done":
        self.called.append("end")
        return Done()

    def allreduce(self, *_: Any) -> "Done":
        return Done()


class Done(dist.Work):
    """A batch that is over."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class Observer:
    """Takes note of what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.waits = 0

    def entered(self, op: str, members: tuple[int, ...]) -> None:
        self.told.append(f"entered {op}")

    def left(self, op: str) -> None:
        self.told.append(f"left {op}")

    def waited(self, seconds: float) -> None:
        assert seconds >= 0
        self.waits += 1


CPU = torch.device("cpu")


def group_of(library: Library, observer: Observer, scope: GenerationScope) -> DeviceGroup:
    """Return a group that the library serves."""
    owner = SimpleNamespace(
        observer=observer, listener=None, recording=lambda: False, build=lambda group, what, call: call()
    )
    group = DeviceGroup(owner, (0, 1), 0, scope, timedelta(seconds=1), CPU, "midstep_hccl")
    group.connect(library, object(), scope)
    return group


def test_a_batch_of_sends_and_receives_is_made_by_the_library_and_watched_as_one() -> None:
    """Two ranks that each queued a send before its receive would wait for each other for ever."""
    library, observer = Library(), Observer()
    group = group_of(library, observer, GenerationScope(lambda: None))
    group._start_coalescing(CPU)
    group.send([torch.ones(1)], 1, 0)
    work = group._end_coalescing(CPU)
    assert library.called == ["start", "send", "end"]
    assert observer.told == ["entered batch"]
    work.wait()
    assert observer.told == ["entered batch", "left batch"]


def test_an_abort_in_the_middle_of_a_batch_is_told_when_the_library_has_closed_it() -> None:
    """It would take what comes in the next generation for more of it. The next batch is not begun any more."""
    library, observer, scope = Library(), Observer(), GenerationScope(lambda: None)
    group = group_of(library, observer, scope)
    group._start_coalescing(CPU)
    scope.end(CommunicatorAborted, "a peer is gone")
    group.send([torch.ones(1)], 1, 0)
    with pytest.raises(CommunicatorAborted):
        group._end_coalescing(CPU)
    with pytest.raises(CommunicatorAborted):
        group._start_coalescing(CPU)
    assert library.called == ["start", "send", "end"]
    assert observer.told == ["entered batch", "left batch"]


def test_a_wait_for_a_collective_is_no_time_of_the_ranks_own() -> None:
    """Where the library blocks the thread, as the fake one does, a rank that waits for a slow one is not slow."""
    observer = Observer()
    work = group_of(Library(), observer, GenerationScope(lambda: None)).allreduce([torch.ones(1)])
    assert observer.waits == 0
    work.wait()
    assert (observer.told, observer.waits) == (["entered allreduce", "left allreduce"], 1)


def test_all_that_a_device_group_asks_of_its_owner_is_there() -> None:
    """Its owner is a communicator of a device, which has more than the owners of other groups."""
    asked = {
        node.attr
        for node in ast.walk(ast.parse(Path(device_group.__file__).read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._owner"
    }
    assert "recording" in asked
    assert {name for name in asked if not hasattr(DeviceCommunicator, name)} <= {"observer"}  # set by its constructor
