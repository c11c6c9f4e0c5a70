"""The black box keeps what it was given, and never hands out half of it."""

import math
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstep.protocol.blackbox import _REPORTED_SEQUENCE, BlackBox
from midstep.protocol.errors import AgentError, RecoveryError
from midstep.protocol.types import Activity, LocalStateCopy

CAPACITY_BYTES = 256


@pytest.fixture
def box() -> Iterator[BlackBox]:
    made = BlackBox.create(3, CAPACITY_BYTES)
    yield made
    made.close()


def write(box: BlackBox, **changes: object) -> None:
    values: dict[str, object] = {
        "pid": 42,
        "incarnation": 2,
        "generation": 5,
        "step": 7,
        "activity": Activity.COMPUTING,
        "collectives": 9,
        "activity_began_s": 100.0,
        "step_began_s": 99.0,
        "median_step_s": 0.25,
    }
    box.write_progress(**{**values, **changes})  # type: ignore[arg-type]


def test_progress_that_was_never_written_is_none(box: BlackBox) -> None:
    assert box.read_progress(1.0) is None


def test_progress_comes_back_with_ages_at_the_time_of_the_reading(box: BlackBox) -> None:
    write(box)

    progress = box.read_progress(101.5)

    assert progress is not None
    assert (progress.rank, progress.incarnation, progress.generation, progress.step) == (3, 2, 5, 7)
    assert (progress.activity, progress.collectives) == (Activity.COMPUTING, 9)
    assert (progress.activity_age_s, progress.step_age_s, progress.median_step_s) == (1.5, 2.5, 0.25)
    assert not progress.suspended
    assert progress.allowed_s == 0.0


def test_the_limit_of_a_step_comes_back_and_goes_with_the_next(box: BlackBox) -> None:
    write(box, allowed_s=0.75)
    seen = box.read_progress(101.5)
    assert seen is not None
    assert seen.allowed_s == 0.75
    box.set_allowed(0.5)
    seen = box.read_progress(101.5)
    assert seen is not None
    assert seen.allowed_s == 0.5
    write(box)
    seen = box.read_progress(101.5)
    assert seen is not None
    assert seen.allowed_s == 0.0


def test_single_fields_change_without_touching_the_others(box: BlackBox) -> None:
    write(box)
    box.set_activity(Activity.COLLECTIVE, 101.0)
    box.set_collectives(10)

    progress = box.read_progress(101.5)

    assert progress is not None
    assert (progress.activity, progress.activity_age_s, progress.collectives) == (
        Activity.COLLECTIVE,
        0.5,
        10,
    )
    assert (progress.step, progress.step_age_s) == (7, 2.5)


@pytest.mark.parametrize("activity", list(Activity))
def test_every_activity_can_be_written(box: BlackBox, activity: Activity) -> None:
    write(box, activity=activity)

    progress = box.read_progress(101.5)

    assert progress is not None
    assert progress.activity is activity


def test_a_second_mapping_sees_what_the_first_wrote(box: BlackBox) -> None:
    other = BlackBox.attach(os.dup(box.fd))
    write(other, step=8)
    other.write_local(8, b"mine")
    other.close()

    progress = box.read_progress(101.5)

    assert progress is not None
    assert progress.step == 8
    assert box.read_local(8) == b"mine"


def test_what_a_killed_process_wrote_can_be_read_afterwards(box: BlackBox) -> None:
    pid = os.fork()
    if pid == 0:
        own = BlackBox.attach(os.dup(box.fd))
        write(own, step=12)
        own.write_local(12, b"last words")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)

    progress = box.read_progress(101.5)

    assert progress is not None
    assert progress.step == 12
    assert box.read_local(12) == b"last words"


def test_a_writer_that_died_between_two_words_does_not_block_readers_or_its_successor(box: BlackBox) -> None:
    write(box)
    box._words[8] |= 1  # as left by a process killed inside a write
    torn = box.read_progress(101.5)
    write(box, step=9)

    progress = box.read_progress(101.5)

    assert torn is not None
    assert torn.step == 7
    assert progress is not None
    assert progress.step == 9
    assert box._words[8] % 2 == 0


def test_the_two_newest_own_states_are_kept(box: BlackBox) -> None:
    for step in range(1, 5):
        box.write_local(step, f"state {step}".encode())

    assert [box.read_local(step) for step in range(1, 5)] == [None, None, b"state 3", b"state 4"]


def test_own_and_ward_do_not_displace_each_other(box: BlackBox) -> None:
    box.write_local(1, b"own 1")
    box.write_peer(4, 1, b"ward 1")
    box.write_peer(4, 2, b"ward 2")
    box.write_local(2, b"own 2")

    assert box.copies() == (
        LocalStateCopy(rank=3, step=1),
        LocalStateCopy(rank=3, step=2),
        LocalStateCopy(rank=4, step=1),
        LocalStateCopy(rank=4, step=2),
    )
    assert box.read_peer(4, 2) == b"ward 2"
    assert box.read_peer(5, 2) is None


def test_another_ward_takes_the_place_of_the_former(box: BlackBox) -> None:
    box.write_peer(4, 1, b"former 1")
    box.write_peer(4, 2, b"former 2")
    box.write_peer(6, 2, b"new 2")
    box.write_peer(6, 3, b"new 3")

    assert box.copies() == (LocalStateCopy(rank=6, step=2), LocalStateCopy(rank=6, step=3))


def test_a_repeated_step_replaces_its_first_copy_and_spares_the_other(box: BlackBox) -> None:
    box.write_local(5, b"five")
    box.write_local(6, b"six")
    box.write_local(6, b"six again")

    assert (box.read_local(5), box.read_local(6)) == (b"five", b"six again")


def test_a_write_after_a_rollback_drops_the_copies_that_were_rolled_back(box: BlackBox) -> None:
    box.write_local(8, b"eight")
    box.write_local(9, b"nine")
    box.write_local(4, b"four")

    assert box.copies() == (LocalStateCopy(rank=3, step=4),)


def test_a_blob_that_fills_the_slot_fits_and_one_byte_more_names_the_setting(box: BlackBox) -> None:
    box.write_local(1, b"x" * CAPACITY_BYTES)

    assert box.read_local(1) == b"x" * CAPACITY_BYTES
    with pytest.raises(RecoveryError, match=r"257 bytes.* 256; raise `black_box_bytes`"):
        box.write_local(2, b"x" * (CAPACITY_BYTES + 1))
    assert box.read_local(1) == b"x" * CAPACITY_BYTES


@settings(max_examples=200, deadline=None)
@given(offset=st.integers(0, 4 * (CAPACITY_BYTES + 64) - 1), flip=st.integers(1, 255))
def test_a_damaged_byte_never_yields_a_wrong_copy(offset: int, flip: int) -> None:
    """Whatever byte of the slots is flipped, a copy comes back as it was written or not at all."""
    box = BlackBox.create(3, CAPACITY_BYTES)
    try:
        written = {1: b"one" * 50, 2: b"two" * 60}
        for step, blob in written.items():
            box.write_local(step, blob)
        box._bytes[256 + offset] ^= flip

        for step, blob in written.items():
            assert box.read_local(step) in {None, blob}
        assert set(box.copies()) <= {LocalStateCopy(rank=3, step=1), LocalStateCopy(rank=3, step=2)}
        box.write_local(3, b"three")
        assert box.read_local(3) == b"three"
    finally:
        box.close()


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_the_newest_write_can_always_be_read(steps: list[int]) -> None:
    box = BlackBox.create(0, 64)
    try:
        for number, step in enumerate(steps):
            box.write_local(step, b"%d" % number)
            assert box.read_local(step) == b"%d" % number
            assert max(copy.step for copy in box.copies()) == step
    finally:
        box.close()


def test_a_descriptor_that_is_no_black_box_is_refused() -> None:
    fd = os.memfd_create("other")
    with pytest.raises(AgentError, match="cannot be mapped"):
        BlackBox.attach(fd)
    os.ftruncate(fd, 4096)
    with pytest.raises(AgentError, match="no black box of layout 3"):
        BlackBox.attach(fd)
    os.close(fd)


def test_a_black_box_whose_size_does_not_fit_its_capacity_is_refused(box: BlackBox) -> None:
    fd = os.dup(box.fd)
    with mmap.mmap(fd, 64) as head:
        struct.pack_into("@q", head, 24, 10**12)
    with pytest.raises(AgentError, match="no black box"):
        BlackBox.attach(fd)
    os.close(fd)


def test_close_is_idempotent_and_closes_the_descriptor() -> None:
    box = BlackBox.create(0, 64)
    fd = box.fd
    box.close()
    box.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


PATIENCE_S = 30.0  # a busy machine may leave a new process waiting


def test_a_reader_is_told_when_it_sees_half_a_step_clock(box: BlackBox) -> None:
    """Against a process that writes as fast as it can, the words of a whole reading belong together."""
    write(box, step=0, collectives=0)
    steps: set[tuple[int, int, int]] = set()
    pid = os.fork()
    if pid == 0:
        own = BlackBox.attach(os.dup(box.fd))
        for step in range(10**9):
            write(own, step=step, collectives=step, generation=step)
    try:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 0.3 or (len(steps) < 2 and time.monotonic() < began_s + PATIENCE_S):
            words, whole = box.read_clock()
            if whole:
                _, _, _, generation, step, _, collectives, *_ = words
                steps.add((generation, step, collectives))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    assert len(steps) > 1
    torn = [each for each in steps if each[1] > 0 and len(set(each)) > 1]
    assert torn == []


def test_what_was_reported_of_a_step_is_read_whole_or_not_at_all(box: BlackBox) -> None:
    """The first six values with short names; numbers that are none, too. Of a writer that was stopped, nothing."""
    assert box.read_reported() is None
    values = {"loss": 2.5, "x" * 33: 1.0, "norm": math.inf, **{f"more{number}": float(number) for number in range(9)}}
    box.set_reported(2, 41, values)
    told = box.read_reported()
    assert told is not None
    assert (told.rank, told.incarnation, told.step) == (3, 2, 41)
    assert told.values == {"loss": 2.5, "norm": math.inf, "more0": 0.0, "more1": 1.0, "more2": 2.0, "more3": 3.0}
    box.set_reported(2, 42, {"loss": 2.0})
    told = box.read_reported()
    assert told is not None
    assert (told.step, told.values) == (42, {"loss": 2.0})
    box._words[_REPORTED_SEQUENCE] |= 1
    assert box.read_reported() is None
