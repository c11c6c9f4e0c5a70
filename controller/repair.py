"""The repair plan: the step with which all resume, and which rank sends what to which. Pure, from step reports.

The consistent step (`docs/architecture.md`): if any clean rank has committed step s, all ranks passed the commit
barrier of s, all gradients of s are final, and the target is s. If none has, s is repeated. Only ranks that lost
state receive any; no other rank reloads.
"""

from collections.abc import Iterable, Mapping, Sized

import msgspec

from ..protocol.errors import StateLost
from ..protocol.types import (
    LocalStateTransfer,
    RepairPart,
    RepairPlan,
    RestoreSource,
    ShardTransfer,
    StepReport,
)
from ..protocol.wording import ranks_text
from .buddies import buddies
from .sources import Location, Sources, distance

REASONS = 8  # ranks and shards that are named


def plan_repair(
    reports: Mapping[int, StepReport],
    places: Mapping[int, Location],
    restore: Iterable[str] = (RestoreSource.REPLICA, RestoreSource.CHECKPOINT),
    trusted_step: int | None = None,
) -> RepairPlan:
    """Return each rank's part in getting the whole world to one step.

    Runs at barrier one, in the controller. `reports` has one entry per rank of the world; `restore` names the sources
    of state that the policy allows, in order. State of more than `trusted_step` updates is not used, wherever it lies.
    Raises `StateLost` when no allowed source can give a consistent world.
    """
    refused: list[str] = []
    untouched = not any(report.clean and (report.committed > 0 or lost_shards(report)) for report in reports.values())
    if trusted_step is not None:
        reports = {rank: _trusted(report, trusted_step) for rank, report in reports.items()}
        refused.append(f"no state of more than {trusted_step} updates can be trusted, on any rank")
    for source in restore:
        if source == RestoreSource.REPLICA:
            plan, why_not = _from_replicas(reports, places)
        elif source == RestoreSource.CHECKPOINT:
            plan, why_not = _from_checkpoint(reports)
        else:
            plan, why_not = None, f"{source} is not a source of state that this version has"
        if plan is not None:
            return _with_buddies(msgspec.structs.replace(plan, reasons=(*refused, *plan.reasons)), places)
        refused.append(why_not)
    if untouched:
        return _with_buddies(_from_nothing(reports, refused), places)
    raise StateLost("; ".join(refused))


def _with_buddies(plan: RepairPlan, places: Mapping[int, Location]) -> RepairPlan:
    """Tell each rank who keeps a copy of its local state from here on, and whose copy it keeps."""
    buddy_of = buddies({rank: places[rank] for rank in plan.parts})
    copied_by = {buddy: rank for rank, buddy in buddy_of.items()}
    parts = {
        rank: msgspec.structs.replace(part, buddy=buddy_of.get(rank), copied_rank=copied_by.get(rank))
        for rank, part in plan.parts.items()
    }
    return msgspec.structs.replace(plan, parts=parts)


def _trusted(report: StepReport, step: int) -> StepReport:
    checkpoints = tuple(each for each in report.checkpoints if each <= step)
    return msgspec.structs.replace(report, clean=report.clean and report.committed <= step, checkpoints=checkpoints)


def _from_replicas(reports: Mapping[int, StepReport], places: Mapping[int, Location]) -> tuple[RepairPlan | None, str]:
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
    # A rank that finishes the update locally must hold all that is updated.
    finishing = {
        rank
        for rank, report in clean.items()
        if report.committed == target - 1 and report.ready and not lost_shards(report)
    }
    behind = sorted(set(reports) - current - finishing)
    corrupted = {rank: shards for rank in sorted(current) if (shards := lost_shards(reports[rank]))}
    sources = _sources(clean, current, finishing, places)
    transfers: list[ShardTransfer] = []
    for rank, shards in [*((rank, reports[rank].needs) for rank in behind), *corrupted.items()]:
        for shard_id in shards:
            if shard_id not in sources:
                return (
                    None,
                    f"no clean copy of shard {shard_id} is left at step {target} (rank {rank} needs it)",
                )
            transfers += sources.send(shard_id, rank)
    own, lost = _local_states(reports, behind, target, places)
    if lost:
        return None, (
            f"the rank-local state (random numbers, data position) of {ranks_text(lost)} at step {target} is lost "
            "with every copy of it"
        )
    reasons = _replica_reasons(reports, target, current, finishing, behind, transfers)
    reasons += _corruption_reasons(corrupted, transfers)
    plan = _assemble(reports, target, RestoreSource.REPLICA, transfers, own, reasons, finishing)
    return plan, ""


def _from_checkpoint(reports: Mapping[int, StepReport]) -> tuple[RepairPlan | None, str]:
    step = _common_checkpoint(reports)
    if step == 0:
        return None, f"no complete checkpoint can be read by all ranks{_unlisted(reports)}"
    reason = f"all ranks load the checkpoint of step {step}"
    return _assemble(reports, step, RestoreSource.CHECKPOINT, [], [], [reason]), ""


def _from_nothing(reports: Mapping[int, StepReport], refused: list[str]) -> RepairPlan:
    reason = "training starts from its first step"
    return _assemble(reports, 0, RestoreSource.NOTHING, [], [], [*refused, reason])


def _common_checkpoint(reports: Mapping[int, StepReport]) -> int:
    """Return the newest step whose checkpoint every rank can read, or 0."""
    steps = [set(report.checkpoints) for report in reports.values()]
    return max(set.intersection(*steps), default=0) if steps else 0


def _unlisted(reports: Mapping[int, StepReport]) -> str:
    """Return which rank could not list the directory: it may hold a checkpoint all the same."""
    return next((f" (rank {rank}: {each.trace.unlisted})" for rank, each in reports.items() if each.trace.unlisted), "")


def lost_shards(report: StepReport) -> tuple[str, ...]:
    """Return the shards that a rank with clean state must hold and lacks: those whose memory is corrupted."""
    held = {hold.shard_id for hold in report.holds}
    return tuple(shard_id for shard_id in report.needs if shard_id not in held)


def _sources(
    clean: Mapping[int, StepReport], current: Iterable[int], finishing: Iterable[int], places: Mapping[int, Location]
) -> Sources:
    """Return the ranks that can send each shard as of the target.

    A rank that has to finish its update before it sends is a source only of shards that no other rank has.
    """
    sources = Sources(places)
    for rank in sorted(current):
        for hold in clean[rank].holds:
            sources.add(hold.shard_id, hold.size_bytes, rank)
    only_there: dict[str, list[tuple[int, int]]] = {}
    for rank in sorted(finishing):
        for hold in clean[rank].holds:
            if hold.shard_id not in sources:
                only_there.setdefault(hold.shard_id, []).append((hold.size_bytes, rank))
    for shard_id, holders in only_there.items():
        for size_bytes, rank in holders:
            sources.add(shard_id, size_bytes, rank)
    return sources


def _local_states(
    reports: Mapping[int, StepReport], behind: list[int], target: int, places: Mapping[int, Location]
) -> tuple[list[LocalStateTransfer], list[int]]:
    """Find a copy of the local state as of `target` for each rank that is behind; return the ranks without one, too."""
    wanted = set(behind)
    copies: dict[int, list[int]] = {}
    for holder in sorted(reports):
        for copy in reports[holder].local_states:
            if copy.rank in wanted and copy.step == target:
                copies.setdefault(copy.rank, []).append(holder)
    transfers, lost = [], []
    for rank in behind:
        if rank not in copies:
            lost.append(rank)
            continue
        source = min(copies[rank], key=lambda holder: (holder != rank, distance(places[rank], places[holder])))
        transfers.append(LocalStateTransfer(rank, source))
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
        reasons.append(
            f"{ranks_text(finishing)} had final gradients and {_verb('finish', finishing)} step {target} locally"
        )
    if behind:
        theirs = set(behind)
        sources = sorted({transfer.source for transfer in transfers if transfer.destination in theirs})
        size = sum(transfer.length_bytes for transfer in transfers if transfer.destination in theirs)
        gets = f"{_verb('get', behind)} {size / 1e6:.1f} MB"
        reasons.append(f"{ranks_text(behind)} {gets} from {ranks_text(sources)}")
    return reasons


def _corruption_reasons(corrupted: Mapping[int, tuple[str, ...]], transfers: list[ShardTransfer]) -> list[str]:
    """Say which corrupted shards are replaced on ranks that keep all others."""
    sizes: dict[int, int] = {}
    for transfer in transfers:
        if transfer.destination in corrupted:
            sizes[transfer.destination] = sizes.get(transfer.destination, 0) + transfer.length_bytes
    return [
        f"rank {rank} keeps the rest and gets {sizes[rank] / 1e6:.1f} MB for corrupted memory: shard "
        f"{', '.join(shards[:REASONS])}{', ...' if len(shards) > REASONS else ''}"
        for rank, shards in list(corrupted.items())[:REASONS]
    ]


def _assemble(  # noqa: PLR0917 - private; the public signature is plan_repair's
    reports: Mapping[int, StepReport],
    target: int,
    restore: RestoreSource,
    transfers: list[ShardTransfer],
    own: list[LocalStateTransfer],
    reasons: list[str],
    finishing: Iterable[int] = (),
) -> RepairPlan:
    moves: dict[int, list[ShardTransfer]] = {}
    for transfer in transfers:
        for rank in {transfer.source, transfer.destination}:
            moves.setdefault(rank, []).append(transfer)
    owns: dict[int, list[LocalStateTransfer]] = {}
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
            local_states=tuple(owns.get(rank, ())),
            restore_local=restore is RestoreSource.REPLICA,
        )
        for rank in reports
    }
    return RepairPlan(target_step=target, restore=restore, parts=parts, reasons=tuple(reasons))


def _verb(base: str, subjects: Sized) -> str:
    """Return the verb in the number of its subjects: one rank finishes or gets, two finish or get."""
    return base if len(subjects) != 1 else base + ("es" if base.endswith("sh") else "s")
