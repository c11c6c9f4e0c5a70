"""The journal on a volume of several machines: what is acknowledged stays, what is damaged is refused, one writes.

Here every controller may lead whenever it likes: it is the journal alone that lets one of them write.
"""

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from midstep.controller import clock
from midstep.controller.clock import HeardClock
from midstep.controller.endpoints.story import StoryOrder, story_of
from midstep.controller.journal import numbered_files, reading, volume_store
from midstep.controller.journal.journal import Journal, Limits
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.volume_place import parse_volume_place
from midstep.controller.journal.volume_store import open_on_volume, submit
from midstep.controller.learned import Learned
from midstep.controller.liveness import Liveness
from midstep.controller.recovery.events import StopRequested
from midstep.controller.routes import Routes
from midstep.launch import directories
from midstep.launch import reached_job as journals
from midstep.launch.job import continued
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.errors import (
    ConfigurationError,
    JournalDamaged,
    JournalError,
    JournalSuperseded,
    StoreUnreachable,
)
from midstep.protocol.types import JobSpec

JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
Open = Callable[..., Journal]


class Anyone:
    """An election that is no obstacle, and the lead that it gives."""

    def stand(self, wait_s: float | None, beat: Callable[[], None]) -> "Anyone":
        return self

    def begin(self, term: int) -> None:
        """Nothing."""

    beat = require = close = lambda self: None

    def overthrow(self) -> bool:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job on a volume."""
    made = tmp_path / "journal"
    assert submit(made, JOB, default_policy())
    return made


@pytest.fixture
def lead(folder: Path) -> Iterator[Open]:
    """Begin a term: `lead()`."""
    with ExitStack() as opened:

        def open_journal(**options: Any) -> Journal:
            return opened.enter_context(open_on_volume(folder, Anyone(), **options))

        yield open_journal


def say(journal: Journal, *words: str, first: int = 0, at_s: float = 1.0) -> tuple[bool, ...]:
    """Append events, numbered from `first` on where that is given."""
    numbers = range(first, first + len(words)) if first else [0] * len(words)
    entries = [
        JournalEntry(StopRequested(word), "node/a", 1, number) for word, number in zip(words, numbers, strict=True)
    ]
    return journal.append(entries, at_s)


def told(journal: Journal) -> list[str]:
    return [event.reason for event, _ in journal.load(lambda state: None) if isinstance(event, StopRequested)]


def entry_files(folder: Path) -> list[Path]:
    return sorted((folder / "entries").iterdir())


def snapshot_of(folder: Path, at_s: float) -> bytes:
    machine = reading.read_founding(folder).machine()
    learned = Learned(machine, Routes(), Liveness(default_policy().heartbeat))
    learned.at_s = at_s
    return learned.snapshot()


def compacted(journal: Journal, folder: Path) -> bool:
    """Have the journal compacted twice, and say whether what it has left is without a gap."""
    for number in range(1, 40):
        say(journal, f"more{number}")
        journal.compact(lambda: snapshot_of(folder, 1.0), quiet=True)
    numbers = numbered_files.NumberedFiles(folder / "entries").numbers()
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_the_next_controller_reads_what_was_written_in_a_later_term_and_session(lead: Open) -> None:
    first = lead(name="first")
    assert (first.term, told(first)) == (1, [])
    assert say(first, "a", "b", first=1) == (True, True)
    assert say(first, "c") == (True,)
    second = lead(name="second")
    assert (second.term, told(second)) == (2, ["a", "b", "c"])
    assert second.session > first.session
    assert [name for name, _ in second.taken_in()] == ["node/a"]


def test_a_repetition_is_marked_and_not_written(lead: Open) -> None:
    first = lead()
    assert say(first, "a", "b", first=1) == (True, True)
    assert say(first, "b", "c", first=2) == (False, True)
    second = lead()
    assert told(second) == ["a", "b", "c"]
    assert say(second, "c", first=3) == (False,)


def test_one_that_was_deposed_can_write_nothing_whatever_it_believes(folder: Path, lead: Open) -> None:
    first = lead()
    say(first, "a")
    second = lead()
    assert told(second) == ["a"]
    for harm in (lambda: say(first, "late"), first.require_lead):
        with pytest.raises(JournalSuperseded, match="term 2 has begun, another controller leads"):
            harm()
    first._growth.restart()
    first._growth.grown(100_000, 0)
    with pytest.raises(JournalSuperseded):
        first.compact(lambda: b"late", quiet=True)
    say(second, "b")
    assert told(lead()) == ["a", "b"]


def test_one_that_slept_until_its_place_was_cleared_away_is_told_so(folder: Path, lead: Open) -> None:
    """The number that it would write next is free again: a later controller has compacted what was there."""
    first = lead()
    say(first, "a")
    second = lead(limits=Limits(events=5))
    told(second)
    for number in range(1, 40):
        say(second, f"e{number}", first=number, at_s=float(number))
        second.compact(lambda: snapshot_of(folder, 1.0), quiet=True)
    for _ in range(10):
        second.compact(lambda: snapshot_of(folder, 1.0), quiet=True)
    assert int(entry_files(folder)[0].name) > first._store._next  # type: ignore[attr-defined]
    with pytest.raises(JournalSuperseded):
        say(first, "late")
    say(second, "last")
    third = lead(limits=Limits(events=5))
    words = told(third)
    assert (words[-1], "late" in words) == ("last", False)
    assert [each.number for each in reading.read_story(folder)][-1] == 41
    assert compacted(third, folder)


def test_one_that_listed_the_folder_before_it_was_compacted_does_not_begin_among_others(
    folder: Path, lead: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that shows an old listing for a while."""
    first = lead(limits=Limits(events=5))
    told(first)
    old = numbered_files.NumberedFiles(folder / "entries").numbers()
    for number in range(1, 40):
        say(first, f"e{number}", first=number)
        first.compact(lambda: snapshot_of(folder, 1.0), quiet=True)
    for _ in range(10):
        first.compact(lambda: snapshot_of(folder, 1.0), quiet=True)
    numbers, stale = numbered_files.NumberedFiles.numbers, list[list[int]]()
    monkeypatch.setattr(numbered_files.NumberedFiles, "numbers", lambda self: stale.pop(0) if stale else numbers(self))
    for listed in ([], old):
        stale.append(listed)
        with pytest.raises(JournalError, match=r"quicker to begin a term|entry 1 was removed while|not kept any more"):
            lead()
    say(first, "still")
    second = lead(limits=Limits(events=5))
    assert second.term == 2
    assert told(second)[-1] == "still"
    assert compacted(second, folder)


def test_of_many_that_begin_at_once_each_has_a_term_of_its_own_and_one_can_write(folder: Path) -> None:
    begun: list[Journal] = []
    threads = [
        threading.Thread(target=lambda: begun.append(open_on_volume(folder, Anyone(), wait_s=60.0))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(each.term for each in begun) == [1, 2, 3, 4, 5, 6]
    written = []
    for each in begun:
        try:
            written.append((each.term, say(each, "a")))
        except JournalSuperseded:
            continue
    assert written == [(6, (True,))]
    with open_on_volume(folder, Anyone()) as last:
        assert (last.term, told(last)) == (7, ["a"])


@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_a_write_that_seemed_to_fail_counts_once(
    lead: Open, monkeypatch: pytest.MonkeyPatch, carried_out: bool, times: int
) -> None:
    """What comes in its place has more events by then, at a later time."""
    first = lead()
    told(first)
    say(first, "a", first=1)
    link_whole = numbered_files.link_whole

    def lossy(path: Path, content: bytes) -> bool:
        made = not carried_out or link_whole(path, content)
        raise StoreUnreachable("no answer") if made else JournalError("it is there")

    for _ in range(times):
        with monkeypatch.context() as broken:
            broken.setattr(numbered_files, "link_whole", lossy)
            with pytest.raises(JournalError):
                say(first, "lost" if carried_out and times > 1 else "b", first=2, at_s=2.0)
    assert say(first, "b", "c", first=2, at_s=3.0) == (True, True)
    assert say(first, "d", first=4, at_s=4.0) == (True,)
    second = lead()
    assert [at_s for _, at_s in second.load(lambda state: None)] == [1.0, 3.0, 3.0, 4.0]
    assert told(second) == ["a", "b", "c", "d"]


def test_a_write_whose_controller_never_heard_of_it_is_taken_or_passed_over_by_all_alike(
    lead: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next controller takes it; then the one that wrote it can write nothing in its place."""
    first = lead()
    told(first)
    link_whole = numbered_files.link_whole

    def lossy(path: Path, content: bytes) -> bool:
        link_whole(path, content)
        raise StoreUnreachable("no answer")

    with monkeypatch.context() as broken:
        broken.setattr(numbered_files, "link_whole", lossy)
        with pytest.raises(StoreUnreachable):
            say(first, "a", first=1)
    second = lead()
    with pytest.raises(JournalSuperseded):
        say(first, "a", "b", first=1)
    assert told(second) == ["a"]


def test_a_link_that_was_made_although_its_answer_was_lost_is_one_s_own(
    lead: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS may send the request again and be told that the name is there."""
    first = lead()
    told(first)
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    with monkeypatch.context() as broken:
        broken.setattr(os, "link", twice)
        assert say(first, "a", first=1) == (True,)
    assert told(lead()) == ["a"]


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_full_or_failing_volume_is_said_and_tried_again(
    folder: Path, lead: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A write that was torn leaves nothing that is read, whatever was torn."""
    first = lead()
    told(first)
    say(first, "a", first=1)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        if call == "write":
            broken.setattr(os, "fdopen", full)
        else:
            broken.setattr(os, call, full)
        with pytest.raises(StoreUnreachable, match=r"No space left on device\. Check that the volume is mounted"):
            say(first, "b", first=2)
    (folder / "entries" / ".draft-torn").write_bytes(b"half of")
    assert say(first, "b", first=2) == (True,)
    assert told(lead()) == ["a", "b"]
    assert not list((folder / "entries").glob(".*"))


def test_a_file_system_without_hard_links_is_refused_when_the_job_is_founded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(JournalError, match="takes no hard links"):
        submit(tmp_path / "journal", JOB, default_policy())


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda entries: entries[2].unlink(), "entry 3 is missing"),
        (lambda entries: entries[2].write_bytes(b""), "entry 3 is not what was written"),
        (lambda entries: entries[2].write_bytes(entries[2].read_bytes()[:-3]), "entry 3 is not what was written"),
        (lambda entries: entries[2].write_bytes(entries[1].read_bytes()), "entry 3 is not what was written"),
        (lambda entries: entries[0].unlink(), "entry 1 is missing"),
    ],
    ids=["missing", "empty", "cut", "another one", "the first"],
)
def test_what_was_changed_by_others_is_refused(
    folder: Path, lead: Open, harm: Callable[[Sequence[Path]], object], complaint: str
) -> None:
    for _ in range(2):
        each = lead()
        told(each)
        for number in (1, 2, 3):
            say(each, f"e{number}", first=number)
    harm(entry_files(folder))
    with pytest.raises(JournalError, match=complaint):
        told(lead())


def test_entries_of_another_job_are_refused(folder: Path, lead: Open, tmp_path: Path) -> None:
    other = tmp_path / "other"
    submit(other, JOB, default_policy())
    with open_on_volume(other, Anyone()) as theirs:
        say(theirs, "a")
    say(lead(), "a")
    for mine, foreign in zip(entry_files(folder), entry_files(other), strict=True):
        mine.write_bytes(foreign.read_bytes())
    with pytest.raises(JournalDamaged, match="does not follow on entry 0"):
        told(lead())


def test_a_controller_whose_last_entry_was_deleted_stops_writing(folder: Path, lead: Open) -> None:
    first = lead()
    say(first, "a")
    entry_files(folder)[-1].unlink()
    with pytest.raises(JournalDamaged, match="entry 2 was deleted while"):
        say(first, "b")


def test_a_takeover_reads_a_snapshot_and_the_entries_after_it_and_few_files_are_kept(folder: Path, lead: Open) -> None:
    first = lead(limits=Limits(events=10))
    told(first)
    for number in range(1, 96):
        say(first, f"e{number}", first=number, at_s=float(number))
        first.compact(partial(snapshot_of, folder, float(number)), quiet=True)
    assert len(entry_files(folder)) <= 30
    assert len(list((folder / "snapshots").iterdir())) <= 3
    restored: list[bytes] = []
    second = lead()
    words = [event.reason for event, _ in second.load(restored.append) if isinstance(event, StopRequested)]
    assert (len(restored), words[-1]) == (1, "e95")
    assert len(words) <= 10
    assert say(second, "e40", first=40) == (False,)
    assert reading.read_status(folder).job == "demo"
    assert [entry.number for entry in reading.read_story(folder)][-1] == 95


def test_a_snapshot_that_cannot_be_read_is_passed_over_for_the_one_before(folder: Path, lead: Open) -> None:
    first = lead(limits=Limits(events=10))
    told(first)
    for number in range(1, 46):
        say(first, f"e{number}", first=number)
        first.compact(partial(snapshot_of, folder, float(number)), quiet=True)
    newest = sorted((folder / "snapshots").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    second = lead()
    words = told(second)
    assert words[-1] == "e45"
    assert len(words) > 10
    say(second, "e46", first=46)
    assert told(lead())[-1] == "e46"


def test_a_job_is_submitted_once_and_one_that_is_not_there_is_said_so(folder: Path, tmp_path: Path) -> None:
    assert not submit(folder, JOB, default_policy())
    with pytest.raises(JournalError, match="there is no such job"):
        open_on_volume(tmp_path / "elsewhere", Anyone())


def test_the_next_controller_continues_the_clock_that_it_heard_whatever_its_own_says(
    lead: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, whose wall clock is an hour ahead."""
    monkeypatch.setattr(clock, "_boot", lambda: secrets.token_hex(4))
    first = lead()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600.0)
    heard = HeardClock(first.clock.now(), time.monotonic(), 2.0)
    second = lead(heard=lambda: heard)
    assert 0 <= second.clock.now() - first.clock.now() <= 2.0


@pytest.mark.parametrize(
    "url",
    ["kubernetes://a/b", "kubernetes://a/B?journal=/x", "kubernetes:///?journal=/x", "kubernetes://a/b?journal=x",
     "kubernetes://a/b?journal=/x&more=1", "etcd://h/b?journal=/x"],
)  # fmt: skip
def test_an_address_that_names_no_lease_or_folder_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="Write kubernetes://"):
        parse_volume_place(url)


def test_an_address_is_read_as_it_is_written() -> None:
    place = parse_volume_place("kubernetes:///midstep-demo?journal=/ckpt/my%20job/journal")
    assert (place.namespace, place.lease, place.folder) == ("", "midstep-demo", Path("/ckpt/my job/journal"))
    assert str(parse_volume_place(str(place))) == str(place)


def test_the_number_of_tries_is_bounded(lead: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lead()
    told(first)
    monkeypatch.setattr(numbered_files.NumberedFiles, "make", lambda self, number, content: False)
    monkeypatch.setattr(volume_store.VolumeStore, "_require_own", lambda self, number: None)
    with pytest.raises(JournalError, match="made again and again"):
        say(first, "a")
    assert volume_store.TRIES == 3


def test_a_job_on_a_volume_is_found_and_reported_and_not_resumed_by_its_directory(folder: Path, lead: Open) -> None:
    directory = folder.parent
    say(lead(), "a")
    assert directories.find_job(str(directory)) == directory
    assert directories.jobs(directory.parent)[0] == directory
    assert journals.read_status(directory).job == "demo"
    assert [entry.number for entry in journals.read_story(directory)] == [1]
    assert [entry.number for entry in story_of(StoryOrder(str(folder), None, None))] == [1]
    assert journals.living_controllers(directory) == ()
    assert journals.paused_until_s(directory) == 0.0
    with pytest.raises(ConfigurationError, match="is kept on a volume of several machines"):
        continued(directory)
