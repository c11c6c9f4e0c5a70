"""Where places for handshakes are short, a connection in the middle of its own never has to leave."""

import random
import socket
from collections.abc import Iterator

import pytest

from midstep.protocol.connection import HANDSHAKE_S, SILENT_S, TURNS, Connection, ConnectionLimits, WaitingRoom

LIMITS = ConnectionLimits(connections=10, unproven=4, unproven_per_address=3)
OURS, THEIRS = "10.0.0.1", "10.0.0.2"


class Handshake:
    """One that is as far as the test says."""

    def __init__(self) -> None:
        self.asks = False


class Door:
    """Makes connections that came at some time, and have come so far."""

    def __init__(self) -> None:
        self.ends = socket.socketpair()

    def comes(self, at_s: float, address: str = OURS, *, spoke: bool = False, asks: bool = False) -> Connection:
        handshake = Handshake()
        handshake.asks = asks
        made = Connection(self.ends[0], address, at_s, handshake)  # type: ignore[arg-type]
        made.router = self.ends[1] if spoke or asks else None
        return made


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    for end in made.ends:
        end.close()


def full(door: Door, **how: bool) -> tuple[WaitingRoom, list[Connection]]:
    """A room without a place left, by connections that came at 0, a millisecond apart."""
    room = WaitingRoom(LIMITS)
    inside = [door.comes(number / 1000, OURS if number < 2 else THEIRS, **how) for number in range(LIMITS.unproven)]
    for each in inside:
        room.add(each)
    return room, inside


def test_while_there_are_places_nothing_goes(door: Door) -> None:
    room = WaitingRoom(LIMITS)
    assert not room.is_closed(0, 0.0)
    assert room.push(OURS, 0, 0.0) is None


def test_a_full_room_is_closed_while_those_in_it_have_their_time(door: Door) -> None:
    """Silent ones have less of it than those that have begun; then the oldest goes."""
    for how, time_s in (({}, SILENT_S), ({"spoke": True}, HANDSHAKE_S)):
        room, inside = full(door, **how)
        assert room.is_closed(len(inside), time_s - 0.01)
        assert not room.is_closed(len(inside), time_s)
        push = room.push(OURS, len(inside), time_s)
        assert push is not None
        assert push.connection is inside[0]


def test_who_waits_for_an_answer_about_its_key_goes_for_no_other(door: Door) -> None:
    """Only the limit of a handshake ends it, from when its key began to be looked at."""
    room, inside = full(door, asks=True)
    for each in inside:
        each.turn_s = each.began_s
    assert room.is_closed(len(inside), 4.9)
    assert list(room.overdue(4.9)) == []
    assert list(room.overdue(LIMITS.handshake_s + 0.0025)) == inside[:3]


def test_who_waits_for_its_turn_does_not_lose_the_time_of_its_handshake(door: Door) -> None:
    """When all nodes connect at once the last one's turn comes later than a handshake may take."""
    room, inside = full(door, asks=True)
    late_s = 3 * LIMITS.handshake_s
    inside[0].turn_s, inside[1].turn_s = 0.0, late_s - 1
    assert list(room.overdue(late_s)) == inside[:1]
    assert list(room.overdue(TURNS * LIMITS.handshake_s + 1)) == inside


def test_the_places_of_one_address_are_its_own_affair(door: Door) -> None:
    """What comes from it too early is closed, so that it does not hold up the backlog of all."""
    room = WaitingRoom(LIMITS)
    for number in range(LIMITS.unproven_per_address):
        room.add(door.comes(number / 1000))
    assert not room.is_closed(3, 0.1)
    push = room.push(OURS, 3, 0.1)
    assert push is not None
    assert (push.connection, push.reason) == (None, "too many connections without a handshake from one address")
    assert room.push(THEIRS, 3, 0.1) is None


def test_a_place_is_free_when_somebody_has_proven_who_it_is(door: Door) -> None:
    room, inside = full(door)
    room.discard(inside[2])
    room.discard(inside[2])
    assert not room.is_closed(len(inside), 0.0)
    assert room.push(THEIRS, len(inside), 0.0) is None


def test_more_nodes_than_places_all_get_in(door: Door) -> None:
    """Each needs three turns for its handshake, in each of which twenty others come: all are in after a while."""
    chance = random.Random(15)
    room, backlog, handshaking, admitted, now = WaitingRoom(LIMITS), 200, dict[Connection, int](), 0, 0.0
    while admitted < 200:
        for _ in range(20):
            if not backlog or room.is_closed(0, now):
                break
            address = f"10.0.0.{chance.randrange(250)}"
            push = room.push(address, 0, now)
            backlog -= 1
            if push is not None:  # it is made again by its client
                backlog += 1
                if push.connection is None:
                    continue
                room.discard(push.connection)
                del handshaking[push.connection]
            made = door.comes(now, address)
            room.add(made)
            handshaking[made] = 3
        for connection in list(handshaking):
            handshaking[connection] -= 1
            connection.router = door.ends[1]
            if not handshaking[connection]:
                del handshaking[connection]
                room.discard(connection)
                admitted += 1
        now += 0.1
        assert now < 3 * 0.1 * 200 / LIMITS.unproven + 1.0
