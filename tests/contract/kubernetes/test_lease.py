"""An election by a Lease: one leads, a silent one is replaced, an API that is away is no end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from midstep.controller.election.lease_election import LeaseElection, LeaseLeadership
from midstep.controller.election.presence import VolumePresence, controllers_on_volume, server_time_s
from midstep.controller.election.succession import FileSuccession
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.volume_store import open_on_volume, submit
from midstep.controller.recovery.events import StopRequested
from midstep.platforms.kubernetes.leases import KubernetesLease
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.errors import ConfigurationError, JournalError, JournalSuperseded
from midstep.protocol.incidents import ControllerPhase
from midstep.protocol.types import JobSpec

from .api_server import ApiServer, ApiThread, lease

JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))
LEASE_S = 2.0
PATIENCE_S = 60.0
NAME = "midstep-demo"
Stand = Callable[..., LeaseLeadership]


class Server(ApiThread):
    """An API server with a Lease."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.api.put("leases", lease(NAME))

    @property
    def lease(self) -> dict[str, Any]:
        return dict(self.api.objects["leases", NAME]["spec"])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(made.config))
    yield made
    made.close()


@pytest.fixture
def api(server: Server) -> ApiServer:
    return server.api


@pytest.fixture
def stand() -> Iterator[Stand]:
    """Stand for the lead: `stand("first")`."""
    with ExitStack() as opened:

        def lead(name: str, wait_s: float | None = PATIENCE_S, **options: Any) -> LeaseLeadership:
            leadership = election(name, **options).stand(wait_s, lambda: None)
            assert isinstance(leadership, LeaseLeadership)
            opened.callback(leadership.close)
            return leadership

        yield lead


def election(name: str, **options: Any) -> LeaseElection:
    return LeaseElection(lambda: KubernetesLease("", NAME), name, **{"lease_s": LEASE_S, **options})


def until(holds: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, f"still waiting for {what}"
        time.sleep(0.02)


def live(leadership: LeaseLeadership, for_s: float) -> None:
    """Run a controller's loop for a while."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        leadership.require()
        leadership.beat()
        time.sleep(0.05)


def test_a_leader_is_named_and_renews_and_leaves_the_lease_free(server: Server, stand: Stand) -> None:
    first = stand("first")
    spec = server.lease
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("first", 2, 1)

    def renewed() -> bool:
        live(first, 0.1)
        return bool(server.lease["renewTime"] > spec["renewTime"])

    until(renewed, "a renewal")
    assert server.lease["acquireTime"] == spec["acquireTime"]
    first.close()
    assert server.lease["holderIdentity"] == ""
    stand("second", wait_s=0.0)
    assert (server.lease["holderIdentity"], server.lease["leaseTransitions"]) == ("second", 2)


def test_a_leader_that_shows_signs_of_life_is_left_alone(server: Server, stand: Stand) -> None:
    first = stand("first")
    refused: list[JournalError] = []

    def rival() -> None:
        try:
            stand("second", wait_s=2 * LEASE_S)
        except JournalError as error:
            refused.append(error)

    thread = threading.Thread(target=rival)
    thread.start()
    while thread.is_alive():
        live(first, 0.1)
    thread.join()
    assert "another controller is active (first)" in str(refused[0])


def test_one_whose_loop_hangs_is_replaced_and_told(server: Server, stand: Stand) -> None:
    first = stand("first")
    stand("second")
    assert server.lease["holderIdentity"] == "second"

    def told() -> bool:
        first.beat()
        try:
            first.require()
        except JournalSuperseded as error:
            return "second leads the job by now" in str(error)
        return False

    until(told, "the first one to be told")
    first.close()
    assert server.lease["holderIdentity"] == "second"


def test_of_several_that_stand_one_leads(server: Server, stand: Stand) -> None:
    led: list[LeaseLeadership] = []
    refused: list[JournalError] = []

    def rival(number: int) -> None:
        try:
            led.append(stand(f"c{number}", wait_s=0.5))
            while len(refused) < 3:
                live(led[0], 0.1)
        except JournalError as error:
            refused.append(error)

    threads = [threading.Thread(target=rival, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (len(led), len(refused)) == (1, 3), refused


def test_an_api_that_is_away_for_longer_than_a_lease_changes_nothing(
    server: Server, api: ApiServer, stand: Stand, tmp_path: Path
) -> None:
    """The leader writes into the journal meanwhile; afterwards it leads in the same term."""
    submit(tmp_path / "journal", JOB, default_policy())
    journal = open_on_volume(tmp_path / "journal", election("first"), wait_s=PATIENCE_S)
    waiting: list[LeaseLeadership] = []
    rival = threading.Thread(target=lambda: waiting.append(stand("second")))
    rival.start()
    until(lambda: len(api.asked) > 4, "the second one to stand by")
    api.failures.extend([503] * 10_000)
    until_s = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < until_s:
        journal.require_lead()
        time.sleep(0.05)
    assert journal.append([JournalEntry(StopRequested("meanwhile"), "node/a", 1, 1)], 1.0) == (True,)
    api.failures.clear()
    until_s = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < until_s:
        journal.require_lead()
        time.sleep(0.05)
    assert not waiting
    assert journal.term == 1
    journal.close()
    rival.join(PATIENCE_S)
    assert waiting


def test_one_that_lost_its_lease_while_only_it_had_no_api_finds_so_in_the_journal(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(tmp_path / "journal", JOB, default_policy())
    first = open_on_volume(tmp_path / "journal", election("first"))
    first._leadership._renew = lambda: None  # type: ignore[attr-defined]
    with open_on_volume(tmp_path / "journal", election("second"), wait_s=PATIENCE_S) as second:
        assert second.term == 2
        with pytest.raises(JournalSuperseded, match="term 2 has begun"):
            first.append([JournalEntry(StopRequested("late"), "node/a", 1, 1)], 1.0)
    first.close()


def test_a_lease_that_somebody_labels_stays_with_its_leader(server: Server, api: ApiServer, stand: Stand) -> None:
    first = stand("first")
    for number in range(5):
        found = api.objects["leases", NAME]
        api.put("leases", {**found, "metadata": {**found["metadata"], "labels": {"a": str(number)}}})
        live(first, LEASE_S / 2)
    assert server.lease["holderIdentity"] == "first"


def test_a_lease_that_is_not_there_or_may_not_be_changed_is_said_with_what_to_do(
    server: Server, api: ApiServer, stand: Stand
) -> None:
    api.forbidden.add(("update", "leases", ""))
    with pytest.raises(JournalError, match="Its Role needs get and update"):
        stand("first")
    api.remove("leases", NAME)
    with pytest.raises(JournalError, match="Make it, with an empty spec"):
        stand("first")


def test_a_free_lead_is_left_to_the_promoted_one_though_another_waits(
    server: Server, stand: Stand, tmp_path: Path
) -> None:
    succession = FileSuccession(tmp_path, partial(server_time_s, tmp_path))
    succession.prefer("second")
    with pytest.raises(JournalError, match="another controller is active"):
        stand("first", wait_s=0.5, admitted=partial(succession.admits, "first", standby=True))
    stand("second", wait_s=0.0, admitted=partial(succession.admits, "second", standby=True)).close()
    stand("first", admitted=partial(succession.admits, "first", standby=True)).close()
    succession.pause("first", 600)
    with pytest.raises(JournalError):
        stand("second", wait_s=0.5, admitted=partial(succession.admits, "second", standby=True))


def test_the_controllers_on_a_volume_are_listed_with_their_phases_until_they_are_gone(tmp_path: Path) -> None:
    first, second = VolumePresence(tmp_path, "first"), VolumePresence(tmp_path, "second")
    try:
        first.enter(ControllerPhase.HOT, 1)

        def listed() -> bool:
            entries = [(each.name, each.phase, each.term) for each in second.controllers()]
            return entries == [("first", ControllerPhase.HOT, 1), ("second", ControllerPhase.COLD, 0)]

        until(listed, "both")
        assert controllers_on_volume(tmp_path) == second.controllers()
        first.close()
        until(lambda: [each.name for each in second.controllers()] == ["second"], "the first one to leave")
        second._path.with_name("killed.json").write_bytes(second._path.read_bytes().replace(b"second", b"killed"))
        until(lambda: len(controllers_on_volume(tmp_path)) == 2, "one that is there")
        until(
            lambda: [each.name for each in controllers_on_volume(tmp_path)] == ["second"],
            "one that was killed to be gone",
        )
    finally:
        first.close()
        second.close()


def test_a_name_that_is_in_use_on_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = VolumePresence(tmp_path, "first")
    try:
        VolumePresence(tmp_path, "first").close()  # the same container, started again
        first._look_after(first._entry)
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
        with pytest.raises(ConfigurationError, match="another controller is called first"):
            VolumePresence(tmp_path, "first")
    finally:
        first.close()
