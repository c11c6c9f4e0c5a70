"""Processes that are built ahead of a fault: taken where they fit, replaced where not, and never left behind."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest

from midstep.protocol.messages import BuildAhead, NodeHeartbeat, ProcessesPrepared, StartProcess, StopProcess
from midstep.protocol.reports import PreparedProcesses
from midstep.protocol.types import Rendezvous, StandbyDepth

from .conftest import SETTINGS, Turn, taking_turns

pytestmark = pytest.mark.chaos

Play = Callable[..., None]

BUILT = msgspec.structs.replace(SETTINGS, standby_depth=StandbyDepth.BUILT)
# What a resilient script does, as far as its agent sees it.
TRAIN = """
import os, time
from midstep.processor import built_ahead
from midstep.protocol.blackbox import BlackBox
from midstep.protocol.types import Activity

ahead = built_ahead.is_waiting()
print("comes to its train function", "ahead" if ahead else "at once", os.environ["MIDSTEP_SEATED"], flush=True)
os.environ["OWN"] = "kept"
del os.environ["LOCAL_WORLD_SIZE"]
environment = built_ahead.await_rank() if ahead else os.environ
incarnation, now = int(environment["MIDSTEP_INCARNATION"]), time.monotonic()
box = BlackBox.attach(int(environment["MIDSTEP_BLACK_BOX_FD"]))
box.write_progress(pid=os.getpid(), incarnation=incarnation, generation=incarnation + 1, step=3, collectives=0,
                   activity=Activity.COMPUTING, activity_began_s=now, step_began_s=now, median_step_s=600.0)
print("trains as", incarnation, environment is os.environ, flush=True)
print("what it has changed is", os.environ.get("OWN"), os.environ.get("LOCAL_WORLD_SIZE"), flush=True)
time.sleep(600)
"""
RANKS = 8  # one for each test of those that share an agent
FAILS_AHEAD = f"""
from midstep.processor import built_ahead
assert not built_ahead.is_waiting(), "a port is taken"
{TRAIN}
"""


@pytest.fixture(scope="module")
def play_ranks() -> Iterator[Callable[[Turn], None]]:
    """Run scenarios one after the other on one agent, each with a rank of its own."""
    with taking_turns(1, settings=BUILT, world_size=RANKS, ranks_per_node=RANKS) as play_turn:
        yield play_turn


async def with_a_built_process(site: Any, rank: int) -> psutil.Process:
    """Start a rank, which trains, and return the process that is built for it meanwhile."""
    site.script(TRAIN)
    site.start(rank)
    await site.mentions(f"is built ahead for rank {rank}:")
    built: psutil.Process = site.below(f"b{rank}")[0]
    return built


def replace(site: Any, rank: int, **changes: Any) -> None:
    """Order the next process of a rank, as in a recovery."""
    site.start(rank, 1, **{"connected": False, "restart_count": 0, **changes})


def test_the_next_process_of_a_rank_is_the_one_that_was_built_for_it(play_ranks: Play) -> None:
    """It stands at the train function already; its environment, output and black box are those of the new process.

    Variables that the script has set or removed by then stay so.
    """

    async def scenario(site: Any, rank: int) -> None:
        built = await with_a_built_process(site, rank)
        replace(site, rank)
        started = await site.started(rank, 1)
        assert (started.process.pid, started.warm) == (built.pid, True)
        await site.says(rank, "trains as 1 True", incarnation=1)
        await site.says(rank, "what it has changed is kept None", incarnation=1)
        assert built.name() == f"midstep-r{rank}"
        assert "comes to its train function" not in site.log(rank, 1)
        assert "ahead 0" in (site.root / "job" / "logs" / f"rank-{rank}.built.log").read_text()
        await site.eventually(lambda: bool(site.below(f"b{rank}")), "the next one")

    play_ranks(scenario)


@pytest.mark.parametrize("hurt", [signal.SIGKILL, signal.SIGSTOP])
def test_a_built_process_that_is_dead_or_stopped_costs_its_rank_only_its_lead(play_ranks: Play, hurt: int) -> None:
    async def scenario(site: Any, rank: int) -> None:
        built = await with_a_built_process(site, rank)
        built.send_signal(hurt)
        replace(site, rank)
        started = await site.started(rank, 1)
        assert started.process.pid != built.pid
        await site.says(rank, "trains as 1", incarnation=1)
        await site.eventually(lambda: not psutil.pid_exists(built.pid), "the end of the process that was built")

    play_ranks(scenario)


def test_a_process_that_was_built_for_another_place_is_ended(play_ranks: Play) -> None:
    """Where the whole world starts together its groups are connected while the script runs."""

    async def scenario(site: Any, rank: int) -> None:
        built = await with_a_built_process(site, rank)
        replace(site, rank, connected=True)
        started = await site.started(rank, 1)
        assert started.process.pid != built.pid
        await site.says(rank, "comes to its train function at once 1", incarnation=1)
        await site.eventually(lambda: not psutil.pid_exists(built.pid), "the end of the process that was built")

    play_ranks(scenario)


def test_a_script_that_cannot_run_beside_itself_is_tried_twice_and_recovers_without(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(FAILS_AHEAD, settings=BUILT)
        site.start(0)
        await site.mentions("nor will one be")
        assert (site.root / "node0.log").read_text().count("a port is taken") >= 2
        replace(site, 0)
        await site.says(0, "trains as 1", incarnation=1)

    play(scenario)


def test_a_process_that_ends_while_it_waits_is_built_once_more_and_not_for_ever(play_ranks: Play) -> None:
    """What the system ends for its memory would be ended again."""

    async def scenario(site: Any, rank: int) -> None:
        def times_built() -> int:
            log: str = (site.root / "node0.log").read_text()
            return log.count(f"is built ahead for rank {rank}:")

        built = await with_a_built_process(site, rank)
        built.kill()
        await site.eventually(lambda: bool(site.below(f"b{rank}")), "the second one")
        await site.eventually(lambda: times_built() == 2, "its end")
        second = site.below(f"b{rank}")[0]
        second.kill()
        await site.mentions(f"process {second.pid}, which was built ahead for rank {rank}, has ended")
        replace(site, rank)
        await site.says(rank, "trains as 1", incarnation=1)
        assert times_built() == 2

    play_ranks(scenario)


def test_what_was_built_for_a_rank_that_leaves_its_node_ends_with_it(play_ranks: Play) -> None:
    async def scenario(site: Any, rank: int) -> None:
        built = await with_a_built_process(site, rank)
        site.controller.order(StopProcess(rank, 0, grace_s=0.0), "node0")
        await site.exited(rank)
        await site.eventually(lambda: not psutil.pid_exists(built.pid), "the end of the process that was built")

    play_ranks(scenario)


def test_an_agent_leaves_no_built_process_behind(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(TRAIN, settings=BUILT)
        await with_a_built_process(site, 0)
        site.let_go()
        await site.gone()

    play(scenario)


WRITES = f"""
import os
held = open("own.txt", "a") if os.environ["RANK"] == "1" else None
{TRAIN}
"""


def test_a_node_that_may_choose_builds_for_the_ranks_that_hold_nothing_of_their_own(play: Play) -> None:
    """It says why it does not for the others."""

    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(WRITES, settings=msgspec.structs.replace(SETTINGS, standby_depth=StandbyDepth.AUTO))
        site.start(0)
        site.start(1)
        await site.mentions("no process is built ahead: rank 1: the script writes ")
        await prepared(site, StandbyDepth.BUILT, 0)
        assert not site.below("b1")

    play(scenario)


# --- for ranks of other nodes, on a spare -----------------------------------------------------------------------------


def build_ahead(site: Any, *ranks: int, restart_count: int = 0) -> None:
    """Order processes for these ranks, none of which runs here."""
    nowhere = Rendezvous("127.0.0.1", 1, "of this test")  # nothing is connected ahead
    starts = (StartProcess(rank, rank, 0, 0, 1, restart_count, True, nowhere) for rank in ranks)  # as the present ones
    site.controller.order(BuildAhead(tuple(starts)), "node0")


async def prepared(site: Any, depth: StandbyDepth, *ranks: int) -> PreparedProcesses:
    """Wait until the agent says what it has prepared."""
    found = await site.controller.until(
        ProcessesPrepared, lambda body: (body.prepared.depth, body.prepared.ranks) == (depth, ranks)
    )
    assert found.node == "node0"
    said: PreparedProcesses = found.prepared
    return said


async def spare_with(site: Any, *ranks: int) -> dict[int, int]:
    """Start an agent without ranks that builds for some; return the processes, by rank."""
    await site.agent()
    site.welcome(TRAIN, settings=BUILT)
    build_ahead(site, *ranks)
    await prepared(site, StandbyDepth.BUILT, *ranks)
    return {rank: site.below(f"b{rank}")[0].pid for rank in ranks}


@pytest.mark.parametrize("early", [False, True])
def test_a_spare_builds_for_the_ranks_that_it_is_ordered_and_they_start_there(play: Play, early: bool) -> None:
    """It says what they took when all are there; what they print goes to a log of this node.

    Also where the ranks are to move before anything breaks, and have other processes for now.
    """

    async def scenario(site: Any) -> None:
        pids = await spare_with(site, 0, 1)
        cost = await prepared(site, StandbyDepth.BUILT, 0, 1)
        assert cost.took_s > 0
        assert cost.memory_bytes > 1 << 20
        assert "ahead 0" in (site.root / "job" / "logs" / "rank-1.built.node0.log").read_text()
        for rank in (0, 1):
            site.start(rank, 1, connected=False, restart_count=0, early=early)
            started = await site.started(rank, 1)
            assert (started.process.pid, started.warm) == (pids[rank], True)

    play(scenario)


def test_what_a_spare_has_built_ends_when_it_is_ordered_other_ranks_or_none(play: Play) -> None:
    async def scenario(site: Any) -> None:
        pids = await spare_with(site, 0)
        build_ahead(site, 1)
        await prepared(site, StandbyDepth.BUILT, 1)
        await site.eventually(lambda: not psutil.pid_exists(pids[0]), "the end of what was built for rank 0")
        build_ahead(site)
        await site.eventually(lambda: not site.below("b1"), "the end of what was built for rank 1")

    play(scenario)


def test_an_order_that_is_repeated_changes_nothing_and_one_of_another_world_builds_again(play: Play) -> None:
    """A new controller repeats it; after a restart of the world the script would see another environment."""

    async def scenario(site: Any) -> None:
        pids = await spare_with(site, 0)
        site.controller.heard.clear()
        build_ahead(site, 0)
        await prepared(site, StandbyDepth.BUILT, 0)
        assert site.below("b0")[0].pid == pids[0]
        site.controller.heard.clear()
        build_ahead(site, 0, restart_count=1)
        await prepared(site, StandbyDepth.BUILT, 0)
        assert site.below("b0")[0].pid != pids[0]

    play(scenario)


def test_what_is_built_stays_when_the_order_ends_as_its_rank_has_come(play: Play) -> None:
    """The spare is a node in use then, and builds for its own ranks."""

    async def scenario(site: Any) -> None:
        await spare_with(site, 0)
        site.start(0, 1, connected=False, restart_count=0)
        await site.started(0, 1)
        site.controller.heard.clear()
        build_ahead(site)
        await prepared(site, StandbyDepth.BUILT, 0)
        assert "ahead 0" in (site.root / "job" / "logs" / "rank-0.built.log").read_text()

    play(scenario)


def test_an_agent_says_what_its_imports_took_once_to_each_controller(play: Play) -> None:
    async def scenario(site: Any) -> None:
        await site.agent()
        site.welcome(TRAIN)
        first = await prepared(site, StandbyDepth.IMPORTED)
        assert first.took_s > 0
        assert first.memory_bytes > 1 << 20
        site.controller.restart()
        await site.controller.until(NodeHeartbeat)  # so it is known how to reach the agent
        site.welcome(TRAIN)
        assert await prepared(site, StandbyDepth.IMPORTED)

    play(scenario)
