"""The device of a process over torch-npu itself: what its calls do, as far as the fake CANN does what CANN does."""

# torch.npu is there once torch_npu was imported, which no type checker sees.
# mypy: disable-error-code="attr-defined, import-not-found, unused-ignore"

from __future__ import annotations

import threading
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packaging.version import Version

from midstep.devices import device_named
from midstep.devices.base import Damage
from midstep.devices.kinds import NPU_DEFAULTS
from midstep.devices.npu_symbols import missing
from midstep.processor.exceptions import chain_of, classify, known_patterns
from midstep.processor.tensor_hash import device_hashes
from midstep.protocol.errors import RecoveryError
from midstep.protocol.faults import FaultAction, FaultKind

from . import fused
from .releases import ASKED_SINCE, names_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.gloo.conftest import Rank, Ranks

    from midstep.devices.npu import NpuDevice

pytestmark = pytest.mark.timeout(300)

LINK_UP_S = 60.0
COPIED = 1 << 26


def taken() -> NpuDevice:
    """Take the device, in a process that is forked from that of the test."""
    from midstep.devices.npu import NpuDevice

    device = device_named("npu")
    assert isinstance(device, NpuDevice)
    device.prepare(0, dict(NPU_DEFAULTS), LINK_UP_S)
    return device


def raised(action: FaultAction, device: NpuDevice) -> Any:
    """Inject a fault, and return what midstep makes of the text that torch-npu raises."""
    try:
        device.inject(action)
        torch.npu.synchronize()
    except RuntimeError as error:
        return classify(chain_of(error), known_patterns())
    raise AssertionError(f"{action} raised nothing")


def stop_and_go_on(rank: Rank) -> None:
    """Wait for a device that hangs; be stopped by another thread; go on."""
    device = taken()
    other = torch.npu.Stream()
    event = torch.npu.Event()
    with torch.npu.stream(other):
        torch.npu.current_stream().wait_event(event)
    stopper = threading.Timer(0.3, device.stop)
    stopper.start()
    texts: list[str] = []
    began_s = time.monotonic()
    while not texts and time.monotonic() - began_s < 20:
        try:
            torch.ones(1000, device="npu").sum().item()
        except RuntimeError as error:
            texts.append(str(error))
    stopper.join()
    assert device.clean() is Damage.NONE
    rank.say((texts, torch.ones(3, device="npu").sum().item()))


def test_a_stopped_device_raises_and_works_again_once_it_is_cleaned(ranks: Ranks) -> None:
    ranks.start(0, 1, stop_and_go_on)
    texts, total = ranks.hear(0)
    assert "FORCE STOP" in texts[0]
    assert total == 3.0


def record_again_behind_the_wait(rank: Rank) -> None:
    """Have a stream wait for another one, and record the same event once more, behind the wait."""
    taken()
    first, second, event = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Event()
    large = torch.ones(COPIED, device="npu")
    with torch.npu.stream(first):
        copied = torch.empty_like(large).copy_(large, non_blocking=True)  # takes longer than the lines below
    event.record(first)
    second.wait_event(event)
    event.record(second)
    second.synchronize()
    rank.say(copied[-1].item())


def test_a_stream_waits_for_the_last_record_before_it_asked(ranks: Ranks) -> None:
    """Not for a later one: ProcessGroupHCCL records its events again and again."""
    ranks.start(0, 1, record_again_behind_the_wait)
    assert ranks.hear(0) == 1.0


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


def struck(rank: Rank) -> None:
    """Have memory damaged, in all ways; say what is raised, what is found, and which tensor it is."""
    device = taken()
    small, large = (torch.nn.Parameter(torch.ones(size, device="npu")) for size in (4096, 1 << 20))
    for action in (FaultAction.MEMORY_TEMPORARY, FaultAction.MEMORY_PERSISTENT, FaultAction.SUSPECT_MEMORY):
        found = raised(action, device)
        if found.locate:
            device.memory_error_raised()
        device.stop()
        damage = device.clean()
        rank.say((found.kind, damage, device.corrupted([small]), device.corrupted([large])))
        device.mark_safe([large])
    raised(FaultAction.MEMORY_OUTSIDE, device)
    device.memory_error_raised()
    device.stop()
    try:
        device.clean()
    except RecoveryError as error:
        rank.say(str(error))


def test_damaged_memory_is_found_where_it_is(ranks: Ranks) -> None:
    ranks.start(0, 1, struck)
    assert ranks.hear(0) == (FaultKind.MEMORY, Damage.TEMPORARY, False, False)
    assert ranks.hear(0) == (FaultKind.MEMORY, Damage.PERSISTENT, False, True)
    assert ranks.hear(0) == (FaultKind.MEMORY, Damage.NONE, False, False)
    assert "outside torch's memory" in ranks.hear(0)


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


def raise_texts(rank: Rank) -> None:
    device = taken()
    for action in (FaultAction.OUT_OF_MEMORY, FaultAction.MULTI_BIT):
        if action is FaultAction.MULTI_BIT:
            parameter = torch.nn.Parameter(torch.ones(1000, device="npu"))
        found = raised(action, device)
        rank.say((found.kind, found.locate, parameter.numel() if action is FaultAction.MULTI_BIT else 0))


def test_other_errors_are_known_by_their_texts(ranks: Ranks) -> None:
    ranks.start(0, 1, raise_texts)
    assert ranks.hear(0) == (FaultKind.OUT_OF_MEMORY, False, 0)
    assert ranks.hear(0) == (FaultKind.MEMORY_MULTI_BIT, True, 1000)


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


def draw(rank: Rank) -> None:
    """Draw, go back, and draw again."""
    device = taken()
    state = device.capture_random()
    first = torch.rand(4, device="npu").tolist()
    device.restore_random(state)
    again = torch.rand(4, device="npu").tolist()
    before, after = device.now_us(), device.now_us()
    assert before is not None
    assert after is not None
    rank.say((first, again, after >= before))


def test_the_devices_random_numbers_and_clock(ranks: Ranks) -> None:
    ranks.start(0, 1, draw)
    first, again, forward = ranks.hear(0)
    assert first == again
    assert forward


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
    assert set(every) - names_in(library, every) == newer
