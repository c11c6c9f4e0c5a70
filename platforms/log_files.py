"""Log files of child processes, with this process's stderr as the fallback where a file cannot be opened.

A log never keeps a process from starting: a directory that is full, read-only or removed costs lines only.
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
    """Return a descriptor, the caller's to close, that appends to `path`, or else to this process's stderr.

    Raises OSError when this process has no descriptor left.
    """
    try:
        make_private_directory(path.parent)
        return open_for_appending(path)
    except OSError as error:
        _log.warning("cannot write %s: %s; its lines are written here instead", path, error.strerror or error)
    sys.stderr.flush()
    try:
        return os.dup(STDERR)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
