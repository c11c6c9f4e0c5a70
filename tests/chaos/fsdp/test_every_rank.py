"""Every rank of four meshes, killed at every moment of a step and of its own recovery: pids, steps and bits are kept.

One job for each rank, which loses it fourteen times. Where another rank holds the same piece no step is lost, be it of
another row or a buddy; where there is none, ranks come back from copies in host memory and lose two at most.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from ..comparing import assert_same_numbers
from ..jobs import Job, Record, inject
from ..losing import incidents_of
from .conftest import PATIENCE_S, WORLD, StartSharded, undisturbed
from .test_host_copies import COPYING
from .training import AFTER_BACKWARD, BEFORE_FORWARD, Ending, Setting

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(1800)]

CHECKPOINTS = 4
POLICY: dict[str, Any] = {**COPYING, "checkpoint": {"every_steps": CHECKPOINTS}}
BUDDIES: dict[str, Any] = {**POLICY, "replica": "buddy"}
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
    soaked: int | None = 1  # the rank whose job is not nightly: a job takes minutes
    policy: dict[str, Any] = POLICY
    second: int = 1  # a rank without a piece in common with rank 0


MESHES = {
    "4": Mesh(Setting(mesh=(4,)), "host_copy", columns=0, others=0, soaked=0),
    "2x2": Mesh(Setting(mesh=(2, 2)), "replica", columns=1, others=2),  # gradients, between the rows
    "2x2 with tensor parallelism": Mesh(Setting(mesh=(2,), tensor=2), "host_copy", columns=2, others=1),
    "4, with buddies": Mesh(Setting(mesh=(4,)), "replica", columns=0, others=0, soaked=3, policy=BUDDIES, second=2),
    "2x2 with tensor parallelism and buddies": Mesh(
        Setting(mesh=(2,), tensor=2), "replica", columns=2, others=1, soaked=None, policy=BUDDIES
    ),
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


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param(name, rank, marks=[] if rank == mesh.soaked else pytest.mark.nightly)
        for name, mesh in MESHES.items()
        for rank in range(WORLD)
    ],
)
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
    hurt = msgspec.structs.replace(setting, endings=endings)
    job = start(start_sharded, hurt, faults, gates=gates, policy=mesh.policy)
    incidents = incidents_of(job, gates, PATIENCE_OF_MANY_S)
    for incident in incidents:
        assert_mended(incident, {rank}, mesh.restore)
    assert_same_numbers(job.record(), calm(start_sharded, setting, calm_runs), ranks=WORLD)


OF_A_SURVIVOR = tuple(InjectionPoint(each) for each in ("stop", "clean", "rebuild", "repair", "rollback"))
OF_A_NEWCOMER = tuple(InjectionPoint(each) for each in ("join", "rebuild", "repair", "rollback"))


def double_blows(second: int) -> Iterator[tuple[tuple[ArmedFault, ArmedFault], set[int], int]]:
    """Yield two faults of one incident, who is replaced for them, and the step: the second comes in the recovery.

    Rank 0 and the `second` one hold different pieces, and no copies of each other's.
    """
    lives, step = [1] * WORLD, FIRST
    for point in OF_A_SURVIVOR:
        faults = (
            inject(0, InjectionPoint.FORWARD, step, life=lives[0]),
            inject(second, point, step, life=lives[second]),
        )
        yield faults, {0, second}, step
        lives[0], lives[second], step = lives[0] + 1, lives[second] + 1, step + STRIDE
    for point in OF_A_NEWCOMER:
        faults = (
            inject(3, InjectionPoint.BACKWARD, step, life=lives[3]),
            inject(3, point, None, life=lives[3] + 1),
        )
        yield faults, {3}, step
        lives[3], step = lives[3] + 2, step + STRIDE


@pytest.mark.parametrize("name", ["4", "2x2", "4, with buddies"])
def test_a_second_rank_is_lost_in_every_phase_of_the_recovery(
    start_sharded: StartSharded, calm_runs: dict[str, Record], name: str
) -> None:
    """A survivor that holds other pieces, and the newcomer itself."""
    mesh = MESHES[name]
    blows = tuple(double_blows(mesh.second))
    setting = msgspec.structs.replace(mesh.setting, steps=blows[-1][2] + 2)
    gates = [step for _, _, step in blows[1:]]
    faults = [fault for pair_of_faults, _, _ in blows for fault in pair_of_faults]
    job = start(start_sharded, setting, faults, gates=gates, policy=mesh.policy)
    incidents = incidents_of(job, gates, PATIENCE_OF_MANY_S)
    for incident, (_, replaced, _) in zip(incidents, blows, strict=True):
        assert_mended(incident, replaced, mesh.restore)
    assert_same_numbers(job.record(), calm(start_sharded, setting, calm_runs), ranks=WORLD)


def test_all_holders_of_a_piece_are_lost_and_then_a_node(
    start_sharded: StartSharded, calm_runs: dict[str, Record]
) -> None:
    """The holders come back from their copies, and the node's ranks on a spare one, from the other node."""
    mesh = MESHES["2x2"]
    setting = msgspec.structs.replace(mesh.setting, steps=10, step_s=0.3)
    victims = (1, 3)
    faults = [inject(3, InjectionPoint.BACKWARD, 7, life=2, action=FaultAction.KILL_NODE)]
    policy = {**POLICY, "host_copy": {"every_steps": 1, "copies": 2}}
    options = {"nodes": 2, "ranks_per_node": 2, "spares": 1, "policy": policy, "gates": [FIRST, 7]}
    job = start(start_sharded, setting, faults, **options)
    pids = {each.rank: each.pid for each in job.held_at(FIRST).ranks}
    for victim in victims:  # at once: the first to be missed would else be repaired from the other one
        os.kill(pids[victim], signal.SIGKILL)
    job.open_gate(FIRST)
    holders, node = incidents_of(job, [7], PATIENCE_S)
    assert_mended(holders, set(victims), "host_copy")
    assert_mended(node, {2, 3}, mesh.restore)
    assert_same_numbers(job.record(), calm(start_sharded, setting, calm_runs), ranks=WORLD)
