"""Controls: all that operators can have a job do while it runs (docs/controls.md), and the record of it.

Each control is a closed, tagged struct: it is a request, then a part of an event in the journal, with who asked for it
and why. `Controls` is what follows from all of them so far; it is a part of the status.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .bounds import MOST_RANKS, Count, Name, Rank, Seconds, Text
from .types import ArmedFault, Rung

MOST_S = 86_400.0 * 7
MOST_RECORDS = 100  # the latest are kept in the status; the journal has all
MOST_WHY = 1000  # characters

MOST_FAILOVER_S = 86_400
MOST_ACTION_S = 7200.0
MOST_ARGUMENTS = 32

Duration = Annotated[float, Meta(gt=0, le=MOST_S)]
Why = Annotated[str, Meta(min_length=1, max_length=MOST_WHY)]
Arguments = Annotated[dict[Name, Text], Meta(max_length=MOST_ARGUMENTS)]


class PauseTraining(msgspec.Struct, frozen=True, tag=True):
    """Stop all ranks at the next step boundary, and hold them there for so many seconds at most."""

    for_s: Duration


class EndPause(msgspec.Struct, frozen=True, tag=True):
    """Train on."""


class SaveNow(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint at the next step boundary, and train on."""


class RestartRank(msgspec.Struct, frozen=True, tag=True):
    """Replace the process of a rank at the next step boundary."""

    rank: Rank


class ReleaseNode(msgspec.Struct, frozen=True, tag=True):
    """Use a node again that an operator had drained or isolated."""

    node: Name


class ForbidRung(msgspec.Struct, frozen=True, tag=True):
    """Take a rung of the ladder for no incident, for so many seconds."""

    rung: Rung
    for_s: Duration


class ForceRung(msgspec.Struct, frozen=True, tag=True):
    """Begin each incident at this rung, and take no cheaper one, for so many seconds."""

    rung: Rung
    for_s: Duration


class AllowRungs(msgspec.Struct, frozen=True, tag=True):
    """End whatever was forbidden or forced."""


class Acknowledge(msgspec.Struct, frozen=True, tag=True):
    """Say that an operator has seen all that the job asks for now."""


class InjectFault(msgspec.Struct, frozen=True, tag=True):
    """Cause a fault in a rank."""

    fault: ArmedFault


class PerformAction(msgspec.Struct, frozen=True, tag=True):
    """Have these ranks (None: all) call the action of this name, while an operator's pause holds them."""

    action: Name
    arguments: Arguments
    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=MOST_RANKS)] | None
    within_s: Annotated[float, Meta(gt=0, le=MOST_ACTION_S)]


class PromoteController(msgspec.Struct, frozen=True, tag=True):
    """Let another controller, which stands by, lead."""

    controller: Name


class PauseFailover(msgspec.Struct, frozen=True, tag=True):
    """Let no standby take over for so many seconds; 0: end the pause."""

    for_s: Annotated[int, Meta(ge=0, le=MOST_FAILOVER_S)]


LeadControl = PromoteController | PauseFailover
"""For the controllers to do, and not for the job: it has their record only. It takes the role of an admin."""
Control = (
    PauseTraining
    | EndPause
    | SaveNow
    | RestartRank
    | ReleaseNode
    | ForbidRung
    | ForceRung
    | AllowRungs
    | Acknowledge
    | InjectFault
    | PerformAction
    | LeadControl
)

_IN_WORDS: dict[type[Control], str] = {
    PauseTraining: "pause for up to {0.for_s:g} s",
    EndPause: "train on",
    SaveNow: "save now",
    RestartRank: "restart rank {0.rank}",
    ReleaseNode: "release node {0.node}",
    ForbidRung: "forbid {0.rung} for {0.for_s:g} s",
    ForceRung: "begin at {0.rung} for {0.for_s:g} s",
    AllowRungs: "allow all rungs",
    Acknowledge: "acknowledge",
    InjectFault: "cause a fault: {0.fault.action} rank {0.fault.rank}",
    PerformAction: "perform {0.action}",
    PromoteController: "let controller {0.controller} lead",
    PauseFailover: "let no standby take over for {0.for_s} s",
}


def words_of(control: Control) -> str:
    """Say what is asked for."""
    if control == PauseFailover(0):
        return "let standbys take over again"
    return _IN_WORDS[type(control)].format(control)


class Asked(msgspec.Struct, frozen=True):
    """The operator who asked for something, as the command says, with which role, and why."""

    by: Name
    role: Name
    why: Why

    @property
    def text(self) -> str:
        """Say it in a few words."""
        return f"{self.by} ({self.role}): {self.why}"


class ControlRecord(msgspec.Struct, frozen=True):
    """One control: when, who, why, what was asked for, and what has become of it so far."""

    at_s: Seconds
    asked: Asked
    what: str
    outcome: str


class StandingPause(msgspec.Struct, frozen=True):
    """Training is to stand still until `until_s`, on the controller's clock, or until an operator ends the pause."""

    until_s: Seconds
    asked: Asked


class RungOrder(msgspec.Struct, frozen=True):
    """A rung that is not taken until `until_s`. `forced`: because this one is, which does more."""

    rung: Rung
    until_s: Seconds
    asked: Asked
    forced: Rung | None = None

    @property
    def reason(self) -> str:
        """Say why the rung is not taken."""
        if self.forced is None:
            return f"an operator forbids it, {self.asked.text}"
        return f"an operator has each incident begin at {self.forced}, {self.asked.text}"


class Wish(msgspec.Struct, frozen=True):
    """Something to be done at a step boundary that was not done yet. `number`: of its record, counted from 1."""

    number: Count
    control: SaveNow | RestartRank
    asked: Asked
    until_s: Seconds  # then it is not wished for any more


class ActionResult(msgspec.Struct, frozen=True):
    """The answer of a rank that has performed an action. `text`: the action's own, or why it failed."""

    rank: Rank
    succeeded: bool
    text: str


class StandingAction(msgspec.Struct, frozen=True):
    """The latest action of ranks that were held. `number`: of its record. `waiting`: ranks that have not answered."""

    number: Count
    control: PerformAction
    until_s: Seconds
    waiting: frozenset[int]
    results: tuple[ActionResult, ...] = ()

    @property
    def outcome(self) -> str:
        """Say how many ranks have performed it, and why the first one that failed has."""
        failed = [result for result in self.results if not result.succeeded]
        told = f"performed by {len(self.results) - len(failed)} of {len(self.results) + len(self.waiting)} ranks"
        return f"{told}; rank {failed[0].rank}: {failed[0].text}" if failed else told


class Controls(msgspec.Struct, frozen=True):
    """All that operators want of a job now, and what they have done."""

    pause: StandingPause | None = None
    rungs: tuple[RungOrder, ...] = ()
    wishes: tuple[Wish, ...] = ()
    records: tuple[ControlRecord, ...] = ()
    counted: Count = 0  # records, those that were dropped as well
    acknowledged: ControlRecord | None = None
    action: StandingAction | None = None
