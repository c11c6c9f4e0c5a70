"""Parse MindCluster's documents: of a node's device plugin, of its node detector, and of ClusterD, which gathers them.

- `mindx-dl-deviceinfo-<node>` has faults of NPUs and switches under `DeviceInfoCfg`, `SwitchInfoCfg` and
  `ManuallySeparateNPU`. Values are JSON text, lists in them are text with commas, and the list of faults is JSON text
  once more. A fault entry can carry several codes; their levels and times are in `fault_time_and_level_map`.
- `mindx-dl-nodeinfo-<node>` has faults of parts that are not NPUs under `NodeInfo`; its codes share one level.
  Ranks do not compute on these parts, so each is a fault of the node.
- `cluster-info-device-<n>`, `cluster-info-switch-<n>` and `cluster-info-node-cm` hold, under a key of their own name,
  the contents of the ConfigMaps of many nodes, by the names of those. An empty one says that nothing is wrong.
- `reset-config-<job>` holds `reset.json`: the ranks of a job that ClusterD has found at fault.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec

from ..protocol.errors import DocumentError
from ..protocol.types import Assertion, FaultKind, FaultLevel
from . import reading as readings

PREFIX = "cluster-info-"
RESET = "reset.json"
OF_DEVICES, OF_NODES, OF_SWITCHES = "mindx-dl-deviceinfo-", "mindx-dl-nodeinfo-", "mindx-dl-switchinfo-"
_LEVELS = {
    "empty": FaultLevel.NOT_HANDLE,
    "ignore": FaultLevel.NOT_HANDLE,
    "restart_request": FaultLevel.RESTART_REQUEST,
    "restart": FaultLevel.RESTART_BUSINESS,
    "free_reset": FaultLevel.FREE_RESTART_NPU,
    "reset": FaultLevel.RESTART_NPU,
    "isolate": FaultLevel.SEPARATE_NPU,
}
_STATES = {
    "unrecovered": Assertion.OCCUR,
    "failed": Assertion.OCCUR,
    "recovered": Assertion.RECOVER,
}
NODE = "NodeInfo"
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


# --- of a node's device plugin --------------------------------------------------------------------------------------


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


def device_readings(text: str, node: str) -> tuple[readings.Reading, ...]:
    """Return the faults in the value of DeviceInfoCfg of `node`. Raises DocumentError."""
    info = readings.decoded(DEVICES, text, DeviceInfoCfg).DeviceInfo
    listed = info.DeviceList or {}
    for name in listed:
        if len(name) > readings.MAX_NAME:
            raise DocumentError(DEVICES, f"{readings.shown(name)} is longer than a key can be")
    explained = readings.bounded(DEVICES, _explained(listed, node, readings.seconds(info.UpdateTime)))
    devices = {reading.device for reading in explained}
    others = (
        _unexplained(node, device)
        for name, value in listed.items()
        if name.endswith(_UNHEALTHY)
        for device in _devices(f"{DEVICES}.DeviceInfo.DeviceList.{name}", value)
        if device not in devices
    )
    return readings.bounded(DEVICES, chain(explained, others))


def separated_readings(text: str, node: str) -> tuple[readings.Reading, ...]:
    """Return the devices that ManuallySeparateNPU of `node` lists. Raises DocumentError."""
    return readings.bounded(
        SEPARATED,
        (
            readings.Reading(
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


def switch_readings(text: str, node: str) -> tuple[readings.Reading, ...]:
    """Return the faults of the switches of `node`, from SwitchInfoCfg. Raises DocumentError."""
    return readings.bounded(SWITCHES, _of_switches(readings.decoded(SWITCHES, text, SwitchInfoCfg), node))


def _of_switches(info: SwitchInfoCfg, node: str) -> Iterator[readings.Reading]:
    levels = info.FaultTimeAndLevelMap or {}
    for index, entry in enumerate(info.FaultCode or ()):
        key = f"{SWITCHES}.FaultCode[{index}]"
        is_text = isinstance(entry, str)
        fault = readings.decoded(key, entry, SwitchFault) if is_text else readings.converted(key, entry, SwitchFault)
        if fault.Assertion not in _ASSERTIONS:
            raise DocumentError(f"{key}.Assertion", f"found {fault.Assertion}; known: 0 recover, 1 occur, 2 once")
        place = f"{fault.AssembledFaultCode}_{fault.SwitchChipId}_{fault.SwitchPortId}"
        known = levels.get(place) or levels.get(fault.AssembledFaultCode) or TimeAndLevel()
        level = readings.level_of(f"{SWITCHES}.FaultTimeAndLevelMap.{place[: readings.MAX_NAME]}", known.fault_level)
        yield readings.Reading(
            kind=FaultKind.SWITCH,
            fault_id=f"{node}/switch/{place}",
            node=node,
            code=fault.AssembledFaultCode,
            level=level or readings.level_of(f"{SWITCHES}.FaultLevel", info.FaultLevel),
            assertion=_ASSERTIONS[fault.Assertion],
            at_s=readings.seconds(fault.AlarmRaisedTime) or readings.seconds(known.fault_time),
            detail=f"switch chip {fault.SwitchChipId}, port {fault.SwitchPortId}",
        )


def _explained(listed: dict[str, str], node: str, updated_s: float) -> Iterator[readings.Reading]:
    """Yield the faults that have an entry."""
    for name, value in listed.items():
        if name.endswith(_FAULTS):
            key = f"{DEVICES}.DeviceInfo.DeviceList.{name}"
            for index, fault in enumerate(readings.decoded(key, value or "[]", list[DeviceFault])):
                yield from _of_entry(f"{key}[{index}]", fault, node, updated_s)


def _of_entry(key: str, fault: DeviceFault, node: str, updated_s: float) -> Iterator[readings.Reading]:
    """Yield a reading for each code of an entry; one for an entry without codes."""
    if fault.fault_type not in _KINDS:
        raise DocumentError(
            f"{key}.fault_type", f"found {readings.shown(fault.fault_type)}; known: {', '.join(_KINDS)}"
        )
    device = _device(f"{key}.npu_name", fault.npu_name) if fault.npu_name.strip() else None
    codes = [code.strip() for code in fault.fault_code.split(",") if code.strip()]
    codes = codes or list(fault.fault_time_and_level_map)
    worst = fault.fault_handling or fault.fault_level or fault.large_model_fault_level
    for code in codes or [""]:
        known = fault.fault_time_and_level_map.get(code, TimeAndLevel())
        level = readings.level_of(
            f"{key}.fault_time_and_level_map.{code[: readings.MAX_NAME]}.fault_level", known.fault_level
        )
        level = level or readings.level_of(f"{key}.fault_level", worst)
        if not code and level is None:
            raise DocumentError(key, "neither a fault_code nor a level")
        yield readings.Reading(
            kind=_KINDS[fault.fault_type],
            fault_id=f"{node}/{'node' if device is None else device}/{code or fault.fault_type}",
            node=node,
            device=device,
            code=code or None,
            level=level,
            at_s=readings.seconds(known.fault_time) or updated_s,
            detail=fault.fault_type,
        )


def _unexplained(node: str, device: int) -> readings.Reading:
    """Return the reading of a device that is listed as unhealthy without a fault: nothing new is placed on it."""
    return readings.Reading(
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
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 6) or int(digits) > readings.MAX_DEVICE:
        raise DocumentError(key, f"{readings.shown(name)} is not a valid name of a device, such as Ascend910-0")
    return int(digits)


# --- of its node detector -------------------------------------------------------------------------------------------


class FaultDevice(msgspec.Struct, frozen=True):
    """One entry of FaultDevList."""

    DeviceType: str
    FaultLevel: str
    DeviceId: int = 0
    FaultCode: list[str] | str = []


class NodeInfo(msgspec.Struct, frozen=True):
    """The value of NodeInfo, or of NodeInfo in it."""

    FaultDevList: list[FaultDevice] | None = None
    NodeStatus: str = ""


class Wrapped(msgspec.Struct, frozen=True):
    """The value as noded writes it: with a check code beside it."""

    NodeInfo: NodeInfo
    CheckCode: str = ""


def node_readings(text: str, node: str) -> tuple[readings.Reading, ...]:
    """Return the faults in the value of NodeInfo of `node`. Raises DocumentError."""
    tree: dict[str, Any] = readings.decoded(NODE, text, dict[str, Any])
    if NODE in tree:
        info, key = readings.decoded(NODE, text, Wrapped).NodeInfo, f"{NODE}.{NODE}"
    elif "FaultDevList" in tree or "NodeStatus" in tree:
        info, key = readings.decoded(NODE, text, NodeInfo), NODE
    else:
        raise DocumentError(NODE, "neither NodeInfo nor FaultDevList in it")
    return readings.bounded(NODE, _of_parts(key, info, node))


def _of_parts(key: str, info: NodeInfo, node: str) -> Iterator[readings.Reading]:
    """Yield a reading for each code of each part; one for a part without codes."""
    for index, part in enumerate(info.FaultDevList or ()):
        level = readings.level_of(f"{key}.FaultDevList[{index}].FaultLevel", part.FaultLevel)
        codes = [part.FaultCode] if isinstance(part.FaultCode, str) else part.FaultCode
        for code in [code.strip() for code in codes if code.strip()] or [""]:
            if not code and level is None:
                raise DocumentError(f"{key}.FaultDevList[{index}]", "neither a FaultCode nor a FaultLevel")
            yield readings.Reading(
                kind=FaultKind.NODE,
                fault_id=f"{node}/{part.DeviceType}/{part.DeviceId}/{code}",
                node=node,
                code=code or None,
                level=level,
                detail=f"{part.DeviceType} {part.DeviceId}"[: readings.MAX_TEXT],
            )


# --- of ClusterD ----------------------------------------------------------------------------------------------------


class RankFault(msgspec.Struct, frozen=True):
    """One entry of RankList of reset.json."""

    RankId: int
    LogicId: int = 0
    Status: str = "unrecovered"
    Policy: str = ""
    InitialPolicy: str = ""
    ErrorCode: list[int] | None = None
    ErrorCodeHex: str = ""


class ResetInfo(msgspec.Struct, frozen=True):
    """The value of reset.json."""

    RankList: list[RankFault] | None = None
    UpdateTime: float = 0


def cluster_readings(text: str, key: str, names: Mapping[str, str]) -> tuple[readings.Reading, ...]:
    """Return the faults of all nodes in the value of a cluster-info. `names`: as those of a document's own node.

    Raises DocumentError, with the name of the ConfigMap whose content is wrong.
    """
    if not text.strip():
        return ()
    return readings.bounded(key, _of_nodes(readings.decoded(key, text, dict[str, dict[str, Any]]), key, names))


def _of_nodes(content: dict[str, dict[str, Any]], key: str, names: Mapping[str, str]) -> Iterator[readings.Reading]:
    for name, value in content.items():
        where = f"{key}.{name[: readings.MAX_NAME]}"
        prefix = next((each for each in (OF_DEVICES, OF_NODES, OF_SWITCHES) if name.startswith(each)), None)
        if prefix is None:
            raise DocumentError(
                where, f"{readings.shown(name)} is no name of a node's ConfigMap, such as {OF_DEVICES}NODE"
            )
        node = readings.node_name(where, name.removeprefix(prefix))
        node = names.get(node, node)
        try:
            if prefix == OF_DEVICES:
                yield from device_readings(_text(value if "DeviceInfo" in value else {"DeviceInfo": value}), node)
            elif prefix == OF_SWITCHES:
                yield from switch_readings(_text(value), node)
            else:
                yield from node_readings(_text(value), node)
        except DocumentError as error:
            raise DocumentError(where, str(error)) from error


def reset_readings(text: str) -> tuple[readings.Reading, ...]:
    """Return the ranks at fault in the value of reset.json. Raises DocumentError."""
    return readings.bounded(RESET, _of_ranks(readings.decoded(RESET, text, ResetInfo)))


def _of_ranks(info: ResetInfo) -> Iterator[readings.Reading]:
    for index, entry in enumerate(info.RankList or ()):
        key = f"{RESET}.RankList[{index}]"
        if entry.RankId < 0:
            raise DocumentError(f"{key}.RankId", f"found {entry.RankId}; known: a rank of the job")
        if entry.Status not in _STATES:
            raise DocumentError(f"{key}.Status", f"found {readings.shown(entry.Status)}; known: {', '.join(_STATES)}")
        if entry.Policy not in _LEVELS:
            raise DocumentError(f"{key}.Policy", f"found {readings.shown(entry.Policy)}; known: {', '.join(_LEVELS)}")
        codes = [code.strip().upper() for code in entry.ErrorCodeHex.split(",") if code.strip()]
        for code in codes or [""]:
            yield readings.Reading(
                kind=FaultKind.DEVICE,
                fault_id=f"rank {entry.RankId}/{code or 'reset'}"[: readings.MAX_ID],
                node="",
                rank=entry.RankId,
                code=code or None,
                level=_LEVELS[entry.Policy],
                assertion=_STATES[entry.Status],
                at_s=readings.seconds(info.UpdateTime),
                detail=f"ClusterD: {entry.Status}, {entry.Policy}",
            )


def _text(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
