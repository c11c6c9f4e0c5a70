"""The store that the roles of a job share: real sockets, one server, several clients."""

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from midstep.communicators.key_value_store import KeyValueClient, KeyValueServer, StoreFull
from midstep.launch.directories import GroupFounding, store_file, store_folder
from midstep.launch.roles import SharedStore
from midstep.policies.scripted_roles import JobOfRoles
from midstep.processor import role as role_module
from midstep.processor.role import RoleStore, role
from midstep.protocol import environment as env
from midstep.protocol.discovery import read_role_store
from midstep.protocol.errors import ConfigurationError, Interrupted, NotUnderMidstep, RoleStoreError

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


def test_a_store_that_comes_back_elsewhere_is_found_again_with_what_it_held(tmp_path: Path) -> None:
    """As after `midstep resume`, also for a rank that has lived through it; what was deleted stays deleted."""
    actor = client(tmp_path)
    with SharedStore(FOUNDING, tmp_path) as first:
        first.begin(1)
        for key, value in (("a", b"1"), ("b", b"2"), ("c", b"3"), ("a", b"4")):
            actor.set(key, value)
        actor.delete("b")
    with SharedStore(FOUNDING, tmp_path) as second:
        second.begin(1)
        assert actor.get("a") == b"4"
        assert (client(tmp_path).get("c"), actor.has("b")) == (b"3", False)
        actor.set("b", b"5")
        assert client(tmp_path).get("b") == b"5"


def test_what_was_set_is_kept_before_it_is_acknowledged_and_is_gone_with_the_job(tmp_path: Path) -> None:
    with SharedStore(FOUNDING, tmp_path) as store:
        store.begin(1)
        client(tmp_path).set("a", b"1")
        assert len(list((store_folder(tmp_path) / "1").iterdir())) == 1
        store.end()
        assert list(store_folder(tmp_path).iterdir()) == []


def test_a_launcher_that_begins_all_roles_again_finds_nothing_of_the_attempt_before(tmp_path: Path) -> None:
    with SharedStore(FOUNDING, tmp_path) as first:
        first.begin(1)
        client(tmp_path).set("a", b"1")
    with SharedStore(FOUNDING, tmp_path) as second:
        second.begin(2)
        assert not client(tmp_path, attempt=2).has("a")
        assert [each.name for each in store_folder(tmp_path).iterdir()] == ["2"]


def test_where_roles_outlive_the_launcher_nothing_is_kept_as_they_begin_again_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their job directory is on a network file system, which would take each value for nothing."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    with SharedStore(msgspec.structs.replace(FOUNDING, platform="ray"), tmp_path) as store:
        store.begin(1)
        client(tmp_path).set("a", b"1")
        assert client(tmp_path).get("a") == b"1"
        assert not store_folder(tmp_path).exists()


def test_a_value_that_cannot_be_kept_is_refused_and_the_one_before_stays(
    shared: SharedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that came back with less than was acknowledged would be worse than an error now."""
    actor = client(tmp_path)
    actor.set("a", b"1")
    shutil.rmtree(store_folder(tmp_path))
    with pytest.raises(RoleStoreError, match="is full"):
        actor.set("a", b"2")
    assert actor.get("a") == b"1"
    assert "a value of 17 bytes for the store is refused, as it cannot be kept" in caplog.text


def test_a_deletion_that_cannot_be_kept_is_refused_and_the_value_stays(shared: SharedStore, tmp_path: Path) -> None:
    """After `midstep resume` the value would be there again, and nobody would know why."""
    actor = client(tmp_path)
    actor.set("a", b"1")
    (file,) = (store_folder(tmp_path) / "1").iterdir()
    file.unlink()
    file.mkdir()
    with pytest.raises(RoleStoreError, match="is full"):
        actor.delete("a")
    assert actor.get("a") == b"1"


def test_a_store_whose_files_are_damaged_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    folder = store_folder(tmp_path) / "1"
    folder.mkdir(parents=True)
    (folder / "ab").write_bytes(b"nothing")
    with (
        SharedStore(FOUNDING, tmp_path) as store,
        pytest.raises(ConfigurationError, match=r"store: what the roles had.*ab: .*Remove that folder"),
    ):
        store.begin(1)


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
