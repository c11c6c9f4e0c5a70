"""Parse the documents of ClusterD: what all nodes' detectors say, gathered, and what becomes of a job's ranks.

`cluster-info-device-<n>`, `cluster-info-switch-<n>` and `cluster-info-node-cm` hold, under a key of their own name, the
contents of the ConfigMaps of many nodes, by the names of those. `reset-config-<job>` holds `reset.json`: the ranks of a
job that ClusterD has found at fault. A cluster-info that is empty says that nothing is wrong.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..protocol.errors import DocumentError
from ..protocol.types import Assertion, FaultKind, FaultLevel
from .device_info import device_readings, switch_readings
from .node_info import node_readings
from .reading import MAX_ID, MAX_NAME, Reading, bounded, decoded, node_name, seconds, shown

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


def cluster_readings(text: str, key: str, names: Mapping[str, str]) -> tuple[Reading, ...]:
    """Return the faults of all nodes in the value of a cluster-info. `names`: as those of a document's own node.

    Raises DocumentError, with the name of the ConfigMap whose content is wrong.
    """
    if not text.strip():
        return ()
    return bounded(key, _of_nodes(decoded(key, text, dict[str, dict[str, Any]]), key, names))


def _of_nodes(content: dict[str, dict[str, Any]], key: str, names: Mapping[str, str]) -> Iterator[Reading]:
    for name, value in content.items():
        where = f"{key}.{name[:MAX_NAME]}"
        prefix = next((each for each in (OF_DEVICES, OF_NODES, OF_SWITCHES) if name.startswith(each)), None)
        if prefix is None:
            raise DocumentError(where, f"{shown(name)} is no name of a node's ConfigMap, such as {OF_DEVICES}NODE")
        node = node_name(where, name.removeprefix(prefix))
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


def reset_readings(text: str) -> tuple[Reading, ...]:
    """Return the ranks at fault in the value of reset.json. Raises DocumentError."""
    return bounded(RESET, _of_ranks(decoded(RESET, text, ResetInfo)))


def _of_ranks(info: ResetInfo) -> Iterator[Reading]:
    for index, entry in enumerate(info.RankList or ()):
        key = f"{RESET}.RankList[{index}]"
        if entry.RankId < 0:
            raise DocumentError(f"{key}.RankId", f"found {entry.RankId}; known: a rank of the job")
        if entry.Status not in _STATES:
            raise DocumentError(f"{key}.Status", f"found {shown(entry.Status)}; known: {', '.join(_STATES)}")
        if entry.Policy not in _LEVELS:
            raise DocumentError(f"{key}.Policy", f"found {shown(entry.Policy)}; known: {', '.join(_LEVELS)}")
        codes = [code.strip().upper() for code in entry.ErrorCodeHex.split(",") if code.strip()]
        for code in codes or [""]:
            yield Reading(
                kind=FaultKind.DEVICE,
                fault_id=f"rank {entry.RankId}/{code or 'reset'}"[:MAX_ID],
                node="",
                rank=entry.RankId,
                code=code or None,
                level=_LEVELS[entry.Policy],
                assertion=_STATES[entry.Status],
                at_s=seconds(info.UpdateTime),
                detail=f"ClusterD: {entry.Status}, {entry.Policy}",
            )


def _text(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
