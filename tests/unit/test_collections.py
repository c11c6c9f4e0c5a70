"""The garbage collector of a controller: it does not look at everything in the midst of a recovery."""

import gc
from collections.abc import Iterator

import pytest

from midstep.controller.service import COLLECT_AFTER, collect_rarely


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_a_turn_of_a_large_job_decodes_starts_no_collection() -> None:
    """Lists in place of messages: as many as a thousand nodes of eight ranks say at one time."""
    collect_rarely()
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        begun.extend([info["generation"]] * (phase == "start"))

    gc.callbacks.append(note)
    try:
        decoded = [[rank] for rank in range(COLLECT_AFTER // 2)]
    finally:
        gc.callbacks.remove(note)
    assert (len(decoded), begun) == (COLLECT_AFTER // 2, [])
