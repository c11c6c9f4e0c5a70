"""A pipeline schedule that is torn out of a step leaves nothing open that would show in a later step."""

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.distributed import DistributedDataParallel

from midstep.adapters.megatron.state import NoSyncContexts


@pytest.fixture(autouse=True)
def collect_only_when_asked() -> Iterator[None]:
    """The collector comes by when a test says so."""
    gc.disable()
    yield
    gc.enable()


def chunk() -> Any:
    """Return a model chunk of two bucket groups, with Megatron's own `no_sync`, handed to the configuration."""
    groups = [SimpleNamespace(is_last_microbatch=True), SimpleNamespace(is_last_microbatch=True)]
    made = SimpleNamespace(bucket_groups=groups, expert_parallel_bucket_groups=[], config=SimpleNamespace())
    made.no_sync = DistributedDataParallel.no_sync.__get__(made)
    made.config.no_sync_func = made.no_sync
    return made


def last_microbatch(of: Any) -> set[bool]:
    """Return whether gradients are reduced as soon as they are ready."""
    return {group.is_last_microbatch for group in of.bucket_groups}


class Torn(Exception):
    """The step is given up."""


def schedule(no_sync: Any, *, torn: bool) -> None:
    """Do as Megatron's pipeline schedules do: enter the context by hand, and leave it at the last micro-batch."""
    context = no_sync()
    context.__enter__()
    frame = sys._getframe()  # the frame is in a circle, as theirs are by their inner functions
    if torn:
        raise Torn(str(frame.f_lineno))
    context.__exit__(None, None, None)


def tear(no_sync: Any) -> None:
    """Run a schedule that does not come to its last micro-batch."""
    with pytest.raises(Torn):
        schedule(no_sync, torn=True)


def test_what_a_torn_schedule_left_open_is_closed_once_and_not_in_a_later_step() -> None:
    """Otherwise the collector would let gradients be reduced before they are complete."""
    model = chunk()
    contexts = NoSyncContexts()
    contexts.watch([model])
    tear(model.config.no_sync_func)
    assert last_microbatch(model) == {False}
    contexts.leave()
    assert last_microbatch(model) == {True}

    context = model.config.no_sync_func()
    context.__enter__()
    gc.collect()
    assert last_microbatch(model) == {False}
    context.__exit__(None, None, None)
    assert last_microbatch(model) == {True}


def test_without_that_the_collector_changes_a_later_step() -> None:
    """That is what this guards against: should Megatron leave its contexts itself one day, this test says so."""
    model = chunk()
    tear(model.config.no_sync_func)
    context = model.config.no_sync_func()
    context.__enter__()
    gc.collect()
    assert last_microbatch(model) == {True}


@pytest.mark.parametrize("listed", [False, True])
def test_contexts_are_known_whether_they_come_from_the_chunk_or_its_configuration(listed: bool) -> None:
    """Schedules take them from the configuration, as a function or a list, and training loops set that again."""
    model = chunk()
    if listed:
        model.config.no_sync_func = [model.no_sync]
    contexts = NoSyncContexts()
    contexts.watch([model])
    given = model.config.no_sync_func[0] if listed else model.config.no_sync_func
    for no_sync in (given, model.no_sync):
        tear(no_sync)
        contexts.leave()
        assert last_microbatch(model) == {True}


def test_a_schedule_that_ends_well_leaves_its_context_itself() -> None:
    """Nothing is left for the rollback then."""
    model = chunk()
    contexts = NoSyncContexts()
    contexts.watch([model])
    schedule(model.no_sync, torn=False)
    model.bucket_groups[0].is_last_microbatch = False
    contexts.leave()
    assert last_microbatch(model) == {False, True}
