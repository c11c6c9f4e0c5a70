"""The store that the roles of a job share: real sockets, one server, several clients."""

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from midstep.communicators.key_value_store import KeyValueClient, KeyValueServer, StoreFull
from midstep.launch.directories import GroupFounding, store_file
from midstep.launch.roles import SharedStore
from midstep.policies.scripted_roles import JobOfRoles
from midstep.processor import role as role_module
from midstep.processor.role import RoleStore, role
from midstep.protocol import environment as env
from midstep.protocol.discovery import read_role_store
from midstep.protocol.errors import Interrupted, NotUnderMidstep, RoleStoreError

FOUNDING = GroupFounding("rl", JobOfRoles((), (), None), {}, "/", "local", True, "secret")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedStore]:
    """A store that serves, in its first attempt."""
    with SharedStore(FOUNDING, tmp_path) as store:
        store.begin(1)
        yield store


def client(directory: Path, attempt: int = 1) -> RoleStore:
    return RoleStore(store_file(directory), attempt)


def test_what_one_role_sets_another_gets_and_may_replace_and_delete(shared: SharedStore, tmp_path: Path) -> None:
    actor, rollout = client(tmp_path), client(tmp_path)
    actor.set("weights/1", b"\x00\xff")
    assert rollout.get("weights/1") == b"\x00\xff"
    rollout.set("weights/1", b"later")
    assert (actor.get("weights/1"), actor.has("weights/1"), actor.has("weights/2")) == (b"later", True, False)
    assert actor.delete("weights/1")
    assert not actor.delete("weights/1")


def test_a_get_waits_for_a_value_and_says_in_the_end_that_none_came(shared: SharedStore, tmp_path: Path) -> None:
    threading.Timer(0.3, client(tmp_path).set, ("late", b"1")).start()
    assert client(tmp_path).get("late") == b"1"
    with pytest.raises(RoleStoreError, match=r"no role has set 'never' within 0\.2 s"):
        client(tmp_path).get("never", timeout_s=0.2)


def test_what_a_process_without_the_secret_writes_is_not_taken_for_a_roles(shared: SharedStore, tmp_path: Path) -> None:
    actor = client(tmp_path)
    actor.set("weights", b"right")
    place = read_role_store(store_file(tmp_path))
    seal = actor._authenticator
    assert seal is not None
    stranger = KeyValueClient(place.host, place.port, timeout=timedelta(seconds=5))
    stranger.set(seal.hashed_key("weights"), b"0123456789abcdefwrong")
    with pytest.raises(RoleStoreError, match="was not written by one of them"):
        actor.get("weights")


def test_a_store_that_comes_back_elsewhere_is_found_again(tmp_path: Path) -> None:
    """As after `midstep resume`, for a rank that has lived through it: what it held is gone."""
    actor = client(tmp_path)
    with SharedStore(FOUNDING, tmp_path) as first:
        first.begin(1)
        actor.set("a", b"1")
        assert actor._client is not None
        actor._client.close()
        assert actor.get("a") == b"1"
    with SharedStore(FOUNDING, tmp_path) as second:
        second.begin(1)
        assert not actor.has("a")
        actor.set("a", b"2")
        assert client(tmp_path).get("a") == b"2"


def test_without_a_store_it_is_said_where_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(RoleStoreError, match="is not reached"):
        client(tmp_path).set("a", b"1", timeout_s=0.1)


def test_when_all_roles_begin_again_the_store_is_empty_and_the_attempt_before_cannot_be_heard(
    shared: SharedStore, tmp_path: Path
) -> None:
    before, after = client(tmp_path), client(tmp_path, attempt=2)
    before.set("weights", b"old")
    shared.begin(2)
    deadline = time.monotonic() + 30
    while before.has("weights"):
        assert time.monotonic() < deadline
    before.set("weights", b"from a process that should have ended")
    assert not after.has("weights")


def test_a_store_is_closed_without_a_word_while_clients_are_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SharedStore(FOUNDING, tmp_path) as store:
        store.begin(1)
        client(tmp_path).set("a", b"1")

        def ask() -> None:
            with pytest.raises(RoleStoreError):
                client(tmp_path).get("b", timeout_s=1.0)

        waiting = threading.Thread(target=ask)
        waiting.start()
        time.sleep(0.3)
    waiting.join()
    assert [record.getMessage() for record in caplog.records] == []


def test_a_full_store_refuses_values_until_others_are_deleted() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = KeyValueServer(listener, limit_bytes=100)
    store = KeyValueClient(*listener.getsockname(), timeout=timedelta(seconds=30))
    store.set("a", b"x" * 60)
    with pytest.raises(StoreFull, match="no room in the store for b"):
        store.set("b", b"x" * 60)
    store.set("a", b"x" * 90)  # in the place of the one before
    store.delete_key("a")
    store.set("b", b"x" * 60)
    assert store.get("b") == b"x" * 60
    store.close()
    server.close()


def test_a_wait_is_interrupted_when_the_own_role_recovers(
    shared: SharedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the process would be taken for one that does not answer, and be replaced."""
    store, orders = client(tmp_path), [False, False, True]
    monkeypatch.setattr(role_module, "_ordered_to_stop", lambda: orders.pop(0))
    with pytest.raises(Interrupted):
        store.get("never")
    assert not orders


def test_a_process_knows_its_role_and_the_sizes_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role.cache_clear()
    with pytest.raises(NotUnderMidstep, match=r"MIDSTEP_ROLE is not set.*midstep run --roles"):
        role()
    monkeypatch.setenv(env.ROLE, "actor")
    monkeypatch.setenv(env.ROLES, '{"actor": 2, "rollout": 4}')
    monkeypatch.setenv(env.ROLE_ATTEMPT, "3")
    monkeypatch.setenv(env.ROLE_STORE, str(store_file(tmp_path)))
    own = role()
    assert (own.name, own.sizes, own.attempt) == ("actor", {"actor": 2, "rollout": 4}, 3)
    assert role() is own
    role.cache_clear()
