"""Many recoveries in a row in one job: nothing grows, in no process that lives through all of them."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from midstep.protocol.incidents import Outcome
from midstep.protocol.types import InjectionPoint

from .comparing import assert_nobody_harmed, assert_same_numbers, finish
from .conftest import StartJob
from .jobs import PATIENCE_S, ROOMY, Job, inject
from .node_processes import agents_of

pytestmark = pytest.mark.chaos

SURVIVOR = 0
FIRST = 4  # step of the first kill
EVERY = 2  # steps from kill to kill
SETTLED_S = 8.0  # until idle processes that were taken are replaced, and threads without work have ended
READINGS, BETWEEN_READINGS_S = 5, 0.3
# Gloo can fail to tell a collective that its connection is gone. The collective then stays until this limit, and the
# group it belongs to cannot be destroyed before: a thread that waits in it, and one that waits for that one.
COLLECTIVE_S = PATIENCE_S + 10  # the least that a job with gates may have
RANKS_KILLED = (1, 2, 3)
GROWTH_BYTES = 8 << 20  # of one process; slower growth than this goes unseen


class Size(msgspec.Struct, frozen=True):
    """What a process holds."""

    fds: int
    threads: int
    memory_bytes: int
    names: tuple[str, ...]  # of the threads, as the kernel knows them


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_fifty_recoveries_leave_nothing_in_who_lives_through_them(start_job: StartJob) -> None:
    """Fifty recoveries: no more descriptors and threads than after the fifth, hardly more memory, and bit-exact."""
    steps = FIRST + 50 * EVERY + 10
    quiet = start_job(steps=steps)
    finish(quiet)
    job = recover_again_and_again(start_job, recoveries=50, settle=5, steps=steps)
    assert_same_numbers(job.record(), quiet.record())


def recover_again_and_again(start_job: StartJob, *, recoveries: int, settle: int, steps: int) -> Job:
    """Run a job with so many kills, and compare sizes at its end with those after the first `settle` ones."""
    kills = list(kill_in_turn(recoveries))
    gates = [FIRST + settle * EVERY - 1, FIRST + recoveries * EVERY - 1]
    # What is built ahead comes and goes, and would be counted.
    policy = {**ROOMY, "communicator": {"collective_s": COLLECTIVE_S}, "standby": {"depth": "imported"}}
    faults = [inject(rank, InjectionPoint.COLLECTIVE, step, life=life) for rank, step, life in kills]
    job = start_job(faults=faults, gates=gates, steps=steps, policy=policy)
    first, last = gates
    job.held_at(first)
    time.sleep(SETTLED_S)
    early = smallest_sizes_of(job)
    job.open_gate(first)
    job.held_at(last)
    time.sleep(SETTLED_S)
    grown = what_stays_grown(job, early)
    job.open_gate(last)
    # A collective that ends at its limit keeps the gate closed for longer than a stall may last: seen, and dismissed.
    incidents = [each for each in finish(job)["incidents"] if each["outcome"] != Outcome.DISMISSED]
    assert not grown, grown
    assert len(incidents) == recoveries, job.said()
    for incident, (rank, step, _) in zip(incidents, kills, strict=True):
        assert_nobody_harmed(incident, {rank})
        assert incident["resumed_step"] == step
    return job


def what_stays_grown(job: Job, early: dict[str, Size]) -> dict[str, tuple[Size, Size]]:
    """Return who holds more than in `early`, and still does when every collective of the past must be over."""
    end = time.monotonic() + COLLECTIVE_S
    while True:
        late = smallest_sizes_of(job)
        assert early.keys() == late.keys()
        grown = {name: (early[name], late[name]) for name in early if has_grown(early[name], late[name])}
        if not grown or time.monotonic() > end:
            return grown


def kill_in_turn(recoveries: int) -> Iterator[tuple[int, int, int]]:
    """Yield rank, step and life of each kill; rank 0 survives them all."""
    for number in range(recoveries):
        turn, place = divmod(number, len(RANKS_KILLED))
        yield RANKS_KILLED[place], FIRST + number * EVERY, turn + 1


def smallest_sizes_of(job: Job) -> dict[str, Size]:
    """Return the smallest of several readings: a launcher that is just asking for the status holds a socket more."""
    readings = []
    for _ in range(READINGS):
        readings.append(sizes_of(job))
        time.sleep(BETWEEN_READINGS_S)
    return {
        name: Size(
            min(reading[name].fds for reading in readings),
            min(reading[name].threads for reading in readings),
            min(reading[name].memory_bytes for reading in readings),
            min((reading[name].names for reading in readings), key=len),
        )
        for name in readings[0]
    }


def sizes_of(job: Job) -> dict[str, Size]:
    """Return the size of every process that lives through all recoveries, by name."""
    found = {"controller": psutil.Process(job.controller_pid()), "survivor": job.rank_process(SURVIVOR)}
    found["launcher"] = psutil.Process(job.launcher.pid)
    for node, agent in agents_of(job.launcher.pid).items():
        found[f"agent of {node}"] = agent
        found |= {f"fork server of {node}": child for child in agent.children() if child.name() == "midstep-forksrv"}
    return {name: size_of(process) for name, process in found.items()}


def size_of(process: psutil.Process) -> Size:
    """Return what a process holds now; memory is what is its own."""
    names = []
    for thread in process.threads():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            names.append(Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip())
    return Size(process.num_fds(), process.num_threads(), process.memory_full_info().uss, tuple(sorted(names)))


def has_grown(early: Size, late: Size) -> bool:
    """Say whether a process holds more than it did."""
    more = late.fds > early.fds or late.threads > early.threads
    return more or late.memory_bytes > early.memory_bytes + GROWTH_BYTES
