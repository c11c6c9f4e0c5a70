"""plan_repair: where the world goes after a fault, and who hands what to whom."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstep.controller.recovery.buddies import Location
from midstep.controller.recovery.repair import MAX_SOURCES_PER_SHARD, MIN_STRIPE_BYTES, plan_repair
from midstep.protocol.errors import StateLost
from midstep.protocol.types import (
    GuestCopy,
    LocalStateCopy,
    RepairPlan,
    RestoreSource,
    ShardHold,
    ShardTransfer,
    StepReport,
)

MB = 1_000_000
ALL = (RestoreSource.REPLICA, RestoreSource.CHECKPOINT)


def report(
    committed: int, *, rank: int = -1, wards: tuple[int, ...] = (), size: int = MB, **changes: Any
) -> StepReport:
    """A survivor that holds the one shard, its local state and copies for `wards`, as of `committed`."""
    own = tuple(LocalStateCopy(each, committed) for each in ((rank,) if rank >= 0 else ()) + wards)
    made = StepReport(
        committed, ready=False, clean=True, holds=(ShardHold("s", size),), needs=("s",), local_states=own
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def newcomer(
    *, own: tuple[LocalStateCopy, ...] = (), checkpoints: tuple[int, ...] = (), host_copies: tuple[int, ...] = ()
) -> StepReport:
    """A process that holds nothing."""
    made = StepReport(0, ready=False, clean=False, needs=("s",), local_states=own, checkpoints=checkpoints)
    return msgspec.structs.replace(made, host_copies=host_copies)


def near(count: int) -> dict[int, Location]:
    """All ranks on one node."""
    return {rank: Location("a", "a") for rank in range(count)}


def spread(*nodes: str) -> dict[int, Location]:
    """One rank on each named node."""
    return {rank: Location(node, node) for rank, node in enumerate(nodes)}


def received(plan: RepairPlan, rank: int) -> list[ShardTransfer]:
    """What a rank gets."""
    return [transfer for transfer in plan.parts[rank].transfers if transfer.destination == rank]


def test_the_newest_committed_step_is_the_target() -> None:
    """Who has committed less, with no final gradients, receives."""
    plan = plan_repair({0: report(6, wards=(1,)), 1: report(5)}, near(2))
    assert plan.target_step == 6
    assert [transfer.source for transfer in received(plan, 1)] == [0]


WITH_COPIES = (RestoreSource.REPLICA, RestoreSource.HOST_COPY, RestoreSource.CHECKPOINT)


def alone(rank: int, committed: int, **changes: Any) -> StepReport:
    """A survivor whose shard nobody else holds."""
    shard = f"s{rank}"
    return report(committed, rank=rank, holds=(ShardHold(shard, MB),), needs=(shard,), **changes)


def test_without_a_replica_all_go_back_to_the_newest_copies_in_host_memory_that_all_have() -> None:
    """Each loads its own; nothing moves between ranks."""
    reports = {0: alone(0, 7, host_copies=(5, 7)), 1: newcomer(host_copies=(5, 6)), 2: alone(2, 7, host_copies=(5, 7))}
    plan = plan_repair(reports, near(3), WITH_COPIES)
    assert (plan.restore, plan.target_step) == (RestoreSource.HOST_COPY, 5)
    assert {(part.host_copy, part.transfers, part.local_states) for part in plan.parts.values()} == {(5, (), ())}


@pytest.mark.parametrize(("restore", "step"), [(WITH_COPIES, 6), ((RestoreSource.REPLICA, RestoreSource.HOST_COPY), 4)])
def test_copies_in_host_memory_give_way_to_a_newer_checkpoint(restore: tuple[RestoreSource, ...], step: int) -> None:
    """Where the policy lets one be loaded."""
    reports = {0: alone(0, 7, host_copies=(4,), checkpoints=(6,)), 1: newcomer(host_copies=(4,), checkpoints=(6,))}
    assert plan_repair(reports, near(2), restore).target_step == step


def test_copies_in_host_memory_of_no_common_step_are_no_source() -> None:
    """The reason names the ranks that have none at all."""
    reports = {0: alone(0, 7, host_copies=(5, 7), checkpoints=(2,)), 1: newcomer(checkpoints=(2,))}
    plan = plan_repair(reports, near(2), WITH_COPIES)
    assert (plan.restore, plan.target_step) == (RestoreSource.CHECKPOINT, 2)
    assert any("not one of rank 1" in reason for reason in plan.reasons)


def test_a_world_that_starts_again_takes_its_copies_in_host_memory() -> None:
    """All processes are new, and hold what their script has made."""
    fresh = report(0, host_copies=(3, 4))
    plan = plan_repair({0: fresh, 1: fresh}, near(2), WITH_COPIES)
    assert (plan.restore, plan.target_step) == (RestoreSource.HOST_COPY, 4)


def test_copies_in_host_memory_that_cannot_be_trusted_are_left_alone() -> None:
    """A later step may hold what a fault has spoilt."""
    reports = {0: alone(0, 7, host_copies=(5, 7)), 1: alone(1, 7, host_copies=(5, 7))}
    plan = plan_repair(reports, near(2), WITH_COPIES, trusted_step=6)
    assert (plan.restore, plan.target_step) == (RestoreSource.HOST_COPY, 5)


def test_a_repair_from_replicas_says_which_copy_in_host_memory_all_keep() -> None:
    """Of no later step than that at which all go on."""
    reports = {0: report(6, wards=(1,), host_copies=(4, 6)), 1: newcomer(host_copies=(4, 5))}
    assert {part.host_copy for part in plan_repair(reports, near(2), WITH_COPIES).parts.values()} == {4}


def test_a_rank_whose_copies_were_lost_with_its_node_gets_one_from_the_rank_that_keeps_it() -> None:
    """All others load their own; the plan says how many bytes go where, and why."""
    kept = (GuestCopy(1, 4, 400), GuestCopy(1, 5, 500))
    reports = {0: alone(0, 6, host_copies=(4, 5), guest_copies=kept), 1: newcomer(), 2: alone(2, 6, host_copies=(5,))}
    plan = plan_repair(reports, near(3), WITH_COPIES)
    assert (plan.restore, plan.target_step) == (RestoreSource.HOST_COPY, 5)
    moves = {rank: [(each.source, each.destination, each.length_bytes) for each in part.copy_transfers]
             for rank, part in plan.parts.items()}  # fmt: skip
    assert moves == {0: [(0, 1, 500)], 1: [(0, 1, 500)], 2: []}
    assert "rank 1 gets its copy from rank 0" in plan.reasons


def test_a_copy_on_another_node_that_cannot_be_trusted_is_left_alone() -> None:
    """As one at home."""
    kept = (GuestCopy(1, 3, 300), GuestCopy(1, 5, 500))
    reports = {0: alone(0, 6, host_copies=(3, 5), guest_copies=kept), 1: newcomer()}
    assert plan_repair(reports, near(2), WITH_COPIES, trusted_step=4).target_step == 3


def test_where_both_holders_of_a_copy_are_lost_the_checkpoint_is_taken() -> None:
    """The reason names the ranks of which there is none at all."""
    kept = (GuestCopy(2, 5, 500),)
    reports = {
        0: alone(0, 6, host_copies=(5,), guest_copies=kept, checkpoints=(2,)),
        1: newcomer(checkpoints=(2,)),
        2: newcomer(checkpoints=(2,)),
    }
    plan = plan_repair(reports, near(3), WITH_COPIES)
    assert (plan.restore, plan.target_step) == (RestoreSource.CHECKPOINT, 2)
    assert any("not one of rank 1" in reason for reason in plan.reasons)


def test_a_step_that_nobody_has_committed_is_repeated() -> None:
    """Final gradients alone do not move the target."""
    plan = plan_repair({0: report(5, ready=True), 1: report(5)}, near(2))
    assert plan.target_step == 5
    assert not any(part.finish_update or part.transfers for part in plan.parts.values())


def test_final_gradients_are_used_when_somebody_has_committed() -> None:
    """The rank finishes its update and receives nothing; the reason says so."""
    plan = plan_repair({0: report(6), 1: report(5, ready=True)}, near(2))
    assert plan.parts[1].finish_update
    assert received(plan, 1) == []
    assert "rank 1 had final gradients and finishes step 6 locally" in plan.reasons


def test_a_rank_two_steps_behind_cannot_finish() -> None:
    """Its gradients are those of another step."""
    plan = plan_repair({0: report(7, wards=(1,)), 1: report(5, ready=True)}, near(2))
    assert not plan.parts[1].finish_update
    assert received(plan, 1)


def test_unclean_state_does_not_move_the_target() -> None:
    """What a half-repaired rank says it has committed counts for nothing."""
    broken = report(9, clean=False, holds=())
    plan = plan_repair({0: report(5, wards=(1,)), 1: broken}, near(2))
    assert plan.target_step == 5
    assert [transfer.source for transfer in received(plan, 1)] == [0]


def test_everybody_puts_back_its_own_state() -> None:
    """A repeated step starts from what it started from, on survivors too."""
    plan = plan_repair({0: report(5), 1: report(5)}, near(2))
    assert all(part.restore_local for part in plan.parts.values())
    assert all(part.restore is RestoreSource.REPLICA for part in plan.parts.values())


def test_sources_on_the_same_node_come_first() -> None:
    """The far copy is not touched while a near one is there."""
    reports = {0: report(5, wards=(2,)), 1: report(5), 2: newcomer()}
    plan = plan_repair(reports, spread("b", "a", "a"))
    assert {transfer.source for transfer in received(plan, 2)} == {1}


def test_the_same_failure_domain_comes_before_another() -> None:
    """A rack is nearer than the hall."""
    reports = {0: report(5, wards=(2,)), 1: report(5), 2: newcomer()}
    places = {0: Location("n0", "rack2"), 1: Location("n1", "rack1"), 2: Location("n2", "rack1")}
    assert {transfer.source for transfer in received(plan_repair(reports, places), 2)} == {1}


def test_a_big_shard_is_striped_over_several_sources() -> None:
    """Never over more than the limit, in pieces that do not overlap."""
    size = 10 * MIN_STRIPE_BYTES + 7
    reports = {rank: report(5, wards=(9,), size=size) for rank in range(9)} | {9: newcomer()}
    transfers = received(plan_repair(reports, near(10)), 9)
    assert len({transfer.source for transfer in transfers}) == MAX_SOURCES_PER_SHARD
    assert sum(transfer.length_bytes for transfer in transfers) == size


def test_a_small_shard_comes_from_one_source() -> None:
    """Cutting it would cost more than it saves."""
    reports = {rank: report(5, wards=(3,), size=MIN_STRIPE_BYTES) for rank in range(3)} | {3: newcomer()}
    assert len(received(plan_repair(reports, near(4)), 3)) == 1


def test_the_load_is_balanced_over_the_sources() -> None:
    """Four newcomers at one node take from four different survivors."""
    reports = {rank: report(5, wards=(4, 5, 6, 7)) for rank in range(4)} | {rank: newcomer() for rank in range(4, 8)}
    plan = plan_repair(reports, near(8))
    assert Counter(received(plan, rank)[0].source for rank in range(4, 8)) == dict.fromkeys(range(4), 1)


def test_an_own_state_comes_from_the_own_black_box_first() -> None:
    """It outlives the process; no byte moves."""
    mine = newcomer(own=(LocalStateCopy(1, 5),))
    plan = plan_repair({0: report(5, wards=(1,)), 1: mine, 2: report(5, wards=(1,))}, near(3))
    (move,) = plan.parts[1].local_states
    assert (move.rank, move.source) == (1, 1)
    assert plan.parts[0].local_states == ()


def test_otherwise_the_nearest_copy_of_the_own_state_is_taken() -> None:
    """Both ends are told of it."""
    reports = {0: report(5, wards=(1,)), 1: newcomer(), 2: report(5, wards=(1,))}
    plan = plan_repair(reports, spread("b", "a", "a"))
    assert [(move.rank, move.source) for move in plan.parts[1].local_states] == [(1, 2)]
    assert plan.parts[2].local_states == plan.parts[1].local_states
    assert plan.parts[0].local_states == ()


def test_a_copy_of_another_step_is_no_copy() -> None:
    """Random numbers of the step before would repeat another step: the checkpoint is taken, and the reason given."""
    reports = {0: report(5, checkpoints=(4,)), 1: newcomer(own=(LocalStateCopy(1, 4),), checkpoints=(4,))}
    plan = plan_repair(reports, near(2))
    assert (plan.restore, plan.target_step) == (RestoreSource.CHECKPOINT, 4)
    assert "rank-local state" in plan.reasons[0]
    assert "rank 1 at step 5" in plan.reasons[0]


def test_a_shard_without_a_clean_copy_falls_back_to_the_checkpoint() -> None:
    """The newest one that every rank can read; nobody sends anything."""
    other = report(5, holds=(ShardHold("t", MB),), needs=("t",), wards=(1,), checkpoints=(2, 4))
    plan = plan_repair({0: other, 1: newcomer(checkpoints=(2, 3))}, near(2))
    assert (plan.restore, plan.target_step) == (RestoreSource.CHECKPOINT, 2)
    assert plan.reasons == (
        "no clean copy of shard s is left at step 5 (rank 1 needs it)",
        "all ranks load the checkpoint of step 2",
    )
    assert not any(part.transfers or part.local_states or part.restore_local for part in plan.parts.values())


def test_state_that_nobody_has_is_lost() -> None:
    """Every source is named with why it cannot help."""
    reports = {0: report(5, holds=(), wards=(1,)), 1: newcomer()}
    with pytest.raises(StateLost, match=r"no clean copy of shard s .*; no complete checkpoint can be read"):
        plan_repair(reports, near(2))


def test_a_source_that_the_policy_does_not_allow_is_not_used() -> None:
    """Replicas are there, and the policy wants the checkpoint."""
    reports = {rank: report(5, checkpoints=(3,)) for rank in range(2)}
    assert plan_repair(reports, near(2), [RestoreSource.CHECKPOINT]).target_step == 3


def test_an_unknown_source_is_named() -> None:
    """A policy of a later version is not half obeyed in silence."""
    with pytest.raises(StateLost, match="host_snapshot is not a source of state"):
        plan_repair({0: report(5)}, near(1), ["host_snapshot"])


def test_a_fresh_world_starts_from_its_first_step() -> None:
    """Nobody moves anything."""
    plan = plan_repair({rank: report(0, rank=rank) for rank in range(3)}, near(3))
    assert plan.target_step == 0
    assert not any(part.transfers for part in plan.parts.values())


def test_a_fresh_world_takes_the_checkpoint_that_is_there() -> None:
    """A restarted job does not begin again."""
    plan = plan_repair({rank: report(0, checkpoints=(8,)) for rank in range(2)}, near(2))
    assert (plan.restore, plan.target_step) == (RestoreSource.CHECKPOINT, 8)


def test_nothing_trained_and_nothing_allowed_starts_fresh() -> None:
    """With only the checkpoint allowed and none written, step 0 is what there is."""
    plan = plan_repair({rank: report(0) for rank in range(2)}, near(2), [RestoreSource.CHECKPOINT])
    assert (plan.restore, plan.target_step) == (RestoreSource.NOTHING, 0)
    assert plan.reasons[-1] == "training starts from its first step"


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, StepReport], dict[int, Location]]:
    """Any mixture of survivors and newcomers, replicated or sharded, near or far, with every local state somewhere."""
    count = draw(st.integers(1, 10))
    shards = draw(st.integers(1, 3))
    size = draw(st.integers(1, 5 * MIN_STRIPE_BYTES))
    step = draw(st.integers(1, 50))
    copies = tuple(LocalStateCopy(rank, at) for rank in range(count) for at in (step, step - 1))
    reports = {}
    for rank in range(count):
        shard = f"s{rank % shards}"
        kind = draw(st.sampled_from(["current", "current", "ready", "behind", "new", "torn"]))
        clean = kind not in {"new", "torn"}
        reports[rank] = StepReport(
            committed={"current": step, "torn": step, "new": 0}.get(kind, step - 1),
            ready=kind == "ready",
            clean=clean,
            holds=(ShardHold(shard, size),) if clean else (),
            needs=(shard,),
            local_states=copies if clean or kind == "torn" else (),
        )
    nodes = st.sampled_from("abc")
    return reports, {rank: Location(draw(nodes), draw(nodes)) for rank in range(count)}


def _plan(reports: Mapping[int, StepReport], places: Mapping[int, Location]) -> RepairPlan | None:
    try:
        return plan_repair(reports, places)
    except StateLost:
        return None


@given(worlds())
def test_every_byte_arrives_once_from_a_clean_holder(world: tuple[dict[int, StepReport], dict[int, Location]]) -> None:
    """Each destination gets each byte of each shard that it needs exactly once; sources are clean and at the target
    when they send."""
    reports, places = world
    plan = _plan(reports, places)
    if plan is None or plan.restore is not RestoreSource.REPLICA:
        return
    sizes = {hold.shard_id: hold.size_bytes for each in reports.values() for hold in each.holds}
    for rank, each in reports.items():
        current = each.clean and each.committed == plan.target_step
        finishing = each.clean and each.ready and each.committed == plan.target_step - 1
        transfers = received(plan, rank)
        assert bool(transfers) is not (current or finishing)
        assert plan.parts[rank].finish_update is finishing
        for shard in each.needs if transfers else ():
            end = 0
            for transfer in sorted((t for t in transfers if t.shard_id == shard), key=lambda t: t.offset_bytes):
                assert transfer.offset_bytes == end
                assert transfer.length_bytes > 0
                end += transfer.length_bytes
                source = reports[transfer.source]
                assert source.clean
                assert source.committed == plan.target_step or plan.parts[transfer.source].finish_update
                assert shard in {hold.shard_id for hold in source.holds}
            assert end == sizes[shard]


@given(worlds())
def test_both_ends_know_of_every_move(world: tuple[dict[int, StepReport], dict[int, Location]]) -> None:
    """A transfer stands in the parts of its source and its destination, and in no other."""
    plan = _plan(*world)
    if plan is None:
        return
    seen = Counter(transfer for part in plan.parts.values() for transfer in part.transfers)
    assert set(seen.values()) <= {2}
    for rank, part in plan.parts.items():
        assert all(rank in {transfer.source, transfer.destination} for transfer in part.transfers)
        assert all(rank in {move.source, move.rank} for move in part.local_states)
        assert part.target_step == plan.target_step


@given(worlds())
def test_with_clean_copies_alive_no_committed_step_is_lost(
    world: tuple[dict[int, StepReport], dict[int, Location]],
) -> None:
    """Where every shard has a clean holder at the newest step, that step is the target."""
    reports, places = world
    newest = max((each.committed for each in reports.values() if each.clean), default=0)
    current = [each for each in reports.values() if each.clean and each.committed == newest]
    held = {hold.shard_id for each in current for hold in each.holds}
    if current and all(set(each.needs) <= held for each in reports.values()):
        plan = plan_repair(reports, places)
        assert (plan.restore, plan.target_step) == (RestoreSource.REPLICA, newest)


def holding(committed: int, *shards: str, needs: tuple[str, ...] = ("a", "b"), **changes: Any) -> StepReport:
    """A rank with clean state that still holds these of its shards."""
    made = StepReport(committed, ready=False, clean=True, holds=tuple(ShardHold(s, MB) for s in shards), needs=needs)
    return msgspec.structs.replace(made, **changes)


def test_a_rank_that_kept_its_process_gets_just_the_shards_that_were_struck() -> None:
    """It is a source of what it still holds, and keeps its local state."""
    reports = {0: holding(5, "a", "b"), 1: holding(5, "a"), 2: newcomer(own=(LocalStateCopy(2, 5),))}
    reports[2] = msgspec.structs.replace(reports[2], needs=("a",))
    plan = plan_repair(reports, spread("x", "y", "y"))
    assert [(move.shard_id, move.source) for move in received(plan, 1)] == [("b", 0)]
    assert [(move.shard_id, move.source) for move in received(plan, 2)] == [("a", 1)]
    assert plan.parts[1].local_states == ()
    assert "rank 1 keeps the rest and gets 1.0 MB for corrupted memory: shard b" in plan.reasons


def test_a_rank_with_a_struck_shard_does_not_finish_an_update_that_it_cannot_make() -> None:
    """Its gradients are final, and half of what they belong to is gone: it gets everything."""
    reports = {0: holding(6, "a", "b"), 1: holding(5, "a", ready=True, local_states=(LocalStateCopy(1, 6),))}
    plan = plan_repair(reports, near(2))
    assert not plan.parts[1].finish_update
    assert {move.shard_id for move in received(plan, 1)} == {"a", "b"}


def test_what_is_struck_with_every_copy_of_it_is_lost() -> None:
    """The checkpoint is next, for all."""
    reports = {0: holding(5, "a", checkpoints=(4,)), 1: holding(5, "a", checkpoints=(4,))}
    assert plan_repair(reports, near(2)).restore is RestoreSource.CHECKPOINT
    with pytest.raises(StateLost, match="no clean copy of shard b is left at step 5"):
        plan_repair(reports, near(2), (RestoreSource.REPLICA,))


def test_who_finishes_its_update_hands_over_what_nobody_else_holds() -> None:
    """It applies the update before it sends, so the copy is as of the target."""
    reports = {
        0: holding(6, "a", needs=("a",)),
        1: holding(5, "b", needs=("b",), ready=True),
        2: newcomer(own=(LocalStateCopy(2, 6),)),
    }
    reports[2] = msgspec.structs.replace(reports[2], needs=("b",))
    plan = plan_repair(reports, near(3))
    assert plan.parts[1].finish_update
    assert [(move.shard_id, move.source) for move in received(plan, 2)] == [("b", 1)]


def test_a_first_step_is_not_begun_anew_with_what_was_struck() -> None:
    """A new process has what everybody began with; one that lost it has not."""
    reports = {0: holding(0, "a", "b"), 1: holding(0, "a")}
    assert [move.shard_id for move in received(plan_repair(reports, near(2)), 1)] == ["b"]
    with pytest.raises(StateLost):
        plan_repair({0: holding(0, "a"), 1: newcomer()}, near(2))


def test_state_that_may_be_made_of_struck_memory_is_not_used_from_anywhere() -> None:
    """Neither a replica nor a checkpoint of a later step than the last that can be trusted."""
    reports = {rank: report(25, rank=rank, checkpoints=(10, 20)) for rank in (0, 1)}
    plan = plan_repair(reports, near(2), ALL, trusted_step=17)
    assert (plan.restore, plan.target_step) == (RestoreSource.CHECKPOINT, 10)
    assert "no state of more than 17 updates can be trusted" in plan.reasons[0]
    with pytest.raises(StateLost, match="can be trusted"):
        plan_repair(reports, near(2), ALL, trusted_step=5)


def test_replicas_of_a_step_that_can_be_trusted_are_used() -> None:
    plan = plan_repair({0: report(5, rank=0, wards=(1,)), 1: newcomer()}, near(2), ALL, trusted_step=5)
    assert (plan.restore, plan.target_step) == (RestoreSource.REPLICA, 5)
