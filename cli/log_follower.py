"""Shows what the training processes print, as it comes, each line with its rank in front."""

import re
from collections.abc import Callable
from pathlib import Path

_NAME = re.compile(r"rank-(\d+)\.(\d+)\.log")
_MOST_BYTES = 1 << 20  # per file and look, so that a flood of output cannot take the launcher's memory


class LogFollower:
    """Reads what has been added to the logs of a job since the last look."""

    def __init__(self, directory: Path, show: Callable[[int, str], None]) -> None:
        self._directory = directory
        self._show = show
        self._read: dict[Path, int] = {}
        self._parts: dict[Path, bytes] = {}

    def look(self) -> None:
        """Show all complete lines that are new."""
        for path in sorted(self._directory.glob("rank-*.log")):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            data = self._added(path)
            if not data:
                continue
            self._read[path] = self._read.get(path, 0) + len(data)
            *lines, rest = (self._parts.pop(path, b"") + data).split(b"\n")
            self._parts[path] = rest[-_MOST_BYTES:]
            for line in lines:
                self._show(int(match[1]), line.decode(errors="replace"))

    def _added(self, path: Path) -> bytes:
        """Return what is new in a log; nothing if it cannot be read, which is no reason to end a job."""
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                return file.read(_MOST_BYTES)
        except OSError:
            return b""
