"""Communicator parts that need no peer: lookups, scopes of a generation, background tasks, completion threads."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._jit_internal import _extract_tensors

from midstep.communicators import communicator_named, process_group
from midstep.communicators.background import Abandoned, BackgroundTask, CompletionThreads
from midstep.communicators.generation_scope import GenerationScope, error_text
from midstep.communicators.gloo.group import GlooGroup
from midstep.communicators.gloo.work import Failure, Promise
from midstep.communicators.loopback import CompletedWork
from midstep.devices import device_named
from midstep.protocol.errors import CommunicatorAborted, CommunicatorFailed, ConfigurationError

SOON_S = 5.0


@pytest.mark.parametrize(
    ("fails_from", "given", "then"),
    [("0", None, "0"), ("0", "0", "0"), ("0", "2000", "0"), ("9999", "2000", "2000")],
)
def test_torchs_recorder_is_off_where_no_group_can_be_made_with_it(
    fails_from: str, given: str | None, then: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A value that a script or a cluster has set is said to have no effect; earlier releases keep it."""
    monkeypatch.setattr(process_group, "_RECORDER_FAILS", Version(fails_from))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    process_group._turn_flight_recorder_off()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == then
    assert [record.levelname for record in caplog.records] == (["WARNING"] if given not in {None, then} else [])


class Collective:
    """Something under way."""

    def __init__(self, *, finished: bool) -> None:
        self.ended = 0
        self._finished = finished

    def scope_ended(self) -> None:
        self.ended += 1

    def finished(self) -> bool:
        return self._finished


def test_an_unknown_communicator_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"'mpi'.*known: external, fake, gloo, hccl, nccl"):
        communicator_named("mpi")


def test_a_device_is_found_by_its_name() -> None:
    device = device_named("cpu")
    assert device.name == "cpu"
    device.stop()
    device.clean()
    device.rebuilt()


def test_an_unknown_device_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"'tpu'.*known: cpu, cuda, fake, npu"):
        device_named("tpu")


def test_looking_at_the_packages_loads_no_torch() -> None:
    code = "import sys, midstep.communicators.base, midstep.devices.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_end_of_a_scope_wakes_what_is_under_way_once() -> None:
    scope, collective = GenerationScope(lambda: None), Collective(finished=False)
    scope.add(collective)
    assert scope.end(CommunicatorAborted, "first")
    assert not scope.end(CommunicatorFailed, "second")
    assert (collective.ended, scope.reason, scope.aborted) == (1, "first", True)
    assert isinstance(scope.error("allreduce"), CommunicatorAborted)


def test_what_is_started_after_the_end_of_a_scope_is_woken_at_once() -> None:
    scope, collective = GenerationScope(lambda: None), Collective(finished=False)
    scope.end(CommunicatorAborted, "over")
    scope.add(collective)
    assert collective.ended == 1


def test_only_the_first_failure_is_announced_and_all_collectives_raise_it() -> None:
    announced: list[str] = []
    scope = GenerationScope(lambda: announced.append("failed"))
    first = scope.fail("allreduce", RuntimeError("no route"))
    second = scope.fail("broadcast", RuntimeError("a consequence"))
    assert announced == ["failed"]
    assert isinstance(first, CommunicatorFailed)
    assert "allreduce failed: no route" in str(first)
    assert "allreduce failed: no route" in str(second)
    assert not scope.aborted


def test_a_scope_knows_what_may_still_touch_tensors_after_its_end() -> None:
    scope = GenerationScope(lambda: None)
    busy, done, dismissed = Collective(finished=False), Collective(finished=True), Collective(finished=False)
    for collective in (busy, done, dismissed):
        scope.add(collective)
    scope.discard(dismissed)
    scope.end(CommunicatorAborted, "over")
    assert scope.unfinished() == [busy]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[/src/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:99. This is typically caused by x", None),
        ("plain words", "plain words"),
        ("first line\nsecond line", "first line"),
        ("", "RuntimeError"),
    ],
)
def test_an_error_of_gloo_is_told_without_its_decoration(text: str, expected: str | None) -> None:
    assert error_text(RuntimeError(text)) == (expected or "Connection closed by peer [10.0.0.1]:99")


def test_a_background_task_hands_over_its_result() -> None:
    assert BackgroundTask(lambda task: task.remaining_s() > 0, time.monotonic() + SOON_S).result() is True


def test_a_background_task_hands_over_its_error() -> None:
    def work(_: BackgroundTask[int]) -> int:
        raise RuntimeError("no store")

    with pytest.raises(RuntimeError, match="no store"):
        BackgroundTask(work, time.monotonic() + SOON_S).result()


def test_a_background_task_that_is_late_is_given_up_with_what_it_waits_for() -> None:
    gate = threading.Event()

    def work(task: BackgroundTask[int]) -> int:
        task.stage = "rank 7 has not come"
        gate.wait(SOON_S)
        return 1

    with pytest.raises(TimeoutError, match="rank 7 has not come"):
        BackgroundTask(work, time.monotonic() + 0.05).result()
    gate.set()


def test_a_background_task_that_is_abandoned_wakes_its_owner_and_stops_at_its_next_step() -> None:
    gate, stopped = threading.Event(), threading.Event()

    def work(task: BackgroundTask[int]) -> int:
        gate.wait(SOON_S)
        try:
            task.remaining_s()
        except Abandoned:
            stopped.set()
            raise
        return 1

    task = BackgroundTask(work, time.monotonic() + SOON_S)
    threading.Timer(0.05, task.abandon).start()
    with pytest.raises(Abandoned):
        task.result()
    gate.set()
    assert stopped.wait(SOON_S)


def test_completion_threads_run_jobs_side_by_side_and_use_idle_threads_again() -> None:
    threads = CompletionThreads()
    both = threading.Barrier(3)
    names: list[str] = []

    def meet() -> None:
        both.wait(SOON_S)

    for _ in range(2):
        threads.run(meet)
    both.wait(SOON_S)
    for _ in range(20):
        done = threading.Event()

        def sign(done: threading.Event = done) -> None:
            names.append(threading.current_thread().name)
            done.set()

        threads.run(sign)
        assert done.wait(SOON_S)
    assert len(names) == 20
    assert len(set(names)) < 20


def test_a_failed_future_does_not_keep_what_failed_alive() -> None:
    """The error of an aborted collective goes away with its future, and the tensors that its traceback holds."""

    def backend_fails(promise: Promise) -> "weakref.ref[CommunicatorFailed]":
        try:
            raise RuntimeError("connection closed")
        except RuntimeError as closed:
            error = CommunicatorFailed(f"allreduce failed: {closed}")
            kept = weakref.ref(error)
            promise.settle(error, None)
        return kept

    promise = Promise()
    kept = backend_fails(promise)
    with pytest.raises(CommunicatorFailed, match="connection closed"):
        promise.future.wait()
    del promise
    gc.collect()

    assert kept() is None


@pytest.mark.parametrize("look", ["wait", "value"])
def test_whoever_looks_at_a_failed_future_is_told_why(look: str) -> None:
    """By its type and its text."""
    promise = Promise()
    promise.settle(CommunicatorAborted("the test said so"), None)
    with pytest.raises(CommunicatorAborted, match="the test said so"):
        getattr(promise.future, look)()


def test_the_reducer_finds_no_tensors_in_a_failure() -> None:
    """It pickles what a future holds, whatever that is."""
    with pytest.raises(CommunicatorAborted, match="the test said so"):
        _extract_tensors(Failure(CommunicatorAborted, "the test said so"))  # type: ignore[no-untyped-call]


def test_the_first_to_settle_a_future_counts() -> None:
    """An abort that comes after the completion changes nothing."""
    promise = Promise()
    promise.settle(None, [1])
    promise.settle(CommunicatorAborted("too late"), None)
    assert promise.future.wait() == [1]


def test_a_group_of_one_does_not_go_to_its_backend() -> None:
    """Nobody else takes part, so it is done when it is started; an aborted one raises like any other."""
    owner, scope = SimpleNamespace(observer=None, listener=None), GenerationScope(lambda: None)
    group = GlooGroup(owner, [3], 0, scope, timedelta(seconds=1))
    backend: Any = SimpleNamespace(process_group=None, gloo=None)  # whatever is asked of it is an error
    group.connect(backend, scope)
    bucket, part = torch.arange(4.0), torch.empty(4)
    assert isinstance(group.start("reduce_scatter_single", True, True, (part, bucket)), CompletedWork)
    assert isinstance(group.start("allreduce", False, True, ([bucket],)), CompletedWork)
    assert part.tolist() == bucket.tolist() == [0.0, 1.0, 2.0, 3.0]
    scope.end(CommunicatorAborted, "over")
    with pytest.raises(CommunicatorAborted, match="over"):
        group.start("allreduce", False, True, ([bucket],))


def test_a_listener_hears_of_what_its_thread_and_a_backward_pass_start() -> None:
    """Not of what a thread of the script's own does beside the step, such as one that writes a checkpoint."""
    heard: list[str] = []

    def given(op: str, args: object, members: tuple[int, ...]) -> bool:
        heard.append(f"{op} in {threading.current_thread().name}")
        return True

    listener = SimpleNamespace(thread=threading.get_ident(), given=given)
    owner, scope = SimpleNamespace(observer=None, listener=listener), GenerationScope(lambda: None)
    group = GlooGroup(owner, [3], 0, scope, timedelta(seconds=1))
    group.connect(SimpleNamespace(process_group=None, gloo=None), scope)  # type: ignore[arg-type]

    def allreduce() -> None:
        group.allreduce([torch.ones(2)])

    def backward() -> None:
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_hook(lambda _: allreduce())  # type: ignore[no-untyped-call]
        torch.autograd.backward(leaf.sum())

    for name, target in (("saving", allreduce), ("of a device", backward)):
        thread = threading.Thread(target=target, name=name)
        thread.start()
        thread.join()
    allreduce()
    assert heard == ["allreduce in of a device", f"allreduce in {threading.current_thread().name}"]
