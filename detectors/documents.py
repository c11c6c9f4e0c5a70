"""Parse a file into its fault documents. Pure: bytes and a path are arguments, documents are returned.

A file is raw JSON, a ConfigMap as `kubectl get -o yaml` or `-o json` prints it, a list of them, or one file of a
mounted ConfigMap.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec

from ..protocol.errors import DocumentError, YamlError
from ..protocol.plain_yaml import read_yaml
from .cluster_info import PREFIX, RESET, cluster_readings, reset_readings
from .device_info import DEVICES, SEPARATED, SWITCHES, device_readings, separated_readings, switch_readings
from .node_info import NODE, node_readings
from .public_fault import NO_SERIALS, PUBLIC, public_readings
from .reading import MAX_DOCUMENT_BYTES, MAX_NAME, Reading, node_name, plain, shown

PARSERS: dict[str, Callable[[str, str], tuple[Reading, ...]]] = {
    DEVICES: device_readings,
    SWITCHES: switch_readings,
    SEPARATED: separated_readings,
    NODE: node_readings,
    PUBLIC: public_readings,
}
# Prefixes of names that end in a node's name.
PREFIXES = ("mindx-dl-deviceinfo-", "mindx-dl-nodeinfo-", "mindx-dl-switchinfo-")
_KUBERNETES = frozenset({"kind", "apiVersion", "data", "items"})
SUFFIXES = (".json", ".yaml", ".yml")
_LONGEST_ERROR = 1000

_log = logging.getLogger(__name__)

# A raw document has no key around it; these names identify it.
_IDENTIFYING = (
    (DEVICES, "DeviceInfo"),
    (NODE, NODE),
    (NODE, "FaultDevList"),
    (PUBLIC, "faults"),
    (RESET, "RankList"),
    (SWITCHES, "FaultCode"),
)


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
    return isinstance(name, str) and (name in PARSERS or name == RESET or name.startswith(PREFIX))


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
    if _is_key(path.name) and not path.name.startswith(PREFIX):
        yield _Piece(path.name, text, path.parent.name)
        return
    tree = _tree(text) if text.strip() or not path.name.startswith(PREFIX) else {}
    if path.name.startswith(PREFIX) and isinstance(tree, dict) and not _KUBERNETES & tree.keys():
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
    if any(_is_key(key) and isinstance(value, str | dict | list) for key, value in tree.items() if key != NODE):
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
        raise DocumentError(where, f"has none of {', '.join(PARSERS)}, {PREFIX}*, {RESET}")
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
    if key == RESET:
        return reset_readings(text)
    if key.startswith(PREFIX):
        return cluster_readings(text, key, names)
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
