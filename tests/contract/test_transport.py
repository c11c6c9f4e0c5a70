"""Real sockets: who gets in, who is heard, and that nothing that has come is overlooked."""

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from midstep.protocol.codec import MAX_FRAME_BYTES
from midstep.protocol.compat import within
from midstep.protocol.connection import OTHER_KEYS
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.keys import ClientKeys, JobKeys, ServerKeys
from midstep.protocol.nonblocking import NonblockingSocket
from midstep.protocol.token import random_pair
from midstep.protocol.transport import (
    MAX_IDENTITY_BYTES,
    OUTBOX_LIMIT,
    DealerSocket,
    Received,
    RouterSocket,
    bound,
    name_of,
    wait,
)

PATIENCE_S = 20.0
QUIET_S = 0.4  # long enough for something to arrive that must not

A, B = "node/a", "node/b"


class House:
    """Opens sockets and closes them all at the end."""

    def __init__(self, directory: Path) -> None:
        self.keys = directory / "keys"
        self.ipc = f"ipc://{directory}/s/agent.sock"
        self.open: list[NonblockingSocket] = []
        self.inbox: dict[NonblockingSocket, list[Received]] = {}
        JobKeys.create(self.keys, [A, B])

    def router(self, endpoint: str = "tcp://127.0.0.1:*") -> RouterSocket:
        keys = JobKeys.load_server(self.keys) if endpoint.startswith("tcp") else None
        router = RouterSocket(endpoint, curve=keys)
        self.open.append(router)
        return router

    def dealer(self, endpoint: str, identity: str, curve: ClientKeys | None = None) -> DealerSocket:
        if endpoint.startswith("tcp") and curve is None:
            curve = JobKeys.load_client(self.keys, identity)
        dealer = DealerSocket(endpoint, identity=identity, curve=curve)
        self.open.append(dealer)
        return dealer

    def pump(self) -> None:
        """Drain every socket once, as its owner always does."""
        alive = [item for item in self.open if not item.raw.closed]
        for item in wait(alive, (), 0.05)[0]:
            self.inbox.setdefault(item, []).extend(item.receive())

    def until(self, done: Callable[[], bool]) -> None:
        """Drain the sockets until `done`."""
        give_up = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < give_up, f"it did not come; this did: {self.inbox}"
            self.pump()

    def expect(self, receiver: NonblockingSocket, data: bytes) -> Received:
        """Wait until `data` arrives, whatever comes before it, and take all of it out."""
        inbox = self.inbox.setdefault(receiver, [])
        self.until(lambda: any(item.data == data for item in inbox))
        found = next(item for item in inbox if item.data == data)
        inbox.clear()
        return found

    def send(self, router: RouterSocket, identity: str, data: bytes) -> None:
        """Send as soon as the client is connected."""
        self.until(lambda: router.send(identity, data))

    def quiet(self, *sockets: NonblockingSocket) -> list[Received]:
        """Return what arrives at these sockets within a while."""
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            self.pump()
        return [item for socket in sockets for item in self.inbox.get(socket, [])]


@pytest.fixture
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    here = House(tmp_path_factory.mktemp("h"))
    yield here
    for item in here.open:
        item.close()


@pytest.fixture(params=["tcp", "ipc"])
def router(request: pytest.FixtureRequest, house: House) -> RouterSocket:
    return house.router() if request.param == "tcp" else house.router(house.ipc)


def test_messages_go_both_ways_and_say_whose_they_are(house: House, router: RouterSocket) -> None:
    dealer = house.dealer(router.endpoint, A)
    assert dealer.send(b"up")
    received = house.expect(router, b"up")
    assert received.identity == A
    assert received.user_id == (A if router.endpoint.startswith("tcp") else None)
    assert router.send(A, b"down")
    assert house.expect(dealer, b"down") == Received("", None, b"down")


def test_a_client_can_be_addressed_before_it_has_said_a_word(house: House, router: RouterSocket) -> None:
    dealer = house.dealer(router.endpoint, A)
    house.send(router, A, b"welcome")
    house.expect(dealer, b"welcome")


def test_an_unknown_client_cannot_be_addressed(router: RouterSocket) -> None:
    assert not router.send("node/nobody", b"hello")


def test_a_client_that_has_left_cannot_be_addressed(house: House, router: RouterSocket) -> None:
    dealer = house.dealer(router.endpoint, A)
    house.send(router, A, b"welcome")
    dealer.close()
    house.until(lambda: not router.send(A, b"gone?"))


def test_a_wrong_client_key_is_refused_and_counted(house: House) -> None:
    router = house.router()
    public, secret = zmq.curve_keypair()
    right = JobKeys.load_client(house.keys, A)
    dealer = house.dealer(router.endpoint, A, ClientKeys(A, public.decode(), secret.decode(), right.server_public))
    dealer.send(b"let me in")
    house.until(lambda: router.refused["unknown key"] > 0)
    assert house.quiet(router, dealer) == []
    assert not router.send(A, b"hello")


def test_a_client_that_was_refused_reaches_another_router_and_the_same_one_once_it_is_admitted(house: House) -> None:
    """As an agent between controllers, of which one has led already and knows its key."""
    first, second, nobody = house.router(), house.router(), "tcp://192.0.2.1:9"
    (listed,) = [each for each in (house.keys / "server" / "clients").iterdir() if each.read_text() == A]
    listed.unlink()
    dealer = house.dealer(nobody, A, JobKeys.load_client(house.keys, A))
    for refused, router in enumerate((first, second), start=1):
        dealer.move_to(router.endpoint)
        while first.refused["unknown key"] + second.refused["unknown key"] < refused:
            house.pump()
        assert house.quiet(router, dealer) == []
    dealer.move_to(nobody)
    house.quiet(dealer)
    listed.write_text(A)
    for router in (second, first):
        dealer.move_to(router.endpoint)
        house.until(lambda: dealer.connected)
        house.send(router, A, b"welcome")


def test_a_wrong_server_key_is_never_talked_to(house: House) -> None:
    router = house.router()
    right = JobKeys.load_client(house.keys, A)
    dealer = house.dealer(router.endpoint, A, ClientKeys(A, right.public, right.secret, right.public))
    dealer.send(b"who are you")
    assert house.quiet(router, dealer) == []


def test_a_wrong_server_key_is_counted_by_the_router_that_could_not_read_it(house: House) -> None:
    router = house.router()
    right = JobKeys.load_client(house.keys, A)
    house.dealer(router.endpoint, A, ClientKeys(A, right.public, right.secret, right.public))
    house.until(lambda: router.refused[OTHER_KEYS] > 0)


def test_a_client_knows_whether_it_is_connected_and_can_connect_again(house: House) -> None:
    """libzmq does not try again by itself after its key was refused."""
    router, pair = house.router(), random_pair()
    server = JobKeys.load_server(house.keys)
    dealer = house.dealer(
        router.endpoint, "node/late", ClientKeys("node/late", pair.public, pair.secret, server.public)
    )
    house.until(lambda: router.refused["unknown key"] > 0)
    assert not dealer.connected
    JobKeys.admit(house.keys, "node/late", pair.public)
    dealer.connect_again()
    house.send(router, "node/late", b"welcome")
    house.until(lambda: dealer.connected)
    house.expect(dealer, b"welcome")


def test_peers_that_share_a_key_have_identities_of_its_family_and_no_other(house: House) -> None:
    router, pair = house.router(), random_pair()
    server = JobKeys.load_server(house.keys)
    JobKeys.admit(house.keys, "joining/", pair.public)
    for identity in ("joining/a", "joining/b", A):
        house.dealer(router.endpoint, identity, ClientKeys(identity, pair.public, pair.secret, server.public)).send(
            identity.encode()
        )

    assert house.expect(router, b"joining/a").user_id == "joining/"
    house.until(lambda: router.refused["identity does not match key"] >= 1)
    house.send(router, "joining/b", b"hello")
    assert not router.send(A, b"hello")


def test_those_who_come_and_go_with_a_shared_key_push_out_nobody_who_stays(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstep.protocol.transport.MAX_PEERS", 4)
    monkeypatch.setattr("midstep.protocol.transport.MAX_OF_FAMILIES", 2)
    router, pair = house.router(), random_pair()
    server = JobKeys.load_server(house.keys)
    JobKeys.admit(house.keys, "operator/viewer/", pair.public)
    house.dealer(router.endpoint, A).send(b"I stay")
    house.expect(router, b"I stay")
    for number in range(6):
        identity = f"operator/viewer/{number}"
        house.dealer(router.endpoint, identity, ClientKeys(identity, pair.public, pair.secret, server.public)).send(
            identity.encode()
        )
        house.expect(router, identity.encode())

    assert router.knows(A)
    assert [number for number in range(6) if router.knows(f"operator/viewer/{number}")] == [4, 5]


def test_asking_whether_it_is_connected_loses_no_arrival_in_a_loop(house: House) -> None:
    """What has come uses up the edge of the descriptor when the socket's state is read."""
    router = house.router(house.ipc)
    dealer = house.dealer(router.endpoint, A)
    house.send(router, A, b"welcome")
    house.expect(dealer, b"welcome")

    async def listen() -> list[Received]:
        came: list[Received] = []
        dealer.attach(asyncio.get_running_loop(), came.extend)
        await asyncio.sleep(0.01)
        assert router.send(A, b"news")
        assert dealer.raw.poll(round(PATIENCE_S * 1000))  # it is here, and the loop has not turned
        assert dealer.connected
        deadline = time.monotonic() + PATIENCE_S
        while not came and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        dealer.detach()
        return came

    assert [each.data for each in asyncio.run(listen())] == [b"news"]


def test_the_right_key_under_a_wrong_identity_is_refused_counted_and_takes_nothing_over(house: House) -> None:
    router = house.router()
    honest = house.dealer(router.endpoint, B)
    house.send(router, B, b"first")
    house.expect(honest, b"first")
    impostor = house.dealer(router.endpoint, B, JobKeys.load_client(house.keys, A))
    impostor.send(b"I am b")
    house.until(lambda: router.refused["identity does not match key"] >= 2)
    assert router.send(B, b"second")
    house.expect(honest, b"second")
    assert house.quiet(impostor) == []


def test_a_client_without_encryption_is_refused(house: House) -> None:
    router = house.router()
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.setsockopt(zmq.ROUTING_ID, A.encode() + b"\0nonce")
        raw.connect(router.endpoint)
        raw.send(b"plain")
        assert house.quiet(router) == []
    assert not router.send(A, b"hello")


def test_a_client_that_is_added_while_the_router_runs_gets_in_and_a_removed_one_does_not(house: House) -> None:
    router = house.router()
    JobKeys.add(house.keys, "node/late")
    late = house.dealer(router.endpoint, "node/late")
    house.send(router, "node/late", b"welcome")
    house.expect(late, b"welcome")
    keys = JobKeys.load_client(house.keys, "node/late")
    JobKeys.remove(house.keys, "node/late")
    again = house.dealer(router.endpoint, "node/late", keys)
    again.send(b"me again")
    house.until(lambda: router.refused["unknown key"] > 0)


def test_an_oversized_message_costs_only_its_own_sender_the_connection(house: House, router: RouterSocket) -> None:
    other = house.dealer(router.endpoint, B)
    house.send(router, B, b"welcome")
    house.expect(other, b"welcome")
    big = house.dealer(router.endpoint, A)
    assert not big.send(bytes(MAX_FRAME_BYTES + 1))
    assert big.refused == {"oversized, not sent": 1}
    assert not router.send(B, bytes(MAX_FRAME_BYTES + 1))
    house.send(router, A, b"welcome")
    big.raw.send(bytes(MAX_FRAME_BYTES + 1))  # past the sender's own check
    house.until(lambda: router.refused["oversized"] == 1)
    big.raw.send(bytes(2 * MAX_FRAME_BYTES))  # more than is even read
    assert house.quiet(router) == []
    assert other.send(b"still here")
    house.expect(router, b"still here")
    big.send(b"back again")
    house.expect(router, b"back again")


def test_the_largest_message_arrives_whole(house: House, router: RouterSocket) -> None:
    dealer = house.dealer(router.endpoint, A)
    data = os.urandom(MAX_FRAME_BYTES)
    dealer.send(data)
    house.expect(router, data)


def test_garbage_on_the_port_disturbs_nobody(house: House, router: RouterSocket) -> None:
    dealer = house.dealer(router.endpoint, A)
    house.send(router, A, b"welcome")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, os.urandom(4096), b""):
        with _plain(router.endpoint) as raw:
            try:
                raw.sendall(junk)
            except ConnectionError:
                continue  # thrown out in the middle of it
    dealer.send(b"fine")
    house.expect(router, b"fine")
    assert house.quiet(router) == []


def _plain(endpoint: str) -> socket.socket:
    if endpoint.startswith("tcp"):
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=5)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(endpoint.removeprefix("ipc://"))
    return raw


@pytest.mark.parametrize("routing_id", [b"no nonce", b"\0nameless", b"\xff\xfe\0nonce"])
def test_a_client_that_does_not_name_itself_is_refused(house: House, routing_id: bytes) -> None:
    router = house.router(house.ipc)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.setsockopt(zmq.ROUTING_ID, routing_id)
        raw.connect(router.endpoint)
        raw.send(b"hello")
        house.until(lambda: router.refused["malformed frames"] == 1)


def test_a_message_of_several_frames_is_refused_as_one(house: House) -> None:
    router = house.router(house.ipc)
    dealer = house.dealer(router.endpoint, A)
    house.send(router, A, b"welcome")
    dealer.raw.send_multipart([b"one", b"two", b"three"])
    dealer.send(b"after")
    house.expect(router, b"after")
    assert router.refused == {"malformed frames": 1}


def test_after_a_restart_the_router_reaches_its_clients_before_they_speak(house: House, router: RouterSocket) -> None:
    endpoint = router.endpoint
    dealers = [house.dealer(endpoint, name) for name in (A, B)]
    for name in (A, B):
        house.send(router, name, b"before")
    router.close()
    again = house.router(endpoint)
    for name, dealer in zip((A, B), dealers, strict=True):
        house.send(again, name, b"after")
        house.expect(dealer, b"after")
    for dealer in dealers:
        assert dealer.send(b"here")
        house.expect(again, b"here")


def test_what_is_sent_without_a_connection_arrives_later_and_the_oldest_goes_first(house: House) -> None:
    dealer = house.dealer(house.ipc, A)
    for number in range(OUTBOX_LIMIT + 3):
        assert dealer.send(b"%d" % number)
    assert dealer.refused == {"outbox full, oldest dropped": 3}
    router = house.router(house.ipc)
    inbox = house.inbox.setdefault(router, [])
    house.until(lambda: len(inbox) == OUTBOX_LIMIT)
    assert [item.data for item in inbox] == [b"%d" % number for number in range(3, OUTBOX_LIMIT + 3)]
    assert not dealer.wants_to_send


def test_what_waits_for_a_connection_does_not_keep_an_event_loop_busy(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that turns without end takes a core from the training, for as long as there is no controller."""
    dealer = house.dealer(house.ipc, A)
    turns: list[float] = []
    receive = dealer.receive

    def counted() -> list[Received]:
        turns.append(time.monotonic())
        return receive()

    monkeypatch.setattr(dealer, "receive", counted)

    async def wait_for_a_router() -> int:
        dealer.attach(asyncio.get_running_loop(), lambda _: None)
        dealer.send(b"news")
        await asyncio.sleep(QUIET_S)
        waited = len(turns)
        router = house.router(house.ipc)
        deadline = time.monotonic() + PATIENCE_S
        while dealer.wants_to_send and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        dealer.detach()
        house.expect(router, b"news")
        return waited

    assert asyncio.run(wait_for_a_router()) < 100


def test_a_second_connection_of_an_identity_takes_over_and_the_first_is_no_longer_heard(
    house: House, router: RouterSocket
) -> None:
    first = house.dealer(router.endpoint, A)
    house.send(router, A, b"to the first")
    house.expect(first, b"to the first")
    second = house.dealer(router.endpoint, A)
    second.send(b"I am new")
    house.expect(router, b"I am new")
    first.send(b"I am old")
    house.until(lambda: router.refused["connection was replaced"] > 0)
    assert router.send(A, b"to the second")
    house.expect(second, b"to the second")
    assert house.quiet(first, router) == []


def test_receive_stops_at_its_limit_and_says_that_there_is_more(house: House, router: RouterSocket) -> None:
    dealer = house.dealer(router.endpoint, A)
    house.send(router, A, b"welcome")
    for number in range(10):
        dealer.send(b"%d" % number)
    got: list[Received] = []
    give_up = time.monotonic() + PATIENCE_S
    while len(got) < 10:
        assert time.monotonic() < give_up
        wait([router], (), 0.1)
        batch = router.receive(limit=3)
        assert len(batch) <= 3
        got += batch
    assert [item.data for item in got] == [b"%d" % number for number in range(10)]
    assert not router.pending


def test_another_thread_wakes_the_waiting_one_through_a_descriptor(house: House) -> None:
    dealer = house.dealer(house.ipc, A)
    reading, writing = os.pipe()
    waker = threading.Timer(0.1, os.write, (writing, b"!"))
    waker.start()
    try:
        assert wait([dealer], [reading], PATIENCE_S) == ([], [reading])
        assert os.read(reading, 1) == b"!"
        assert wait([dealer], [reading], 0.0) == ([], [])
    finally:
        waker.join()
        os.close(reading)
        os.close(writing)


def test_in_asyncio_no_message_is_overlooked_whatever_is_sent_meanwhile(house: House, router: RouterSocket) -> None:
    """Both ends answer each other in a burst: each send may use up the edge of what arrives at that moment."""
    rounds, burst = 300, 5
    dealer = house.dealer(router.endpoint, A)

    async def play() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        counts = [0, 0]

        def at_router(received: list[Received]) -> None:
            for item in received:
                counts[0] += 1
                router.send(item.identity, item.data)

        def at_dealer(received: list[Received]) -> None:
            for _ in received:
                counts[1] += 1
                if counts[1] + burst <= rounds * burst:
                    dealer.send(b"again")
                if counts[1] == rounds * burst and not over.done():
                    over.set_result(None)

        router.attach(loop, at_router)
        dealer.attach(loop, at_dealer)
        for _ in range(burst):
            dealer.send(b"start")
        try:
            await within(PATIENCE_S, over)
        finally:
            router.detach()
            dealer.detach()
        return counts[0], counts[1]

    assert asyncio.run(play()) == (rounds * burst, rounds * burst)


def test_in_asyncio_a_callback_that_fails_does_not_lose_what_comes_after(house: House) -> None:
    router = house.router(house.ipc)
    dealer = house.dealer(house.ipc, A)

    async def play() -> tuple[list[bytes], int]:
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        got: list[bytes] = []
        over = asyncio.Event()

        def callback(received: list[Received]) -> None:
            got.extend(item.data for item in received)
            if b"last" in got:
                over.set()
            else:
                raise RuntimeError("a mistake")

        router.attach(loop, callback)
        dealer.attach(loop, lambda _: None)
        dealer.send(b"first")
        while b"first" not in got:
            await asyncio.sleep(0.01)
        dealer.send(b"last")
        await within(PATIENCE_S, over.wait())
        router.close()
        dealer.close()
        return got, len(failures)

    got, failures = asyncio.run(play())
    assert got == [b"first", b"last"]
    assert failures == 1


def test_sockets_and_their_directory_are_the_owners_alone_and_leave_with_them(house: House) -> None:
    router = house.router(house.ipc)
    path = Path(house.ipc.removeprefix("ipc://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    router.close()
    router.close()
    assert not path.exists()


def test_a_directory_that_others_can_enter_is_refused(house: House) -> None:
    folder = Path(house.ipc.removeprefix("ipc://")).parent
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        RouterSocket(house.ipc, curve=None)


def test_the_socket_of_a_dead_process_is_taken_over_and_that_of_a_living_one_is_not(house: House) -> None:
    path = Path(house.ipc.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    house.router(house.ipc)
    with pytest.raises(ConfigurationError, match="another process listens"):
        RouterSocket(house.ipc, curve=None)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://127.0.0.1:*", "needs CURVE"),
        ("ipc://relative.sock", "no endpoint"),
        ("inproc://x", "no endpoint"),
        ("ipc:///tmp/" + "x" * 120, "shorter run directory"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_refused_with_the_remedy(endpoint: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        RouterSocket(endpoint, curve=None)
    with pytest.raises(ConfigurationError, match=reason):
        DealerSocket(endpoint, identity=A, curve=None)


@pytest.mark.parametrize("identity", ["", "a\0b", "x" * (MAX_IDENTITY_BYTES + 1)])
def test_an_identity_that_cannot_be_one_is_refused(identity: str) -> None:
    with pytest.raises(ConfigurationError, match="no identity"):
        DealerSocket("ipc:///tmp/x", identity=identity, curve=None)


def test_a_port_that_is_taken_is_refused_and_nothing_stays_open(house: House) -> None:
    router = house.router()
    before = _descriptors()
    with pytest.raises(ConfigurationError, match="cannot listen"):
        RouterSocket(router.endpoint, curve=JobKeys.load_server(house.keys))
    _settles(before)


def test_two_routers_with_keys_cannot_share_a_context(house: House) -> None:
    keys: ServerKeys = JobKeys.load_server(house.keys)
    with zmq.Context() as context:
        first = RouterSocket("tcp://127.0.0.1:*", curve=keys, context=context)
        with pytest.raises(ConfigurationError, match="context of its own"):
            RouterSocket("tcp://127.0.0.1:*", curve=keys, context=context)
        first.close()


def test_sockets_leave_no_descriptors_and_no_threads(house: House) -> None:
    def once() -> None:
        for endpoint in ("tcp://127.0.0.1:*", house.ipc):
            router = house.router(endpoint)
            dealer = house.dealer(router.endpoint, A)
            house.send(router, A, b"welcome")
            dealer.close()
            router.close()

    once()
    descriptors, threads = _descriptors(), threading.active_count()
    for _ in range(5):
        once()
    _settles(descriptors)
    assert threading.active_count() == threads


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _settles(limit: int) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while _descriptors() > limit:
        assert time.monotonic() < give_up, f"{_descriptors()} descriptors are open, not {limit}"
        time.sleep(0.05)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://*:0", "tcp://localhost:0"])
def test_an_endpoint_is_named_by_where_it_listens(endpoint: str) -> None:
    """The port that was found is in the name, whatever way the endpoint was written."""
    with bound(endpoint) as listener:
        name = name_of(listener)
        assert name.startswith("tcp://")
        assert int(name.rpartition(":")[2]) == listener.getsockname()[1] > 0
