"""One rank's part in votes: when it hashes what it holds, and what it says of itself afterwards."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from midstep.processor.framework import ShardDigest
from midstep.processor.step_order import StepState
from midstep.processor.votes import Votes
from midstep.protocol.errors import Interrupted
from midstep.protocol.faults import EACH_TIME
from midstep.protocol.types import (
    Activity,
    FaultKind,
    JobSettings,
    RepairPart,
    RestoreSource,
    ShardTransfer,
)

STEP_S = 0.1


class Rank:
    """A rank with one shard, whose bytes are a number. It stands for its runtime and its framework."""

    changes_in_updates_alone = True
    activity = Activity.COMPUTING

    def __init__(self, rank: int, world: "list[Rank]", every_steps: int | None = 1, hash_s: float = 0.0) -> None:
        self.rank, self.world_size, self.held, self.hashed = rank, 3, 7, 0
        self.hash_s = hash_s
        self.settings = JobSettings(integrity_every_steps=every_steps)
        self.step_clock = self.black_box = self
        self.step_state = StepState(clean=True)
        self.said: list[tuple[FaultKind, bool]] = []
        self.trusted: list[int | None] = []
        self.codes: list[object] = []
        clock = lambda: self.hashed * self.hash_s  # noqa: E731
        self.votes = Votes(self, self, self.step_state, clock)  # type: ignore[arg-type]
        world.append(self)

    def doing(self, activity: Activity) -> None:
        """Be a step clock."""

    def set_votes(self, step: int, unchecked: int) -> None:
        """Be a black box."""

    def shards(self) -> list[Any]:
        """Be a framework."""
        return []

    def digests(self) -> dict[str, ShardDigest]:
        """Hash."""
        self.hashed += 1
        return {"a": ShardDigest(self.held, self.held)}

    def report_fault(
        self, kind: FaultKind, *_: object, mendable: bool = False, trusted_step: int | None = None, **more: object
    ) -> None:
        """Report."""
        self.codes.append(more.get("code"))
        self.trusted.append(trusted_step)
        self.said.append((kind, mendable))


def world(every_steps: int | None = 1, hash_s: Sequence[float] = (0.0, 0.0, 0.0)) -> list[Rank]:
    """Return three ranks whose copies have been equal in a vote. `hash_s`: how long each of them takes to hash."""
    ranks: list[Rank] = []
    for rank in range(3):
        Rank(rank, ranks, every_steps, hash_s[rank])
    assert not step(ranks, 2)
    return ranks


def step(ranks: list[Rank], number: int, *, unheard: Rank | None = None, changes: Sequence[Rank] = ()) -> bool:
    """Have all do a step, up to its update; return whether the vote was lost.

    `unheard`: it has said what it holds, and heard nothing: it applies the update because the others have.
    `changes`: those whose memory changes in the forward pass.
    """
    for each in ranks:
        each.step_state.count = number
        each.votes.begins(number, wanted=False)
    for each in changes:
        each.held += 1
    ballots = [each.votes.ballot(STEP_S) for each in ranks]
    said = [ballot.said() for ballot in ballots if ballot is not None]
    lost = 0
    for each, ballot in zip(ranks, ballots, strict=True):
        if ballot is None:
            continue
        if each is unheard:
            each.votes.passed_elsewhere(number)
            continue
        for heard in said:
            ballot.heard(heard)
        try:
            each.votes.counted(number, ballot)
        except Interrupted:
            lost += 1
    assert lost in {0, len(ranks)}
    return lost > 0


def received(target: int, rank: int) -> RepairPart:
    """Return the part of a rank that gets the shard from rank 1."""
    transfers = (ShardTransfer("a", 0, 1, 1, rank),)
    return RepairPart(target_step=target, restore=RestoreSource.REPLICA, transfers=transfers)


def repaired(rank: Rank, part: RepairPart) -> None:
    """Have a rank train again after a repair."""
    with rank.votes.repairing(part):
        pass
    rank.votes.resumed(part.target_step)


def test_a_step_without_a_vote_costs_no_hash() -> None:
    """Neither where it begins nor before its barrier."""
    ranks = world(every_steps=10)
    before = [each.hashed for each in ranks]
    assert not step(ranks, 3)
    assert [each.hashed for each in ranks] == before


def test_memory_that_has_changed_in_a_step_that_was_left_serves_no_other() -> None:
    """The rank says so; where nothing has changed it says nothing."""
    ranks = world()
    for each in ranks:
        each.step_state.count = 3
        each.votes.begins(3, wanted=False)
    ranks[1].held = 9
    assert [each.votes.changed_since_begun() for each in ranks] == [(), ("a",), ()]
    assert [each.said for each in ranks] == [[], [(FaultKind.ODD_COPY, False)], []]
    assert ranks[1].votes.changed_since_begun() == ()


def test_what_an_update_has_changed_is_not_taken_for_that() -> None:
    """One that was applied at a broken barrier, or has ended halfway."""
    ranks = world()
    for each, changes in zip(ranks, ("count", "updating", "clean"), strict=True):
        each.step_state.count = 3
        each.votes.begins(3, wanted=False)
        each.held = 9
        setattr(each.step_state, changes, {"count": 4, "updating": True, "clean": False}[changes])
        assert each.votes.changed_since_begun() == ()


def replaced(ranks: list[Rank], rank: int, target: int) -> Rank:
    """Have a rank train in a new process, which was sent the shard by rank 1."""
    newcomer = Rank(rank, [])
    newcomer.held, ranks[rank] = ranks[1].held, newcomer
    repaired(newcomer, received(target, rank))
    for each in ranks:
        if each is not newcomer:
            repaired(each, RepairPart(target, RestoreSource.REPLICA))
    return newcomer


def test_memory_that_changes_in_the_first_step_of_a_new_process_is_found() -> None:
    """The others know that the script changes nothing between updates. The step is repeated, with another's copy."""
    ranks = world()
    newcomer = replaced(ranks, 2, 3)
    assert step(ranks, 3, changes=(newcomer,))
    assert [each.said for each in ranks] == [[], [], [(FaultKind.ODD_COPY, True)]]
    assert newcomer.trusted == [None]
    assert newcomer.step_state.corrupted == frozenset({"a"})


def test_a_new_process_of_a_script_that_changes_its_tensors_is_not_blamed() -> None:
    """The others look at their memory no more, and tell it so; also where its own process was the only one."""
    for changes in (1, 3):
        ranks: list[Rank] = []
        for rank in range(3):
            Rank(rank, ranks)
        assert not step(ranks, 2, changes=ranks[:changes])
        for each in ranks:
            each.held = 7
        newcomer = replaced(ranks, 0, 3)
        assert not step(ranks, 3, changes=(newcomer,))
        assert not any(each.said for each in ranks)


def test_a_rank_that_has_not_heard_how_a_vote_ended_hears_later_that_tensors_change() -> None:
    """It has applied the update because others have."""
    ranks: list[Rank] = []
    for rank in range(3):
        Rank(rank, ranks)
    assert not step(ranks, 2, changes=ranks[:1], unheard=ranks[2])
    ranks[0].held = 7
    assert not step(ranks, 3, changes=ranks[2:])
    assert not any(each.said for each in ranks)


def test_a_newcomer_that_was_sent_a_wrong_copy_is_not_blamed() -> None:
    """Three ranks cannot tell, and the repetition from the last state that passed does."""
    ranks = world(every_steps=10)
    ranks[0].held = ranks[1].held = 9
    repaired(ranks[0], received(4, 0))
    for each in ranks[1:]:
        each.votes.resumed(4)
    assert step(ranks, 4)
    assert [each.said for each in ranks] == [[(FaultKind.COPIES_DIFFER, True)], [], []]
    for each in ranks:
        each.held = 7
        repaired(each, RepairPart(target_step=2, restore=RestoreSource.HOST_COPY))
    assert not step(ranks, 4)
    assert [each.said[-1:] for each in ranks] == [[(FaultKind.COPIES_DIFFER, True)], [(FaultKind.ODD_COPY, False)], []]


def test_where_a_wrong_copy_has_spoilt_all_no_rank_is_blamed_for_the_difference() -> None:
    """The repetition has what no rank had."""
    ranks = world(every_steps=10)
    for each, held in zip(ranks, (8, 8, 9), strict=True):
        each.held = held
    repaired(ranks[0], received(4, 0))
    for each in ranks[1:]:
        each.votes.resumed(4)
    assert step(ranks, 4)
    for each in ranks:
        each.held = 7
        repaired(each, RepairPart(target_step=2, restore=RestoreSource.HOST_COPY))
    assert not step(ranks, 4)
    assert not any((FaultKind.ODD_COPY, False) in each.said for each in ranks)


@pytest.mark.parametrize("mended", [False, True])
def test_a_copy_that_changed_on_its_way_is_asked_for_again(mended: bool) -> None:
    """Its rank says so, and keeps its process."""
    ranks = world(every_steps=10)
    ranks[0].held = 7 if mended else 9
    repaired(ranks[0], received(4, 0))
    for each in ranks[1:]:
        each.votes.resumed(4)
    assert step(ranks, 4) is not mended
    assert ranks[0].step_state.corrupted == (frozenset() if mended else frozenset({"a"}))
    assert ranks[0].said == ([] if mended else [(FaultKind.ODD_COPY, True)])


def test_a_rank_that_applies_what_others_have_has_a_voice_in_the_next_vote() -> None:
    """It has not heard how the last one ended, in which the copy that it had been sent was right.

    Else a wrong copy, and another one of that, would be all that counts, and the healthy rank the odd one.
    """
    ranks = world()
    repaired(ranks[2], received(3, 2))
    assert not step(ranks, 3, unheard=ranks[2])
    ranks[0].held = ranks[1].held = 9  # one has flipped, and the other one is sent that
    repaired(ranks[0], received(4, 0))
    for each in ranks[1:]:
        each.votes.resumed(4)
    assert step(ranks, 4)
    assert [each.said for each in ranks] == [[(FaultKind.COPIES_DIFFER, True)], [], []]


def test_what_arrived_in_a_repair_that_failed_has_no_voice_either() -> None:
    """The next attempt has nothing more to send it, so its plan does not name it."""
    ranks = world(every_steps=10)
    ranks[0].held = ranks[1].held = 9
    with pytest.raises(ConnectionError), ranks[0].votes.repairing(received(4, 0)):
        raise ConnectionError
    for each in ranks:
        repaired(each, RepairPart(target_step=4, restore=RestoreSource.REPLICA))
    assert step(ranks, 4)
    assert [each.said for each in ranks] == [[(FaultKind.COPIES_DIFFER, True)], [], []]


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_was_loaded_after_a_repair_that_failed_has_a_voice(fails: bool) -> None:
    """Nothing of what another rank had is left then. A way back that fails may have left it."""
    ranks = world(every_steps=10)
    with pytest.raises(ConnectionError), ranks[0].votes.repairing(received(4, 0)):
        raise ConnectionError
    with suppress(ConnectionError), ranks[0].votes.repairing(RepairPart(2, RestoreSource.HOST_COPY)):
        if fails:
            raise ConnectionError
    ranks[0].held = ranks[1].held = 9
    for each in ranks:
        each.votes.resumed(2)
    assert step(ranks, 2)
    assert ranks[2].said == ([] if fails else [(FaultKind.ODD_COPY, True)])


def test_where_memory_is_not_looked_at_before_each_update_the_copy_of_the_majority_is_not_exact() -> None:
    """The odd one may have computed with it. All go back, but for a copy that was changed on its way."""
    for sent in (False, True):
        ranks = world()
        for each in ranks:
            each.votes._steady = False
        ranks[0].held = 9
        for each in ranks:
            repaired(each, received(3, 0) if sent and each is ranks[0] else RepairPart(3, RestoreSource.REPLICA))
        assert step(ranks, 3)
        assert ranks[0].said == [(FaultKind.ODD_COPY, True)]
        assert ranks[0].trusted == [None if sent else 2]
        assert ranks[0].step_state.corrupted == (frozenset({"a"}) if sent else frozenset())


def test_a_job_that_is_back_at_its_first_update_votes_there_too() -> None:
    """What went wrong since that was loaded would be in all gradients by the next vote, which would take it for new."""
    ranks = world()
    for each in ranks:
        repaired(each, RepairPart(1, RestoreSource.HOST_COPY))
    ranks[1].held = 9
    assert step(ranks, 1)
    assert ranks[1].said == [(FaultKind.ODD_COPY, True)]


def test_a_new_process_votes_on_the_first_update_too_where_the_others_have() -> None:
    """They are back there. Before the first vote of a job nothing follows from what is said."""
    for has_voted in (True, False):
        ranks: list[Rank] = []
        for rank in range(3):
            Rank(rank, ranks)
        assert not has_voted or not step(ranks, 2)
        newcomer = replaced(ranks, 2, 1)
        newcomer.held = 9
        assert step(ranks, 1) is has_voted
        assert newcomer.said == ([(FaultKind.ODD_COPY, True)] if has_voted else [])


def test_new_processes_do_not_vote_on_copies_that_never_were_equal() -> None:
    """The others tell them so: else the second one would differ from the first, which has voted alone."""
    ranks: list[Rank] = []
    for rank in range(3):
        Rank(rank, ranks).held = 7 + rank
    assert not step(ranks, 2)
    for number in (1, 2):
        replaced(ranks, number, 2 + number).held = 20 + number
        assert not step(ranks, 2 + number)
    assert not any(each.said or each.votes.is_on for each in ranks)


def test_a_rank_that_has_not_heard_of_the_first_update_knows_of_no_equal_copies() -> None:
    """It has applied it because others have, before any vote counts."""
    ranks: list[Rank] = []
    for rank in range(3):
        Rank(rank, ranks).held = 7 + rank
    assert not step(ranks, 1, unheard=ranks[0])
    assert not step(ranks, 2)
    assert not any(each.said for each in ranks)


def test_memory_of_which_the_device_says_that_it_is_lost_is_not_compared_later() -> None:
    """What a repair has put there since is no change by itself, also where the repair fails, and it is cleaned again.

    Nor is what arrived in the place of memory that had nothing wrong.
    """
    ranks = world()
    for each in ranks:
        each.step_state.count = 3
        each.votes.begins(3, wanted=False)
    assert ranks[0].votes.changed_since_begun(readable=False) == ()
    with pytest.raises(ConnectionError), ranks[1].votes.repairing(received(3, 1)):
        raise ConnectionError
    for each in ranks:
        each.held = 9
    assert [each.votes.changed_since_begun() for each in ranks] == [(), (), ("a",)]


def voted_in(ranks: list[Rank], steps: range) -> list[int]:
    """Have all do these steps; return those that had a vote. In such a step all ranks vote."""
    found = []
    for number in steps:
        before = [each.hashed for each in ranks]
        assert not step(ranks, number)
        hashed = {each.hashed - was for each, was in zip(ranks, before, strict=True)}
        assert hashed in ({0}, {2})
        found += [number] * (hashed == {2})
    return found


def test_with_auto_votes_are_as_far_apart_as_the_slowest_rank_wants() -> None:
    """It hashes for 2.4 ms twice, which is 0.4 percent of 12 steps of 100 ms. The first votes are sooner."""
    ranks = world(None, [0.00079, 0.00239, 0.00159])
    assert voted_in(ranks, range(3, 40)) == [14, 26, 38]


def test_with_auto_a_rank_that_hashes_faster_from_now_on_brings_votes_together() -> None:
    ranks = world(None, [0.00079, 0.00239, 0.00079])
    ranks[1].hash_s = 0.0
    assert voted_in(ranks, range(3, 40)) == [14, 26, 30, 34, 38]


def test_with_auto_a_vote_in_four_that_takes_longer_counts_for_nothing_and_two_count() -> None:
    """One may have been held up. Two say what votes cost, where ranks of one machine share its memory."""
    ranks = world(None, [0.00079, 0.00079, 0.00079])
    assert voted_in(ranks, range(3, 12)) == [6, 10]
    ranks[0].hash_s = 0.0039
    assert voted_in(ranks, range(12, 15)) == [14]
    ranks[0].hash_s = 0.00079
    assert voted_in(ranks, range(15, 23)) == [18, 22]
    ranks[0].hash_s = 0.0039
    assert voted_in(ranks, range(23, 51)) == [26, 46]


def test_with_auto_a_new_process_votes_when_the_others_do() -> None:
    """It has heard in its first step, in which all vote, when the next vote is."""
    ranks = world(None, [0.00079, 0.00239, 0.00079])
    assert voted_in(ranks, range(3, 17)) == [14]
    ranks.pop()
    Rank(2, ranks, None, 0.00079)
    repaired(ranks[2], received(17, 2))
    for each in ranks:
        each.votes.resumed(17)
    assert voted_in(ranks, range(17, 45)) == [17, 29, 41]


def test_with_auto_ranks_vote_again_soon_when_all_have_gone_back() -> None:
    """Also to the state before the first update, which has no vote."""
    ranks = world(None, [0.00079, 0.00239, 0.00079])
    assert voted_in(ranks, range(3, 40)) == [14, 26, 38]
    for each in ranks:
        each.votes.resumed(0)
    assert voted_in(ranks, range(30))[0] == 12


def repeated_with(ranks: list[Rank], step_number: int, held: Sequence[int]) -> None:
    """Have ranks lose a vote with these copies, and go back for it to the state before, which passes."""
    for each, now in zip(ranks, held, strict=True):
        each.held = now
    assert step(ranks, step_number)
    for each in ranks:
        each.held = 7
        repaired(each, RepairPart(target_step=step_number - 1, restore=RestoreSource.HOST_COPY))
    assert not step(ranks, step_number - 1)


def pair() -> list[Rank]:
    """Return two ranks whose copies have been equal in a vote."""
    ranks = world()[:2]
    for each in ranks:
        each.world_size = len(ranks)
    return ranks


def test_of_two_copies_the_one_that_differs_from_itself_in_the_repetition_is_wrong_each_time() -> None:
    """What is right gives the same again. The rank says so itself, and has had its second chance."""
    ranks = pair()
    repeated_with(ranks, 4, (8, 9))
    assert not ranks[1].said
    repeated_with(ranks, 4, (8, 10))
    assert (ranks[1].said, ranks[1].codes, ranks[1].trusted) == ([(FaultKind.ODD_COPY, True)], [EACH_TIME], [3])
    assert {kind for kind, _ in ranks[0].said} == {FaultKind.COPIES_DIFFER}


def test_a_rank_that_is_wrong_only_in_the_repetition_has_a_strike_like_any_other() -> None:
    """The one that was wrong before has what is right now, which was there before, too."""
    ranks = pair()
    repeated_with(ranks, 4, (8, 9))
    repeated_with(ranks, 4, (10, 8))
    assert (ranks[0].said[-1], ranks[0].codes[-1]) == ((FaultKind.ODD_COPY, True), None)
    assert not ranks[1].said


@pytest.mark.parametrize("again", [(8, 9), (10, 11)])
def test_of_two_copies_that_both_repeat_themselves_or_both_do_not_none_is_blamed(again: tuple[int, int]) -> None:
    """A device that is wrong in the same way each time is not told from one that is right."""
    ranks = pair()
    repeated_with(ranks, 4, (8, 9))
    repeated_with(ranks, 4, again)
    assert {kind for each in ranks for kind, _ in each.said} == {FaultKind.COPIES_DIFFER}


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_rank_that_was_stopped_before_it_heard_of_the_difference_is_blamed_all_the_same(wrong: int) -> None:
    """In the barrier, by the order that the first to hear has brought about. It hears with the repetition."""
    ranks = pair()
    for each, held in zip(ranks, (9, 8) if wrong == 0 else (8, 9), strict=True):
        each.held = held
        each.step_state.count = 4
        each.votes.begins(4, wanted=False)
    ballots = [each.votes.ballot(STEP_S) for each in ranks]
    heard, missed = ballots[1 - wrong], ballots[wrong]
    assert heard is not None
    assert missed is not None
    heard.heard(missed.said())
    with pytest.raises(Interrupted):
        ranks[1 - wrong].votes.counted(4, heard)
    for each in ranks:
        each.held = 7
        repaired(each, RepairPart(target_step=3, restore=RestoreSource.HOST_COPY))
        each.said.clear()
    assert not step(ranks, 3)
    for each in ranks:
        each.held = 8
    assert not step(ranks, 4)
    assert [each.said for each in ranks] == [[(FaultKind.ODD_COPY, False)] * (rank == wrong) for rank in range(2)]


def test_what_was_said_in_a_vote_that_broke_for_another_reason_blames_no_rank() -> None:
    """All have the same; then a process is lost, and the step before is repeated with other data."""
    ranks = pair()
    for each in ranks:
        each.step_state.count = 4
        each.votes.begins(4, wanted=False)
        each.votes.ballot(STEP_S)
        repaired(each, RepairPart(target_step=3, restore=RestoreSource.HOST_COPY))
    assert not step(ranks, 3)
    for each in ranks:
        each.held = 9
    assert not step(ranks, 4)
    assert [each.said for each in ranks] == [[], []]
