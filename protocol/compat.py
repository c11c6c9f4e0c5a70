"""Parts of later standard libraries that Python 3.10 lacks: `StrEnum`, and a time limit for `await`.

asyncio is imported in the functions: pure modules need the enum, and load no event loop for it.
"""

import sys
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum

    async def within(limit_s: float, awaitable: Awaitable[T]) -> T:
        """Await for `limit_s` at most. Raises TimeoutError, after what was awaited has been cancelled."""
        import asyncio

        async with asyncio.timeout(limit_s):
            return await awaitable

else:
    import enum

    class StrEnum(str, enum.Enum):
        """Make members that are strings, and print as their values in messages and reports."""

        def __str__(self) -> str:
            return str(self.value)

        def __format__(self, format_spec: str) -> str:
            return format(str(self.value), format_spec)

    async def within(limit_s: float, awaitable: Awaitable[T]) -> T:
        """Await for `limit_s` at most. Raises TimeoutError, after what was awaited has been cancelled."""
        import asyncio

        from async_timeout import timeout

        try:
            async with timeout(limit_s):
                return await awaitable
        except asyncio.TimeoutError as error:
            raise TimeoutError(*error.args) from None
