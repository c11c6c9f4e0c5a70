"""An agent that has joined by itself: what it does without a controller, and what it runs."""

import asyncio
import itertools
import socket
from pathlib import Path

import pytest

from midstep.agent.main import OwnProgram, read_program, write_program
from midstep.policies.rules import job_settings
from midstep.policies.schema import default_policy
from midstep.protocol import discovery as controller_addresses
from midstep.protocol import link as absence
from midstep.protocol.compat import within
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.exits import AgentEnd, read_agent_end, write_agent_end
from midstep.protocol.link import Absence
from midstep.protocol.types import JobSpec

FIRST, SECOND = "tcp://192.0.2.10:1", "tcp://192.0.2.11:1"


class _Link:
    """A link without a network."""

    def __init__(self) -> None:
        self.connected = False
        self.endpoint = FIRST
        self.tried: list[str] = []
        self.turned_away: str | None = None
        self.proxied = False
        self.listed: tuple[str, ...] = ()

    def connect_to(self, endpoint: str) -> None:
        self.tried.append(endpoint)
        self.endpoint = endpoint
        self.proxied = False
        if len(self.tried) == 1:
            raise ConfigurationError("not now")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look without a pause, and connect elsewhere after a long one."""
    monkeypatch.setattr(absence, "LOOK_S", 0.0)
    monkeypatch.setattr(absence, "CONNECT_AGAIN_S", 3600.0)
    monkeypatch.setattr(absence, "NEXT_S", 3600.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look without a pause."""
    monkeypatch.setattr(absence, "LOOK_S", 0.0)
    monkeypatch.setattr(absence, "CONNECT_AGAIN_S", 0.0)
    monkeypatch.setattr(absence, "NEXT_S", 0.0)


def test_an_agent_tries_all_endpoints_in_turn_and_leaves_when_none_answers_for_too_long(quick: None) -> None:
    async def run() -> _Link:
        link, left = _Link(), asyncio.Event()
        watch = Absence(link, [FIRST, SECOND], left.set)
        while len(link.tried) < 4:
            await asyncio.sleep(0)
        assert not left.is_set()
        watch.leave_s = 0.0
        await within(20, left.wait())
        watch.close()
        return link

    assert asyncio.run(run()).tried[:4] == [SECOND, FIRST, SECOND, FIRST]


def test_each_turn_gives_an_endpoint_twice_as_long_so_that_a_busy_machine_can_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same short time at each, no handshake would ever be finished where all take longer."""
    monkeypatch.setattr(absence, "LOOK_S", 0.0)
    monkeypatch.setattr(absence, "NEXT_S", 0.01)

    async def run() -> list[float]:
        loop, times = asyncio.get_running_loop(), list[float]()
        played_ms = itertools.count()
        monkeypatch.setattr(loop, "time", lambda: next(played_ms) / 1000)
        link = _Link()
        watch = Absence(link, [FIRST, SECOND])
        while len(link.tried) < 9:
            if len(times) < len(link.tried):
                times.append(loop.time())
            await asyncio.sleep(0)
        watch.close()
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    pauses = asyncio.run(run())
    assert min(pauses[-2:]) >= 0.01 * 2**3


def test_all_addresses_of_a_name_are_tried_and_looked_up_again(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one name are all controllers of a job in Kubernetes, and the one that leads has another address now."""
    there = iter([("192.0.2.1", "2001:db8::2"), ("192.0.2.3", "192.0.2.1")])
    monkeypatch.setattr(controller_addresses, "resolved", lambda host: next(there) if host == "a" else ())

    async def run() -> list[str]:
        link = _Link()
        watch = Absence(link, ["tcp://a:1", SECOND])
        while len(link.tried) < 6:
            await asyncio.sleep(0)
        watch.close()
        return link.tried

    first, last = ["tcp://192.0.2.1:1", "tcp://[2001:db8::2]:1"], ["tcp://192.0.2.3:1", "tcp://192.0.2.1:1"]
    assert asyncio.run(run()) == [*first, SECOND, *last, SECOND]


def test_an_agent_that_is_turned_away_goes_to_the_controller_that_leads_and_then_tries_all_that_it_was_told_of(
    quick: None,
) -> None:
    """Also one that joined later. A platform beside its own controller stays with that one."""
    third = "tcp://192.0.2.12:1"

    async def run(*, follows: bool) -> list[str]:
        link = _Link()
        link.turned_away, link.listed = third, (third, SECOND)
        watch = Absence(link, [FIRST], follows=follows)
        while len(link.tried) < 5:
            await asyncio.sleep(0)
        watch.close()
        return link.tried

    told = asyncio.run(run(follows=True))
    assert told[0] == third
    assert set(told[1:4]) == {FIRST, SECOND, third}
    assert set(asyncio.run(run(follows=False))) == {FIRST}


def test_an_agent_that_is_connected_stays_however_long_it_hears_nothing(quick: None) -> None:
    async def run() -> list[str]:
        link, left = _Link(), asyncio.Event()
        link.connected = True
        watch = Absence(link, [FIRST], left.set)
        watch.leave_s = 0.0
        for _ in range(100):
            await asyncio.sleep(0)
        watch.close()
        assert not left.is_set()
        return link.tried

    assert asyncio.run(run()) == []


def test_each_machine_runs_its_own_command_and_all_else_is_the_jobs(tmp_path: Path) -> None:
    settings = job_settings(default_policy(), "/")
    job = JobSpec("j", ("t.py",), False, False, {"A": "1", "B": "1"}, "/there", "/job", 4, 2, 2, 0, 0, settings)
    own = OwnProgram(("mine.py", "x"), False, False, "/here", {"B": "2"})
    write_program(tmp_path / "program.json", own)

    runs = read_program(tmp_path / "program.json").of(job)

    assert (runs.command, runs.working_directory, runs.environment) == (own.command, "/here", {"A": "1", "B": "2"})
    assert (runs.world_size, runs.settings, runs.job_directory) == (4, settings, "/job")
    assert (tmp_path / "program.json").stat().st_mode & 0o077 == 0


def test_a_program_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"program\.json cannot be read"):
        read_program(tmp_path / "program.json")


def test_the_end_of_an_agent_is_read_by_the_launcher_that_started_it(tmp_path: Path) -> None:
    assert read_agent_end(tmp_path) is None
    write_agent_end(tmp_path, AgentEnd(75, "gone"))

    assert read_agent_end(tmp_path) == AgentEnd(75, "gone")


@pytest.mark.usefixtures("slow")
def test_a_proxy_that_falls_silent_is_left_at_once() -> None:
    """Where a controller was, it is waited for: another one may take its port."""

    async def tried(*, proxied: bool) -> list[str]:
        link = _Link()
        link.tried.append("")  # the first try of this link fails
        link.proxied = proxied
        watch = Absence(link, [SECOND], proxies=[FIRST])
        await asyncio.sleep(0.3)
        watch.close()
        return link.tried[1:]

    assert asyncio.run(tried(proxied=True)) == [SECOND]
    assert asyncio.run(tried(proxied=False)) == []


@pytest.mark.usefixtures("quick")
def test_a_node_goes_to_its_proxy_once_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absence, "RETURN_S", 0.01)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        proxy = f"tcp://127.0.0.1:{port}"
        link = _Link()
        link.connected, link.endpoint = True, SECOND
        link.tried.append("")
        watch = Absence(link, [SECOND], proxies=[proxy])
        await asyncio.sleep(0.1)
        assert link.endpoint == SECOND
        with socket.create_server(("127.0.0.1", port)):
            give_up_s = asyncio.get_running_loop().time() + 20
            while link.endpoint != proxy:
                assert asyncio.get_running_loop().time() < give_up_s
                await asyncio.sleep(0.01)
            link.proxied = True
            await asyncio.sleep(0.05)
        watch.close()
        assert set(link.tried) == {"", proxy}

    asyncio.run(run())
