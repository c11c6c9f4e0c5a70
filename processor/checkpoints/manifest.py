"""What a complete checkpoint consists of, as its manifest says: nothing in it is believed that could not be true.

A manifest names files, so each name must be one that midstep gives, and the ranks' local states must be those of its
world, no more and no fewer.
"""

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from ...protocol.errors import CheckpointError
from .files import MANIFEST, MOST_MANIFEST_BYTES, is_part, read_small

FORMAT = 1
MOST_RANKS = 1 << 20
MOST_STEPS = 10**15
MOST_OWN_BYTES = 1 << 30  # no black box is larger

Record = TypeVar("Record")


class Part(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
    checksum: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # xxh3, 64 bit, hexadecimal


class Manifest(msgspec.Struct, frozen=True):
    """What a complete checkpoint consists of."""

    format: int
    step: Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    parts: dict[str, Part]


def step_directory(directory: str | Path, step: int) -> Path:
    """Return where the complete checkpoint of `step` lies."""
    return Path(directory) / f"step-{step:08d}"


def own_name(rank: int) -> str:
    """Return the name of the file of a rank's local state."""
    return f"own-{rank}.bin"


def read_manifest(place: Path) -> Manifest:
    """Return the manifest of the checkpoint in a directory. Raises OSError, CheckpointError where it is damaged."""
    path = place / MANIFEST
    manifest = read_record(path, Manifest, MOST_MANIFEST_BYTES)
    wrong = _wrong(manifest, place)
    if wrong:
        raise CheckpointError(f"{path} is damaged: {wrong}")
    return manifest


def read_record(path: Path, kind: type[Record], most_bytes: int) -> Record:
    """Return what a file of JSON holds. Raises OSError, CheckpointError where it is damaged."""
    try:
        return msgspec.json.decode(read_small(path, most_bytes), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _wrong(manifest: Manifest, place: Path) -> str:
    if manifest.format != FORMAT:
        return f"it has format {manifest.format}, and this version reads format {FORMAT}"
    if step_directory(place.parent, manifest.step) != place:
        return f"it is that of step {manifest.step}"
    foreign = next((name for name in manifest.parts if not is_part(name)), None)
    if foreign is not None:
        return f"it names {foreign[:64]!r}, which is no file of a checkpoint"
    own = [manifest.parts.get(own_name(rank)) for rank in range(min(manifest.world_size, len(manifest.parts)))]
    states = sum(name.startswith("own-") and name.endswith(".bin") for name in manifest.parts)
    if states != manifest.world_size or None in own or states == len(manifest.parts):
        ranks, names = manifest.world_size, len(manifest.parts)
        return f"it names {names} files, which are not the shards and rank-local states of {ranks} ranks"
    if any(part is not None and part.size_bytes > MOST_OWN_BYTES for part in own):
        return f"it names a rank-local state of more than {MOST_OWN_BYTES} bytes"
    return ""
