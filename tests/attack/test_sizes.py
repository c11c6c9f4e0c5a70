"""Memory of the controller under messages and reports without end"""

import contextlib
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq
from rich.console import Console

from midstep.cli.views.status_view import status_view
from midstep.controller.endpoints import local_sockets as control_socket
from midstep.controller.endpoints.control_requests import StatusReply, StatusRequest
from midstep.controller.endpoints.request_handler import Abridger, RequestHandler
from midstep.controller.recovery.fitness import MAX_OF_ONE, FaultBook
from midstep.controller.switchover import Switchover
from midstep.policies.fault_codes import Treatment
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol.incidents import Incident, JobStatus, NodeStatus, Outcome, RankPhase, RankStatus
from midstep.protocol.keys import JobKeys
from midstep.protocol.types import Assertion, Decision, FaultKind, FaultLevel, FaultReport, JobSpec, Rung

from .attack import attack
from .served import REFUSED, A, B, served

MIB = 1024 * 1024
MOST_GROWTH_BYTES = 200 * MIB
PARTS = 400  # of 1 MiB
LOOKING_S = 5.0
JOB = JobSpec("demo", ("t.py",), False, False, {}, "/", "/", 4, 2, 2, 0, 0, job_settings(default_policy(), "/"))


def rendered(status: JobStatus) -> str:
    """What the command line shows."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status_view(status))
    return console.export_text()


@attack(
    "somebody with a detector's key sends a message of 400 parts of 1 MiB each, each of them within the limit",
    holds="a connection is closed after 32 MiB, which frees what was collected, and 8 MiB a second are read of one key",
    reads="refused: connection has carried its share, to be made again",
)
def test_a_message_of_many_parts_takes_little_memory(tmp_path: Path) -> None:
    """Memory grows by a fraction of what was sent, and another agent is answered all the while."""
    with served(tmp_path) as router, contextlib.ExitStack() as cleanup:
        other = router.client(B)
        assert other.ask()
        before = router.memory_bytes
        context = cleanup.enter_context(zmq.Context())
        endless = cleanup.enter_context(context.socket(zmq.DEALER))
        keys = JobKeys.load_client(router.keys, A)
        endless.linger, endless.sndhwm = 0, 0
        endless.curve_serverkey, endless.curve_secretkey, endless.curve_publickey = (
            keys.server_public.encode(),
            keys.secret.encode(),
            keys.public.encode(),
        )
        endless.routing_id = A.encode() + b"\0nonce"
        endless.connect(router.endpoint)
        part = bytes(MIB)
        for _ in range(PARTS):
            endless.send(part, zmq.SNDMORE)
        endless.send(b"")
        most, until_s = before, time.monotonic() + LOOKING_S
        while time.monotonic() < until_s and most - before < MOST_GROWTH_BYTES:
            most = max(most, router.memory_bytes)
            assert other.ask()
        assert most - before < MOST_GROWTH_BYTES, f"{(most - before) // MIB} MiB more"
        counted = json.loads(other.ask(REFUSED) or b"{}")
        assert counted["connection has carried its share, to be made again"] >= 1


def long_history(ranks: int, incidents: int) -> JobStatus:
    """The status of a big job after many incidents, each of them with what every rank did."""
    phases = ("stop", "clean", "rebuild", "repair", "rollback")
    each = Incident(
        number=0,
        began_s=1.0,
        reports=tuple(FaultReport(FaultKind.EXIT, 1.0, "node/n1", "signal 9", rank=rank) for rank in range(8)),
        decisions=(Decision(Rung.RECOVER_IN_PLACE, "one process ended"),),
        rank_phases=tuple(RankPhase(2, rank, name, 0.1) for rank in range(ranks) for name in phases),
        replaced=tuple(range(8)),
        pids_before={rank: 100_000 + rank for rank in range(ranks)},
        pids_after={rank: (100_000 if rank > 7 else 200_000) + rank for rank in range(ranks)},
        resumed_step=7,
        resumed_s=2.0,
        outcome=Outcome.RESUMED,
    )
    ranks_now = tuple(RankStatus(rank, f"n{rank // 8}", 1, 1, "training", 9, "updating") for rank in range(ranks))
    nodes = tuple(NodeStatus(f"n{node}", f"n{node}", "active", (node * 8,)) for node in range(ranks // 8))
    history = tuple(msgspec.structs.replace(each, number=number) for number in range(1, incidents + 1))
    return JobStatus("demo", 9.0, "running", 3, 1, 9, 0.1, ranks_now, nodes, (), history)


@attack(
    "a job of 10,000 ranks has 200 incidents, and each answer to `midstep status` holds all of them",
    holds="the answer stays below 7 MiB: what each rank did in earlier incidents is left out, and it is said so",
    reads="all incidents in the overview; the latest whole",
)
def test_the_status_of_a_long_job_can_be_read(tmp_path: Path) -> None:
    """The command line gets its answer, with every incident, every rank and the latest incident in full."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    status = long_history(10_000, 200)
    handler = RequestHandler(JOB, Switchover())
    server = control_socket.ControlServer(folder)
    try:
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(control_socket.ask, folder, StatusRequest(), 60.0)
            while not asked.done():
                for asker, request in server.requests():
                    event = handler.begin(request, "owner", lambda: status, partial(server.answer, asker))
                    assert event is None
                time.sleep(0.01)
    finally:
        server.close()
    reply = asked.result()
    assert isinstance(reply, StatusReply)
    assert len(msgspec.msgpack.encode(reply)) < 7 * MIB
    assert not reply.status.incidents[-1].abridged
    assert reply.status.ranks == status.ranks
    assert len(reply.status.incidents) + reply.status.incidents_left_out == 200
    assert len(reply.status.incidents) == 200
    early = reply.status.incidents[0]
    assert early.abridged
    assert (early.rung, early.steps_lost, early.recovery_s) == (Rung.RECOVER_IN_PLACE, 0, 1.0)
    assert early.healthy_pids_kept
    assert "200 incidents" in rendered(reply.status)


@pytest.mark.parametrize(("ranks", "incidents"), [(8, 2), (400, 40), (2000, 300)])
def test_a_status_has_as_much_as_fits(ranks: int, incidents: int) -> None:
    """A small one is left as it is; of a big one the latest incidents are kept, and the rest is counted."""
    status = long_history(ranks, incidents)
    short = Abridger(MIB).abridged(status)
    assert len(msgspec.msgpack.encode(short)) <= 1.1 * MIB
    assert any(each.abridged for each in short.incidents) == (ranks > 8)
    assert [each.number for each in short.incidents] == list(range(short.incidents_left_out + 1, incidents + 1))


def test_an_abridged_incident_still_says_whose_process_was_lost() -> None:
    """A healthy process that was not kept is seen in the short form, too."""
    (incident,) = long_history(10_000, 1).incidents
    harmed = msgspec.structs.replace(incident, pids_after={**incident.pids_after, 9000: 1}, resumed_s=2.0)
    status = msgspec.structs.replace(long_history(80, 0), incidents=(harmed, harmed))
    (first, _) = Abridger(MIB // 4).abridged(status).incidents
    assert first.abridged
    assert not first.healthy_pids_kept


@attack(
    "a detector's key reports 20,000 faults, to push out those that others have seen",
    holds="a detector has at most 5,000 standing faults; its own oldest goes",
)
def test_a_detector_pushes_out_only_its_own_faults() -> None:
    """What another detector has reported still stands, and the book has its limit."""
    book = FaultBook(devices_per_node=8)
    sound = FaultReport(
        FaultKind.DEVICE, 1.0, "detector/bmc", "", node="n0", device=1, code="C", level=FaultLevel.SEPARATE_NPU,
        assertion=Assertion.OCCUR,
    )  # fmt: skip
    book.enter(sound, 1.0)
    for number in range(20_000):
        book.enter(msgspec.structs.replace(sound, seen_by="detector/thief", node=f"n{number}"), 2.0)
    assert book.on("n0", frozenset(Treatment))[0] == sound
    assert len(book.standing()) == MAX_OF_ONE + 1
    assert book.clear(msgspec.structs.replace(sound, seen_by="detector/thief", node="n0")) is None
    assert book.clear(sound) is not None
