"""Parse the documents of a node's device plugin, `mindx-dl-deviceinfo-<node>`: faults of NPUs and of switches.

The ConfigMap has the keys `DeviceInfoCfg`, `SwitchInfoCfg` and `ManuallySeparateNPU`. Values are JSON text, lists in
them are text with commas, and the list of faults is JSON text once more. A fault entry can carry several codes; their
levels and times are in `fault_time_and_level_map`.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from ..protocol.errors import DocumentError
from ..protocol.types import Assertion, FaultKind, FaultLevel
from .reading import MAX_DEVICE, MAX_NAME, Reading, bounded, converted, decoded, level_of, seconds, shown

DEVICES = "DeviceInfoCfg"
SWITCHES = "SwitchInfoCfg"
SEPARATED = "ManuallySeparateNPU"

_FAULTS = "-Fault"
_UNHEALTHY = "-Unhealthy"
_ASSERTIONS = {0: Assertion.RECOVER, 1: Assertion.OCCUR, 2: Assertion.ONCE}
_KINDS = {
    "CardUnhealthy": FaultKind.DEVICE,
    "CardNetworkUnhealthy": FaultKind.NETWORK,
    "NodeUnhealthy": FaultKind.NODE,
    "PublicFault": FaultKind.DEVICE,
}


class TimeAndLevel(msgspec.Struct, frozen=True):
    """Time and level of one code."""

    fault_time: float = 0
    fault_level: str = ""


class DeviceFault(msgspec.Struct, frozen=True):
    """One entry of `huawei.com/<device>-Fault`."""

    fault_type: str = "CardUnhealthy"
    npu_name: str = ""
    large_model_fault_level: str = ""
    fault_level: str = ""
    fault_handling: str = ""
    fault_code: str = ""
    fault_time_and_level_map: dict[str, TimeAndLevel] = {}


class DeviceInfo(msgspec.Struct, frozen=True):
    """`DeviceInfo` of DeviceInfoCfg."""

    DeviceList: dict[str, str] | None
    UpdateTime: float = 0


class DeviceInfoCfg(msgspec.Struct, frozen=True):
    """The value of DeviceInfoCfg."""

    DeviceInfo: DeviceInfo


class SwitchFault(msgspec.Struct, frozen=True):
    """One entry of FaultCode of SwitchInfoCfg."""

    AssembledFaultCode: str
    SwitchChipId: int = 0
    SwitchPortId: int = 0
    Assertion: int = 1
    AlarmRaisedTime: float = 0


class SwitchInfoCfg(msgspec.Struct, frozen=True):
    """The value of SwitchInfoCfg. Entries of FaultCode are JSON text; objects are understood, too."""

    FaultCode: list[Any] | None = None
    FaultLevel: str = ""
    UpdateTime: float = 0
    NodeStatus: str = ""
    FaultTimeAndLevelMap: dict[str, TimeAndLevel] | None = None


def device_readings(text: str, node: str) -> tuple[Reading, ...]:
    """Return the faults in the value of DeviceInfoCfg of `node`. Raises DocumentError."""
    info = decoded(DEVICES, text, DeviceInfoCfg).DeviceInfo
    listed = info.DeviceList or {}
    for name in listed:
        if len(name) > MAX_NAME:
            raise DocumentError(DEVICES, f"{shown(name)} is longer than a key can be")
    explained = bounded(DEVICES, _explained(listed, node, seconds(info.UpdateTime)))
    devices = {reading.device for reading in explained}
    others = (
        _unexplained(node, device)
        for name, value in listed.items()
        if name.endswith(_UNHEALTHY)
        for device in _devices(f"{DEVICES}.DeviceInfo.DeviceList.{name}", value)
        if device not in devices
    )
    return bounded(DEVICES, chain(explained, others))


def separated_readings(text: str, node: str) -> tuple[Reading, ...]:
    """Return the devices that ManuallySeparateNPU of `node` lists. Raises DocumentError."""
    return bounded(
        SEPARATED,
        (
            Reading(
                kind=FaultKind.DEVICE,
                fault_id=f"{node}/{device}/{SEPARATED}",
                node=node,
                device=device,
                level=FaultLevel.MANUALLY_SEPARATE_NPU,
                detail="separated by an operator, until an operator takes it back",
            )
            for device in _devices(SEPARATED, text)
        ),
    )


def switch_readings(text: str, node: str) -> tuple[Reading, ...]:
    """Return the faults of the switches of `node`, from SwitchInfoCfg. Raises DocumentError."""
    return bounded(SWITCHES, _of_switches(decoded(SWITCHES, text, SwitchInfoCfg), node))


def _of_switches(info: SwitchInfoCfg, node: str) -> Iterator[Reading]:
    levels = info.FaultTimeAndLevelMap or {}
    for index, entry in enumerate(info.FaultCode or ()):
        key = f"{SWITCHES}.FaultCode[{index}]"
        is_text = isinstance(entry, str)
        fault = decoded(key, entry, SwitchFault) if is_text else converted(key, entry, SwitchFault)
        if fault.Assertion not in _ASSERTIONS:
            raise DocumentError(f"{key}.Assertion", f"found {fault.Assertion}; known: 0 recover, 1 occur, 2 once")
        place = f"{fault.AssembledFaultCode}_{fault.SwitchChipId}_{fault.SwitchPortId}"
        known = levels.get(place) or levels.get(fault.AssembledFaultCode) or TimeAndLevel()
        level = level_of(f"{SWITCHES}.FaultTimeAndLevelMap.{place[:MAX_NAME]}", known.fault_level)
        yield Reading(
            kind=FaultKind.SWITCH,
            fault_id=f"{node}/switch/{place}",
            node=node,
            code=fault.AssembledFaultCode,
            level=level or level_of(f"{SWITCHES}.FaultLevel", info.FaultLevel),
            assertion=_ASSERTIONS[fault.Assertion],
            at_s=seconds(fault.AlarmRaisedTime) or seconds(known.fault_time),
            detail=f"switch chip {fault.SwitchChipId}, port {fault.SwitchPortId}",
        )


def _explained(listed: dict[str, str], node: str, updated_s: float) -> Iterator[Reading]:
    """Yield the faults that have an entry."""
    for name, value in listed.items():
        if name.endswith(_FAULTS):
            key = f"{DEVICES}.DeviceInfo.DeviceList.{name}"
            for index, fault in enumerate(decoded(key, value or "[]", list[DeviceFault])):
                yield from _of_entry(f"{key}[{index}]", fault, node, updated_s)


def _of_entry(key: str, fault: DeviceFault, node: str, updated_s: float) -> Iterator[Reading]:
    """Yield a reading for each code of an entry; one for an entry without codes."""
    if fault.fault_type not in _KINDS:
        raise DocumentError(f"{key}.fault_type", f"found {shown(fault.fault_type)}; known: {', '.join(_KINDS)}")
    device = _device(f"{key}.npu_name", fault.npu_name) if fault.npu_name.strip() else None
    codes = [code.strip() for code in fault.fault_code.split(",") if code.strip()]
    codes = codes or list(fault.fault_time_and_level_map)
    worst = fault.fault_handling or fault.fault_level or fault.large_model_fault_level
    for code in codes or [""]:
        known = fault.fault_time_and_level_map.get(code, TimeAndLevel())
        level = level_of(f"{key}.fault_time_and_level_map.{code[:MAX_NAME]}.fault_level", known.fault_level)
        level = level or level_of(f"{key}.fault_level", worst)
        if not code and level is None:
            raise DocumentError(key, "neither a fault_code nor a level")
        yield Reading(
            kind=_KINDS[fault.fault_type],
            fault_id=f"{node}/{'node' if device is None else device}/{code or fault.fault_type}",
            node=node,
            device=device,
            code=code or None,
            level=level,
            at_s=seconds(known.fault_time) or updated_s,
            detail=fault.fault_type,
        )


def _unexplained(node: str, device: int) -> Reading:
    """Return the reading of a device that is listed as unhealthy without a fault: nothing new is placed on it."""
    return Reading(
        kind=FaultKind.DEVICE,
        fault_id=f"{node}/{device}/unhealthy",
        node=node,
        device=device,
        level=FaultLevel.PRE_SEPARATE_NPU,
        detail="listed as unhealthy, without a fault",
    )


def _devices(key: str, text: str) -> Iterator[int]:
    return (_device(key, name) for name in text.split(",") if name.strip())


def _device(key: str, name: str) -> int:
    """Return the number of a device from its name: `Ascend910-3` is 3."""
    digits = name.strip().rpartition("-")[2]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 6) or int(digits) > MAX_DEVICE:
        raise DocumentError(key, f"{shown(name)} is not a valid name of a device, such as Ascend910-0")
    return int(digits)
