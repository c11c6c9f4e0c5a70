"""Define a topic of the recovery machine, and what topics recommend to each other.

A topic is one file: it says which events it takes in which phases, which rules hold in it after every event, when its
time runs out, what it owes a controller that takes over, and what may never be true of it. Topics do not call each
other. A handler changes what is its own topic's, and returns recommendations; the machine hands each to the topic that
answers it (`machine.py`). Topics import this module as `do`: `[do.Blame(report), do.Decide()]`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ...protocol.messages import Command
from ...protocol.types import ArmedFault, Decision, FaultReport, Rung, RunningProcess
from .state import JobState, Phase, PlannedChange, Reschedule, Resize, Result
from .world import Holder


class Recommendation(msgspec.Struct, frozen=True):
    """Something that another topic is to do next, before anything that was recommended earlier."""


Recs = Iterable[Recommendation] | None  # in the order in which they are done
Owed = tuple[str, Command]  # who is to get it, and what


# --- blame and decision -----------------------------------------------------------------------------------------------


class AboutFault(Recommendation, frozen=True):
    """Something that is to be done about one fault."""

    report: FaultReport


class SortOut(AboutFault, frozen=True):
    """A fault was reported, of hardware perhaps: enter it into the book, and take it as a fault if it hurts a rank."""


class TakeFault(AboutFault, frozen=True):
    """Something is wrong with a rank or node as it is now: drop it as stale, suspect, or blame."""


class RuleBroken(AboutFault, frozen=True):
    """A value that a script reports breaks a rule of the policy: do what the rule asks for."""


class RepeatAsRuled(AboutFault, frozen=True):
    """Have all ranks repeat a step as a rule asks for. `trusted_step`: no state of more updates is to be used.

    `opens`: in a generation that begins now, as no fault has opened one.
    """

    decision: Decision
    trusted_step: int | None
    opens: bool


class StepRepeated(Recommendation, frozen=True):
    """The step to which a rule had all ranks go is committed everywhere."""

    step: int


class NothingLeftOut(Recommendation, frozen=True):
    """The data that a rule wants left out cannot be: it is repeated."""


class CannotGoBack(Recommendation, frozen=True):
    """There is no state to go back to as a rule asks for (`why`), at barrier one."""

    why: str


class TakeUp(AboutFault, frozen=True):
    """A fault was put off while there was no world: take it for one of the world that there is now."""


class Blame(AboutFault, frozen=True):
    """Hold a rank, or all ranks of a node, at fault. `known`: the report is in the record already."""

    known: bool = False


class Suspect(AboutFault, frozen=True):
    """Something holds up the job, and it is not known who: find out."""


class Decide(Recommendation, frozen=True):
    """Choose a rung for the ranks that are at fault now.

    `hasty`: no node was asked so far. Before the job stops for want of a culprit, every node is asked.
    """

    hasty: bool = False


class AskNodes(Recommendation, frozen=True):
    """No rung helps without a rank at fault: ask all nodes what their ranks do. One that is lost does not answer."""


class RungFailed(Recommendation, frozen=True):
    """A rung (None: the attempt under way) did not lead to a resume. `decide`: choose again now."""

    rung: Rung | None
    reason: str
    decide: bool = True


class StopNow(Recommendation, frozen=True):
    """End the job for a reason that no rung can mend."""

    reason: str
    exit_code: int = 1


# --- processes and generations ----------------------------------------------------------------------------------------


class OpenGeneration(Recommendation, frozen=True):
    """Open the next generation: the ranks of `replace` get a new process, those of `moved` have one already.

    `widen`: do it in the generation that gathers now. `ask_for_nodes`: ask the platform for those that are missing.
    """

    replace: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    widen: bool = False
    ask_for_nodes: bool = False


class AskNewcomers(Recommendation, frozen=True):
    """Ask processes that were started early to stop, and so to join."""

    ranks: tuple[int, ...]


class Gone(Recommendation, frozen=True):
    """The processes of these ranks are no more. `incarnation`: only if it is still this one."""

    ranks: tuple[int, ...]
    incarnation: int | None = None


class ReleaseHeld(Recommendation, frozen=True):
    """Devices may be well again: start the processes that wait for that."""


class StartWorld(Recommendation, frozen=True):
    """Start every process again; where there are too few nodes, end all and wait for them."""


class StartIfPossible(Recommendation, frozen=True):
    """Start the world that waits, if there are enough nodes now."""


class Restart(Recommendation, frozen=True):
    """The checkpoint is written, or cannot be (`remark`): start the world again."""

    goal: Reschedule
    remark: str = ""


class ChangeSize(Recommendation, frozen=True):
    """The checkpoint is written, or cannot be (`remark`): start the world in another size, or wait for its nodes."""

    goal: Resize
    remark: str


class NodesMissing(Recommendation, frozen=True):
    """Too few nodes will come: the world gets smaller, the rung that asked for them has failed, or the job ends."""

    reason: str


# --- saving and ending ------------------------------------------------------------------------------------------------


class SaveFirst(Recommendation, frozen=True):
    """Park the survivors and save what they hold; then the job ends, or the world starts again."""

    goal: Result | Resize | Reschedule


class SavePart(Recommendation, frozen=True):
    """Have the ranks that stand at a boundary write a checkpoint, and train on."""


class PartSaved(Recommendation, frozen=True):
    """The checkpoint at a boundary is written, or (`error`) cannot be. `begun`: it was under way."""

    step: int
    error: str = ""
    begun: bool = True


class LostWhileSaving(Recommendation, frozen=True):
    """Survivors died while the checkpoint was under way."""

    ranks: tuple[int, ...]
    detail: str


class EndNow(Recommendation, frozen=True):
    """Tell all nodes and the platform that the job is over."""

    exit_code: int
    reason: str


# --- nodes and what is planned ----------------------------------------------------------------------------------------


class UseAgain(Recommendation, frozen=True):
    """A node that was left is well again: check it, and use it. `asked`: an operator wants it so."""

    node: str
    asked: bool = False


class NodeCame(Recommendation, frozen=True):
    """The platform has nodes to give."""


class Refill(Recommendation, frozen=True):
    """A spare may be missing."""


class NotWell(AboutFault, frozen=True):
    """A detector says that a node, or a device of it, is not well; the fault book has it."""


class Going(AboutFault, frozen=True):
    """The platform will take a node in use away; the fault book has it."""


class WellAgain(Recommendation, frozen=True):
    """Something that stood on a node does not stand any more."""

    node: str


class NewcomerStarted(Recommendation, frozen=True):
    """A process that was started early is there."""

    process: RunningProcess


class NewcomerFailed(Recommendation, frozen=True):
    """A process that was started early could not be started, or has ended."""

    rank: int
    why: str


class StoppedAtBoundary(Recommendation, frozen=True):
    """A rank has stopped at the boundary that was chosen for a planned change."""


class GiveUpChange(Recommendation, frozen=True):
    """Drop the planned change, if there is one."""

    why: str


class Plan(Recommendation, frozen=True):
    """Make a change at a step boundary."""

    change: PlannedChange


class Enlarge(Recommendation, frozen=True):
    """All ranks stand at a step boundary: let the new ones of a larger world join them."""

    change: PlannedChange


class ReadClocks(Recommendation, frozen=True):
    """The planned change is prepared: read the step clocks, and choose the boundary."""


class HoldRanks(Recommendation, frozen=True):
    """All ranks stand at the boundary at which an operator wants them held: begin to hold them, or hold them on."""


class EndHold(Recommendation, frozen=True):
    """The ranks are not to be held any more, if they are yet: all train on."""


class CauseFault(Recommendation, frozen=True):
    """An operator wants a fault in a rank that has a node."""

    fault: ArmedFault


class WishDone(Recommendation, frozen=True):
    """A wish of an operator at a boundary is done, or cannot be."""

    wish: int
    outcome: str


class Stay(Recommendation, frozen=True):
    """The change at the boundary cannot be made: all ranks stay where they are."""

    why: str


# --- the parts of a topic ---------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """In each of `phases`, an event of type `event` is handled by `handler`."""

    phases: tuple[Phase, ...]
    event: type
    handler: Callable[[JobState, Any], Recs]


class Rule(msgspec.Struct, frozen=True):
    """In one of `phases`, once `holds` is true, `then` is done, which makes it false."""

    phases: frozenset[Phase]
    holds: Callable[[JobState], bool]
    then: Callable[[JobState], Recs]


class Deadline(msgspec.Struct, frozen=True):
    """A time of the topic's own: all that the machine has to know of it.

    `overdue` runs when it has passed. `fresh_s` is what a controller that takes over allows those that are waited for;
    None: it is not put off. `ahead`: it is for something planned, so a suspicion or an incident comes first. `at`: when
    it passes, where that follows from the state.
    """

    name: str
    overdue: Callable[[JobState], Recs]
    fresh_s: Callable[[JobState], float | None] = lambda state: None
    ahead: bool = False
    at: Callable[[JobState], float | None] | None = None

    def due(self, state: JobState) -> float | None:
        """Return when it passes; None: nothing is waited for."""
        return self.at(state) if self.at is not None else self._kept(state).get(self.name)

    def within(self, state: JobState, seconds: float) -> None:
        """Have it pass so many seconds from now."""
        self._kept(state)[self.name] = state.now + seconds

    def at_time(self, state: JobState, at_s: float) -> None:
        """Have it pass at `at_s`."""
        self._kept(state)[self.name] = at_s

    def drop(self, state: JobState) -> None:
        """Wait for it no longer."""
        self._kept(state).pop(self.name, None)

    def _kept(self, state: JobState) -> dict[str, float]:
        return state.due.ahead if self.ahead else state.due.incident


class PhaseLimit(msgspec.Struct, frozen=True):
    """The action when a phase is over time, and how long it may take once more under another controller."""

    overdue: Callable[[JobState], Recs]
    fresh_s: Callable[[JobState], float | None] = lambda state: None


class Follow(msgspec.Struct, frozen=True):
    """After every event, in one of `phases`, `then` looks at what can be planned."""

    phases: frozenset[Phase]
    then: Callable[[JobState], Recs]


def answer_limit_s(state: JobState) -> float:
    """Return how long ranks may take to answer: those that write a checkpoint longer than those that only stop."""
    limits = state.policy.deadlines
    return limits.save_s if state.saving.outstanding else limits.quiesce_s


class Topic(msgspec.Struct, frozen=True):
    """One topic of the machine.

    `takes`: its events, and the phases in which it takes them. `answers`: the recommendations that it carries out.
    `tidies` runs once after every event, `rules` until no rule of any topic holds, and `follows` once after that.
    `deadlines` and `limits`: when time runs out. `owes`: the commands that follow from the state and may not have
    arrived, `owes_rank` those to the process of one rank. `contradictions`: what may never be true.
    """

    name: str
    takes: tuple[Row, ...] = ()
    answers: Mapping[type[Recommendation], Callable[[JobState, Any], Recs]] = {}
    rules: tuple[Rule, ...] = ()
    tidies: Callable[[JobState], None] | None = None
    follows: Follow | None = None
    deadlines: tuple[Deadline, ...] = ()
    limits: Mapping[Phase, PhaseLimit] = {}
    owes: Callable[[JobState], Iterator[Owed]] = lambda state: iter(())
    owes_rank: Callable[[JobState, Holder], Iterator[Owed]] | None = None
    contradictions: Callable[[JobState], Iterator[str]] = lambda state: iter(())


ALIVE = tuple(phase for phase in Phase if phase is not Phase.ENDED)
