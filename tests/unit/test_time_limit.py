"""Awaiting for a limited time, the same on every Python."""

import asyncio

import pytest

from midstep.protocol.compat import within


def test_what_comes_in_time_is_returned() -> None:
    """And nothing is left of the limit."""

    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    assert asyncio.run(within(60.0, answer())) == 7


def test_what_takes_too_long_is_cancelled_and_is_a_timeout_error() -> None:
    """Python's own: asyncio's is another one in Python 3.10."""
    ended: list[str] = []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("never")

    with pytest.raises(TimeoutError):
        asyncio.run(within(0.01, never()))
    assert ended == ["never"]


def test_a_cancellation_from_outside_stays_one() -> None:
    """It is no timeout, even where what was awaited has just come."""

    async def cancelled() -> bool:
        came = asyncio.Event()
        task = asyncio.create_task(within(60.0, came.wait()))
        await asyncio.sleep(0)
        came.set()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    assert asyncio.run(cancelled())


def test_an_error_of_what_is_awaited_is_raised_as_it_is() -> None:
    """A TimeoutError of its own, too."""

    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(within(60.0, fail()))
