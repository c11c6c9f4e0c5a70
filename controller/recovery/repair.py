"""The repair plan: the step with which all resume, and which rank sends what to which. Pure, from step reports.

The consistent step (`docs/recovery.md`): if any clean rank has committed step s, all ranks passed the commit
barrier of s, all gradients of s are final, and the target is s. If none has, s is repeated. Only ranks that lost state
receive any; no other rank reloads.

Lost shards come from near holders first, each with about as many bytes as the others; holders are kept by node and by
failure domain, the least loaded at hand, so that a choice among ten thousand costs no more than one among ten. They
travel over the devices' own links, which are fast and have just been rebuilt and checked; where an attempt of the same
incident over these was not completed, they travel from host to host.

Where a checkpoint was ever complete, beginning at the first step throws training away. The user decides that, by
`checkpoint.begin_again`, and never a file that could not be read (`why_not_begin`).
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sized

import msgspec

from ...protocol.errors import StateLost
from ...protocol.types import (
    LocalStateTransfer,
    RepairLinks,
    RepairPart,
    RepairPlan,
    RestoreSource,
    ShardTransfer,
    StepReport,
)
from ...protocol.wording import ranks_text
from .buddies import Location, common_copy, copy_transfers, distance, paired

REASONS = 8  # ranks and shards that are named


MAX_SOURCES_PER_SHARD = 4

MIN_STRIPE_BYTES = 8 * 1024 * 1024


class Sources:
    """The clean holders of every shard, and how many bytes each has to send by now."""

    def __init__(self, places: Mapping[int, Location]) -> None:
        self._places = places
        self._load: dict[int, int] = {}
        self._sizes: dict[str, int] = {}
        # shard -> node, failure domain or everywhere -> holders as (bytes to send when it was looked at, rank)
        self._holders: dict[str, dict[tuple[str, str], list[tuple[int, int]]]] = {}

    def add(self, shard_id: str, size_bytes: int, rank: int) -> None:
        """Enter a holder. Ranks come in order, so that each list is a heap from the start."""
        place = self._places[rank]
        groups = self._holders.setdefault(shard_id, {})
        for key in (("node", place.node), ("domain", place.failure_domain), ("", "")):
            groups.setdefault(key, []).append((0, rank))
        self._sizes[shard_id] = size_bytes

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self._holders

    def send(self, shard_id: str, destination: int) -> list[ShardTransfer]:
        """Cut a shard over the nearest, least loaded holders; remember what each will have to send."""
        size_bytes, place = self._sizes[shard_id], self._places[destination]
        groups = self._holders[shard_id]
        keys = (("node", place.node), ("domain", place.failure_domain), ("", ""))
        heap = next(groups[key] for key in keys if key in groups)
        chosen = self._least_loaded(heap, max(1, min(MAX_SOURCES_PER_SHARD, size_bytes // MIN_STRIPE_BYTES)))
        piece = -(-size_bytes // len(chosen))
        transfers = []
        for number, source in enumerate(chosen):
            offset = number * piece
            length = min(piece, size_bytes - offset)
            self._load[source] = self._load.get(source, 0) + length
            heapq.heappush(heap, (self._load[source], source))
            transfers.append(ShardTransfer(shard_id, offset, length, source, destination))
        return transfers

    def _least_loaded(self, heap: list[tuple[int, int]], count: int) -> list[int]:
        """Take the ranks with the least to send off the heap. What has grown elsewhere since is sorted in again."""
        chosen: list[int] = []
        while heap and len(chosen) < count:
            known, rank = heapq.heappop(heap)
            load = self._load.get(rank, 0)
            if known == load:
                chosen.append(rank)
            else:
                heapq.heappush(heap, (load, rank))
        return chosen


def plan_repair(
    reports: Mapping[int, StepReport],
    places: Mapping[int, Location],
    restore: Iterable[str] = (RestoreSource.REPLICA, RestoreSource.CHECKPOINT),
    trusted_step: int | None = None,
    new: Collection[int] = (),
) -> RepairPlan:
    """Return each rank's part in getting the whole world to one step.

    Runs at barrier one, in the controller. `reports` has one entry per rank of the world; `restore` names the sources
    of state that the policy allows, in order. State of more than `trusted_step` updates is not used, wherever it lies.
    Ranks that are `new` to the world have no rank-local state yet, and get that of another rank.
    Raises `StateLost` when no allowed source can give a consistent world.
    """
    refused, restore = list[str](), tuple(restore)
    untouched = not any(report.clean and (report.committed > 0 or lost_shards(report)) for report in reports.values())
    if trusted_step is not None:
        reports = {rank: _trusted(report, trusted_step) for rank, report in reports.items()}
        refused.append(f"no state of more than {trusted_step} updates can be trusted, on any rank")
    for source in restore:
        if source == RestoreSource.REPLICA:
            plan, why_not = _from_replicas(reports, places, new)
        elif source == RestoreSource.HOST_COPY:
            plan, why_not = _from_host_copies(reports, restore)
        elif source == RestoreSource.CHECKPOINT:
            plan, why_not = _from_checkpoint(reports)
        else:
            plan, why_not = None, f"{source} is not a source of state that this version has"
        if plan is not None:
            former = min(new, default=len(reports))
            plan = _for_all(plan, host_copy=common_copy(reports, most=plan.target_step), former_size=former)
            return _with_buddies(msgspec.structs.replace(plan, reasons=(*refused, *plan.reasons)), places)
        refused.append(why_not)
    if untouched:
        refused.append("training starts from its first step")
        return _with_buddies(_assemble(reports, 0, RestoreSource.NOTHING, [], [], refused), places)
    raise StateLost("; ".join(refused))


def _with_buddies(plan: RepairPlan, places: Mapping[int, Location]) -> RepairPlan:
    """Tell each rank who keeps copies for it from here on, and for whom it keeps some."""
    pairs = paired({rank: places[rank] for rank in plan.parts})
    parts = {rank: msgspec.structs.replace(part, **pairs.get(rank, {})) for rank, part in plan.parts.items()}
    return msgspec.structs.replace(plan, parts=parts)


def _trusted(report: StepReport, step: int) -> StepReport:
    checkpoints = tuple(each for each in report.checkpoints if each <= step)
    copies = tuple(each for each in report.host_copies if each <= step)
    guests = tuple(each for each in report.guest_copies if each.step <= step)
    clean = report.clean and report.committed <= step
    return msgspec.structs.replace(
        report, clean=clean, checkpoints=checkpoints, host_copies=copies, guest_copies=guests
    )


def _from_replicas(
    reports: Mapping[int, StepReport], places: Mapping[int, Location], new: Collection[int]
) -> tuple[RepairPlan | None, str]:
    clean = {rank: report for rank, report in reports.items() if report.clean}
    if not clean:
        return None, "no rank holds a clean copy of its state"
    target = max(report.committed for report in clean.values())
    on_disk = _common_checkpoint(reports)
    if target == 0 and (on_disk > 0 or common_copy(reports) > 0):
        where = f"a checkpoint of step {on_disk} is there" if on_disk > 0 else "copies are in host memory"
        return None, f"nothing has been trained yet in this world, and {where}"
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
    own, lost = _local_states(reports, behind, target, places, new)
    if lost:
        return None, (
            f"the rank-local state (random numbers, data position) of {ranks_text(lost)} at step {target} is lost "
            "with every copy of it"
        )
    reasons = _replica_reasons(reports, target, current, finishing, behind, transfers)
    reasons += _corruption_reasons(corrupted, transfers)
    plan = _assemble(reports, target, RestoreSource.REPLICA, transfers, own, reasons, finishing)
    return plan, ""


def _from_host_copies(reports: Mapping[int, StepReport], restore: Iterable[str]) -> tuple[RepairPlan | None, str]:
    """Have all ranks go back to their copies of one step, unless a checkpoint that may be loaded is newer."""
    step, on_disk = common_copy(reports), _common_checkpoint(reports)
    if step == 0:
        kept = {each.rank for report in reports.values() for each in report.guest_copies}
        without = [rank for rank, report in reports.items() if not report.host_copies and rank not in kept]
        lacking = f": not one of {ranks_text(without)}" if without else ""
        return None, f"there is no step of which all ranks have a copy in host memory{lacking}"
    if RestoreSource.CHECKPOINT in restore and on_disk > step:
        return None, f"the copies in host memory are of step {step}, and a checkpoint of step {on_disk} is there"
    reasons = [f"all ranks load their copies of step {step} in host memory"]
    transfers = copy_transfers(reports, step)
    reasons += [f"rank {each.destination} gets its copy from rank {each.source}" for each in transfers[:REASONS]]
    plan = _assemble(reports, step, RestoreSource.HOST_COPY, [], [], reasons)
    for each in transfers:
        for rank in (each.source, each.destination):
            part = plan.parts[rank]
            plan.parts[rank] = msgspec.structs.replace(part, copy_transfers=(*part.copy_transfers, each))
    return plan, ""


def _for_all(plan: RepairPlan, *, host_copy: int, former_size: int) -> RepairPlan:
    """Tell each rank which copies in host memory are kept until newer ones are whole, and which ranks are not new."""
    facts = {"host_copy": host_copy, "former_size": former_size}
    parts = {rank: msgspec.structs.replace(part, **facts) for rank, part in plan.parts.items()}
    return msgspec.structs.replace(plan, parts=parts)


def _from_checkpoint(reports: Mapping[int, StepReport]) -> tuple[RepairPlan | None, str]:
    step = _common_checkpoint(reports)
    if step == 0:
        return None, f"no complete checkpoint can be read by all ranks{_unlisted(reports)}"
    reason = f"all ranks load the checkpoint of step {step}"
    return _assemble(reports, step, RestoreSource.CHECKPOINT, [], [], [reason]), ""


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
    reports: Mapping[int, StepReport],
    behind: list[int],
    target: int,
    places: Mapping[int, Location],
    new: Collection[int],
) -> tuple[list[LocalStateTransfer], list[int]]:
    """Find a copy of the local state as of `target` for each rank that is behind; return the ranks without one, too.

    A rank that is new begins with that of the rank whose number is its own modulo the size that the world had before.
    """
    before = min(new, default=len(reports))
    origins = {rank: rank % before for rank in behind if rank in new}
    wanted = {*behind, *origins.values()}
    copies: dict[int, list[int]] = {}
    for holder in sorted(reports):
        for copy in reports[holder].local_states:
            if copy.rank in wanted and copy.step == target:
                copies.setdefault(copy.rank, []).append(holder)
    transfers, lost = [], []
    for rank in behind:
        origin = None if rank in copies else origins.get(rank)
        holders = copies.get(rank if origin is None else origin)
        if holders is None:
            lost.append(rank)
            continue
        source = min(holders, key=lambda holder: (holder != rank, distance(places[rank], places[holder])))
        transfers.append(LocalStateTransfer(rank, source, origin))
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
            world_size=len(reports),
        )
        for rank in reports
    }
    return RepairPlan(target_step=target, restore=restore, parts=parts, reasons=tuple(reasons))


def _verb(base: str, subjects: Sized) -> str:
    """Return the verb in the number of its subjects: one rank finishes or gets, two finish or get."""
    return base if len(subjects) != 1 else base + ("es" if base.endswith("sh") else "s")


INSTEAD = (
    "name another checkpoint.directory, or set checkpoint.begin_again: true to begin at the first step all the same, "
    "which keeps what is there under other names"
)


def why_not_begin(
    reports: Mapping[int, StepReport],
    *,
    restore: Iterable[str],
    trusted_step: int | None,
    begin_again: bool,
    marked_before: bool,
) -> str:
    """Return why training must not begin at its first step; empty: it may.

    Runs at barrier one, in the controller, when a plan leads to step 0. `marked_before`: this job has trained before,
    and marked the checkpoint directory then. Where a directory cannot be listed, `begin_again` does not help: what is
    there could not be distinguished from later checkpoints.
    """
    where = next((report.trace.directory for report in reports.values() if report.trace.directory), "the directory")
    unlisted = {rank: report.trace.unlisted for rank, report in reports.items() if report.trace.unlisted}
    if unlisted:
        rank, why = next(iter(unlisted.items()))
        return (
            f"training does not begin at its first step, as rank {rank}{_others(unlisted)} does not know whether "
            f"checkpoints are there: {why}. Mend {where} and start the job again"
        )
    if begin_again:
        return ""
    found = _found(reports, restore=tuple(restore), trusted_step=trusted_step, where=where)
    if not found and marked_before and all(report.trace.unmarked for report in reports.values()):
        found = f"this job has marked {where}, and no rank finds the mark there: it is empty, or not mounted. Mend it"
    return f"training does not begin at its first step: {found}, {INSTEAD}" if found else ""


def _found(reports: Mapping[int, StepReport], *, restore: tuple[str, ...], trusted_step: int | None, where: str) -> str:
    """Say which trace of checkpoints there is and what can be done about it; empty where there is none."""
    readers = {rank: report.checkpoints for rank, report in reports.items() if report.checkpoints}
    if readers:
        rank, steps = next(iter(readers.items()))
        there = f"rank {rank}{_others(readers)} can read the checkpoint of step {max(steps)} in {where}"
        if RestoreSource.CHECKPOINT not in restore:
            return f"{there}, and restore is without checkpoint. Add it to continue from there"
        if trusted_step is not None and min(steps) > trusted_step:
            return f"{there}, and no state of more than {trusted_step} updates can be trusted. Bring an older one back"
        blind = [rank for rank, report in reports.items() if not report.checkpoints]
        cannot = f"rank {blind[0]}{_others(blind)} none" if blind else "no checkpoint can be read by all"
        return f"{there}, and {cannot}. Mount one directory on all nodes"
    for rank, report in reports.items():
        if report.trace.unusable:
            return f"no checkpoint in {where} can be used, says rank {rank}: {report.trace.unusable}. Bring one back"
    return ""


def _others(ranks: Mapping[int, object] | list[int]) -> str:
    others = len(ranks) - 1
    return f" (and {others} more)" if others else ""


_BY_DEVICE = "shards travel from device to device"

_BY_POLICY = "shards travel from host to host, as communicator.repair_links says"

_TRIED = "shards travel from host to host: an attempt of this incident over the devices' links was not completed"


def choose_links(plan: RepairPlan, wanted: RepairLinks, *, tried: bool) -> RepairPlan:
    """Return the plan with the links that its shards travel over, and the reason. Devices have links of their own.

    `tried`: an attempt of this incident has been ordered to use the devices' links.
    """
    if not any(part.transfers for part in plan.parts.values()):
        return plan
    links, reason = RepairLinks.DEVICE, _BY_DEVICE
    if wanted is RepairLinks.HOST:
        links, reason = RepairLinks.HOST, _BY_POLICY
    elif tried:
        links, reason = RepairLinks.HOST, _TRIED
    parts = {rank: msgspec.structs.replace(part, links=links) for rank, part in plan.parts.items()}
    return msgspec.structs.replace(plan, parts=parts, reasons=(*plan.reasons, reason))


def uses_devices(plan: RepairPlan) -> bool:
    """Return whether shards of the plan travel over the devices' links."""
    return any(part.links is RepairLinks.DEVICE for part in plan.parts.values())
