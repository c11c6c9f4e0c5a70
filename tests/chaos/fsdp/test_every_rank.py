"""Every rank of four meshes, killed at every moment of a step: processes, steps and bits are kept.

One job for each rank, which loses it fourteen times. Where another rank holds the same piece no step is lost; where
there is none, ranks come back from copies in host memory and lose two at most.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..comparing import assert_same_numbers
from ..jobs import Job, Record
from ..losing import incidents_of
from .conftest import PATIENCE_S, WORLD, StartSharded, undisturbed
from .test_host_copies import COPYING
from .training import AFTER_BACKWARD, BEFORE_FORWARD, Ending, Setting

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1800)]

CHECKPOINTS = 4
POLICY: dict[str, Any] = {**COPYING, "checkpoint": {"every_steps": CHECKPOINTS}}
PATIENCE_OF_MANY_S = 2 * PATIENCE_S
MOST_LOST = 2  # of a rank that ends between its update and its copy
FIRST, STRIDE = 3, 2  # steps of the incidents: the copy of the one before is whole by then
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather_single", "reduce_scatter_single", "allreduce"


class Mesh(NamedTuple):
    """A mesh, and where copies of its pieces are. Functions of a rank name the others of a group of it."""

    setting: Setting
    restore: str
    columns: int  # distance of two ranks that hold the two pieces of one parameter; 0: each has the whole of it
    others: int  # of two ranks that add something up before the clipping; 0: there are none


MESHES = {
    "4": Mesh(Setting(mesh=(4,)), "host_copy", columns=0, others=0),
    "2x2": Mesh(Setting(mesh=(2, 2)), "replica", columns=1, others=2),  # gradients, between the rows
    "2x2 with tensor parallelism": Mesh(Setting(mesh=(2,), tensor=2), "host_copy", columns=2, others=1),
    "two rows with tensor parallelism": Mesh(Setting(mesh=(2, 1), tensor=2), "replica", columns=0, others=2),
}


class Blow(NamedTuple):
    """What one rank suffers in one incident: a fault of midstep's injection points, or an end of its own."""

    fault: ArmedFault | None
    ending: Ending | None
    step: int


def pair(rank: int, distance: int) -> tuple[int, ...]:
    """Return the two ranks of which this is one and that are so far from each other."""
    other = rank + distance if rank // distance % 2 == 0 else rank - distance
    return tuple(sorted((rank, other)))


def moments_of(mesh: Mesh, rank: int) -> Iterator[dict[str, Any]]:
    """Yield each moment of a step at which this rank is lost, as the arguments of a fault or of an ending."""
    sharded = mesh.setting.mesh[-1] > 1
    group = pair(rank, mesh.columns) if mesh.columns else ()
    yield {"place": BEFORE_FORWARD}
    if sharded:
        yield {"point": InjectionPoint.COLLECTIVE, "operation": ALL_GATHER, "group": group}  # unshard
    yield {"point": InjectionPoint.FORWARD}
    yield {"point": InjectionPoint.BACKWARD}
    if sharded:
        yield {"point": InjectionPoint.COLLECTIVE, "operation": REDUCE_SCATTER, "group": group}
    if mesh.others:
        others = pair(rank, mesh.others)
        yield {"point": InjectionPoint.COLLECTIVE, "operation": ALL_REDUCE, "group": others}
    yield {"place": AFTER_BACKWARD}
    if sharded:  # of the norm, by which gradients are clipped
        yield {"point": InjectionPoint.COLLECTIVE, "operation": ALL_REDUCE, "group": group}
    yield {"point": InjectionPoint.BARRIER}
    yield {"point": InjectionPoint.UPDATE}
    yield {"point": InjectionPoint.HOST_COPY}
    yield {"point": InjectionPoint.CHECKPOINT}
    yield {"point": InjectionPoint.FORWARD, "action": FaultAction.STOP}
    yield {"point": InjectionPoint.BACKWARD, "action": FaultAction.RAISE}


def blows_to(mesh: Mesh, rank: int) -> Iterator[Blow]:
    """Yield what a rank suffers in a job, one incident after the other, each in the life that it has by then."""
    step = FIRST
    for life, moment in enumerate(moments_of(mesh, rank), start=1):
        if moment.get("point") is InjectionPoint.CHECKPOINT:
            step += -(step + 1) % CHECKPOINTS  # it is written after this one
        if "place" in moment:
            yield Blow(None, Ending(rank, step=step, life=life, **moment), step)
        else:
            given = {"action": FaultAction.KILL, **moment}
            yield Blow(ArmedFault(rank, step=step, incarnation=life, **given), None, step)
        step += STRIDE


def assert_mended(incident: dict[str, Any], replaced: set[int], restore: str) -> None:
    """Only these ranks got another process, and state came from where this mesh has a copy of it."""
    assert (incident["outcome"], incident["restore"]) == ("resumed", restore), incident
    assert set(incident["replaced"]) == replaced, incident
    assert incident["healthy_pids_kept"], incident
    assert incident["steps_lost"] <= (0 if restore == "replica" else MOST_LOST), incident


@pytest.fixture(scope="module")
def calm_runs() -> dict[str, Record]:
    """Records of runs to which nothing happens, made once for each setting."""
    return {}


def calm(start_sharded: StartSharded, setting: Setting, runs: dict[str, Record]) -> Record:
    """Return the record of the undisturbed run of a setting."""
    name = msgspec.json.encode(setting).decode()
    if name not in runs:
        runs[name] = undisturbed(start_sharded, setting)
    return runs[name]


def start(start_sharded: StartSharded, setting: Setting, faults: Sequence[ArmedFault], **options: Any) -> Job:
    """Start a job on one node, unless the options say something else."""
    return start_sharded(setting, faults, **{"nodes": 1, "ranks_per_node": WORLD, "policy": POLICY, **options})


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("name", MESHES)
def test_a_rank_is_lost_at_every_moment(
    start_sharded: StartSharded, calm_runs: dict[str, Record], name: str, rank: int
) -> None:
    """Killed, stopped, and ended by an exception."""
    mesh = MESHES[name]
    blows = tuple(blows_to(mesh, rank))
    setting = msgspec.structs.replace(mesh.setting, steps=blows[-1].step + 2)
    endings = tuple(blow.ending for blow in blows if blow.ending is not None)
    faults = [blow.fault for blow in blows if blow.fault is not None]
    gates = [blow.step for blow in blows[1:]]
    job = start(start_sharded, msgspec.structs.replace(setting, endings=endings), faults, gates=gates)
    incidents = incidents_of(job, gates, PATIENCE_OF_MANY_S)
    for incident in incidents:
        assert_mended(incident, {rank}, mesh.restore)
    assert_same_numbers(job.record(), calm(start_sharded, setting, calm_runs), ranks=WORLD)
