"""Where the world goes after a fault, and who hands what to whom: a pure function of the reports of barrier one.

The consistent step (`docs/architecture.md`): if any clean rank has committed step s, everybody passed the commit
barrier of s, all gradients of s are final, and the target is s. If nobody has, s is repeated. Only ranks that lost
state receive any; nobody else reloads.
"""

from collections.abc import Iterable, Mapping

import msgspec

from ..protocol.errors import StateLost
from ..protocol.types import (
    OwnStateTransfer,
    RepairPart,
    RepairPlan,
    RestoreSource,
    ShardTransfer,
    StepReport,
)

MAX_SOURCES_PER_SHARD = 4
MIN_STRIPE_BYTES = 8 * 1024 * 1024


class Place(msgspec.Struct, frozen=True):
    """Where a rank runs; near sources are preferred."""

    node: str
    failure_domain: str


def plan_repair(
    reports: Mapping[int, StepReport],
    places: Mapping[int, Place],
    restore: Iterable[str] = (RestoreSource.REPLICA, RestoreSource.CHECKPOINT),
) -> RepairPlan:
    """Return each rank's part in getting the whole world to one step.

    Runs at barrier one, in the controller. `reports` has one entry per rank of the world; `restore` names the sources
    of state that the policy allows, in order. Raises `StateLost` when no allowed source can give a consistent world.
    """
    refused: list[str] = []
    for source in restore:
        if source == RestoreSource.REPLICA:
            plan, why_not = _from_replicas(reports, places)
        elif source == RestoreSource.CHECKPOINT:
            plan, why_not = _from_checkpoint(reports)
        else:
            plan, why_not = None, f"{source} is not a source of state that this version has"
        if plan is not None:
            return msgspec.structs.replace(plan, reasons=(*refused, *plan.reasons))
        refused.append(why_not)
    if not any(report.clean and report.committed > 0 for report in reports.values()):
        return _from_nothing(reports, refused)
    raise StateLost("; ".join(refused))


def _from_replicas(reports: Mapping[int, StepReport], places: Mapping[int, Place]) -> tuple[RepairPlan | None, str]:
    clean = {rank: report for rank, report in reports.items() if report.clean}
    if not clean:
        return None, "no rank holds a clean copy of its state"
    target = max(report.committed for report in clean.values())
    on_disk = _common_checkpoint(reports)
    if target == 0 and on_disk > 0:
        return (
            None,
            f"nothing has been trained yet in this world, and a checkpoint of step {on_disk} is there",
        )
    current = {rank for rank, report in clean.items() if report.committed == target}
    finishing = {rank for rank, report in clean.items() if report.committed == target - 1 and report.ready}
    behind = sorted(set(reports) - current - finishing)
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank in sorted(current):
        for hold in clean[rank].holds:
            holders.setdefault(hold.shard_id, []).append(rank)
            sizes[hold.shard_id] = hold.size_bytes
    load: dict[int, int] = {}
    transfers: list[ShardTransfer] = []
    for rank in behind:
        for shard_id in reports[rank].needs:
            if shard_id not in holders:
                return (
                    None,
                    f"no clean copy of shard {shard_id} is left at step {target} (rank {rank} needs it)",
                )
            transfers += _stripe(shard_id, sizes[shard_id], holders[shard_id], rank, places, load)
    own, lost = _own_states(reports, behind, target, places)
    if lost:
        return None, (
            f"the own state (random numbers, data position) of rank {_ranks(lost)} at step {target} is lost "
            "with every copy of it"
        )
    reasons = _replica_reasons(reports, target, current, finishing, behind, transfers)
    plan = _assemble(reports, target, RestoreSource.REPLICA, transfers, own, reasons, finishing)
    return plan, ""


def _from_checkpoint(reports: Mapping[int, StepReport]) -> tuple[RepairPlan | None, str]:
    step = _common_checkpoint(reports)
    if step == 0:
        return None, "no complete checkpoint can be read by all ranks"
    reason = f"all ranks load the checkpoint of step {step}"
    return _assemble(reports, step, RestoreSource.CHECKPOINT, [], [], [reason]), ""


def _from_nothing(reports: Mapping[int, StepReport], refused: list[str]) -> RepairPlan:
    reason = "training starts from its first step"
    return _assemble(reports, 0, RestoreSource.NOTHING, [], [], [*refused, reason])


def _common_checkpoint(reports: Mapping[int, StepReport]) -> int:
    """Return the newest step whose checkpoint every rank can read, or 0."""
    steps = [set(report.checkpoints) for report in reports.values()]
    return max(set.intersection(*steps), default=0) if steps else 0


def _stripe(  # noqa: PLR0917 - one row of a plan needs all of it
    shard_id: str,
    size_bytes: int,
    holders: list[int],
    destination: int,
    places: Mapping[int, Place],
    load: dict[int, int],
) -> list[ShardTransfer]:
    """Cut one shard over the nearest, least loaded holders; remember what each will have to send."""
    nearest = min(_distance(places[destination], places[rank]) for rank in holders)
    near = [rank for rank in holders if _distance(places[destination], places[rank]) == nearest]
    near.sort(key=lambda rank: (load.get(rank, 0), rank))
    count = max(1, min(len(near), MAX_SOURCES_PER_SHARD, size_bytes // MIN_STRIPE_BYTES))
    piece = -(-size_bytes // count)
    transfers = []
    for number, source in enumerate(near[:count]):
        offset = number * piece
        length = min(piece, size_bytes - offset)
        load[source] = load.get(source, 0) + length
        transfers.append(ShardTransfer(shard_id, offset, length, source, destination))
    return transfers


def _distance(one: Place, other: Place) -> int:
    if one.node == other.node:
        return 0
    return 1 if one.failure_domain == other.failure_domain else 2


def _own_states(
    reports: Mapping[int, StepReport], behind: list[int], target: int, places: Mapping[int, Place]
) -> tuple[list[OwnStateTransfer], list[int]]:
    """Find a copy of the own state, as of `target`, for each rank that is behind; the second answer is who has none."""
    wanted = set(behind)
    copies: dict[int, list[int]] = {}
    for holder in sorted(reports):
        for copy in reports[holder].own_states:
            if copy.rank in wanted and copy.step == target:
                copies.setdefault(copy.rank, []).append(holder)
    transfers, lost = [], []
    for rank in behind:
        if rank not in copies:
            lost.append(rank)
            continue
        source = min(copies[rank], key=lambda holder: (holder != rank, _distance(places[rank], places[holder])))
        transfers.append(OwnStateTransfer(rank, source))
    return transfers, lost


def _replica_reasons(  # noqa: PLR0917 - the sentence is made of all of it
    reports: Mapping[int, StepReport],
    target: int,
    current: set[int],
    finishing: set[int],
    behind: list[int],
    transfers: list[ShardTransfer],
) -> list[str]:
    reasons = [f"{len(current)} of {len(reports)} ranks hold clean state of step {target}"]
    if finishing:
        reasons.append(f"rank {_ranks(sorted(finishing))} had final gradients and finishes step {target} locally")
    if behind:
        sources = sorted({transfer.source for transfer in transfers})
        size = sum(transfer.length_bytes for transfer in transfers)
        reasons.append(f"rank {_ranks(behind)} gets {size / 1e6:.1f} MB from rank {_ranks(sources)}")
    return reasons


def _assemble(  # noqa: PLR0917 - private; the public signature is plan_repair's
    reports: Mapping[int, StepReport],
    target: int,
    restore: RestoreSource,
    transfers: list[ShardTransfer],
    own: list[OwnStateTransfer],
    reasons: list[str],
    finishing: Iterable[int] = (),
) -> RepairPlan:
    moves: dict[int, list[ShardTransfer]] = {}
    for transfer in transfers:
        for rank in {transfer.source, transfer.destination}:
            moves.setdefault(rank, []).append(transfer)
    owns: dict[int, list[OwnStateTransfer]] = {}
    for move in own:
        for rank in {move.source, move.rank}:
            owns.setdefault(rank, []).append(move)
    finishing = set(finishing)
    parts = {
        rank: RepairPart(
            target_step=target,
            restore=restore,
            finish_update=rank in finishing,
            transfers=tuple(moves.get(rank, ())),
            own_states=tuple(owns.get(rank, ())),
            restore_own=restore is RestoreSource.REPLICA,
        )
        for rank in reports
    }
    return RepairPlan(target_step=target, restore=restore, parts=parts, reasons=tuple(reasons))


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks) or "none"
