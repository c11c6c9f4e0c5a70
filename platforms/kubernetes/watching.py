"""Watches a kind of object for as long as it takes: lists, follows, and begins again whatever happens to the API."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from .api import Event, Expired, RequestRefused, Unavailable

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0

_log = logging.getLogger(__name__)

Listing = Callable[[], Awaitable[tuple[list[dict[str, Any]], str]]]
Watch = Callable[[str], AsyncGenerator[Event, None]]


def pause_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, 16)))


async def watch(
    what: str,
    listing: Listing,
    events: Watch,
    *,
    on_all: Callable[[list[dict[str, Any]]], None],
    on_event: Callable[[str, dict[str, Any]], None],
) -> None:
    """Hand on all objects, then each change of one, until it is cancelled. `what` is for the log.

    After each interruption all are handed on again: what went away meanwhile is not among them. A refusal is asked
    again, too: the right may be given later.
    """
    failures = 0
    while True:
        try:
            found, version = await listing()
            if failures:
                _log.info("%s are watched again", what)
            failures = 0
            on_all(found)
            async with aclosing(events(version)) as following:
                async for operation, each in following:
                    on_event(operation, each)
        except Expired as error:
            _log.debug("%s are listed again: %s", what, error)
        except (RequestRefused, Unavailable) as error:
            failures += 1
            if failures == 1:
                _log.warning("%s are not watched for now: %s", what, error)
        await asyncio.sleep(pause_s(failures))
