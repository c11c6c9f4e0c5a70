"""SIGTERM that reaches all processes of a job at once is acted on by launchers only."""

import os
import signal
from collections.abc import Iterator

import pytest

from midstep.agent.linux import ignores
from midstep.protocol.exits import hear_for_all, heard, is_left_to_launcher, leave_to_launcher


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Take back what a test does to this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_what_a_launcher_starts_leaves_sigterm_to_it_where_the_launcher_says_so() -> None:
    environment: dict[str, str] = {}
    hear_for_all(environment)
    leave_to_launcher(environment)

    assert environment == {}, "it would be said to ranks, too"
    assert is_left_to_launcher()
    assert heard(signal.SIGINT, signal.SIGTERM) == [signal.SIGINT]
    assert ignores(os.getpid(), signal.SIGTERM)


def test_without_a_word_of_the_launcher_sigterm_keeps_its_meaning() -> None:
    leave_to_launcher({})

    assert not is_left_to_launcher()
    assert not ignores(os.getpid(), signal.SIGTERM)


def test_no_other_signal_is_left_to_launchers() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert heard(signal.SIGHUP, signal.SIGTERM) == [signal.SIGHUP, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_that_has_ended_ignores_nothing() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)

    assert not ignores(child, signal.SIGTERM)
