"""Parse PublicFault documents, by which any program reports faults to MindCluster.

Unlike the other documents this is a message and not a state: each fault says whether it occurs or recovers, and what is
no longer in the document has not recovered. One fault can have many devices on many nodes.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec

from ..protocol.compat import StrEnum
from ..protocol.errors import DocumentError
from ..protocol.types import Assertion, FaultKind
from .reading import MAX_DEVICE, MAX_TEXT, Reading, bounded, decoded, node_name, seconds, shown

PUBLIC = "PublicFault"
NO_SERIALS: Mapping[str, str] = MappingProxyType({})


class FaultType(StrEnum):
    """The part of the cluster that a public fault affects."""

    NPU = "NPU"
    NODE = "Node"
    NETWORK = "Network"
    STORAGE = "Storage"


_KINDS = {
    FaultType.NPU: FaultKind.DEVICE,
    FaultType.NODE: FaultKind.NODE,
    FaultType.NETWORK: FaultKind.NETWORK,
    FaultType.STORAGE: FaultKind.STORAGE,
}

_NAMES = {
    "node_name": "nodeName",
    "node_sn": "nodeSN",
    "device_ids": "deviceIds",
    "fault_id": "faultId",
    "fault_type": "faultType",
    "fault_code": "faultCode",
    "fault_time": "faultTime",
}


class Influence(msgspec.Struct, frozen=True, rename=_NAMES.get):
    """Where a fault is: devices of a node; none: the node."""

    node_name: str = ""
    node_sn: str = ""
    device_ids: list[int] = []


class Fault(msgspec.Struct, frozen=True, rename=_NAMES.get):
    """One fault of the message."""

    fault_id: str
    fault_type: FaultType
    fault_code: str
    fault_time: float
    assertion: Assertion
    influence: list[Influence]
    description: str = ""


class Message(msgspec.Struct, frozen=True):
    """The whole document."""

    id: str
    timestamp: float
    version: str
    resource: str
    faults: list[Fault]


def public_readings(text: str, node: str = "", serials: Mapping[str, str] = NO_SERIALS) -> tuple[Reading, ...]:
    """Return the faults of a PublicFault document; it names its nodes, so `node` is unused. Raises DocumentError.

    `serials`: the nodes of machines that are named by their serial number only.
    """
    return bounded(PUBLIC, _of_message(decoded(PUBLIC, text, Message), serials))


def _of_message(message: Message, serials: Mapping[str, str]) -> Iterator[Reading]:
    for index, fault in enumerate(message.faults):
        key = f"{PUBLIC}.faults[{index}]"
        if not fault.fault_code.strip():
            raise DocumentError(f"{key}.faultCode", "is empty")
        detail = ": ".join(part[:MAX_TEXT] for part in (message.resource, fault.description) if part)[:MAX_TEXT]
        for number, place in enumerate(fault.influence):
            yield from _at(f"{key}.influence[{number}]", fault, place, detail, serials)


def _at(key: str, fault: Fault, place: Influence, detail: str, serials: Mapping[str, str]) -> Iterator[Reading]:
    name = node_name(f"{key}.nodeName", place.node_name) if place.node_name else _by_serial(key, place, serials)
    name = serials.get(name, name)
    if not all(0 <= device <= MAX_DEVICE for device in place.device_ids):
        raise DocumentError(f"{key}.deviceIds", f"found a number out of range; known: 0 to {MAX_DEVICE}")
    # A fault of a network or of storage is one of its devices where they are named.
    devices: list[int | None] = [*place.device_ids] or [None]
    if fault.fault_type is FaultType.NODE:
        devices = [None]
    for device in devices:
        yield Reading(
            kind=_KINDS[fault.fault_type],
            fault_id=f"{fault.fault_id}/{name}/{'node' if device is None else device}",
            node=name,
            device=device,
            code=fault.fault_code,
            assertion=fault.assertion,
            at_s=seconds(fault.fault_time),
            detail=detail,
        )


def _by_serial(key: str, place: Influence, serials: Mapping[str, str]) -> str:
    """Return the node whose machine has the serial number."""
    if not place.node_sn:
        raise DocumentError(f"{key}.nodeName", "is missing, and so is nodeSN")
    name = serials.get(place.node_sn)
    if name is None:
        known = "name its node in faults.node_serials of the policy, or with midstep detect --serial SN=NODE"
        raise DocumentError(f"{key}.nodeSN", f"no node is known by the serial number {shown(place.node_sn)}; {known}")
    return node_name(f"{key}.nodeSN", name)
