"""The kernel tells how long data was on its way on a process's own connections, and whose fault that is not."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from midstep.agent import link_use
from midstep.agent.link_use import LEAST_BYTES, LOOK_S, LinkReader, TcpConnection, each_connection
from midstep.protocol.types import Activity, LinkUse, RankProgress, StepTimes

HERE, THERE = "127.0.0.1", "127.0.0.2"
CLOCK = RankProgress(3, 1, 2, 10, Activity.COMPUTING, 0, 0.0, 0.0, 0.1, times=StepTimes(1, 0, 0, 0))
PIDS = {(3, 1): os.getpid()}
MUCH = bytes(1 << 20)


@contextmanager
def connection(there: str = THERE) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect two addresses of this machine: the ends of the connection."""
    with socket.create_server((there, 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, source_address=(HERE, 0)) as sender, listener.accept()[0] as receiver:
            yield sender, receiver


def drain(receiver: socket.socket, count: int) -> None:
    """Read so many bytes."""
    while count > 0:
        count -= len(receiver.recv(1 << 16))


def read(reader: LinkReader, now: float) -> dict[tuple[str, str], LinkUse]:
    """Return the links of this process, by both addresses."""
    (clock,) = reader.added((CLOCK,), PIDS, now)
    return {(each.here, each.there): each for each in clock.links}


def test_what_was_sent_over_a_connection_is_counted_for_its_process_and_its_addresses() -> None:
    reader = LinkReader()
    with connection() as (sender, receiver):
        read(reader, 0.0)
        reading = threading.Thread(target=drain, args=(receiver, len(MUCH)))
        reading.start()
        sender.sendall(MUCH)
        reading.join()
        time.sleep(0.1)  # for the last acknowledgement
        use = read(reader, 1.0)[HERE, THERE]
        assert use.sent_bytes == len(MUCH) + 1  # the kernel counts the opening as one
        assert 0 <= use.busy_us < 1_000_000


def test_a_link_that_carries_hardly_anything_in_a_step_is_left_out() -> None:
    """As one over which ranks meet in barriers only."""
    with connection() as (sender, receiver):
        sender.sendall(bytes(LEAST_BYTES // 2))
        drain(receiver, LEAST_BYTES // 2)
        time.sleep(0.1)
        reader = LinkReader()
        assert read(reader, 0.0) == {}
        sender.sendall(bytes(LEAST_BYTES))
        drain(receiver, LEAST_BYTES)
        time.sleep(0.1)
        assert read(reader, 1.0).keys() == {(HERE, THERE)}
        assert reader.added((msgspec.structs.replace(CLOCK, times=None),), PIDS, 2.0)[0].links == ()


def test_a_receiver_that_does_not_read_makes_no_link_busy() -> None:
    with connection() as (sender, _receiver):
        sender.setblocking(False)
        with suppress(BlockingIOError):
            while sender.send(MUCH):
                pass
        reader = LinkReader()
        first = read(reader, 0.0)[HERE, THERE].busy_us
        time.sleep(0.5)
        assert read(reader, 1.0)[HERE, THERE].busy_us - first < 100_000


def test_a_closed_connection_stays_in_the_sum_and_a_new_one_is_added() -> None:
    reader, sums = LinkReader(), []
    for now in (0.0, LOOK_S, 2 * LOOK_S):
        with connection() as (sender, receiver):
            sender.sendall(bytes(LEAST_BYTES))
            drain(receiver, LEAST_BYTES)
            time.sleep(0.1)
            sums.append(read(reader, now)[HERE, THERE].sent_bytes)
    first, second, third = sums
    assert second - first == third - second == LEAST_BYTES + 1  # the kernel counts the opening as one


def test_connections_of_other_processes_and_within_an_address_are_not_told() -> None:
    with connection(HERE) as (within, _), connection() as (sender, _):
        for each in (within, sender):
            each.sendall(bytes(2 * LEAST_BYTES))
        time.sleep(0.1)
        (clock,) = LinkReader().added((CLOCK,), {(3, 1): 1}, 0.0)
        assert clock.links == ()
        assert all(each.here != each.there for each in each_connection())
        assert read(LinkReader(), 0.0).keys() == {(HERE, THERE)}


def test_a_clock_whose_process_is_not_known_stays_as_it_is() -> None:
    assert LinkReader().added((CLOCK,), {}, 0.0) == (CLOCK,)


def test_a_machine_with_very_many_connections_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstep.agent.link_use.MOST_CONNECTIONS", 1)
    reader = LinkReader()
    with connection():
        assert reader.added((CLOCK,), PIDS, 0.0) == (CLOCK,)
    assert reader.added((CLOCK,), PIDS, 9.0) == (CLOCK,)


def test_a_kernel_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse() -> Iterator[None]:
        asked.append(True)
        raise PermissionError("no netlink here")

    monkeypatch.setattr("midstep.agent.link_use.each_connection", refuse)
    reader = LinkReader()
    assert reader.added((CLOCK,), PIDS, 0.0) == reader.added((CLOCK,), PIDS, 9.0) == (CLOCK,)
    assert len(asked) == 1


def test_the_kernel_is_asked_less_often_while_no_rank_is_connected_to_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heartbeat is sent twice a second, and its agent takes its time from the ranks."""
    asked, reader = [], LinkReader()

    def ask() -> Iterator[TcpConnection]:
        asked.append(1)
        return each_connection()

    monkeypatch.setattr(link_use, "each_connection", ask)
    for tick in range(20):
        read(reader, tick * LOOK_S / 4)
    assert len(asked) == 5
    with connection() as (sender, receiver):
        sender.sendall(bytes(2 * LEAST_BYTES))
        drain(receiver, 2 * LEAST_BYTES)
        time.sleep(0.1)
        asked.clear()
        assert [len(read(reader, (20 + tick) * LOOK_S / 4)) for tick in range(4)] == [1, 1, 1, 1]
        assert len(asked) == 4
