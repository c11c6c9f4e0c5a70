"""Faults of GPUs and NPUs as their drivers write them to the kernel's log.

A process learns of an error of its own device when a call fails, which a device that has fallen off the bus may never
let happen; the driver writes it down at once. Each event becomes one report. What is to be done about it is in
`configs/fault_codes.yaml`.

- NVIDIA's driver writes Xid events, and SXid events of NVSwitches: the code is `XID<number>`, and its level follows the
  column of immediate actions in NVIDIA's catalog of Xids (docs.nvidia.com/deploy/xid-errors). The driver's own summary,
  Xid 154, names its action itself.
- Ascend's driver writes few of its faults there, and those of the host's side: a lost heartbeat, which is the code
  40F84E00 to MindCluster, a PCIe channel that the kernel has blocked, a device that did not start, each with a line of
  its own; and, where a product's driver is built so, every event of its fault manager with its code. They are read as
  the driver's source prints them (github.com/hicann/driver, docs/faults.md names the files).
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..protocol.errors import ConfigurationError
from ..protocol.types import Assertion, FaultKind, FaultLevel, FaultReport, detector_address
from .reading import MAX_DEVICE, Report

KERNEL_LOG = Path("/dev/kmsg")
GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, named by its place on the bus
MAX_RECORD_BYTES = 8192  # of the kernel's log
MAX_DETAIL = 400
REPEATED_S = 1.0  # the driver may write the same event for hundreds of channels at once
MAX_REMEMBERED = 1000

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<place>[0-9a-fA-F:.]+)\): (?P<number>\d{1,4}), ?(?P<text>.*)")
_SXID = re.compile(r"nvidia-nvswitch\d*: SXid \(PCI:(?P<place>[0-9a-fA-F:.]+)\): (?P<number>\d{1,6}), ?(?P<text>.*)")
_ACTION = re.compile(r"action changed from .* to 0x[0-9a-fA-F]+ \((?P<action>[^)]*)\)")
_SUMMARY = 154  # the driver says what the events before it ask for
_ACTIONS = {
    "Drain P2P": FaultLevel.SUB_HEALTH,
    "Drain and Reset": FaultLevel.SUB_HEALTH,
    "GPU Reset Required": FaultLevel.RESTART_NPU,
    "Node Reboot Required": FaultLevel.RESTART_NPU,
}

# A line of Ascend's driver: the word ERROR stands before the module that writes, or behind it.
_ASCEND = re.compile(r"\[ascend\] (?:\[ERROR\] )?\[(?P<module>\w+)\] (?:\[\w+\] )?\[\w+ \d+\] (?P<text>.*)")
_HEARTBEAT, _BLOCKED, _NOT_STARTED = "40F84E00", "NPU-PCIE-BLOCKED", "NPU-NOT-STARTED"
_NPU_LINES = (
    ("drv_soft_fault", r"Heartbeat lost! \(device(?:_id)?=(\d{1,4});", _HEARTBEAT, Assertion.OCCUR),
    ("dms_module", r"The device urgent heartbeat is lost! \(device=(\d{1,4})\)", _HEARTBEAT, Assertion.OCCUR),
    (
        "drv_soft_fault",  # it was lost before, and the device has been reset
        r"Heartbeat already initialized, just start it\. \(dev_id=(\d{1,4})\)",
        _HEARTBEAT,
        Assertion.RECOVER,
    ),
    ("drv_pcie", r"Channel is blocked\. \(dev_id=(\d{1,4});", _BLOCKED, Assertion.ONCE),
    ("drv_pcie", r"Device os load failed\. \(loader_devid=\d+; dev_id=(\d{1,4})\)", _NOT_STARTED, Assertion.ONCE),
)
_FAULT_MANAGER = "fault_manager"
_MANAGED = re.compile(
    r"event_id=0x(?P<code>[0-9a-fA-F]{4,8}); device_id=(?P<device>\d{1,4}); node_type=(?P<part>0x[0-9a-fA-F]+)\[.*?\];"
    r" node_id=(?P<node>\d+); sub_node_id=(?P<sub_node>\d+);.*?assertion=(?P<assertion>[012])\["
)
_ASSERTIONS = {"0": Assertion.RECOVER, "1": Assertion.OCCUR, "2": Assertion.ONCE}

_log = logging.getLogger(__name__)


class DriverEvent(msgspec.Struct, frozen=True):
    """One event of a driver.

    `place`: the GPU's or switch's on the bus, `0000:3b:00`; of an NPU its number, and the part where it is named.
    `level`: None where the table of codes has to say it. `device`: its number, where the driver names that.
    """

    code: str
    place: str
    text: str
    kind: FaultKind = FaultKind.DEVICE
    level: FaultLevel | None = None
    assertion: Assertion = Assertion.ONCE
    device: int | None = None


def parse_event(line: str) -> DriverEvent | None:
    """Return the event in a line of the kernel's log, None if it is about something else."""
    if found := _XID.search(line):
        code, place, text = f"XID{found['number']}", _place(found["place"]), found["text"].strip()
        if int(found["number"]) != _SUMMARY:
            return DriverEvent(code, place, text)
        changed = _ACTION.search(text)
        if changed and changed["action"] == "None":
            return DriverEvent(code, place, text, level=FaultLevel.NOT_HANDLE, assertion=Assertion.RECOVER)
        level = _ACTIONS.get(changed["action"]) if changed else None
        return DriverEvent(code, place, text, level=level, assertion=Assertion.OCCUR)
    if found := _SXID.search(line):
        text = found["text"].strip()
        level = FaultLevel.SEPARATE_NPU if text.startswith("Fatal") else FaultLevel.NOT_HANDLE
        return DriverEvent(f"SXID{found['number']}", _place(found["place"]), text, FaultKind.SWITCH, level)
    if found := _ASCEND.search(line):
        event = _npu_event(found["module"], found["text"].strip())
        return None if event is None or (event.device or 0) > MAX_DEVICE else event
    return None


def _npu_event(module: str, text: str) -> DriverEvent | None:
    if module == _FAULT_MANAGER:
        if not (found := _MANAGED.match(text)):
            return None
        device, part = int(found["device"]), f"{found['part']}.{found['node']}.{found['sub_node']}"
        assertion = _ASSERTIONS[found["assertion"]]
        return DriverEvent(found["code"].upper(), f"NPU {device} {part}", text, assertion=assertion, device=device)
    for written_by, pattern, code, assertion in _NPU_LINES:
        if module == written_by and (found := re.search(pattern, text)):
            device = int(found[1])
            return DriverEvent(code, f"NPU {device}", text, assertion=assertion, device=device)
    return None


def _place(text: str) -> str:
    """Return a place on the bus as the driver names its folders, without the function: `0000:3b:00`."""
    text = text.lower().partition(".")[0]
    return text if text.count(":") == 2 else f"0000:{text}"


def device_at(place: str, gpus: Path = GPUS) -> int | None:
    """Return the number that `nvidia-smi` gives the GPU at a place on the bus; None if there is no such GPU."""
    try:
        known = sorted(_place(each.name) for each in gpus.iterdir())
    except OSError:
        return None
    number = known.index(place) if place in known else None
    return None if number is None or number > MAX_DEVICE else number


class KernelLogDetector:
    """Reports each event that the drivers write from now on."""

    def __init__(self, name: str, node: str, gpus: Path = GPUS) -> None:
        """`node`: the job's name of this machine."""
        self._seen_by = detector_address(name)
        self._node = node
        self._gpus = gpus
        self._last: dict[tuple[str, str], float] = {}

    async def watch(self, report: Report) -> None:
        """Report what the kernel writes to its log from now on, until cancelled. Raises ConfigurationError."""
        log = open_kernel_log()
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(log, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                for line in new_records(log):
                    self.take(line, report, time.time())
        finally:
            loop.remove_reader(log)
            os.close(log)

    async def watch_lines(self, stream: asyncio.StreamReader, report: Report) -> None:
        """Report the events in lines of the kernel's log, until the stream ends."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the stream's limit: nothing that the driver writes
                continue
            if not line:
                return
            self.take(line.decode(errors="replace"), report, time.time())

    def take(self, line: str, report: Report, now: float) -> None:
        """Report the event in a line, if there is one, and the same has not just been reported."""
        event = parse_event(line)
        if event is None:
            return
        key = (event.code, f"{event.place} {event.assertion}")
        if now - self._last.get(key, -REPEATED_S) < REPEATED_S:
            return
        if len(self._last) >= MAX_REMEMBERED:
            self._last.clear()
        self._last[key] = now
        report(self._report(event, now))

    def _report(self, event: DriverEvent, now: float) -> FaultReport:
        device = event.device
        if device is None and event.kind is FaultKind.DEVICE:
            device = device_at(event.place, self._gpus)
        if device is None and event.kind is FaultKind.DEVICE:
            _log.warning("%s of the GPU at %s, which %s does not list: told of the node", event.code, event.place, GPUS)
        return FaultReport(
            kind=event.kind if device is not None or event.kind is FaultKind.SWITCH else FaultKind.NODE,
            at_s=now,
            seen_by=self._seen_by,
            detail=f"{event.place}: {event.text}"[:MAX_DETAIL],
            node=self._node,
            device=device,
            level=event.level or FaultLevel.SOFTWARE,
            code=event.code,
            fault_id=f"{event.code} {event.place}",
            assertion=event.assertion,
        )


def open_kernel_log(path: Path = KERNEL_LOG) -> int:
    """Return a descriptor of the kernel's log, behind all that it holds now. Raises ConfigurationError."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: the kernel's log cannot be read: {error.strerror}. Run this as root or with CAP_SYSLOG, or give "
            "its lines on standard input: `journalctl --dmesg --follow --lines 0 | midstep detect JOB --kernel-log -`."
        ) from error
    os.lseek(log, 0, os.SEEK_END)
    return log


def new_records(log: int) -> Iterator[str]:
    """Yield the records that have come to the kernel's log: each read returns one."""
    while True:
        try:
            record = os.read(log, MAX_RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # the kernel has overwritten what was not read yet; the next read goes on behind that
            _log.warning("the kernel's log was written faster than it was read: events may be missing")
            continue
        if not record:
            return
        yield record.decode(errors="replace").partition(";")[2]
