"""Where on a shared volume a job is kept, and which Lease of Kubernetes its controllers are elected by."""

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import msgspec

from ...protocol.errors import ConfigurationError

SCHEME = "kubernetes"
FOLDER = "journal"  # of a job directory
FOUNDING = "founding"  # the file in it that says what the job is
ENTRIES = "entries"  # the folder in it with all that is written
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_FORM = "kubernetes://[NAMESPACE]/LEASE?journal=/FOLDER"


class VolumePlace(msgspec.Struct, frozen=True):
    """A Lease, and the folder with the journal. `namespace` "": that of the pod, or of the user's context."""

    namespace: str
    lease: str
    folder: Path

    def __str__(self) -> str:
        return f"{SCHEME}://{self.namespace}/{self.lease}?journal={self.folder}"


def is_volume(url: str) -> bool:
    """Say whether `--store` names a folder and a Lease."""
    return url.startswith(f"{SCHEME}://")


def parse_volume_place(url: str) -> VolumePlace:
    """Return the place that `--store` names. Raises ConfigurationError."""
    parts = urlsplit(url)
    lease, query = parts.path.strip("/"), dict(parse_qsl(parts.query))
    names = [lease, *([parts.netloc] if parts.netloc else [])]
    folder = query.get("journal", "")
    if not is_volume(url) or set(query) != {"journal"} or not folder.startswith("/"):
        raise ConfigurationError(f"--store {url}: not a Lease with a folder. Write {_FORM}.")
    if any(_NAME.fullmatch(name) is None for name in names):
        raise ConfigurationError(f"--store {url}: no Lease can be called so. Write {_FORM}.")
    return VolumePlace(parts.netloc, lease, Path(folder))


def folder_in(job_directory: Path) -> Path:
    """Return where the journal of a job that is kept on a volume lies in its job directory."""
    return job_directory / FOLDER


def holds_journal(folder: Path) -> bool:
    """Say whether there is a journal in a folder."""
    return (folder / FOUNDING).is_file()
