"""The state of a process that is built ahead of a fault: it holds no rank yet, and knows how it gets one.

It has run the script up to the train function, in the name of a rank that another process holds. Its agent puts the
way to the rank here before the script begins; the train function asks.
"""

from collections.abc import Callable, Mapping

_await_rank: Callable[[], Mapping[str, str]] | None = None


def hold_back(await_rank: Callable[[], Mapping[str, str]]) -> None:
    """Make this a process without a rank. Before the script begins.

    Args:
        await_rank: Returns, when a fault has made the rank free, the environment with which this process holds it.
    """
    global _await_rank  # noqa: PLW0603 - a process is built ahead as a whole
    _await_rank = await_rank


def is_waiting() -> bool:
    """Return whether this process was built ahead and holds no rank yet."""
    return _await_rank is not None


def await_rank() -> Mapping[str, str]:
    """Wait until this process is to hold its rank; return its environment from then on. In the train thread, once."""
    global _await_rank
    assert _await_rank is not None
    await_rank_once, _await_rank = _await_rank, None
    return await_rank_once()
