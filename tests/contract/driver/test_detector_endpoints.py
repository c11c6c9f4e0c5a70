"""The two endpoints for other detectors, with real sockets: TCP with keys, and the unix socket for lines of JSON."""

import asyncio
import contextlib
import json
import shutil
import stat
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from midstep.controller.endpoints.local_sockets import DETECTORS_SOCKET, LineServer
from midstep.detectors.lines import MAX_LINE_BYTES
from midstep.detectors.reporter import FaultReporter, NotTaken
from midstep.protocol.compat import within
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.keys import JobKeys
from midstep.protocol.messages import FaultReported, NodeLost
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

if TYPE_CHECKING:
    from tests.contract.driver.conftest import Rig

ME = "detector/bmc"
REPORT = FaultReport(FaultKind.DEVICE, 1000.0, ME, "seen", node="a", device=1, code="C1", assertion=Assertion.OCCUR)


def taken(rig: "Rig") -> list[FaultReport]:
    """The fault reports that the machine was given."""
    return [event.report for event, _ in rig.machine.events if isinstance(event, FaultReported)]


# --- TCP ----------------------------------------------------------------------------------------------------------


def test_a_detector_with_its_key_reports_and_is_acknowledged_when_it_is_durable(rig: "Rig") -> None:
    async def scenario() -> None:
        JobKeys.add(rig.keys, ME)
        async with rig.controller(), FaultReporter("demo", rig.endpoint, "bmc", rig.keys) as reporter:
            reporter.tell(REPORT)
            await reporter.flush()
            assert "FaultReported" in rig.journaled()
            (report,) = taken(rig)
            assert (report.node, report.device, report.code) == ("a", 1, "C1")
            assert report.level is FaultLevel.NOT_HANDLE  # completed before it was journaled
            assert report.meaning.startswith("unknown code")

    asyncio.run(scenario())


def test_a_detector_that_reported_before_the_controller_came_is_heard_later(rig: "Rig") -> None:
    async def scenario() -> None:
        JobKeys.add(rig.keys, ME)
        async with rig.controller():
            endpoint = rig.endpoint
        async with FaultReporter("demo", endpoint, "bmc", rig.keys) as reporter:
            reporter.tell(REPORT)
            await asyncio.sleep(0.1)
            async with rig.controller():
                await reporter.flush()
            assert len(taken(rig)) == 1

    asyncio.run(scenario())


def test_a_key_that_was_not_made_for_the_job_is_turned_away(rig: "Rig") -> None:
    async def scenario() -> None:
        other = rig.root / "other"
        JobKeys.create(other, [ME])
        # The right controller, and a key of somebody else's making.
        keys = json.loads((JobKeys.folder(other, ME) / "client.json").read_text())
        keys["server_public"] = JobKeys.load_server(rig.keys).public
        (JobKeys.folder(other, ME) / "client.json").write_text(json.dumps(keys))
        async with rig.controller() as (driver, _), FaultReporter("demo", rig.endpoint, "bmc", other) as reporter:
            reporter.tell(REPORT)
            await rig.until(lambda: driver.status().refused.get("unknown key"))
            with pytest.raises(NotTaken, match="has not acknowledged all reports"):
                await reporter.flush(0.1)
            assert not taken(rig)

    asyncio.run(scenario())


def test_a_detector_is_nobody_else_and_says_nothing_else(rig: "Rig") -> None:
    async def scenario() -> None:
        JobKeys.add(rig.keys, ME)
        async with rig.controller() as (driver, _):
            peer = rig.peer(ME)
            peer.say(NodeLost("a", "gone", 1.0))
            peer.say(FaultReported(REPORT), sender="detector/other")
            peer.say(FaultReported(REPORT), sender="node/a")
            peer.say(FaultReported(FaultReport(FaultKind.EXIT, 1.0, ME, "", rank=0)))
            peer.say(FaultReported(FaultReport(FaultKind.DEVICE, 1.0, "detector/other", "", node="a", code="C")))
            await rig.until(lambda: sum(driver.status().refused.values()) >= 5)
            assert driver.status().refused == {
                "not for a detector to say": 1,
                "sender is not the connection's owner": 2,
                "not for a detector to see": 1,
                "speaks for another detector": 1,
            }
            assert not taken(rig)

    asyncio.run(scenario())


def test_a_key_of_a_node_lets_nobody_in_as_a_detector(rig: "Rig") -> None:
    async def scenario() -> None:
        shutil.copytree(JobKeys.folder(rig.keys, "node/a"), JobKeys.folder(rig.keys, ME))
        with pytest.raises(ConfigurationError, match="holds the keys of node/a, not of detector/bmc"):
            FaultReporter("demo", "tcp://127.0.0.1:1", "bmc", rig.keys)

    asyncio.run(scenario())


# --- lines --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(rig: "Rig") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A controller with the line socket, and a connection to it."""
    async with rig.controller() as (driver, _):
        server = LineServer(rig.run_directory, driver.report)
        await server.open()
        try:
            reader, writer = await asyncio.open_unix_connection(rig.run_directory / DETECTORS_SOCKET)
            try:
                yield reader, writer
            finally:
                writer.close()
        finally:
            await server.close()
    assert not (rig.run_directory / DETECTORS_SOCKET).exists()


async def answer(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], line: bytes) -> dict[str, Any]:
    """Say a line and return the answer."""
    reader, writer = connection
    writer.write(line + b"\n")
    answered: dict[str, Any] = json.loads(await within(20, reader.readline()))
    return answered


def test_a_line_is_answered_when_it_is_durable(rig: "Rig") -> None:
    async def scenario() -> None:
        async with connected(rig) as connection:
            line = b'{"code": "C1", "node": "a", "device": 1, "detector": "bmc", "detail": "hot"}'
            said = await answer(connection, line)
            assert said["ok"] is True
            assert said["text"].startswith("noted: NotHandleFault C1 (unknown code")
            assert "FaultReported" in rig.journaled()
            said = await answer(connection, b'{"level": "RestartNPU", "rank": 3, "assertion": "once"}')
            assert said["ok"] is True
        first, second = taken(rig)
        assert (first.seen_by, first.detail, first.assertion) == ("detector/bmc", "hot", Assertion.OCCUR)
        assert (second.seen_by, second.rank, second.level) == ("detector/socket", 3, FaultLevel.RESTART_NPU)

    asyncio.run(scenario())


WRONG = (
    (b"what?", "JSON is malformed"),
    (b"\xff\xfe", "JSON is malformed"),
    (b"[]", "Expected `object`, got `array`"),
    (b"{}", "code: is missing; name a code, a level, or both"),
    (b'{"code": "C1"}', "node: name either a node"),
    (b'{"code": "C1", "node": "a", "rank": 1}', "node: name either a node"),
    (b'{"code": "C1", "rank": 1, "device": 1}', "device: is for a node"),
    (b'{"code": "C1", "rank": 99}', "there is no rank 99: the job has ranks 0 to 3"),
    (b'{"code": "C1", "node": "a", "devise": 1}', "unknown field `devise`"),
    (b'{"code": "C1", "node": "a b"}', 'node: "a b" is not a valid name of a node'),
    (b'{"level": "RestartNpu", "node": "a"}', "Invalid enum value 'RestartNpu'"),
    (b'{"code": "C1", "node": "a", "kind": "exit"}', "kind: exit cannot be reported by a detector; allowed: device"),
    (b'{"code": "C1", "node": "a", "device": -1}', "Expected `int` >= 0"),
    (b'{"code": "C1", "node": "a", "detector": "a/b"}', "detector: allowed: up to 64 letters"),
    (b'{"code": "C1", "node": "a", "at_s": "now"}', "Expected `float`, got `str`"),
    (b'{"code": "' + b"C" * 600 + b'", "node": "a"}', "code: longer than 500 characters"),
)


def test_a_line_that_is_wrong_is_refused_with_its_key_and_the_next_one_is_taken(rig: "Rig") -> None:
    async def scenario() -> None:
        async with connected(rig) as connection:
            for line, complaint in WRONG:
                said = await answer(connection, line)
                assert said["ok"] is False
                assert complaint in said["text"]
            assert (await answer(connection, b'{"code": "C1", "node": "a"}'))["ok"] is True
        assert len(taken(rig)) == 1

    asyncio.run(scenario())


def test_a_line_without_an_end_is_refused(rig: "Rig") -> None:
    async def scenario() -> None:
        async with connected(rig) as connection:
            said = await answer(connection, b"x" * (3 * MAX_LINE_BYTES))
            assert said["ok"] is False
        assert not taken(rig)

    asyncio.run(scenario())


def test_the_socket_is_the_owners_alone_and_is_not_made_where_others_could_reach_it(rig: "Rig") -> None:
    async def scenario() -> None:
        async with connected(rig):
            assert stat.S_IMODE((rig.run_directory / DETECTORS_SOCKET).stat().st_mode) == 0o600
        rig.run_directory.chmod(0o755)
        with pytest.raises(ConfigurationError, match="is open to others"):
            await LineServer(rig.run_directory, lambda report, answer: None).open()
        rig.run_directory.chmod(0o700)

    asyncio.run(scenario())
