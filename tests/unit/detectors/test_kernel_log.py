"""Events of NVIDIA's and Ascend's drivers in the kernel's log: what is read of them, and what is reported."""

import asyncio
import os
from pathlib import Path

import pytest

from midstep.detectors import kernel_log
from midstep.detectors.kernel_log import (
    REPEATED_S,
    DriverEvent,
    KernelLogDetector,
    device_at,
    new_records,
    open_kernel_log,
    parse_event,
)
from midstep.policies.code_files import default_codes
from midstep.policies.fault_codes import TREATMENTS, FaultCodes, Treatment
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

OFF_THE_BUS = "[ 84.1] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FAULT = "kernel: NVRM: Xid (PCI:0000:2b:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS"
RESET = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
DRAIN = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
WELL = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 46 sourcetrack timeout error (First)"

# As MindCluster's log diagnosis has it in its tests (component/ascend-faultdiag/test, messages_0x40F84E00).
HEARTBEAT_LOST = (
    "Aug  1 08:38:31 localhost kernel: [ 1197.584409] [ascend] [ERROR] [drv_soft_fault] [heart_beat_judge 318] "
    "<kworker/5:1H:39365> Heartbeat lost! (device=1; old_count=1104; new_count=1104; lost_count=4; total_lost_count=4; "
    "total_10s_count=0; total_15s_count 0)."
)
# As the driver's source prints them (github.com/hicann/driver).
HEARTBEAT_LOST_NEWER = (
    "[ascend] [ERROR] [drv_soft_fault] [hb_read_one_device_count 203] <kworker/u8:3:411,411> Heartbeat lost! "
    "(device_id=6; old_count=77; current_count=77; lost_count=5; total_lost_count=5; miss_read_count=0; "
    "hb_read_fail_count=0)."
)
URGENT = "[ascend] [ERROR] [dms_module] [heart_beat_urgent_judge 399] The device urgent heartbeat is lost! (device=6)"
HEARTBEAT_BACK = (
    "[ascend] [ERROR] [drv_soft_fault] [hb_read_item_work_start 219] <sh:12,12> Heartbeat already initialized, "
    "just start it. (dev_id=6)"
)
BLOCKED = (
    "[ascend] [ERROR] [drv_pcie] [devdrv_error_detected 110] <irq/29-aerdrv:312:312> Channel is blocked. (dev_id=3; "
    "aer_critical_cnt=1)"
)
NOT_STARTED = (
    "[ascend] [ERROR] [drv_pcie] [devdrv_timer_task 740] <swapper/0:0:0> Device os load failed. (loader_devid=2; "
    "dev_id=2)"
)
MANAGED = (
    "[ascend] [ERROR] [fault_manager] [dms_record_fault_event_log 1410] event_id=0x80e01801; device_id=5; "
    "node_type=0x70[HBM]; node_id=0; sub_node_id=2; event_type=0x1[multi bit ecc]; severity=3[Critical]; "
    "assertion=1[Event occur]; description=[addr 0x12]; os_id=0; event_serial_num=9; notify_serial_num=9; "
    "event_raised_time=1744168468259 ms."
)


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """The driver's folders of a machine with three GPUs."""
    for place in ("0000:3b:00.0", "0000:01:00.0", "0000:2b:00.0"):
        (tmp_path / place).mkdir()
    return tmp_path


@pytest.fixture
def detector(gpus: Path) -> KernelLogDetector:
    return KernelLogDetector("kernel-log", "node1", gpus)


def reported(detector: KernelLogDetector, *lines: str, now: float = 100.0) -> list[FaultReport]:
    """What a detector reports of lines that come at one time."""
    told: list[FaultReport] = []
    for line in lines:
        detector.take(line, told.append, now)
    return told


@pytest.mark.parametrize(
    ("line", "code", "place", "level", "assertion"),
    [
        (OFF_THE_BUS, "XID79", "0000:3b:00", None, Assertion.ONCE),
        (FAULT, "XID31", "0000:2b:00", None, Assertion.ONCE),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "XID14", "0000:03:00", None, Assertion.ONCE),
        ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper", "XID63", "0000:10:1c", None, Assertion.ONCE),
        (RESET, "XID154", "0000:01:00", FaultLevel.RESTART_NPU, Assertion.OCCUR),
        (DRAIN, "XID154", "0000:01:00", FaultLevel.SUB_HEALTH, Assertion.OCCUR),
        (WELL, "XID154", "0000:01:00", FaultLevel.NOT_HANDLE, Assertion.RECOVER),
        (SWITCH, "SXID24007", "0000:c1:00", FaultLevel.SEPARATE_NPU, Assertion.ONCE),
        (SWITCH.replace("Fatal", "Non-fatal"), "SXID24007", "0000:c1:00", FaultLevel.NOT_HANDLE, Assertion.ONCE),
    ],
)
def test_an_event_has_a_code_a_place_and_what_the_driver_says_is_to_be_done(
    line: str, code: str, place: str, level: FaultLevel | None, assertion: Assertion
) -> None:
    event = parse_event(line)
    assert isinstance(event, DriverEvent)
    assert (event.code, event.place, event.level, event.assertion) == (code, place, level, assertion)


@pytest.mark.parametrize(
    ("line", "code", "device", "assertion"),
    [
        (HEARTBEAT_LOST, "40F84E00", 1, Assertion.OCCUR),
        (
            HEARTBEAT_LOST.replace("[ERROR] [drv_soft_fault]", "[drv_soft_fault] [ERROR]"),
            "40F84E00",
            1,
            Assertion.OCCUR,
        ),
        (HEARTBEAT_LOST_NEWER, "40F84E00", 6, Assertion.OCCUR),
        (URGENT, "40F84E00", 6, Assertion.OCCUR),
        (HEARTBEAT_BACK, "40F84E00", 6, Assertion.RECOVER),
        (BLOCKED, "NPU-PCIE-BLOCKED", 3, Assertion.ONCE),
        (NOT_STARTED, "NPU-NOT-STARTED", 2, Assertion.ONCE),
        (MANAGED, "80E01801", 5, Assertion.OCCUR),
        (MANAGED.replace("assertion=1[Event occur]", "assertion=0[Event resume]"), "80E01801", 5, Assertion.RECOVER),
        (MANAGED.replace("assertion=1[Event occur]", "assertion=2[One time event]"), "80E01801", 5, Assertion.ONCE),
    ],
)
def test_lines_of_an_npus_driver_name_the_device_and_its_fault(
    detector: KernelLogDetector, line: str, code: str, device: int, assertion: Assertion
) -> None:
    (report,) = reported(detector, line)
    assert (report.code, report.node, report.device, report.assertion) == (code, "node1", device, assertion)
    assert report.kind is FaultKind.DEVICE


@pytest.mark.parametrize(
    "line",
    [
        HEARTBEAT_LOST.replace("device=1;", "device=10000;"),
        HEARTBEAT_LOST.replace("device=1;", "device=4097;"),
        HEARTBEAT_LOST.replace("drv_soft_fault", "drv_pcie"),
        BLOCKED.replace("Channel is blocked", "Channel is in normal state"),
        MANAGED.replace("assertion=1[Event occur]", "assertion=3[?]"),
        MANAGED[: MANAGED.index("severity")],
        "[ascend] [drv_pcie] [INFO] [devdrv_init_dev_num 2248] <systemd-udevd:4853:4853> Findout device. (index=7)",
    ],
)
def test_other_lines_of_an_npus_driver_are_no_event(line: str) -> None:
    assert parse_event(line) is None


def test_a_heartbeat_that_is_back_ends_the_fault_of_the_same_device(detector: KernelLogDetector) -> None:
    lost, back = reported(detector, URGENT, HEARTBEAT_BACK)
    assert lost.fault_id == back.fault_id
    assert TREATMENTS[FaultCodes(default_codes()).completed(lost).level] is Treatment.LEAVE


def test_two_parts_of_an_npu_have_faults_of_their_own(detector: KernelLogDetector) -> None:
    one, other = reported(detector, MANAGED, MANAGED.replace("sub_node_id=2", "sub_node_id=3"))
    assert one.fault_id != other.fault_id


@pytest.mark.parametrize(
    "line", ["", "usb 1-1: new device", "NVRM: GPU at PCI:0000:2b:00: GPU-0b11d014", "NVRM: Xid (PCI:): 79", "Xid 79"]
)
def test_other_lines_are_no_event(line: str) -> None:
    assert parse_event(line) is None


def test_a_report_names_the_gpu_by_its_number_in_the_order_of_the_bus(detector: KernelLogDetector) -> None:
    (report,) = reported(detector, OFF_THE_BUS)
    assert (report.node, report.device, report.kind) == ("node1", 2, FaultKind.DEVICE)
    assert report.detail.startswith("0000:3b:00: pid=")
    assert report.detail.endswith("GPU has fallen off the bus.")


def test_an_event_of_a_gpu_that_is_not_listed_is_the_nodes(detector: KernelLogDetector, gpus: Path) -> None:
    (report,) = reported(detector, OFF_THE_BUS.replace("3b", "4c"))
    assert (report.node, report.device, report.kind) == ("node1", None, FaultKind.NODE)
    assert device_at("0000:3b:00", gpus / "none") is None


def test_the_fault_of_a_switch_is_the_nodes_that_hangs_on_it(detector: KernelLogDetector) -> None:
    (report,) = reported(detector, SWITCH)
    assert (report.node, report.device, report.kind) == ("node1", None, FaultKind.SWITCH)


def test_an_event_that_is_written_for_many_channels_is_one_report(detector: KernelLogDetector) -> None:
    assert len(reported(detector, FAULT, FAULT, OFF_THE_BUS, FAULT)) == 2
    assert len(reported(detector, FAULT, now=100.0 + REPEATED_S)) == 1


def test_a_recovery_ends_the_fault_of_the_same_gpu_at_once(detector: KernelLogDetector) -> None:
    occurred, recovered = reported(detector, RESET, WELL)
    assert (occurred.assertion, recovered.assertion) == (Assertion.OCCUR, Assertion.RECOVER)
    assert occurred.fault_id == recovered.fault_id


@pytest.mark.parametrize(
    ("line", "treatment"),
    [
        (OFF_THE_BUS, Treatment.LEAVE),
        (RESET, Treatment.LEAVE),
        (DRAIN, Treatment.WATCH),
        (FAULT, Treatment.NOTE),
        (BLOCKED, Treatment.LEAVE),
        (NOT_STARTED, Treatment.LEAVE),
        (MANAGED, Treatment.RESTART),
    ],
)
def test_what_follows_from_an_event_is_in_the_table_of_codes(
    detector: KernelLogDetector, line: str, treatment: Treatment
) -> None:
    """An illegal address is the script's: its process raises by itself."""
    (report,) = reported(detector, line)
    assert TREATMENTS[FaultCodes(default_codes()).completed(report).level] is treatment


def test_a_log_that_may_not_be_read_is_an_error_with_another_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"kmsg: the kernel's log cannot be read.*journalctl"):
        open_kernel_log(tmp_path / "kmsg")


def test_lines_are_read_to_their_end(detector: KernelLogDetector) -> None:
    async def read() -> list[FaultReport]:
        stream, told = asyncio.StreamReader(limit=1024), list[FaultReport]()
        stream.feed_data(f"{'x' * 3000}\n\xff\n{OFF_THE_BUS}\n".encode("latin-1"))
        stream.feed_eof()
        await detector.watch_lines(stream, told.append)
        return told

    assert [report.code for report in asyncio.run(read())] == ["XID79"]


def test_records_of_the_real_kernel_log_are_read_from_now_on() -> None:
    try:
        written = os.open(kernel_log.KERNEL_LOG, os.O_WRONLY)
        log = open_kernel_log()
    except (OSError, ConfigurationError):
        pytest.skip("the kernel's log cannot be read and written here")
    try:
        text = f"midstep test {os.getpid()}: no event"
        os.write(written, f"{text}\n".encode())
        assert text in [record.strip() for record in new_records(log)]
        assert list(new_records(log)) == []
    finally:
        os.close(written)
        os.close(log)
