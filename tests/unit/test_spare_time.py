"""When a machine that has joined by itself leaves."""

import asyncio

import pytest

from midstep.agent import main as spare_time
from midstep.agent.main import Departure
from midstep.policies.files import parse_policy
from midstep.policies.rules import job_settings
from midstep.protocol.compat import within


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look without a pause."""
    monkeypatch.setattr(spare_time, "LOOK_S", 0.0)


def test_a_node_leaves_once_when_it_had_no_rank_for_too_long(quick: None) -> None:
    async def run() -> list[str]:
        said, looks, ranks = [], [0], [True]

        def hosts_ranks() -> bool:
            looks[0] += 1
            return ranks[0]

        left = asyncio.Event()
        watch = Departure(hosts_ranks, lambda _: left.set())
        watch.spare_s = 0.0
        while looks[0] < 5:
            await asyncio.sleep(0)
        said.append("left with a rank" if left.is_set() else "stayed with a rank")
        ranks[0] = False
        await within(20, left.wait())
        looks[0] = 0
        for _ in range(10):
            await asyncio.sleep(0)
        said.append(f"{looks[0]} looks after it")
        watch.close()
        return said

    assert asyncio.run(run()) == ["stayed with a rank", "0 looks after it"]


def test_a_node_that_is_to_go_leaves_as_soon_as_its_ranks_have_moved(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it could have waited."""
    monkeypatch.setattr(spare_time, "SOON_S", 0.0)

    async def run() -> bool:
        looks, ranks, left = [0], [True], asyncio.Event()

        def hosts_ranks() -> bool:
            looks[0] += 1
            return ranks[0]

        watch = Departure(hosts_ranks, lambda _: left.set())
        watch.spare_s = 3600.0
        watch.ask("SIGUSR1")
        while looks[0] < 5:
            await asyncio.sleep(0)
        stayed = not left.is_set()
        ranks[0] = False
        await within(20, left.wait())
        watch.close()
        return stayed

    assert asyncio.run(run())


def test_a_node_whose_ranks_do_not_move_leaves_when_its_time_is_over(quick: None) -> None:
    async def run() -> list[str]:
        said: list[str] = []
        left = asyncio.Event()

        def leave(reason: str) -> None:
            said.append(reason)
            left.set()

        watch = Departure(lambda: True, leave)
        watch.ask("SIGTERM", within_s=0.0)
        await within(20, left.wait())
        watch.close()
        return said

    why = "it was asked to leave (SIGTERM), and its ranks found no other place within 0 s"
    assert asyncio.run(run()) == [why]


def test_without_a_limit_a_node_waits_for_as_long_as_the_job_runs(quick: None) -> None:
    async def run() -> bool:
        looks, left = [0], asyncio.Event()

        def hosts_ranks() -> bool:
            looks[0] += 1
            return False

        watch = Departure(hosts_ranks, lambda _: left.set())
        while looks[0] < 10:
            await asyncio.sleep(0)
        watch.close()
        return left.is_set()

    assert not asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "spares", "waits_s"),
    [
        ("", 0, 600.0),
        ("agent: {spare_s: 300}", 0, 300.0),
        ("agent: {spare_s: null}", 0, None),
        ("deadlines: {nodes_s: 900, orders_s: 1200}", 0, 910.0),  # nodes without ranks may be waiting for others
        ("scale: {min_nodes: 1}", 0, 1200.0),  # a job that may grow does so 600 s after the last change at the latest
        ("", 1, None),  # the job asks for machines that wait
    ],
)
def test_a_machine_that_comes_late_waits_600_s_and_those_that_the_job_asks_for_as_long_as_it_runs(
    text: str, spares: int, waits_s: float | None
) -> None:
    assert job_settings(parse_policy(text, "job.yaml"), "/", spares=spares).spare_s == waits_s
