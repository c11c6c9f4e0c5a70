"""A job on torch-npu to which twenty things happen: at other moments of a step, and while it recovers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.chaos.comparing import assert_nobody_harmed, assert_same_numbers
from tests.chaos.jobs import Job, Record

from midstep.protocol.faults import ArmedFault, FaultAction, InjectionPoint

from .environment import require_cann
from .test_jobs import IN_PLACE, RANKS, RETRY, ended, harm, job

EVERY = 4  # steps from one case to the next
JOB_S = 900.0
BOTH = [*RETRY, *IN_PLACE]
KILL, STOP, RAISE, EXIT, HANG = (
    FaultAction.KILL,
    FaultAction.STOP,
    FaultAction.RAISE,
    FaultAction.EXIT,
    FaultAction.HANG,
)
FORWARD, BACKWARD, COLLECTIVE = InjectionPoint.FORWARD, InjectionPoint.BACKWARD, InjectionPoint.COLLECTIVE

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1200)]

# What happens to which ranks, the rungs taken, who is replaced. A second fault comes in the recovery from the first.
Happening = tuple[int, FaultAction, InjectionPoint]
CASES: list[tuple[str, list[Happening], list[str], set[int]]] = [
    ("kill -9 in the forward pass", [(2, KILL, FORWARD)], IN_PLACE, {2}),
    ("kill -9 of rank 0 in a collective", [(0, KILL, COLLECTIVE)], IN_PLACE, {0}),
    ("kill -9 in the update", [(1, KILL, InjectionPoint.UPDATE)], IN_PLACE, {1}),
    ("two ranks killed in one step", [(1, KILL, BACKWARD), (2, KILL, BACKWARD)], IN_PLACE, {1, 2}),
    ("an exception", [(0, RAISE, BACKWARD)], IN_PLACE, {0}),
    ("an exit without a word", [(2, EXIT, FORWARD)], IN_PLACE, {2}),
    ("SIGSTOP of rank 0 in a collective", [(0, STOP, COLLECTIVE)], IN_PLACE, {0}),
    ("a rank that sleeps for ever", [(1, HANG, FORWARD)], IN_PLACE, {1}),
    ("a collective that never ends", [(2, FaultAction.HANG_COLLECTIVE, BACKWARD)], RETRY, set()),
    ("another device is suspected", [(1, FaultAction.REMOTE, BACKWARD)], RETRY, set()),
    ("an alarm for nothing", [(0, FaultAction.SUSPECT_MEMORY, FORWARD)], RETRY, set()),
    ("several bits of a parameter", [(1, FaultAction.MULTI_BIT, BACKWARD)], RETRY, set()),
    ("a link of rank 0 that fails", [(0, FaultAction.LINK_DOWN, BACKWARD)], RETRY, set()),
    ("an error outside of torch's memory", [(2, FaultAction.MEMORY_OUTSIDE, FORWARD)], BOTH, {2}),
    ("memory that is used up", [(1, FaultAction.OUT_OF_MEMORY, FORWARD)], IN_PLACE, {1}),
    ("a second kill when devices stop", [(0, KILL, FORWARD), (2, KILL, InjectionPoint.STOP)], IN_PLACE, {0, 2}),
    (
        "a second kill when devices are cleaned",
        [(1, KILL, BACKWARD), (0, KILL, InjectionPoint.CLEAN)],
        IN_PLACE,
        {0, 1},
    ),
    ("a second kill in the repair", [(2, KILL, FORWARD), (1, KILL, InjectionPoint.REPAIR)], IN_PLACE, {1, 2}),
    ("a second kill in the rollback", [(0, KILL, BACKWARD), (1, KILL, InjectionPoint.ROLLBACK)], IN_PLACE, {0, 1}),
    (
        "a kill when a link that failed is resumed",
        [(1, FaultAction.LINK_DOWN, COLLECTIVE), (2, KILL, InjectionPoint.REBUILD)],
        BOTH,
        {2},
    ),
]
STEPS = EVERY * (len(CASES) + 2)


def armed() -> list[ArmedFault]:
    """Return the faults of all cases: each in the process that a rank has by then."""
    lives: Counter[int] = Counter()
    faults = []
    for number, (_, happenings, _, replaced) in enumerate(CASES):
        for rank, action, point in happenings:
            faults.append(harm(rank, action, point, EVERY * (number + 1), life=lives[rank] + 1))
        lives.update(replaced)
    return faults


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a run to which nothing happens."""
    require_cann()
    calm = job(tmp_path_factory.mktemp("undisturbed"), [], STEPS)
    try:
        assert not ended(calm)["incidents"], calm.said()
        return calm.record()
    finally:
        calm.close()


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, dict[str, Any]]]:
    """The job to which everything happens, one after the other."""
    require_cann()
    made = job(tmp_path_factory.mktemp("hurt"), armed(), STEPS)
    try:
        yield made, ended(made, JOB_S)
    finally:
        made.close()


@pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, *_ in CASES])
def test_a_fault_is_mended_by_its_rung(hurt: tuple[Job, dict[str, Any]], number: int) -> None:
    made, report = hurt
    _, _, rungs, replaced = CASES[number]
    assert len(report["incidents"]) == len(CASES), made.said()
    incident = report["incidents"][number]
    assert list(dict.fromkeys(decision["rung"] for decision in incident["decisions"])) == rungs, incident["reasons"]
    assert_nobody_harmed(incident, replaced, ranks=RANKS)


def test_every_step_has_the_bits_of_the_undisturbed_run(hurt: tuple[Job, dict[str, Any]], undisturbed: Record) -> None:
    assert_same_numbers(hurt[0].record(), undisturbed, ranks=RANKS)
