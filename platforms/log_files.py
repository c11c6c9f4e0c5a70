"""Where a child of midstep writes what it says: its log, or, where that cannot be opened, its parent's own stderr.

A log is never a reason not to start a process: a directory that became full, read-only or was removed costs lines.
"""

import errno
import logging
import os
import stat
import sys
from pathlib import Path

_MODE = 0o644
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
STDERR = 2

_log = logging.getLogger(__name__)


def open_log(path: Path) -> int:
    """Return a descriptor, the caller's to close, that appends to `path`, or else to this process's own stderr.

    Raises OSError when this process has no descriptor left to give.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _open_file(path)
    except OSError as error:
        _log.warning("%s cannot be written: %s; what belongs there stands here", path, error.strerror or error)
    sys.stderr.flush()
    try:
        return os.dup(STDERR)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _open_file(path: Path) -> int:
    """Open a regular file only: a pipe in its place would block this process or its child. Raises OSError."""
    log = os.open(path, _FLAGS | os.O_NONBLOCK, _MODE)
    if stat.S_ISREG(os.fstat(log).st_mode):
        os.set_blocking(log, True)
        return log
    os.close(log)
    raise OSError(errno.EINVAL, "not a regular file", str(path))
