"""From a file to the documents in it. Pure: bytes and a path in, documents out.

A file is raw JSON, a ConfigMap as `kubectl get -o yaml` or `-o json` prints it, a list of them, or one file of a
mounted ConfigMap.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import msgspec
import yaml

from ..protocol.errors import DocumentError
from .device_info import DEVICES, SEPARATED, SWITCHES, device_readings, separated_readings, switch_readings
from .node_info import NODE, node_readings
from .public_fault import NO_SERIALS, PUBLIC, public_readings
from .reading import MAX_DOCUMENT_BYTES, Reading, node_name, shown

PARSERS: dict[str, Callable[[str, str], tuple[Reading, ...]]] = {
    DEVICES: device_readings,
    SWITCHES: switch_readings,
    SEPARATED: separated_readings,
    NODE: node_readings,
    PUBLIC: public_readings,
}
# What a name that is followed by a node's name begins with.
PREFIXES = ("mindx-dl-deviceinfo-", "mindx-dl-nodeinfo-", "mindx-dl-switchinfo-")
MAX_DEPTH = 64
SUFFIXES = (".json", ".yaml", ".yml")

# A raw document has no key around it; these names tell which one it is.
_TELLING = ((DEVICES, "DeviceInfo"), (NODE, NODE), (NODE, "FaultDevList"), (PUBLIC, "faults"), (SWITCHES, "FaultCode"))


class Document(msgspec.Struct, frozen=True):
    """One document of a file: its readings, or what is wrong with it.

    `snapshot`: it says what is, so what is no longer in it has recovered.
    """

    name: str
    key: str
    readings: tuple[Reading, ...] = ()
    error: str = ""
    snapshot: bool = True


def documents_in(path: PurePath, data: bytes, serials: Mapping[str, str] = NO_SERIALS) -> tuple[Document, ...]:
    """Return every document of the file at `path` that has `data`. Never raises: mistakes are documents, too.

    `serials`: the nodes of machines that a document may name by their serial number.
    """
    try:
        pieces = list(_pieces(path, data))
    except DocumentError as error:
        return (Document(str(path), error.key, error=str(error)),)
    return tuple(_document(path, key, value, name, serials) for key, value, name in pieces)


def is_document(path: PurePath) -> bool:
    """Say whether a file of a watched directory is to be looked at, by its name."""
    name = path.name
    return not name.startswith(".") and (name in PARSERS or name.endswith(SUFFIXES) or name.startswith(PREFIXES))


_Piece = tuple[str, Any, str]  # (key, value, name of the ConfigMap or file)


def _pieces(path: PurePath, data: bytes) -> Iterator[_Piece]:
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DocumentError("", f"larger than {MAX_DOCUMENT_BYTES} bytes, which no document is")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError("", f"byte {error.start} is not UTF-8") from error
    if path.name in PARSERS:
        yield path.name, text, path.parent.name
        return
    tree = _tree(text)
    if not isinstance(tree, dict):
        raise DocumentError("", f"found {shown(tree)}; known: a ConfigMap or a JSON document")
    yield from _of_object(tree, _stem(path.name))


def _of_object(tree: dict[Any, Any], name: str) -> Iterator[_Piece]:
    items = tree.get("items")
    if isinstance(items, list) and str(tree.get("kind", "")).endswith("List"):
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                raise DocumentError(f"items[{index}]", f"found {shown(item)}; known: a ConfigMap")
            yield from _of_object(item, name)
        return
    if tree.get("kind") == "ConfigMap" or isinstance(tree.get("data"), dict):
        metadata = tree.get("metadata")
        named = metadata.get("name") if isinstance(metadata, dict) else None
        yield from _known(tree.get("data"), str(named or name), "data")
        return
    if any(key in PARSERS and isinstance(value, str | dict | list) for key, value in tree.items() if key != NODE):
        yield from _known(tree, name, "")
        return
    for key, telling in _TELLING:
        if telling in tree:
            yield key, tree, name
            return
    raise DocumentError("", f"none of the documents that are known: {', '.join(PARSERS)}")


def _known(data: Any, name: str, where: str) -> Iterator[_Piece]:
    if not isinstance(data, dict):
        raise DocumentError(where, f"found {shown(data)}; known: a mapping with {', '.join(PARSERS)}")
    known = [(key, value, name) for key, value in data.items() if key in PARSERS]
    if not known:
        raise DocumentError(where, f"has none of {', '.join(PARSERS)}")
    yield from known


def _document(path: PurePath, key: str, value: Any, name: str, serials: Mapping[str, str]) -> Document:
    snapshot = key != PUBLIC
    whole = f"{path}:{name}:{key}"
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        readings = public_readings(text, "", serials) if key == PUBLIC else PARSERS[key](text, _node(name))
        return Document(whole, key, readings, snapshot=snapshot)
    except DocumentError as error:
        return Document(whole, error.key or key, error=str(error), snapshot=snapshot)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return Document(whole, key, error=f"{key}: {error}", snapshot=snapshot)


def _node(name: str) -> str:
    """Return the node that a ConfigMap, its mount or its file is named for."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return node_name("metadata.name", name.removeprefix(prefix))
    known = " or ".join(f"{prefix}NODE" for prefix in PREFIXES[:2])
    raise DocumentError("metadata.name", f"{shown(name)} names no node; known: {known}")


def _stem(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def _tree(text: str) -> Any:
    """Return the plain values of JSON or YAML text."""
    if text.lstrip()[:1] in {"{", "["}:
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DocumentError("", f"not JSON: {' '.join(str(error).split())}") from error
    try:
        _refuse_tricks(text)
        return yaml.load(text, Loader=_LOADER)  # a safe loader, in C where there is one
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise DocumentError("", f"not YAML: {' '.join(str(error).split())}") from error


def _refuse_tricks(text: str) -> None:
    """Refuse what YAML can do and no ConfigMap does, before anything is built of it: aliases, and deep nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise DocumentError("", "has YAML aliases, which no ConfigMap needs")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise DocumentError("", f"is nested deeper than {MAX_DEPTH} levels")


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
