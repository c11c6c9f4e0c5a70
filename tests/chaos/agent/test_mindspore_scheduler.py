"""The agent of rank 0 runs MindSpore's scheduler, which a small module stands in for: it listens where it was told.

What MindSpore itself makes of it is tested with MindSpore (`tests/mindspore/test_scheduler.py`).
"""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstep.agent.kept_process import MAX_EARLY_EXITS
from midstep.agent.scheduler_host import LOG
from midstep.protocol import environment as names
from midstep.protocol.messages import StoreMoved

pytestmark = pytest.mark.chaos

Play = Callable[..., None]

MINDSPORE = """
import os, socket, sys, time
from pathlib import Path
communication, home = sys.modules[__name__], Path(__file__).parent

def set_device(kind):
    print("device", kind, flush=True)

def init():
    if (home / "fails").exists():
        raise RuntimeError("no scheduler today")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])))
        server.listen()
        wanted = ("MS_ROLE", "MS_WORKER_NUM", "MS_ENABLE_RECOVERY", "RANK_ID")
        print("serves", *(os.environ[name] for name in wanted), flush=True)
        while not (home / "over").exists():
            time.sleep(0.02)
"""
SCRIPT = """
import json, os, sys
print(json.dumps({name: value for name, value in os.environ.items() if name.startswith(("MS_", "RANK_", "DEVICE_"))}))
"""
FOR_MINDSPORE = {names.MINDIO: "1", "MINDIO_FOR_MINDSPORE": "1"}


@pytest.fixture
def mindspore(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in."""
    home = root / "mindspore"
    home.mkdir()
    (home / "__init__.py").write_text(MINDSPORE)
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return home


async def told(site: Any, rank: int, incarnation: int = 0) -> dict[str, str]:
    """Wait for a rank's process to end, and return what its environment said to MindSpore."""
    assert (await site.exited(rank, incarnation)).status == 0, site.log(rank, incarnation)
    found: dict[str, str] = json.loads(site.log(rank, incarnation).splitlines()[-1])
    return found


def served(site: Any) -> int:
    """How many schedulers have served."""
    log = site.root / "job" / "logs" / LOG
    return log.read_text().count("serves MS_SCHED 2 1 0") if log.exists() else 0


async def next_one(site: Any, count: int) -> Any:
    """Wait until so many have served, and return the process of the last one."""
    await site.eventually(lambda: served(site) == count and len(site.below("sched")) == 1, f"scheduler {count}")
    return site.below("sched")[0]


def test_ranks_find_the_scheduler_and_so_do_newcomers_after_it_was_killed(play: Play, mindspore: Path) -> None:
    """It serves the same place again; and it says again where, when the store has forgotten it."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SCRIPT, environment=FOR_MINDSPORE)
        site.start(0)
        site.start(1)
        first = [await told(site, rank) for rank in (0, 1)]
        for rank, each in enumerate(first):
            assert (each["MS_ROLE"], each["MS_NODE_ID"], each["RANK_ID"]) == ("MS_WORKER", str(rank), str(rank))
            assert (each["MS_WORKER_NUM"], each["RANK_SIZE"], each["DEVICE_ID"]) == ("2", "2", str(rank))
            assert each["MS_ENABLE_RECOVERY"] == "1"
        [place] = {(each["MS_SCHED_HOST"], each["MS_SCHED_PORT"]) for each in first}

        (await next_one(site, 1)).kill()
        second = await next_one(site, 2)
        for incarnation in (1, 2):
            [store] = site.below("store")
            store.kill()
            moved = len(site.controller.all(StoreMoved)) + 1
            await site.eventually(lambda: len(site.controller.all(StoreMoved)) == moved, "the next store")  # noqa: B023
            site.start(1, incarnation=incarnation, restart_count=0, connected=False)
            again = await told(site, 1, incarnation=incarnation)
            assert (again["MS_SCHED_HOST"], again["MS_SCHED_PORT"]) == place
            assert "scheduler was started again in this world" in site.log(1, incarnation=incarnation)
        assert second.is_running()
        assert served(site) == 2

    play(scenario)


def test_a_scheduler_that_is_stopped_is_replaced(play: Play, mindspore: Path) -> None:
    """Ranks that register would wait for it, and it would say nothing."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SCRIPT, environment=FOR_MINDSPORE)
        site.start(0)
        stopped = await next_one(site, 1)
        stopped.send_signal(signal.SIGSTOP)
        await next_one(site, 2)
        assert not stopped.is_running()

    play(scenario)


def test_a_world_that_starts_again_meets_at_another_scheduler(play: Play, mindspore: Path) -> None:
    """What the first one knows of is gone. The last one ends with the job."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SCRIPT, environment=FOR_MINDSPORE)
        site.start(0)
        first = await told(site, 0)
        old = await next_one(site, 1)
        site.start(1, incarnation=1)
        await site.eventually(lambda: not old.is_running(), "the end of the first scheduler")
        site.start(0, incarnation=1)
        second = await told(site, 0, incarnation=1)
        await next_one(site, 2)
        assert await told(site, 1, incarnation=1) == {**second, "MS_NODE_ID": "1", "RANK_ID": "1", "DEVICE_ID": "1"}
        assert first["MS_SCHED_PORT"] != second["MS_SCHED_PORT"]
        site.let_go()
        await site.gone()

    play(scenario)


def test_the_scheduler_ends_with_an_agent_that_is_killed(play: Play, mindspore: Path) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SCRIPT, environment=FOR_MINDSPORE)
        site.start(0)
        await next_one(site, 1)
        site.agents["node0"].kill()
        assert await site.gone() == -signal.SIGKILL

    play(scenario)


def test_a_port_of_the_users_is_taken(play: Play, mindspore: Path) -> None:
    """For machines between which only some ports are open. The next scheduler may find it still in use."""

    async def scenario(site: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        await site.agent()
        site.welcome(SCRIPT, environment={**FOR_MINDSPORE, "MS_SCHED_PORT": port})
        for incarnation in (0, 1):
            site.start(0, incarnation=incarnation)
            assert (await told(site, 0, incarnation=incarnation))["MS_SCHED_PORT"] == port
            await next_one(site, incarnation + 1)

    play(scenario)


def test_a_scheduler_that_has_nothing_left_to_do_is_not_started_again(play: Play, mindspore: Path) -> None:
    """MindSpore's ends when all ranks have left."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SCRIPT, environment=FOR_MINDSPORE)
        site.start(0)
        await next_one(site, 1)
        (mindspore / "over").touch()
        await site.mentions("MindSpore's scheduler has ended: nothing needs it any more")
        assert site.below("sched") == []

    play(scenario)


def test_a_scheduler_that_cannot_start_ends_the_node_and_says_where_the_reason_is(play: Play, mindspore: Path) -> None:
    async def scenario(site: Any) -> None:
        (mindspore / "fails").touch()
        await site.agent()
        site.welcome(SCRIPT, environment=FOR_MINDSPORE)
        site.start(0)
        assert await site.gone() == 1
        said = (site.root / "node0.log").read_text()
        assert f"MindSpore's scheduler ended with status 1, {MAX_EARLY_EXITS} times in a row. See {site.root}" in said
        reasons = (site.root / "job" / "logs" / LOG).read_text().splitlines()
        assert reasons.count("RuntimeError: no scheduler today") == MAX_EARLY_EXITS

    play(scenario)


def test_without_mindspore_ranks_get_no_role_and_a_warning(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SCRIPT, environment=FOR_MINDSPORE)
        site.start(0)
        assert "MS_ROLE" not in await told(site, 0)
        assert "its scheduler is not started" in site.log(0)

    play(scenario)


@pytest.mark.parametrize("own", [{"MS_ROLE": "MS_WORKER"}, {"MS_SCHED_HOST": "10.0.0.1"}])
def test_a_user_who_has_settled_how_ranks_meet_is_left_alone(play: Play, mindspore: Path, own: dict[str, str]) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(SCRIPT, environment={**FOR_MINDSPORE, **own})
        site.start(0)
        given = await told(site, 0)
        assert "MS_SCHED_PORT" not in given
        assert given.get("MS_ROLE") == own.get("MS_ROLE")
        assert given["MS_NODE_ID"] == "0"
        assert site.below("sched") == []

    play(scenario)
