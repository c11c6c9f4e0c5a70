"""The NPU device understands torch-npu's answers, on the fake chip and on a scripted one."""

import ast
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from midstep.devices import device_named, fake, fake_chip
from midstep.devices import npu as answers
from midstep.devices.base import Damage
from midstep.devices.cpu import CpuDevice
from midstep.devices.fake_chip import CHIP, Chip
from midstep.devices.npu import NpuDevice, QueueThread
from midstep.processor.exceptions import chain_of, classify, known_patterns
from midstep.processor.recovery_phases import RecoveryPhases
from midstep.processor.step_order import StepState
from midstep.protocol.errors import ConfigurationError, RecoveryError
from midstep.protocol.faults import DEVICE_FAULT_ACTIONS, FaultAction
from midstep.protocol.types import JobSettings, ShardHold

ENVIRONMENT = {"HCCL_ASYNC_ERROR_HANDLING": "0"}


@pytest.fixture
def device() -> Iterator[NpuDevice]:
    """A device on a fresh chip."""
    CHIP.__dict__.update(Chip().__dict__)
    made = device_named("fake")
    assert isinstance(made, NpuDevice)
    made.prepare(0, ENVIRONMENT, 1.5)
    yield made
    CHIP.__dict__.update(Chip().__dict__)


def text_of(action: FaultAction, device: NpuDevice) -> str:
    with pytest.raises(RuntimeError) as caught:
        device.inject(action)
    if classify(chain_of(caught.value), known_patterns()).locate:
        device.memory_error_raised()  # as the exception policy does
    return str(caught.value).splitlines()[0]


def test_a_wrong_environment_is_refused_with_everything_that_is_wrong(device: NpuDevice) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)cannot be recovered.*ASYNC_ERROR.*CACHING"):
        device.prepare(0, {"PYTORCH_NO_NPU_MEMORY_CACHING": "1"}, 1.5)


def test_a_stop_makes_a_waiting_thread_raise_and_a_clean_lets_the_device_work_again(device: NpuDevice) -> None:
    device.finish()
    device.stop()
    device.stop()
    assert device.stopped
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        device.finish()
    assert device.clean() is Damage.NONE
    assert not device.stopped
    device.finish()


def test_a_stop_lets_no_other_thread_run_until_it_is_done(device: NpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch-npu's, which waits for the device with the GIL in its hands: timers and heartbeats stand still."""
    monkeypatch.setattr(fake_chip, "STOP_S", 0.3)
    ticks, over = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    device.stop()
    over.set()
    thread.join()
    ticks.append(time.monotonic())
    assert max(later - earlier for earlier, later in pairwise(ticks)) >= 0.3


def test_a_blocked_thread_raises_when_the_device_is_stopped(device: NpuDevice) -> None:
    """What is queued and never ends is what a hanging collective looks like to the host."""
    device.inject(FaultAction.HANG_COLLECTIVE)
    task = CHIP.submit(lambda _: None)
    with pytest.raises(RuntimeError, match="timed out"):
        task.wait(0.05)
    device.stop()
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        task.wait(5)
    device.clean()
    CHIP.submit(lambda _: None).wait(5)


def test_a_dead_task_queue_takes_work_that_nobody_does_whatever_is_restarted(device: NpuDevice) -> None:
    device.inject(FaultAction.TASK_QUEUE_DEAD)
    task = CHIP.submit(lambda _: None)
    with pytest.raises(RuntimeError, match="The process exits for this inner error"):
        task.wait(5)
    device.stop()
    assert device.clean() is Damage.NONE
    with pytest.raises(RuntimeError, match="still under way"):
        CHIP.submit(lambda _: None).wait(0.05)


@pytest.mark.parametrize(
    ("action", "text", "damage"),
    [
        (FaultAction.MEMORY_TEMPORARY, "UCE ERROR.", Damage.TEMPORARY),
        (FaultAction.SUSPECT_MEMORY, "SUSPECT MEM ERROR", Damage.NONE),
        (FaultAction.LINK_DOWN, "HCCL OP RETRY FAILED", Damage.NONE),
        (FaultAction.LINK_BROKEN, "HCCL OP RETRY FAILED", Damage.NONE),
        (FaultAction.REMOTE, "SUSPECT REMOTE ERROR", Damage.NONE),
        (FaultAction.OUT_OF_MEMORY, "NPU out of memory", Damage.NONE),
        (FaultAction.UNSAFE_TENSOR, "There is unsafe data in the input tensor.", Damage.NONE),
        (FaultAction.MULTI_BIT_LATE, "HBM MULTI BIT ECC ERROR.time is ", Damage.PERSISTENT),
    ],
)
def test_a_fault_action_raises_the_real_text_and_leaves_its_damage(
    device: NpuDevice, action: FaultAction, text: str, damage: Damage
) -> None:
    assert text_of(action, device).startswith(text)
    device.stop()
    assert device.clean() is damage


def test_the_generator_of_the_device_draws_the_same_numbers_again(device: NpuDevice) -> None:
    """It is another one than torch's own."""
    generator, torch_before = fake.npu.default_generators[0], torch.get_rng_state()
    torch.rand(3, generator=generator)
    state = device.capture_random()
    drawn = torch.rand(3, generator=generator)
    device.restore_random(state)
    assert torch.equal(torch.rand(3, generator=generator), drawn)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert CpuDevice().capture_random() == b""


def test_corrupted_memory_is_found_and_can_be_used_once_it_is_marked_safe(device: NpuDevice) -> None:
    """Address by address: another tensor is not blamed, and a struck one is refused until it is unlocked."""
    whole, hit = torch.arange(100.0), torch.arange(1000.0)
    before = hit.clone()
    CHIP.corrupt(hit)
    assert not torch.equal(hit, before)
    device.memory_error_raised()
    device.stop()
    assert device.clean() is Damage.PERSISTENT
    assert device.corrupted([whole, hit])
    assert not device.corrupted([whole])
    with pytest.raises(RuntimeError, match="unsafe data"):
        CHIP.submit(lambda _: None, [hit])
    device.mark_safe([hit])
    assert not device.corrupted([hit])
    CHIP.submit(lambda _: None, [hit]).wait(5)


@pytest.mark.parametrize(
    "action", [FaultAction.MEMORY_TEMPORARY, FaultAction.MULTI_BIT_LATE, FaultAction.MEMORY_PERSISTENT]
)
@pytest.mark.parametrize("later", [FaultAction.LINK_DOWN, FaultAction.SUSPECT_MEMORY])
def test_a_memory_error_of_an_earlier_incident_is_not_found_again(
    device: NpuDevice, action: FaultAction, later: FaultAction
) -> None:
    """torch-npu never forgets one: asked again it would answer that memory is lost, and the process be replaced.

    Of a mere suspicion it takes no note.
    """
    parameter = torch.nn.Parameter(torch.zeros(100))
    text_of(action, device)
    device.stop()
    assert device.clean() is not Damage.NONE
    device.mark_safe([parameter])
    device.release_unused()
    assert fake.check_uce_in_memory(0) in {answers.OUTSIDE, answers.PERSISTENT}
    text_of(later, device)
    device.stop()
    assert device.clean() is Damage.NONE


def test_unused_memory_is_given_back_once_the_device_works_again(
    device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied = []
    monkeypatch.setattr(CHIP, "cache_emptied", lambda: emptied.append(not CHIP.stopped))
    device.stop()
    device.release_unused()  # the control thread was faster with another stop
    assert emptied == []
    device.clean()
    device.release_unused()
    assert emptied == [True]


def test_a_cache_that_cannot_be_emptied_is_told(device: NpuDevice) -> None:
    CHIP.lost = True
    with pytest.raises(RecoveryError, match="cannot empty the cache"):
        device.release_unused()


def test_memory_outside_of_the_allocator_cannot_be_mended(device: NpuDevice) -> None:
    text_of(FaultAction.MEMORY_OUTSIDE, device)
    device.stop()
    with pytest.raises(RecoveryError, match="outside torch's memory"):
        device.clean()


def test_a_lost_device_cannot_be_used_again(device: NpuDevice) -> None:
    assert "507010" in text_of(FaultAction.DROP_DEVICE, device)
    device.stop()
    with pytest.raises(RecoveryError, match="cannot restart device"):
        device.clean()


def test_a_device_that_refuses_to_stop_is_told(device: NpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.npu, "stop_device", lambda device_id: 1)
    with pytest.raises(RecoveryError, match="cannot stop device"):
        device.stop()


def test_a_stopped_device_is_given_time_before_it_works_again(
    device: NpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of torch-npu's queue would take the abort of its call for an inner error, and end."""
    slept: list[float] = []
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: 7.0, sleep=slept.append))
    device.stop()
    device.clean()
    assert slept == [pytest.approx(answers.SETTLE_S)]


def test_the_devices_clock_goes_forward(device: NpuDevice) -> None:
    first, second = device.now_us(), device.now_us()
    assert first is not None
    assert second is not None
    assert first <= second


def test_every_fault_of_a_device_has_its_action() -> None:
    assert set(fake._FAULT_ACTIONS) == DEVICE_FAULT_ACTIONS


def test_faults_cannot_be_injected_on_a_real_device_or_the_cpu() -> None:
    library: Any = type("Library", (), {"npu": fake.npu, "distributed": fake.distributed})
    with pytest.raises(ConfigurationError, match="fake device"):
        NpuDevice(library).inject(FaultAction.LINK_DOWN)
    with pytest.raises(ConfigurationError, match="fake"):
        CpuDevice().inject(FaultAction.LINK_DOWN)


def test_tensors_that_share_memory_are_locked_and_unlocked_together(device: NpuDevice) -> None:
    """As torch-npu does it, which looks at whole allocations: a flat buffer and its views are one thing."""
    flat = torch.zeros(100)
    first, last = flat[:50], flat[50:]
    CHIP.corrupt(last)
    device.memory_error_raised()
    device.stop()
    device.clean()
    assert device.corrupted([first])
    assert device.corrupted([last])
    device.mark_safe([first])
    assert not device.corrupted([last])


def test_every_shard_in_corrupted_memory_counts_as_lost(device: NpuDevice) -> None:
    """Also the one that is asked about second, when the first one's repair would unlock what they share."""
    flat, apart = torch.zeros(100), torch.zeros(100)
    shards = {"one": [flat[:50]], "other": [flat[50:]], "apart": [apart]}
    framework = SimpleNamespace(
        shards=lambda: tuple(ShardHold(name, 1) for name in shards),
        open_shard=lambda name: SimpleNamespace(tensors=shards[name]),
    )
    box = SimpleNamespace(copies=tuple)
    settings = JobSettings()
    runtime: Any = SimpleNamespace(device=device, connected=True, black_box=box, settings=settings)
    nothing: Any = None
    step_state = StepState(clean=True)
    no_copies: Any = SimpleNamespace(reported=lambda report: report)
    rejoining = RecoveryPhases(runtime, cast("Any", framework), nothing, step_state, no_copies)
    CHIP.corrupt(flat[50:])
    device.memory_error_raised()
    device.stop()
    step_state.mark_corrupted(rejoining.inspect())
    assert [hold.shard_id for hold in rejoining.survey(0.0).holds] == ["apart"]
    assert not device.corrupted([flat])


@pytest.mark.parametrize("shard_as_well", [False, True])
def test_memory_that_is_derived_from_shards_may_be_used_again(
    device: NpuDevice, caplog: pytest.LogCaptureFixture, shard_as_well: bool
) -> None:
    """What is written whole by the rollback costs no process, and the log says that it was struck."""
    shard, derived = torch.zeros(100), torch.zeros(100)
    framework = SimpleNamespace(
        shards=lambda: (ShardHold("one", 1),),
        open_shard=lambda _: SimpleNamespace(tensors=[shard]),
        derived=lambda: [torch.zeros(100), derived],
    )
    runtime, nothing = cast("Any", SimpleNamespace(device=device, settings=JobSettings())), cast("Any", None)
    phases = RecoveryPhases(runtime, cast("Any", framework), nothing, nothing, nothing)
    CHIP.corrupt(derived)
    if shard_as_well:
        CHIP.corrupt(shard)
    device.memory_error_raised()
    device.stop()
    assert phases.inspect() == ["one"]
    assert not device.corrupted([derived])
    beside = "1 of 2 buffers that no shard has, and that are written again"
    said = f"one, {beside}" if shard_as_well else f"{beside}; no shard is trusted"
    assert f"device memory is corrupted: {said}" in caplog.messages


def test_marking_everything_unsafe_locks_every_tensor(device: NpuDevice) -> None:
    """What restart_device does when all resources are rebuilt."""
    tensor = torch.ones(5)
    fake.restart_device(0, rebuild_all_resources=True)
    assert device.corrupted([tensor])
    fake.update_npu_tensor_to_safe(tensor)
    assert not device.corrupted([tensor])


@pytest.mark.parametrize("folder", ["adapters", "processor", "controller", "policies", "communicators", "agent"])
def test_nothing_asks_whether_the_device_is_the_fake_one(folder: str) -> None:
    """What runs on the fake is what would run on an NPU: only the module of calls that is handed in differs."""
    asked = []
    for path in (Path(__file__).resolve().parents[2] / folder).rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "fake" in source.lower() else ():
            asked += [f"{path.name}: {ast.unparse(test)}" for test in _tests_of(node) if _names_the_fake(test)]
    assert asked == []


def test_a_question_for_the_fake_device_would_be_found() -> None:
    """In whatever form it is put."""
    asking = (
        "if name == 'fake': pass",
        "x = 1 if device.name in {'fake'} else 2",
        "y = self.kind is DeviceName.FAKE",
        "z = [a for a in b if is_fake(a)]",
        "match name:\n  case 'fake': pass",
        "assert not fake",
    )
    for source in asking:
        tests = [test for node in ast.walk(ast.parse(source)) for test in _tests_of(node)]
        assert any(_names_the_fake(test) for test in tests), source


def _tests_of(node: ast.AST) -> list[ast.AST]:
    """What a node makes a decision by."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return list(node.ifs)
    if isinstance(node, ast.match_case):
        return [node.pattern]
    return [node] if isinstance(node, ast.Compare) else []


def _names_the_fake(test: ast.AST) -> bool:
    return "fake" in ast.unparse(test).lower()


def test_a_queue_whose_thread_has_ended_is_told_at_each_commit_and_when_the_device_is_cleaned(
    device: NpuDevice, tmp_path: Path
) -> None:
    """torch-npu says it once. Where that exception is lost, it drops what it is given, and synchronize returns."""
    comm = tmp_path / "7" / "comm"
    comm.parent.mkdir()
    comm.write_text("acl_thread\n")
    device._queue = QueueThread(tmp_path)
    device._queue.find()
    device.finish()
    comm.unlink()
    with pytest.raises(RuntimeError, match="The process exits for this inner error") as raised:
        device.finish()
    (pattern,) = [each for each in known_patterns() if each.name == "task_queue_dead"]
    assert pattern.text is not None
    assert pattern.text in str(raised.value)
    device.stop()
    with pytest.raises(RecoveryError, match="queue of device 0 has ended"):
        device.clean()
