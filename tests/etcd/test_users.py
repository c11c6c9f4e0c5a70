"""An etcd with users: a job by one that may touch its keys only, and what a wrong password or a lost right says."""

import subprocess

import msgspec
import pytest

from midstep.controller.election.presence import EtcdPresence
from midstep.controller.etcd.client import Etcd, put
from midstep.controller.etcd.place import Access, EtcdPlace, parse_place
from midstep.controller.journal.etcd_store import open_in_etcd, submit
from midstep.controller.journal.reading import read_status
from midstep.controller.journal.records import JournalEntry
from midstep.controller.recovery.events import StopRequested
from midstep.policies.schema import default_policy
from midstep.protocol.errors import StoreUnreachable

from .conftest import StartServer
from .server import Server
from .test_etcd_journal import JOB, LEASE_S, PATIENCE_S

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]

USER, PASSWORD = "midstep", "not:secret"
USERS = (
    ("user", "add", "root:root"),
    ("user", "grant-role", "root", "root"),
    ("role", "add", "midstep"),
    ("role", "grant-permission", "midstep", "--prefix=true", "readwrite", "/midstep/"),
    ("user", "add", f"{USER}:{PASSWORD}"),
    ("user", "grant-role", USER, "midstep"),
)


def etcdctl(server: Server, *arguments: str) -> None:
    """Administer an etcd as docs/controllers.md does, with etcd's own tool."""
    addresses = ",".join(f"127.0.0.1:{member.port}" for member in server.members)
    subprocess.run(("etcdctl", "--endpoints", addresses, *arguments), check=True, capture_output=True, timeout=30)


@pytest.fixture
def guarded(start_server: StartServer) -> Server:
    """An etcd that asks who one is."""
    server = start_server()
    for each in USERS:
        etcdctl(server, *each)
    etcdctl(server, "auth", "enable")
    return server


@pytest.fixture
def place(guarded: Server) -> EtcdPlace:
    """A job in it, for who has the password."""
    return parse_place(guarded.url, "demo", Access(user=USER, password=PASSWORD))


def test_a_job_is_led_and_read_by_a_user_with_a_right_to_its_keys_only(place: EtcdPlace, guarded: Server) -> None:
    """Founding, election, leases, journal, status: all of what a controller does."""
    submit(place, JOB, default_policy())
    presence = EtcdPresence(place, "first", LEASE_S)
    try:
        journal = open_in_etcd(place, presence, lease_s=LEASE_S, wait_s=PATIENCE_S)
        try:
            journal.append([JournalEntry(StopRequested("why"), "operator", 1, 1)], 1.0)
            etcdctl(
                guarded, "--user", "root:root", "role", "add", "another"
            )  # what was logged in before is asked again
            journal.append([JournalEntry(StopRequested("why"), "operator", 1, 2)], 2.0)
            guarded.members[0].kill()  # and forgets who has logged in
            guarded.members[0].start()
            guarded.members[0].wait()
            journal.append([JournalEntry(StopRequested("why"), "operator", 1, 3)], 3.0)
            assert read_status(place).job == "demo"
        finally:
            journal.close()
    finally:
        presence.close()


def test_without_the_password_or_beyond_the_right_nothing_is_done(place: EtcdPlace) -> None:
    for wrong in (Access(), Access(user=USER, password="guessed")):
        with pytest.raises(
            StoreUnreachable, match=r"(user name is empty|invalid user ID or password|authentication failed)"
        ):
            Etcd(msgspec.structs.replace(place, access=wrong)).get(place.founding)
    with pytest.raises(StoreUnreachable, match="permission denied"):
        Etcd(place).change([], [put("/others/key", b"x")])
