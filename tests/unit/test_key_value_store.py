"""The rendezvous store of a job without torch."""

import socket
import threading
from datetime import timedelta

import pytest

from midstep.communicators.key_value_store import KeyValueClient, KeyValueServer, StoreTimeout

SOON, LATE = timedelta(seconds=0.05), timedelta(seconds=20)


@pytest.fixture(scope="module")
def port() -> int:
    """A store that serves for the whole file; its thread ends with the process."""
    listener = socket.create_server(("127.0.0.1", 0))
    KeyValueServer(listener)
    port: int = listener.getsockname()[1]
    return port


def client(port: int) -> KeyValueClient:
    return KeyValueClient("127.0.0.1", port, timeout=LATE)


def test_what_one_client_sets_another_reads(port: int) -> None:
    """Whatever the bytes are."""
    client(port).set("key", b"\0\xff" * 100_000)
    reader = client(port)
    assert reader.get("key") == b"\0\xff" * 100_000
    assert reader.check(["key"])
    assert not reader.check(["key", "nothing"])


def test_a_wait_ends_when_the_last_key_comes(port: int) -> None:
    """The client that sets it need not know who waits."""
    ended = threading.Event()

    def wait() -> None:
        client(port).wait(["first", "second"], LATE)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    client(port).set("first", b"1")
    assert not ended.is_set()
    client(port).set("second", b"2")
    assert ended.wait(20.0)


def test_a_wait_in_vain_times_out_and_the_connection_is_still_good(port: int) -> None:
    """The answer of the wait is not taken for that of the next request."""
    waiting = client(port)
    with pytest.raises(StoreTimeout, match="never"):
        waiting.wait(["never"], SOON)
    waiting.set("after", b"ok")
    assert waiting.get("after") == b"ok"


def test_counting_comparing_and_deleting_are_as_torchs(port: int) -> None:
    """The rest of what a store can do."""
    store = client(port)
    assert [store.add("number", 2), store.add("number", 3)] == [2, 5]
    assert store.compare_set("one", b"", b"mine") == b"mine"
    assert store.compare_set("one", b"other", b"theirs") == b"mine"
    before = store.num_keys()
    assert store.delete_key("one")
    assert not store.delete_key("one")
    assert store.num_keys() == before - 1


def test_nonsense_costs_only_its_own_connection(port: int) -> None:
    """A stranger's bytes, or the announcement of more than a request may have."""
    for nonsense in (b"\xff\xff\xff\xff", b"\x04\0\0\0oops", b"GET / HTTP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            stranger.sendall(nonsense)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    store = client(port)
    store.set("still", b"here")
    assert store.get("still") == b"here"
