"""Awaiting with a time limit, the same on every Python.

Python 3.10 has no `asyncio.timeout`, its asyncio raises a TimeoutError of its own, and `asyncio.wait_for` can lose a
cancellation before 3.12. So everything here that waits for a limited time calls `within`.
"""

import asyncio
import sys
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

if sys.version_info >= (3, 11):

    async def within(limit_s: float, awaitable: Awaitable[T]) -> T:
        """Await for `limit_s` at most. Raises TimeoutError, after what was awaited has been cancelled."""
        async with asyncio.timeout(limit_s):
            return await awaitable

else:
    from async_timeout import timeout

    async def within(limit_s: float, awaitable: Awaitable[T]) -> T:
        """Await for `limit_s` at most. Raises TimeoutError, after what was awaited has been cancelled."""
        try:
            async with timeout(limit_s):
                return await awaitable
        except asyncio.TimeoutError as error:
            raise TimeoutError(*error.args) from None
