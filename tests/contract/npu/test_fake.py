"""The fake device has the names and signatures of the real torch-npu, so what runs on it would be taken there."""

import inspect
import threading
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest
from tests.contract.npu.wheels import RELEASES, NotReachable, Signature, Sources, wheel
from torch._C._distributed_c10d import TCPStore

from midstep.communicators.fake import FakeHcclGroup, StoreOfTask
from midstep.devices import fake
from midstep.devices.fake_chip import Task
from midstep.devices.npu_calls import BACKEND_METHODS, CALLS, Call, require

NEWEST = RELEASES[-1]
PATIENCE_S = 20.0


def found(name: str) -> Any:
    return reduce(getattr, name.split("."), fake)


def signature_of(function: Any) -> Signature:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return Signature(
        tuple(p.name for p in parameters),
        frozenset(p.name for p in parameters if p.default is not inspect.Parameter.empty),
    )


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_call_of_the_fake_is_declared_as_the_real_one(call: Call) -> None:
    """The same parameters in the same order, and the same ones may be left out."""
    try:
        sources = Sources(wheel(NEWEST).sources)
    except NotReachable as reason:
        pytest.skip(f"the package registry was not reached: {reason}")
    assert signature_of(found(call.name)) == sources.signature(call.name)


def test_the_fake_has_every_call() -> None:
    require(fake, "fake")


@pytest.mark.parametrize("name", BACKEND_METHODS)
def test_the_fakes_backend_has_what_torch_npu_calls_on_a_backend(name: str) -> None:
    assert callable(getattr(FakeHcclGroup, name))


def test_a_link_up_that_is_given_up_leaves_the_store_to_the_next_one() -> None:
    """A script has one client of its store, and a client that waits in the store takes no other call meanwhile."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    task, ended = Task(lambda _: None), list[str]()

    def wait() -> None:
        try:
            StoreOfTask(client, task).wait(["of a rank that was killed"], timedelta(seconds=3 * PATIENCE_S))
        except RuntimeError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    next_one = threading.Timer(0.2, client.set, ("number", "1"))
    next_one.daemon = True
    next_one.start()
    next_one.join(PATIENCE_S)
    assert server.check(["number"])
    task.finish("aborted")
    waiting.join(PATIENCE_S)
    assert ended == ["aborted"]
