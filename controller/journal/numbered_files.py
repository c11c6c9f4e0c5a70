"""Numbered files that are made once and never changed: the first that makes a number has it, whatever the machine.

A file is written under another name, made durable, and linked to its number. The server of the file system decides who
was first, so that no clock and no lock is needed, and a reader sees a whole file or none.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ...protocol.errors import JournalError, StoreUnreachable
from ...protocol.private_files import FILE_MODE, make_private_directory

_DIGITS = 16  # so that names in their order are numbers in theirs
_DRAFT = ".draft-"
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_GONE = {errno.ENOENT, errno.ESTALE}


class NumberedFiles:
    """The files of one folder. Methods raise StoreUnreachable for what may succeed later, with path and advice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def make_folder(self) -> None:
        """Make the folder, if it is not there."""
        with explained(self.folder, "be made"):
            make_private_directory(self.folder)

    def numbers(self) -> list[int]:
        """Return which numbers there are, in order."""
        with explained(self.folder, "be listed"):
            return sorted(int(name) for name in os.listdir(self.folder) if name.isdecimal())

    def read(self, number: int) -> bytes | None:
        """Return a file; None when there is none of that number."""
        return read_whole(self._path(number))

    def has(self, number: int) -> bool:
        """Say whether there is a file, as the server of the file system has it: by opening it."""
        path = self._path(number)
        with explained(path, "be looked at"):
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                if error.errno in _GONE:
                    return False
                raise
        return True

    def make(self, number: int, content: bytes) -> bool:
        """Make a file durable, whole or not at all; False when there is one of that number.

        After StoreUnreachable it may be there or not.
        """
        return link_whole(self._path(number), content)

    def remove(self, number: int) -> None:
        """Remove a file, if it is there."""
        path = self._path(number)
        with explained(path, "be removed"):
            path.unlink(missing_ok=True)

    def remove_drafts(self) -> None:
        """Remove what processes have left that were killed while they wrote."""
        with explained(self.folder, "be cleaned"):
            for name in os.listdir(self.folder):
                if name.startswith(_DRAFT):
                    (self.folder / name).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:0{_DIGITS}d}"


def link_whole(path: Path, content: bytes) -> bool:
    """Make a file durable under a name that was free; False when it was not. Raises JournalError."""
    draft = path.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
    with explained(path, "be written"):
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            made = _linked(draft, path)
        finally:
            with contextlib.suppress(OSError):  # the next controller removes it
                draft.unlink()
        if made:
            _make_names_durable(path.parent)
        return made


def read_whole(path: Path) -> bytes | None:
    """Return a file; None when there is none. Raises StoreUnreachable."""
    with explained(path, "be read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _linked(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        # A request that was sent again because its answer was lost fails, although the first one succeeded.
        return os.stat(draft).st_nlink > 1
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise JournalError(
                f"{path.parent}: the file system takes no hard links ({error.strerror}), by which controllers know who "
                "was first. Choose a volume on NFS, CephFS, Lustre or a local disk."
            ) from error
        raise
    return True


def _make_names_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn every error of a file inside into StoreUnreachable with path and advice."""
    try:
        yield
    except OSError as error:
        raise StoreUnreachable(
            f"{path}: cannot {doing}: {error.strerror or error}. Check that the volume is mounted, has room, and is "
            "this user's to write; nothing that was acknowledged is lost."
        ) from error
