"""Where a child of midstep writes what it says: its log, or, where that cannot be opened, its parent's own stderr.

A log is never a reason not to start a process: a directory that became full, read-only or was removed costs lines.
"""

import errno
import logging
import os
import sys
from pathlib import Path

from ..protocol.private_files import make_private_directory, open_for_appending

STDERR = 2

_log = logging.getLogger(__name__)


def open_log(path: Path) -> int:
    """Return a descriptor, the caller's to close, that appends to `path`, or else to this process's own stderr.

    Raises OSError when this process has no descriptor left to give.
    """
    try:
        make_private_directory(path.parent)
        return open_for_appending(path)
    except OSError as error:
        _log.warning("%s cannot be written: %s; what belongs there stands here", path, error.strerror or error)
    sys.stderr.flush()
    try:
        return os.dup(STDERR)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
