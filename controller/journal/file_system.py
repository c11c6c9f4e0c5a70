"""Which file systems a journal may lie on: those of this machine.

The journal is held together by locks and memory that its readers and writers share, which network file systems grant
between machines only in part, or pretend to.
"""

import os
import re
from pathlib import Path

from ...protocol.errors import ConfigurationError

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"),
        *("nfs4", "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs"),
    }
)
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs"})  # what containers without root have in place of overlayfs
_ESCAPED = re.compile(r"\\([0-7]{3})")


def require_local(directory: Path) -> None:
    """Raise ConfigurationError when a job directory would lie on a network file system."""
    try:
        mounts = MOUNTS.read_text(errors="surrogateescape")
    except OSError:  # not Linux, or a sandbox: what cannot be known is not refused
        return
    kind = file_system_type(Path(os.path.realpath(directory)), mounts)
    if is_network(kind):
        raise ConfigurationError(
            f"{directory} lies on a network file system ({kind}), on which the journal's locks do not hold. Choose a "
            "--job-dir (or MIDSTEP_HOME) on a disk of this machine. Checkpoints may be shared: set "
            "checkpoint.directory in the policy."
        )


def is_network(kind: str) -> bool:
    """Say whether a type of file system is one that several machines can share."""
    family, _, program = kind.partition(".")
    return family in NETWORK and not (program and kind in LOCAL_FUSE)


def file_system_type(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds an absolute path, by the text of /proc/self/mountinfo; or "".

    Of several mounts at one place the last one counts.
    """
    best, found = -1, ""
    for line in mounts.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, kinds = head.split(" "), tail.split(" ")
        if not separator or len(fields) < 5:
            continue
        place = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if path.is_relative_to(place) and len(place.parts) >= best:
            best, found = len(place.parts), kinds[0]
    return found
