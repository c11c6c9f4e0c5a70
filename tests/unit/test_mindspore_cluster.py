"""Ranks of a job with MindSpore get what its launcher would give them, unless the user has."""

import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from midstep.adapters.mindio import cluster
from midstep.protocol import environment as names
from midstep.protocol.errors import AgentError

RANK = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", names.MINDIO: "1", names.JOB: "job", names.STORE: "here:1"}
MINDSPORE = {**RANK, "MINDIO_FOR_MINDSPORE": "1", cluster.RESTARTS: "0"}
Announce = Callable[..., None]
KEY = "midstep/job/restart0/mindspore"


class _Store(dict[str, bytes]):
    """The rendezvous store, in which nothing comes any more."""

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> Announce:
    """Let the store say where the scheduler is."""
    store = _Store()
    monkeypatch.setattr(cluster, "_store", lambda environment: store)
    monkeypatch.setattr(cluster, "FIND_S", 0.3)

    def say(address: str, *, again: bool = False) -> None:
        host, _, port = address.rpartition(":")
        store[KEY] = msgspec.msgpack.encode(cluster.SchedulerPlace(host, int(port), again))

    return say


def test_a_job_without_mindspore_needs_no_scheduler() -> None:
    assert not cluster.needs_scheduler(RANK)
    assert cluster.rank_variables(RANK) == {"MS_NODE_ID": "5", "MS_WORKER_NUM": "8"}


def test_ranks_get_what_the_launcher_sets(announce: Announce) -> None:
    """Where the world starts together the scheduler need not answer yet."""
    announce("10.0.0.7:4711")
    assert cluster.rank_variables({**MINDSPORE, names.CONNECTED: "1"}) == {
        **{"MS_NODE_ID": "5", "MS_WORKER_NUM": "8", "RANK_ID": "5", "RANK_SIZE": "8", "DEVICE_ID": "1"},
        **{"MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "10.0.0.7", "MS_SCHED_PORT": "4711", "MS_ENABLE_RECOVERY": "1"},
    }


@pytest.mark.parametrize(("name", "value"), [("DEVICE_ID", "7"), ("MS_ENABLE_RECOVERY", "0"), ("MS_NODE_ID", "3")])
def test_what_the_user_has_set_stays(name: str, value: str, announce: Announce) -> None:
    announce("10.0.0.7:4711")
    assert name not in cluster.rank_variables({**MINDSPORE, names.CONNECTED: "1", name: value})
    assert cluster.scheduler_variables({**MINDSPORE, name: value}, "h", 1)["MS_ENABLE_RECOVERY"] in {value, "1"}


def test_an_address_that_does_not_come_is_an_error_that_says_where_to_look(announce: Announce) -> None:
    with pytest.raises(
        AgentError, match=r"not in the rendezvous store at here:1.* The log of the agent on rank 0's node"
    ):
        cluster.find(MINDSPORE)


def test_a_newcomer_whose_scheduler_does_not_answer_says_so(announce: Announce) -> None:
    """Its machine may be lost, and MindSpore would try for half an hour."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        announce(f"127.0.0.1:{held.getsockname()[1]}")
        with pytest.raises(AgentError, match=r"does not answer.* all ranks have to start again"):
            cluster.rank_variables({**MINDSPORE, names.CONNECTED: "0"})
        held.listen()
        assert cluster.rank_variables({**MINDSPORE, names.CONNECTED: "0"})["MS_ROLE"] == "MS_WORKER"


def test_a_newcomer_that_may_wait_in_vain_is_warned(announce: Announce, caplog: pytest.LogCaptureFixture) -> None:
    """What the first scheduler knew is lost, and MindSpore waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        announce(f"127.0.0.1:{listener.getsockname()[1]}", again=True)
        cluster.find({**MINDSPORE, names.CONNECTED: "1"})
        assert caplog.messages == []
        cluster.find({**MINDSPORE, names.CONNECTED: "0"})
        assert caplog.messages == [cluster.STARTED_AGAIN]


@pytest.mark.parametrize(
    ("inited", "backend", "warnings"), [(True, "mccl", [cluster.STALE_LINKS]), (True, "hccl", []), (False, "mccl", [])]
)
def test_who_keeps_links_of_mccl_is_warned(
    inited: bool, backend: str, warnings: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MindSpore's collectives on CPUs cannot be set up again in a process that lives."""
    groups = SimpleNamespace(GlobalComm=SimpleNamespace(INITED=inited, BACKEND=backend))
    monkeypatch.setitem(sys.modules, "mindspore.communication.management", groups)
    cluster.warn_of_stale_links()
    assert caplog.messages == warnings


def test_another_world_looks_for_another_scheduler(announce: Announce) -> None:
    announce("10.0.0.7:4711")
    with pytest.raises(AgentError):
        cluster.find({**MINDSPORE, cluster.RESTARTS: "1"})
