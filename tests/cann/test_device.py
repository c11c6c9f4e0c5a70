"""The device of a process over torch-npu itself, and the fake CANN, beside what all devices have to do.

That is in tests/contract/devices, which runs here as well.
"""

# torch.npu is there once torch_npu was imported, which no type checker sees.
# mypy: disable-error-code="attr-defined, import-not-found, unused-ignore"

from __future__ import annotations

import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from tests.contract.makers import Setup

from midstep.devices import device_named
from midstep.devices.kinds import NPU_DEFAULTS
from midstep.devices.npu_symbols import missing
from midstep.processor.exceptions import chain_of, classify, known_patterns
from midstep.processor.tensor_hash import device_hashes
from midstep.protocol.errors import RecoveryError
from midstep.protocol.faults import FaultAction, FaultKind

from . import fused
from .releases import ASKED_SINCE, NOT_ASKED, names_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.gloo.conftest import Rank, Ranks

    from midstep.devices.npu import NpuDevice

pytestmark = pytest.mark.timeout(300)

LINK_UP_S = 60.0
ROUNDS = 300
# torch-npu's queue, what a stream takes of it here, and more than both; when it is full for sure, and a stop's effect.
QUEUE_LENGTH, STREAM_DEPTH, FILLS = 4096, 64, 5000
FILLED_S, WOKEN_S = 2.0, 10.0


def taken() -> NpuDevice:
    """Take the device, in a process that is forked from that of the test."""
    from midstep.devices.npu import NpuDevice

    device = device_named("npu")
    assert isinstance(device, NpuDevice)
    device.prepare(0, dict(NPU_DEFAULTS), LINK_UP_S)
    return device


def differentiate_fused(rank: Rank) -> None:
    """Say how far fused operators, and their gradients, are from their formulas, differentiated by torch."""
    taken()
    calls: list[tuple[Any, Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
        (torch.ops.npu.npu_swiglu, fused.swiglu, ((5, 8),)),
        (lambda *each: torch.ops.npu.npu_rms_norm(*each)[0], lambda *each: fused.rms_norm(*each)[0], ((2, 5, 8), (8,))),
        (torch.ops.npu.npu_rotary_mul, fused.rotary_mul, ((5, 2, 3, 8), (5, 1, 1, 8), (5, 1, 1, 8))),
    ]
    for on_device, on_host, shapes in calls:
        host = [torch.randn(shape, requires_grad=True) for shape in shapes]
        device = [each.detach().to("npu").requires_grad_() for each in host]
        results = on_host(*host), on_device(*device)
        for result in results:
            result.square().sum().backward()
        pairs = [results, *((each.grad, other.grad) for each, other in zip(host, device, strict=True))]
        rank.say(max(float((one - other.cpu()).abs().max()) for one, other in pairs))


def test_fused_operators_have_the_gradients_of_their_formulas(ranks: Ranks) -> None:
    ranks.start(0, 1, differentiate_fused)
    assert max(ranks.hear(0) for _ in range(3)) < 1e-4


def hash_there(rank: Rank) -> None:
    """Hash tensors that lie on the device, on the host, and on both; say what each gives."""
    taken()
    on_host = [torch.arange(200_000), torch.tensor(3.0), torch.arange(7).to(torch.bfloat16)]
    on_host.append(torch.arange(600_001).to(torch.uint8)[1:])
    on_npu = [tensor.npu() for tensor in on_host]
    mixed = [on_npu[0], *on_host[1:3], on_npu[3]]
    for place in ("cpu", "npu"):
        rank.say(device_hashes([on_host, on_npu, mixed], torch.device(place)))


def test_a_device_hashes_as_the_cpu_does_wherever_tensors_lie(ranks: Ranks) -> None:
    ranks.start(0, 1, hash_there)
    found = [*ranks.hear(0), *ranks.hear(0)]
    assert len(found) == 6
    assert len({*found}) == 1


def lose_the_queue(rank: Rank) -> None:
    """Lose the one exception that says that the queue has ended; say what is seen afterwards."""
    from tests.cann import faults

    device = taken()
    numbers = torch.zeros(3, device="npu")
    faults.refuse_operator()
    for _ in range(3):
        try:
            numbers.fill_(1)
            torch.npu.synchronize()
        except RuntimeError:
            pass
        time.sleep(0.2)
    numbers.fill_(7)
    torch.npu.synchronize()  # raises nothing
    try:
        device.finish()
    except RuntimeError as error:
        kind = classify(chain_of(error), known_patterns()).kind
    device.stop()
    try:
        device.clean()
    except RecoveryError as error:
        rank.say((kind, str(error)))


def test_a_queue_that_has_ended_is_noticed_although_torch_npu_says_nothing(ranks: Ranks) -> None:
    """What is queued then is dropped, and synchronize returns: a step would be committed that was not computed."""
    ranks.start(0, 1, lose_the_queue)
    kind, text = ranks.hear(0)
    assert kind is FaultKind.DEVICE
    assert "queue of device 0 has ended" in text


def fill_the_queue(rank: Rank) -> None:
    """Queue operators behind a collective that hangs, until the queue takes no more; be stopped by another thread."""
    setup = Setup(rank)
    numbers = torch.zeros(1, device="npu")
    dist.all_reduce(numbers)
    setup.device.finish()
    setup.inject(FaultAction.HANG_COLLECTIVE)
    dist.all_reduce(numbers)
    stopper = setup.stop_soon(FILLED_S)
    began_s, queued = time.monotonic(), 0
    text = "all of them were taken"
    try:
        while queued < FILLS:
            numbers.fill_(1)
            queued += 1
    except RuntimeError as error:
        text = str(error).splitlines()[0]
    rank.say((text, queued, time.monotonic() - began_s))
    stopper.join()
    setup.device.clean()
    rank.say(setup.reconnect())
    numbers.fill_(3)
    dist.all_reduce(numbers)
    rank.say(numbers.item())


def test_a_thread_that_has_filled_the_queue_waits_without_the_gil_and_is_woken(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the GIL held no other thread would run, and none would stop the device."""
    monkeypatch.setenv("FAKE_CANN_STREAM_DEPTH", str(STREAM_DEPTH))
    ranks.start(0, 1, fill_the_queue)
    text, queued, took_s = ranks.hear(0)
    assert "FORCE STOP" in text
    assert QUEUE_LENGTH <= queued < FILLS
    assert FILLED_S / 2 < took_s < FILLED_S + WOKEN_S
    ranks.say(1)
    assert ranks.hear(0) == ("up", "")
    assert ranks.hear(0) == 3.0


def record_again(rank: Rank) -> None:
    """Have two streams wait for events of each other, of which one is recorded again while it is waited for."""
    taken()
    first, second = torch.npu.Stream(), torch.npu.Stream()
    there, back = torch.npu.Event(), torch.npu.Event()
    for _ in range(ROUNDS):
        there.record(first)
        second.wait_event(there)
        back.record(second)
        first.wait_event(back)
        there.record(first)
    torch.npu.synchronize()
    rank.say("over")


def test_a_stream_waits_for_an_event_as_it_was_recorded_last_by_then(ranks: Ranks) -> None:
    """As on a device. torch-npu records an event of its own again and again, before and behind its collectives."""
    ranks.start(0, 1, record_again)
    assert ranks.hear(0) == "over"


def test_the_functions_that_the_doctor_looks_for_are_there() -> None:
    assert missing() == []


def test_this_release_asks_cann_for_what_the_table_says() -> None:
    """A name that a release does not know by itself is of no use to it; one that it knows and does not find, fails."""
    package = find_spec("torch_npu")
    assert package is not None
    assert package.origin is not None
    library = Path(package.origin).with_name("lib") / "libtorch_npu.so"
    here = Version(metadata.version("torch_npu"))
    newer = {name for since, names in ASKED_SINCE.items() if Version(since) > here for name in names}
    every = tuple(name for names in ASKED_SINCE.values() for name in names)
    assert set(every) - names_in(library, every) == newer | NOT_ASKED.get(str(here), set())
