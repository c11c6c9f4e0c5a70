"""Parse a file into its fault documents. Pure: bytes and a path are arguments, documents are returned.

A file is raw JSON, a ConfigMap as `kubectl get -o yaml` or `-o json` prints it, a list of them, or one file of a
mounted ConfigMap.

Any program reports faults to MindCluster by a PublicFault. Unlike the other documents this is a message and not a
state: each fault says whether it occurs or recovers, and what is no longer in the document has not recovered. One fault
can have many devices on many nodes.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from ..protocol.compat import StrEnum
from ..protocol.errors import DocumentError, YamlError
from ..protocol.plain_yaml import read_yaml
from ..protocol.types import Assertion, FaultKind
from . import mindcluster
from .reading import (
    MAX_DEVICE,
    MAX_DOCUMENT_BYTES,
    MAX_NAME,
    MAX_TEXT,
    Reading,
    bounded,
    decoded,
    node_name,
    plain,
    seconds,
    shown,
)

# Prefixes of names that end in a node's name.
PUBLIC = "PublicFault"
PREFIXES = ("mindx-dl-deviceinfo-", "mindx-dl-nodeinfo-", "mindx-dl-switchinfo-")
_KUBERNETES = frozenset({"kind", "apiVersion", "data", "items"})
SUFFIXES = (".json", ".yaml", ".yml")
_LONGEST_ERROR = 1000
_log = logging.getLogger(__name__)
# A raw document has no key around it; these names identify it.
_IDENTIFYING = (
    (mindcluster.DEVICES, "DeviceInfo"),
    (mindcluster.NODE, mindcluster.NODE),
    (mindcluster.NODE, "FaultDevList"),
    (PUBLIC, "faults"),
    (mindcluster.RESET, "RankList"),
    (mindcluster.SWITCHES, "FaultCode"),
)
NO_SERIALS: Mapping[str, str] = MappingProxyType({})
_NAMES = {
    "node_name": "nodeName",
    "node_sn": "nodeSN",
    "device_ids": "deviceIds",
    "fault_id": "faultId",
    "fault_type": "faultType",
    "fault_code": "faultCode",
    "fault_time": "faultTime",
}


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


class Influence(msgspec.Struct, frozen=True, rename=_NAMES.get):
    """The place of a fault: devices of a node; none: the node."""

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


PARSERS: dict[str, Callable[[str, str], tuple[Reading, ...]]] = {
    mindcluster.DEVICES: mindcluster.device_readings,
    mindcluster.SWITCHES: mindcluster.switch_readings,
    mindcluster.SEPARATED: mindcluster.separated_readings,
    mindcluster.NODE: mindcluster.node_readings,
    PUBLIC: public_readings,
}


class Document(msgspec.Struct, frozen=True):
    """One document of a file: its readings, or its error.

    `snapshot`: it lists what is wrong now, so what is no longer in it has recovered.
    """

    name: str
    key: str
    readings: tuple[Reading, ...] = ()
    error: str = ""
    snapshot: bool = True


def documents_in(path: PurePath, data: bytes, serials: Mapping[str, str] = NO_SERIALS) -> tuple[Document, ...]:
    """Return every document in `data`, the bytes of the file at `path`. Never raises: errors are in the documents.

    An error in one document does not keep the others from being read. The work is bounded by the size of the file, the
    depth and number of its values, and the number of faults that one document can have. `serials`: the nodes of
    machines that a document names by their serial number, or as the cluster names them.
    """
    whole = displayed(str(path))
    try:
        pieces = list(_pieces(path, data))
    except DocumentError as error:
        return (Document(whole, error.key, error=_error_text(error)),)
    except Exception as error:  # a library may raise anything for malformed input: it must not end the watch
        _log.exception("cannot read %s", whole)
        return (Document(whole, "", error=_unexpected(error)),)
    found: dict[str, Document] = {}
    for piece in pieces:
        document = _invalid(whole, piece) if isinstance(piece, DocumentError) else _document(whole, piece, serials)
        if document.name in found:
            document = Document(document.name, document.key, error=f"{document.key}: is twice in the file")
        found[document.name] = document
    return tuple(found.values())


def displayed(name: str) -> str:
    """Format a file's name or path for messages: unprintable characters are escaped, so that no two look the same."""
    text = os.fsencode(name).replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in text)


def is_document(path: PurePath) -> bool:
    """Return whether a file of a watched directory is to be read, by its name."""
    name = path.name
    return not name.startswith(".") and (_is_key(name) or name.endswith(SUFFIXES) or name.startswith(PREFIXES))


def has_documents(data: Mapping[str, object]) -> bool:
    """Return whether a ConfigMap with this data is one of a detector."""
    return any(map(_is_key, data))


def _is_key(name: object) -> bool:
    """Return whether a document is known by this key."""
    return isinstance(name, str) and (
        name in PARSERS or name == mindcluster.RESET or name.startswith(mindcluster.PREFIX)
    )


class _Piece(NamedTuple):
    """A candidate for a document. `name`: of the ConfigMap or the file."""

    key: str
    value: Any
    name: str


def _pieces(path: PurePath, data: bytes) -> Iterator[_Piece | DocumentError]:
    """Yield candidates, and errors. Raises DocumentError when nothing of the file can be read."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DocumentError("", f"larger than {MAX_DOCUMENT_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError("", f"byte {error.start} is not UTF-8") from error
    if _is_key(path.name) and not path.name.startswith(mindcluster.PREFIX):
        yield _Piece(path.name, text, path.parent.name)
        return
    tree = _tree(text) if text.strip() or not path.name.startswith(mindcluster.PREFIX) else {}
    if path.name.startswith(mindcluster.PREFIX) and isinstance(tree, dict) and not _KUBERNETES & tree.keys():
        yield _Piece(_stem(path.name), tree, _stem(path.name))  # raw, or of a mounted ConfigMap
        return
    if not isinstance(tree, dict):
        raise DocumentError("", f"found {shown(tree)}; known: a ConfigMap or a JSON document")
    items, kind = tree.get("items"), tree.get("kind")
    if not (isinstance(items, list) and isinstance(kind, str) and kind.endswith("List")):
        yield from _of_object(tree, _stem(path.name))
        return
    if not items:
        raise DocumentError("items", "found nothing; known: ConfigMaps")
    for index, item in enumerate(items):
        where = f"items[{index}]"
        try:
            if not isinstance(item, dict):
                raise DocumentError("", f"found {shown(item)}; known: a ConfigMap")
            yield from list(_of_object(item, _stem(path.name)))
        except DocumentError as error:
            yield DocumentError(where, str(error))


def _of_object(tree: dict[Any, Any], name: str) -> Iterator[_Piece]:
    """Yield the candidates in one object. Raises DocumentError when there are none."""
    if tree.get("kind") == "ConfigMap" or isinstance(tree.get("data"), dict):
        metadata = tree.get("metadata")
        named = metadata.get("name") if isinstance(metadata, dict) else None
        if named is not None and not (isinstance(named, str) and len(named) <= MAX_NAME):
            raise DocumentError("metadata.name", f"found {shown(named)}; known: up to {MAX_NAME} characters")
        yield from _known(tree.get("data"), named or name, "data")
        return
    if any(
        _is_key(key) and isinstance(value, str | dict | list) for key, value in tree.items() if key != mindcluster.NODE
    ):
        yield from _known(tree, name, "")
        return
    for key, name_in_it in _IDENTIFYING:
        if name_in_it in tree:
            yield _Piece(key, tree, name)
            return
    raise DocumentError("", f"not a known document; known: {', '.join(PARSERS)}")


def _known(data: Any, name: str, where: str) -> Iterator[_Piece]:
    if not isinstance(data, dict):
        raise DocumentError(where, f"found {shown(data)}; known: a mapping with {', '.join(PARSERS)}")
    known = [_Piece(key, value, name) for key, value in data.items() if _is_key(key)]
    if not known:
        raise DocumentError(where, f"has none of {', '.join(PARSERS)}, {mindcluster.PREFIX}*, {mindcluster.RESET}")
    yield from known


def _document(whole: str, piece: _Piece, serials: Mapping[str, str]) -> Document:
    key, value, name = piece
    snapshot = key != PUBLIC
    whole = f"{whole}:{displayed(name)}:{key}"
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        readings = _readings(key, text, name, serials)
        return Document(whole, key, readings, snapshot=snapshot)
    except DocumentError as error:
        return Document(whole, plain(error.key) or key, error=_error_text(error), snapshot=snapshot)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return Document(whole, key, error=plain(f"{key}: {error}"), snapshot=snapshot)
    except Exception as error:  # as above
        _log.exception("cannot read %s", whole)
        return Document(whole, key, error=_unexpected(error), snapshot=snapshot)


def _readings(key: str, text: str, name: str, names: Mapping[str, str]) -> tuple[Reading, ...]:
    """Return the faults in the value of a key. Raises DocumentError, and what a parser raises for malformed input."""
    if key == PUBLIC:
        return public_readings(text, "", names)
    if key == mindcluster.RESET:
        return mindcluster.reset_readings(text)
    if key.startswith(mindcluster.PREFIX):
        return mindcluster.cluster_readings(text, key, names)
    node = _node(name)
    return PARSERS[key](text, names.get(node, node))


def _invalid(whole: str, error: DocumentError) -> Document:
    return Document(f"{whole}:{error.key}", error.key, error=_error_text(error))


def _error_text(error: DocumentError) -> str:
    return plain(str(error), _LONGEST_ERROR)


def _unexpected(error: Exception) -> str:
    return plain(f"cannot be read: {type(error).__name__}: {error}", _LONGEST_ERROR)


def _node(name: str) -> str:
    """Return the node in the name of a ConfigMap, its mount or its file."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return node_name("metadata.name", name.removeprefix(prefix))
    known = " or ".join(f"{prefix}NODE" for prefix in PREFIXES[:2])
    raise DocumentError("metadata.name", f"{shown(name)} names no node; known: {known}")


def _stem(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def _tree(text: str) -> Any:
    """Parse JSON or YAML text into plain values."""
    if text.lstrip()[:1] in {"{", "["}:
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DocumentError("", f"not JSON: {' '.join(str(error).split())}") from error
    try:
        return read_yaml(text)
    except YamlError as error:
        raise DocumentError("", f"not YAML: {error}") from error
