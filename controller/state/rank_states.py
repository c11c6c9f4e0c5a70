"""Where the process of a rank can stand in the way of a fault, and what takes it from one state to the next.

The table is the only way by which a rank changes its state: `World.take` goes by it, and keeps the ranks of each state.
A test holds it against what simulated jobs reach.
"""

from collections.abc import Mapping

from ...protocol.enums import StrEnum


class RankState(StrEnum):
    """Where the process of a rank stands."""

    ABSENT = "absent"  # no process holds the rank
    STARTING = "starting"  # ordered to start, has not reached its train function
    JOINED = "joined"  # new, parked in front of its train function
    TRAINING = "training"
    QUIESCING = "quiescing"
    QUIESCED = "quiesced"  # a survivor, parked
    REJOINING = "rejoining"
    READY = "ready"
    RESUMING = "resuming"  # ordered to train, has not committed its first step
    FINISHED = "finished"  # train function returned, parked
    RELEASED = "released"
    EXITED = "exited"  # ended well

    @property
    def shown(self) -> str:
        """What status calls it: whether the first step is committed is the job's phase, and not a rank's state."""
        return str(RankState.TRAINING if self is RankState.RESUMING else self)


class RankEvent(StrEnum):
    """What can happen to a rank: what its process was ordered, and what followed."""

    START_ORDERED = "start ordered"
    JOINED = "joined"
    QUIESCE_ORDERED = "quiesce ordered"
    QUIESCED = "quiesced"
    REJOIN_ORDERED = "rejoin ordered"
    READY = "ready"
    RESUME_ORDERED = "resume ordered"
    STEP_COMMITTED = "step committed"
    FINISHED = "finished"
    RELEASE_ORDERED = "release ordered"
    EXITED = "exited"  # well
    LOST = "lost"  # it has failed, was ended, or is out of reach


PARKED = frozenset({RankState.JOINED, RankState.QUIESCED})
GONE = frozenset({RankState.ABSENT, RankState.EXITED})
AT_WORK = frozenset({RankState.RESUMING, RankState.TRAINING})
DONE = frozenset({RankState.FINISHED, RankState.RELEASED, RankState.EXITED})

S, E = RankState, RankEvent
_QUIESCED_FROM = (S.RESUMING, S.TRAINING, S.QUIESCING, S.REJOINING, S.READY, S.FINISHED, S.RELEASED)

NEXT: Mapping[tuple[RankState, RankEvent], RankState] = {
    (S.ABSENT, E.START_ORDERED): S.STARTING,
    (S.STARTING, E.JOINED): S.JOINED,
    **{(state, E.QUIESCE_ORDERED): S.QUIESCING for state in _QUIESCED_FROM},
    (S.QUIESCING, E.QUIESCED): S.QUIESCED,
    (S.JOINED, E.REJOIN_ORDERED): S.REJOINING,
    (S.QUIESCED, E.REJOIN_ORDERED): S.REJOINING,
    (S.REJOINING, E.READY): S.READY,
    (S.READY, E.RESUME_ORDERED): S.RESUMING,
    (S.RESUMING, E.STEP_COMMITTED): S.TRAINING,
    (S.TRAINING, E.STEP_COMMITTED): S.TRAINING,  # as it does not know whether it was heard
    (S.FINISHED, E.STEP_COMMITTED): S.FINISHED,  # what it said first has come last
    (S.RESUMING, E.FINISHED): S.FINISHED,
    (S.TRAINING, E.FINISHED): S.FINISHED,
    (S.QUIESCING, E.FINISHED): S.FINISHED,  # before the boundary at which it was to stop
    (S.FINISHED, E.RELEASE_ORDERED): S.RELEASED,
    (S.RELEASED, E.EXITED): S.EXITED,
    (S.STARTING, E.EXITED): S.EXITED,  # a script that is not resilient never joins
    **{(state, E.LOST): S.ABSENT for state in S},
}


def after(state: RankState, event: RankEvent) -> RankState:
    """Return where `event` takes a rank that stands at `state`. What does not fit its state leaves it there."""
    return NEXT.get((state, event), state)
