"""A heartbeat tells where the ranks of a node are; in a large job most are a sign of life alone."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from midstep.agent.heartbeat import CLOCKS_MOST_S, CLOCKS_PER_S, Heartbeat, clocks_every_s
from midstep.agent.ranks import RankHost
from midstep.protocol.compat import within
from midstep.protocol.messages import NodeHeartbeat
from midstep.protocol.types import JobSettings

HEARTBEAT_S = 0.02


@pytest.mark.parametrize(
    ("world_size", "every_s"),
    [(1, 0.5), (2500, 0.5), (10_000, 2.0), (100_000, CLOCKS_MOST_S)],
)
def test_the_larger_a_job_the_less_often_its_clocks_are_told(world_size: int, every_s: float) -> None:
    assert clocks_every_s(world_size, 0.5) == every_s


def test_clocks_are_told_with_each_heartbeat_where_these_are_rarer() -> None:
    assert clocks_every_s(100_000, 30.0) == 30.0


class Ranks:
    """A node without processes."""

    rests = SimpleNamespace(start=lambda settings: None, held_up=lambda lag_s: None, soonest_s=lambda: 1.0)

    def progress(self) -> tuple[()]:
        return ()

    def with_links(self, readings: tuple[()], now: float) -> tuple[()]:
        return readings

    def waiting(self, readings: object) -> tuple[()]:
        return ()

    def reported(self) -> None:
        return None

    def prepare(self, readings: object) -> None:
        pass

    def write_copies(self) -> None:
        pass

    def watch_memory(self) -> None:
        pass


def beats_of(world_size: int, beats: int) -> list[str]:
    """Return so many words of a node in a job of this size; "" is a sign of life."""

    async def hear() -> list[str]:
        said: list[str] = []
        heard = asyncio.Event()

        def take(word: str) -> None:
            said.append(word)
            if len(said) >= beats:
                heard.set()

        def post(body: Any, *, reliable: bool = True) -> None:
            assert not reliable
            take(type(body).__name__)

        heartbeat = Heartbeat("a", cast(RankHost, Ranks()), post=post, sign=lambda: take(""))
        heartbeat.start(JobSettings(heartbeat_s=HEARTBEAT_S), world_size)
        try:
            await within(30.0, heard.wait())
        finally:
            heartbeat.close()
        return said

    return asyncio.run(hear())


def test_a_small_job_tells_its_clocks_with_each_heartbeat() -> None:
    assert beats_of(8, 5) == [NodeHeartbeat.__name__] * 5


def test_a_larger_job_tells_its_clocks_now_and_then() -> None:
    assert NodeHeartbeat.__name__ in beats_of(round(CLOCKS_PER_S * 4 * HEARTBEAT_S), 40)


def test_a_very_large_job_tells_its_clocks_with_few_of_them() -> None:
    assert beats_of(100_000, 40).count("") > 30
