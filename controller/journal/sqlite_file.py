"""The journal of one host as a file: a sqlite database per job, its schema, and errors that say what to do.

Every sqlite error leaves here as a JournalError that names the file. The end of the journal is noted in a second place
(`HeadFile`): a journal whose last records are lost cannot show that by itself. The note lies in the job's run
directory, apart from the journal. It is not synced to disk: it outlives the controller, and after the death of the
machine nothing is left that an older world could harm.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from xxhash import xxh3_64_digest

from ...protocol.errors import JournalDamaged, JournalError
from .records import ADVICE, damaged

JOURNAL_NAME = "journal.sqlite"
HEAD_NAME = "journal.head"
APPLICATION_ID = 0x6D696473  # "mids": tells a journal from any other sqlite file
SCHEMA_VERSION = 3
OLDEST_SCHEMA = 2  # without snapshots
BUSY_S = 5.0  # how long sqlite waits for a reader that holds up a checkpoint
BLOCKED_S = 0.2  # for a leader that was deposed, and may be frozen in the middle of a write
BEAT_INSTRUCTIONS = 100_000  # of sqlite's machine: some milliseconds
_LONGEST_NOTE = 256

_log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE lease (
    term INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    boot TEXT NOT NULL,  -- which start of the machine, with its monotonic clock when the term began
    monotonic_s REAL NOT NULL,
    began_s REAL NOT NULL,
    events INTEGER NOT NULL,  -- how many there were
    chain BLOB NOT NULL  -- see records.py
);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    term INTEGER NOT NULL,
    at_s REAL NOT NULL,
    sender TEXT NOT NULL,
    session INTEGER NOT NULL,
    number INTEGER,  -- NULL: sent without a number, not distinguishable from a repetition
    kind TEXT NOT NULL,
    payload BLOB NOT NULL,
    chain BLOB NOT NULL,
    UNIQUE (sender, session, number)
);
"""

# What compaction adds (`sqlite_store.py`).
_COMPACTION = """
CREATE TABLE snapshots (
    seq INTEGER PRIMARY KEY,  -- of the last event that is in it
    chain BLOB NOT NULL,  -- of that event
    state BLOB NOT NULL,
    taken_in BLOB NOT NULL,  -- what was received from whom
    digest BLOB NOT NULL
);
CREATE TABLE archive (first INTEGER PRIMARY KEY, last INTEGER NOT NULL, rows BLOB NOT NULL);
CREATE TABLE anchors (seq INTEGER PRIMARY KEY, chain BLOB NOT NULL);  -- of archived events that a term names
"""

_ADVICE = {
    "SQLITE_FULL": "Free space on that disk; nothing that was acknowledged is lost",
    "SQLITE_IOERR": "Look for a full or failing disk (df, dmesg) and for a file size limit (ulimit -f)",
    "SQLITE_NOTADB": f"The file is not a journal of midstep. {ADVICE.removesuffix('.')}",
    "SQLITE_CORRUPT": f"The file is damaged. {ADVICE.removesuffix('.')}",
    "SQLITE_BUSY": "Another process holds it; end that process and try again",
    "SQLITE_LOCKED": "Another process holds it; end that process and try again",
    "SQLITE_READONLY": "Make the file and its directory writable for this user",
    "SQLITE_CANTOPEN": "Check that the directory exists and that this user may read and write it",
    "SQLITE_PERM": "Check that this user may read and write it",
}


_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


# SQLite's own texts, for Python 3.10, whose errors carry no name.
_TEXTS = {
    "database or disk is full": "SQLITE_FULL",
    "disk I/O error": "SQLITE_IOERR",
    "file is not a database": "SQLITE_NOTADB",
    "database disk image is malformed": "SQLITE_CORRUPT",
    "database is locked": "SQLITE_BUSY",
    "database table is locked": "SQLITE_LOCKED",
    "attempt to write a readonly database": "SQLITE_READONLY",
    "unable to open database file": "SQLITE_CANTOPEN",
    "access permission denied": "SQLITE_PERM",
}


def journal_path(job_directory: str | Path) -> Path:
    """Return where the journal of a job lies."""
    return Path(job_directory) / JOURNAL_NAME


def lock_path(journal: Path) -> Path:
    """Return the file over which controllers of one host are elected."""
    return journal.with_name(journal.name + ".lock")


def _name_of(error: sqlite3.Error) -> str:
    name: str | None = getattr(error, "sqlite_errorname", None)
    return name or _TEXTS.get(str(error), "")


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn every sqlite and file error inside into a JournalError with path and advice; JournalDamaged for damage."""
    try:
        yield
    except sqlite3.Error as error:
        name = _name_of(error)
        advice = next((text for key, text in _ADVICE.items() if name.startswith(key)), "See the text above")
        kind = JournalDamaged if name.startswith(_DAMAGE) else JournalError
        raise kind(f"{path}: cannot {doing}: {error} ({name or 'sqlite'}). {advice}.") from error
    except OSError as error:
        raise JournalError(
            f"{path}: cannot {doing}: {error.strerror}. Check space and permissions of that directory."
        ) from error


def wait_for_writers(connection: sqlite3.Connection, limit_s: float) -> None:
    """Wait so long for other processes from now on."""
    connection.execute(f"PRAGMA busy_timeout = {int(1000 * limit_s)}")


def is_busy(error: JournalError) -> bool:
    """Say whether another process was in the middle of writing."""
    return isinstance(error.__cause__, sqlite3.Error) and _name_of(error.__cause__).startswith("SQLITE_BUSY")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a block as one transaction: durable when it has ended, undone when anything in it raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def create(path: Path, meta: dict[str, bytes]) -> None:
    """Make a journal with `meta`, whole or not at all. Refuses to replace one."""
    if path.exists():
        raise JournalError(
            f"{path}: a job has already been run in this directory. Choose another one, or move it away."
        )
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    with explained(path, "create the journal"):
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it holds the job's environment
        try:
            connection = sqlite3.connect(draft, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.executescript(f"BEGIN;{_SCHEMA}{_COMPACTION}COMMIT;")
                with transaction(connection):
                    connection.executemany("INSERT INTO meta VALUES (?, ?)", sorted(meta.items()))
            finally:
                connection.close()
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)


def open_for_writing(path: Path, beat: Callable[[], None] = lambda: None) -> sqlite3.Connection:
    """Open the journal for the one controller that holds its lock: WAL, synchronous FULL, checked for damage.

    `beat` is called again and again while sqlite works.
    """
    _require(path)
    with explained(path, "open the journal"):
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
        connection.text_factory = _text
        try:
            _identify(connection, path)
            connection.set_progress_handler(beat, BEAT_INSTRUCTIONS)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise damaged(path, f"the file is damaged ({' '.join(str(damage).split())})")
            upgrade(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def is_compacted(connection: sqlite3.Connection) -> bool:
    """Say whether the journal has a place for snapshots: those that earlier versions wrote have none."""
    return bool(connection.execute("PRAGMA user_version").fetchone()[0] > OLDEST_SCHEMA)


def upgrade(connection: sqlite3.Connection) -> None:
    """Make place for snapshots in a journal of an earlier version, or do nothing and raise sqlite3.Error."""
    if is_compacted(connection):
        return
    with transaction(connection):
        for statement in _COMPACTION.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the journal beside a writer that may be there, or may be gone; nothing is changed."""
    _require(path)
    with explained(path, "open the journal"):
        # A finished job may lie on a read-only disk, where sqlite can make no shared-memory file beside it.
        settled = not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK)
        query = "immutable=1" if settled else "mode=ro"
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?{query}", uri=True, isolation_level=None, timeout=BUSY_S
        )
        connection.text_factory = _text
        try:
            _identify(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


class OpenFiles:
    """The files of an open journal, which are asked in every transaction whether they still have their names."""

    def __init__(self, path: Path) -> None:
        """Take note of what there is now. Raises OSError."""
        self._names = (str(path), f"{path}-wal")
        self._identities = [_identity(os.stat(name)) for name in self._names]

    def are_there(self) -> bool:
        """Say whether none was deleted or replaced. Raises OSError for other trouble."""
        try:
            return [_identity(os.stat(name)) for name in self._names] == self._identities
        except FileNotFoundError:
            return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _text(data: bytes) -> str:
    """Return what should be text; where it is not, the chain says so."""
    return data.decode(errors="replace")


def _require(path: Path) -> None:
    if not path.is_file():
        raise JournalError(
            f"{path}: there is no journal. `midstep run` makes it; check the job directory that was given."
        )


def _identify(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise JournalError(
            f"{path}: this sqlite file is not a journal of midstep. Check the job directory that was given."
        )
    if not OLDEST_SCHEMA <= version <= SCHEMA_VERSION:
        raise JournalError(
            f"{path}: the journal has schema {version}, this midstep reads {OLDEST_SCHEMA} to {SCHEMA_VERSION}. "
            "Use the midstep version that wrote it."
        )


class Head(msgspec.Struct, frozen=True, array_like=True):
    """How far a journal has come: its origin, its last term and event by number, with their hashes."""

    origin: bytes
    term: int
    lease: bytes
    events: int
    chain: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode
_decode_head = msgspec.msgpack.Decoder(Head).decode


def read_head(path: Path) -> Head | None:
    """Return what was noted last; None when there is no note, or none that can be read."""
    try:
        data = path.read_bytes()[:_LONGEST_NOTE]
        size = int.from_bytes(data[:2], "big")
        digest, head = _decode_note(data[2 : 2 + size])
        return _decode_head(head) if xxh3_64_digest(head) == digest else None
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


class HeadFile:
    """The note, open for the one writer of the journal."""

    def __init__(self, path: Path) -> None:
        """Open the file for this user only. Raises OSError."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._told = False

    def write(self, head: Head) -> None:
        """Note where the journal ends, after it was made durable. Failure leaves the note before, and is logged."""
        content = _encode(head)
        data = _encode((xxh3_64_digest(content), content))
        try:
            os.pwrite(self._descriptor, len(data).to_bytes(2, "big") + data, 0)
        except OSError as error:
            if not self._told:
                self._told = True
                _log.warning("%s cannot be written: %s; a loss of the journal's end may not be seen", self._path, error)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._descriptor)

    def __enter__(self) -> "HeadFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
