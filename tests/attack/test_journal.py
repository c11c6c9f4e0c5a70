"""The journal is cut, swapped, deleted or damaged"""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from midstep.controller.journal.journal import Journal
from midstep.controller.journal.reading import read_status
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_file import HEAD_NAME, journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.recovery.events import StopRequested
from midstep.launch import directories as file_system
from midstep.launch.job import Start, create_job
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.errors import ConfigurationError, JournalDamaged, JournalError
from midstep.protocol.types import JobSpec

from ..chaos.controller.conftest import Cluster
from .attack import attack

JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
EVENTS = 40


class Place:
    """A job directory and a run directory, with a journal that a controller has written and was killed over."""

    def __init__(self, root: Path) -> None:
        self.job, self.head = root / "job", root / "run" / HEAD_NAME
        self.path = journal_path(self.job)
        self.job.mkdir(parents=True)
        self.head.parent.mkdir()
        found_journal(self.path, JOB, default_policy(), head=self.head)

    @property
    def log(self) -> Path:
        """The write-ahead log of sqlite, in which the latest records are."""
        return self.path.with_name(self.path.name + "-wal")

    def open(self) -> Journal:
        return open_sqlite(self.path, head=self.head)

    def write(self, journal: Journal, first: int = 1, count: int = EVENTS) -> None:
        for number in range(first, first + count):
            journal.append([JournalEntry(StopRequested(f"event {number}"), "node/a", 1, number)], float(number))

    def kill_over(self, journal: Journal) -> None:
        """Leave the files as a controller leaves them that is killed: the log is not folded into the journal."""
        kept = self.job.with_name("kept")
        shutil.copytree(self.job, kept)
        journal.close()
        shutil.rmtree(self.job)
        kept.rename(self.job)

    def events(self) -> int:
        """How many events the next controller would replay."""
        with self.open() as journal:
            return len(list(journal.replay()))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A journal whose controller was killed."""
    made = Place(tmp_path / "one")
    journal = made.open()
    made.write(journal)
    made.kill_over(journal)
    return made


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def test_a_journal_to_which_nothing_happened_is_taken_over(place: Place) -> None:
    """Otherwise the tests below would show nothing."""
    assert place.log.stat().st_size > 0
    assert (place.events(), place.events()) == (EVENTS, EVENTS)


@pytest.mark.parametrize(
    "how",
    [
        lambda place: cut(place.log, 0),
        lambda place: cut(place.log, place.log.stat().st_size // 2),
        lambda place: cut(place.log, place.log.stat().st_size - 1),
        lambda place: place.log.unlink(),
        lambda place: cut(place.path, 0),
        lambda place: cut(place.path, place.path.stat().st_size // 2),
    ],
    ids=["log emptied", "half of the log", "the log's last byte", "no log", "file emptied", "half of the file"],
)
@attack(
    "the journal or its write-ahead log is cut while there is no controller",
    holds="no controller acts on the older world that is left",
    reads="its end is lost: 40 events were in it, and 12 are. It may tell of an older world, ...",
)
def test_a_journal_whose_end_is_lost_is_refused(place: Place, how: Callable[[Place], None]) -> None:
    """Also where what is left is a sound sqlite file, and an earlier state of the job."""
    how(place)
    with pytest.raises(JournalError):
        place.events()


@attack(
    "the file of another job, or an earlier copy of this one, is put in the journal's place",
    holds="no controller acts on it",
    reads="this is the journal of another job, or of an earlier run of this one. ...",
)
def test_a_journal_that_was_replaced_is_refused(place: Place, tmp_path: Path) -> None:
    """Another job's journal, one of the same name, and a backup of this very job."""
    other = Place(tmp_path / "other")
    with other.open() as journal:
        other.write(journal)
    backup = tmp_path / "backup"
    shutil.copytree(place.job, backup)
    with place.open() as journal:
        place.write(journal, first=EVENTS + 1)
    for source, said in ((other.job, "the journal of another job"), (backup, "was in it, and is not any more")):
        shutil.rmtree(place.job)
        shutil.copytree(source, place.job)
        with pytest.raises(JournalDamaged, match=said):
            place.open()


@pytest.mark.parametrize(
    "how",
    [
        lambda place, other: place.path.unlink(),
        lambda place, other: place.log.unlink(),
        lambda place, other: shutil.rmtree(place.job),
        lambda place, other: os.replace(shutil.copy(other.path, f"{other.path}.copy"), place.path),
    ],
    ids=["deleted", "log deleted", "directory deleted", "replaced"],
)
@attack(
    "the journal is deleted or replaced under a running controller",
    holds="the controller decides nothing more, as nothing that it writes would be found by the next one",
    reads="it was deleted or replaced while this controller was writing it. ...",
)
def test_a_controller_whose_journal_is_taken_away_stops_deciding(
    place: Place, tmp_path: Path, how: Callable[[Place, Place], object]
) -> None:
    """It is seen with the next event, and nothing follows from that."""
    other = Place(tmp_path / "other")
    with place.open() as journal:
        how(place, other)
        with pytest.raises(JournalDamaged, match="deleted or replaced"):
            place.write(journal, first=EVENTS + 1)


@attack(
    "somebody else writes into the journal of a running controller",
    holds="the controller decides nothing more",
    reads="after event 41 it was changed by another process. ...",
)
def test_a_controller_whose_journal_is_written_by_another_stops_deciding(place: Place) -> None:
    """Rows that are added or removed show, as the controller knows what its last one was."""
    with place.open() as journal:
        place.write(journal, first=EVENTS + 1, count=1)
        with sqlite3.connect(place.path) as stranger:
            stranger.execute("DELETE FROM events WHERE seq > 10")
        stranger.close()
        with pytest.raises(JournalDamaged, match="changed by another process"):
            place.write(journal, first=EVENTS + 2)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM events WHERE seq = 7", "event 7 is missing"),
        (
            "UPDATE events SET payload = (SELECT payload FROM events WHERE seq = 8) WHERE seq = 7",
            r"event 7 .* not what",
        ),
        ("UPDATE events SET at_s = at_s + 3600 WHERE seq = 20", "event 20"),
        ("UPDATE lease SET term = 5", "term 1 is missing"),
        ("UPDATE lease SET session = session - 1", "term 1 is missing, or is not what was written"),
        ("DELETE FROM lease", "term 1 was in it"),
        ("UPDATE meta SET value = x'00' WHERE key = 'founding'", "the job that it was founded for"),
    ],
)
@attack(
    "single records of the journal are changed or removed",
    holds="the first one that is not what was written is named, and no controller acts on the journal",
    reads="event 7 is missing. It may tell of an older world, so no controller acts on it. ...",
)
def test_a_record_that_is_not_what_was_written_is_named(place: Place, statement: str, said: str) -> None:
    """Each carries a hash of itself and of the one before."""
    with sqlite3.connect(place.path) as stranger:
        stranger.execute(statement)
    stranger.close()
    with pytest.raises(JournalDamaged, match=said):
        place.events()


def test_status_does_not_show_a_world_that_a_damaged_journal_tells_of(place: Place) -> None:
    """`midstep status` and `midstep report` read the same records."""
    with sqlite3.connect(place.path) as stranger:
        stranger.execute("DELETE FROM events WHERE seq = 7")
    stranger.close()
    with pytest.raises(JournalDamaged, match="event 7 is missing"):
        read_status(place.job)


def test_without_a_note_of_its_end_a_sound_journal_is_taken_over_and_that_is_said(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The note lies in the run directory, which another machine does not have."""
    for damage in (place.head.unlink, lambda: place.head.write_bytes(b"\0" * 50)):
        damage()
        assert place.events() == EVENTS
        assert "a loss of the journal's end would not be seen" in caplog.text
        caplog.clear()


@pytest.mark.chaos
@attack(
    "the controller is killed, and the write-ahead log is emptied before the next one starts",
    holds="no healthy rank is stopped or started by a controller that knows only the past",
    reads="midstep controller: .../journal.sqlite: its end is lost: ..., and exit code 65",
)
def test_no_controller_starts_on_an_older_world(tmp_path: Path) -> None:
    """The nodes train on and get no order."""
    cluster = Cluster()
    try:
        cluster.start()
        cluster.host(1).kill(1)  # so that the older world has other processes
        cluster.until(cluster.recovered)
        cluster.kill_controller()
        cut(journal_path(cluster.job_directory).with_name("journal.sqlite-wal"), 0)
        starts = cluster.starts()
        cluster.start_controller()
        cluster.play(3.0)
        assert cluster.starts() == starts
        assert cluster.controllers[-1].wait(20) == 65
        cluster.log.seek(0)
        said = cluster.log.read()
        assert "is lost" in said or "is not any more" in said
    finally:
        cluster.close()


MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:21 / /proc rw - proc proc rw
30 22 0:40 / /home rw,relatime shared:7 master:2 - nfs4 filer:/home rw,vers=4.2
31 30 0:41 / /home/ann/scratch rw - xfs /dev/nvme0n1 rw
32 22 0:42 / /mnt/with\040space rw - fuse.sshfs ann@host:/ rw
33 22 0:43 / /merged rw - fuse.fuse-overlayfs fuse-overlayfs rw
34 22 0:44 / /mnt/twice rw - ext4 /dev/vdb rw
35 34 0:45 / /mnt/twice rw - lustre mds:/fs rw
not a line of this file
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/jobs/1", "ext4", False),
        ("/home/ann/.midstep/jobs/1", "nfs4", True),
        ("/home/ann/scratch/1", "xfs", False),
        ("/home/ann/scratchy", "nfs4", True),
        ("/mnt/with space/job", "fuse.sshfs", True),
        ("/merged/job", "fuse.fuse-overlayfs", False),
        ("/mnt/twice", "lustre", True),
    ],
)
def test_the_file_system_of_a_directory_is_that_of_the_nearest_mount(path: str, kind: str, network: bool) -> None:
    """As the text of /proc/self/mountinfo has it, escapes included."""
    assert file_system.file_system_type(Path(path), MOUNTS) == kind
    assert file_system.is_network(kind) is network


@attack(
    "a job directory on a network file system, where locks and shared memory do not hold",
    holds="the job is not started, and nothing is written there",
    reads="/home/ann/job lies on a network file system (nfs4), ... Choose a --job-dir on a disk of this machine.",
)
def test_a_job_directory_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two controllers on two machines could both believe that they are the active one."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {tmp_path}/net rw - nfs4 filer:/ rw\n")
    monkeypatch.setattr(file_system, "MOUNTS", mounts)
    with pytest.raises(ConfigurationError, match=r"network file system \(nfs4\).*--job-dir"):
        create_job(Start(command=("train",), no_python=True, job_directory=tmp_path / "net" / "job"))
    assert not (tmp_path / "net").exists()
