"""Parse the document of a node's own detector, `mindx-dl-nodeinfo-<node>`: faults of parts that are not NPUs.

The key is `NodeInfo`. A part can have several codes, which share one level. Ranks do not compute on these parts, so
each is a fault of the node.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from ..protocol.errors import DocumentError
from ..protocol.types import FaultKind
from .reading import MAX_TEXT, Reading, bounded, decoded, level_of

NODE = "NodeInfo"


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


def node_readings(text: str, node: str) -> tuple[Reading, ...]:
    """Return the faults in the value of NodeInfo of `node`. Raises DocumentError."""
    tree: dict[str, Any] = decoded(NODE, text, dict[str, Any])
    if NODE in tree:
        info, key = decoded(NODE, text, Wrapped).NodeInfo, f"{NODE}.{NODE}"
    elif "FaultDevList" in tree or "NodeStatus" in tree:
        info, key = decoded(NODE, text, NodeInfo), NODE
    else:
        raise DocumentError(NODE, "neither NodeInfo nor FaultDevList in it")
    return bounded(NODE, _of_parts(key, info, node))


def _of_parts(key: str, info: NodeInfo, node: str) -> Iterator[Reading]:
    """Yield a reading for each code of each part; one for a part without codes."""
    for index, part in enumerate(info.FaultDevList or ()):
        level = level_of(f"{key}.FaultDevList[{index}].FaultLevel", part.FaultLevel)
        codes = [part.FaultCode] if isinstance(part.FaultCode, str) else part.FaultCode
        for code in [code.strip() for code in codes if code.strip()] or [""]:
            if not code and level is None:
                raise DocumentError(f"{key}.FaultDevList[{index}]", "neither a FaultCode nor a FaultLevel")
            yield Reading(
                kind=FaultKind.NODE,
                fault_id=f"{node}/{part.DeviceType}/{part.DeviceId}/{code}",
                node=node,
                code=code or None,
                level=level,
                detail=f"{part.DeviceType} {part.DeviceId}"[:MAX_TEXT],
            )
