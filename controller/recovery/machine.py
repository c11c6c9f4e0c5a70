"""The recovery machine: the pure heart of the controller. Events in, actions out; the clock is an argument.

THEORY OF OPERATION

The machine reads no clock, opens nothing, and remembers only what the events told it. So its journal is the truth about
it: replay the events, and it stands where it stood, and asks for the same actions in the same order. A controller that
takes over replays, gets `ControllerStarted`, and sends what is owed; nothing else is needed to go on.

*Facts, and the phase that follows from them.* The state (`state.py`) is facts: where the process of each rank stands
(`world.py`, by a table), the open incident (`incident.py`), the repair that was planned, the checkpoint that is being
written, the change that waits for a boundary. The job's phase is not stored. It is derived: no process at all is
`waiting`; processes on their way are `starting` (all together) or `quiescing` (some survive); a planned repair is
`rejoining`, then `resuming`; then the job is `running`, `finishing`, `ended`. A suspicion, a planned stop, or a
checkpoint before an end shows as `suspecting`, `pausing`, `saving`, whatever the ranks are doing underneath.

*Two barriers.* An incident is a way through two barriers. When a fault is decided, a new generation is opened: its
number fences off whatever is said in earlier ones. Survivors are ordered to quiesce; the ranks at fault get another
process. Barrier one closes when every survivor has stopped and cleaned, and every newcomer has reached its train
function. Only then the whole picture is known, and the repair is planned from the step reports (`repair.py`): the step
to which all go, and which rank sends what to which. All rejoin. Barrier two closes when all are rebuilt, repaired and
rolled back to that step. All resume, and the incident is over when each rank has committed the first new step. A fault
on the way does not start another procedure: it is decided in its turn, it widens the attempt or replaces it, and the
next generation comes to the same two barriers.

*Decisions.* Whom to blame is one question (`blame.py`), what to do about it another (`decision.py`). The ladder of the
policy is asked for the cheapest rung that fits, with facts only; what was tried, what failed and what was spent are
among them. Each decision carries its reason, and the reason against each cheaper rung.

*Topics.* The machine is cut by topic, not by kind. Each topic is one file with a value of type `Topic` at its end: the
events that it takes, in which phases; the recommendations that it carries out; its rules; its deadlines; what it owes a
controller that takes over; what may never be true of it. A topic changes its own facts. It calls no other topic: it
returns recommendations. Below the topics are the facts, and the verbs that send a command for each change
(`orders.py`).

    hardware    faults of devices and nodes: the book, and whether a rank is hurt; strikes of ranks that were wrong in
                a vote, and nodes whose ranks compute more slowly than others
    nodes       nodes that come, go, are promised and checked; the platform; operators' injuries
    decision    facts, ladder, rung, attempt, cost; what rules on reported values ask for
    blame       suspicion, step clocks, struck memory, who is at fault
    planned     nodes that are drained, between two steps
    boundary    the step between which and the next all ranks stop for a planned change
    lifecycle   generations, both barriers, resume, finish
    saving      the emergency checkpoint, stop, end
    controls    what operators have a job do: pause, save, restart a rank, forbid a rung
    start       every process starts: first, again, in another size; growth; newcomers that are waited for
    spares      spares that are asked for, and what they build ahead

*What happens after an event*, in this order:

1. Its row in the table of phases and events is looked up. An event without one changes nothing and is counted: it is
   stale, or means nothing now. `ControllerStarted` and `DeadlinePassed` are the machine's own.
2. The topic's handler runs; for reports of one kind that ranks of a node made together once for each, before all that
   follows. What it recommends is folded: each recommendation is handed to the topic that carries it out, and what that
   one recommends comes first, before what was recommended earlier. So the order of commands is that of a chain of
   calls, while no topic knows which other one acts. `Blame` before `Decide`, `GiveUpChange` before a decision, `Gone`
   after it: the order in a list is the order in which it is done.
3. Rules are asked, in the order of topics, until none holds. A rule says what follows from how everything stands
   together (all are parked: plan the repair), whichever event came last; doing it makes it false. Handlers therefore
   only note what each rank answers, and no order of answers needs a rule of its own.
4. Topics look once at what can be planned (`follows`): this costs nothing while nothing is planned.

Folding and rules both have a bound. That it is reached is counted as `UNSETTLED`, which every test, the simulation and
the exploration take for a broken invariant; the job still has its deadlines.

*Time.* Every phase that waits has a limit, and topics have deadlines of their own, each declared in one place. The
earliest is `next_deadline`; the driver tells `DeadlinePassed`, and the machine finds the one that has passed: first
what an incident waits for, then the phase, then what is planned. A controller that takes over gives those that are
waited for their time once more, as no controller was there to hear them.

*What must hold* is written down once (`testing/invariants.py`, with the contradictions of each topic), and asked after
every event by the unit tests, the simulation, the exploration of all orders of events, and the mutants.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, get_type_hints

import msgspec

from ...policies.ladder import Ladder
from ...policies.schema import Policy
from ...protocol import messages as m
from ...protocol.errors import SnapshotUnreadable
from ...protocol.incidents import Incident, JobStatus, NodeStatus, RankStatus
from ...protocol.types import PLATFORM, JobSpec, node_address
from .blame import BLAME
from .boundary import BOUNDARY
from .controls import CONTROLS, applied_number, put_in_force
from .decision import DECISION
from .events import Action, ControllerStarted, DeadlinePassed, Event
from .fitness import FaultBook
from .hardware import HARDWARE
from .lifecycle import LIFECYCLE
from .nodes import NODES, staying
from .planned_change import PLANNED
from .saving import SAVING
from .spares import SPARES
from .start import START, wait_for_nodes
from .state import Arrivals, JobState, Phase
from .topic import ALIVE, Owed, PhaseLimit, Recommendation, Recs, Row, Rule, Topic
from .world import REACHABLE, Meeting, Node, NodeState, World

TOPICS = (
    HARDWARE,
    NODES,
    DECISION,
    BLAME,
    BOUNDARY,
    PLANNED,
    CONTROLS,
    START,
    LIFECYCLE,
    SAVING,
    SPARES,
)

MOST_RULES = 20  # after one event: each leads to another phase, and no way through them is that long
MOST_RECOMMENDATIONS = 10_000  # after one event: faults that were put off are taken up together
UNSETTLED = "rules that do not settle"

_Handler = Callable[[JobState, Any], Recs]


class Machine(Protocol):
    """The recovery machine, as a driver needs it."""

    def handle(self, event: Event, now: float, *more: Event) -> list[Action]:
        """Take in an event, and `more` of its kind that came with it; return what is to be done."""

    def next_deadline(self) -> float | None:
        """Return when DeadlinePassed is due."""

    def status(self, now: float) -> JobStatus:
        """Return how the job stands."""

    @property
    def is_quiet(self) -> bool:
        """Return whether training continues and nothing is wrong."""

    @property
    def state(self) -> JobState:
        """Its memory, to be read."""

    def memory(self) -> bytes:
        """Return everything that the events so far have left in it."""

    def restore(self, memory: bytes) -> None:
        """Stand where the machine stood whose memory this is. Raises SnapshotUnreadable."""


class RecoveryMachine:
    """Decides what is to be done about everything that happens to one job. `topics`: what it is made of."""

    def __init__(
        self,
        policy: Policy,
        job: JobSpec,
        *,
        can_create_nodes: bool = False,
        rendezvous_key: bytes = b"",
        device_links: bool = False,
        topics: tuple[Topic, ...] = TOPICS,
    ) -> None:
        """Begin a job. `rendezvous_key`: what the secrets of its generations are derived from.

        `device_links`: whether the communicator's links carry memory of the devices.
        """
        world = World(size=job.world_size, ranks_per_node=job.ranks_per_node)
        book = FaultBook(job.ranks_per_node, policy.faults.too_often)
        arrivals = Arrivals(can_be_created=can_create_nodes)
        meeting = Meeting(rendezvous_key)
        self._state = JobState(job, Ladder(policy), world, book, device_links, meeting, arrivals=arrivals)
        self._parts = _PARTS if topics is TOPICS else _Parts(topics)
        self._started = False

    def handle(self, event: Event, now: float, *more: Event) -> list[Action]:
        """Take in one event at `now` (seconds, never going back) and return what is to be done, in order.

        `more`: reports of the same kind by other ranks, which came with it (`journaled.handled_with`). Never raises
        for what comes from outside: an event that does not fit the phase changes nothing and is counted.
        """
        state, parts = self._state, self._parts
        if isinstance(event, m.NodeEnrolled):  # a node counts when it joins
            stays = staying(state, event.node)
            if stays is None:
                return []
            event = stays
        state.now = now
        if not self._started:
            self._started = True
            self._fold(wait_for_nodes(state))
        taken = False
        for each in (event, *more):
            phase = state.turn.came_in = state.phase
            handler = parts.table.get((phase, type(each)))
            if handler is None:
                state.ignore(f"{type(each).__name__} while {phase}")
                continue
            taken = True
            if recs := handler(state, each):
                self._fold(recs)
        if not taken:
            return []
        for tidy in parts.tidies:
            tidy(state)
        phase = self._apply_rules()  # no topic that looks here leads from one of these phases to another's
        for follow in parts.follows:
            if phase in follow.phases:
                self._fold(follow.then(state))
        actions, state.turn.actions = state.turn.actions, []
        return actions

    def _fold(self, recs: Recs) -> None:
        """Have each recommendation carried out, and what that one recommends before those that were there earlier."""
        waiting = [*reversed([*recs])] if recs else []
        for _ in range(MOST_RECOMMENDATIONS):
            if not waiting:
                return
            rec = waiting.pop()
            more = self._parts.answers[type(rec)](self._state, rec)
            if more:
                waiting += reversed([*more])
        self._state.ignore(UNSETTLED)

    def _apply_rules(self) -> Phase:
        """Do what follows from how everything stands together, until nothing does; return the phase that led to."""
        state = self._state
        for _ in range(MOST_RULES):
            phase = state.phase
            for rule in self._parts.rules[phase]:
                if rule.holds(state):
                    self._fold(rule.then(state))
                    break
            else:
                return phase
        state.ignore(UNSETTLED)
        return state.phase

    def next_deadline(self) -> float | None:
        """Return when `DeadlinePassed` is due, on the clock of `handle`; None: nothing is waited for."""
        state, parts = self._state, self._parts
        ahead = parts.ahead if _looks_ahead(state) else ()
        times = [state.due.phase_s, *(each.due(state) for each in (*parts.deadlines, *ahead))]
        return min((at for at in times if at is not None), default=None)

    @property
    def is_quiet(self) -> bool:
        """Return whether training continues and nothing is wrong: a moment for what takes long."""
        return self.phase is Phase.RUNNING and self._state.history.open is None

    def memory(self) -> bytes:
        """Return everything that the events so far have left in it, for `restore`. Not in the middle of an event."""
        return _encoded(self._state, self._started)

    def restore(self, memory: bytes) -> None:
        """Stand where the machine of the same job stood whose memory this is. Raises SnapshotUnreadable."""
        self._started = _restore(memory, self._state)
        put_in_force(self._state)

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        return self._state.phase

    @property
    def generation(self) -> int:
        """Return the number of the present membership."""
        return self._state.generation

    @property
    def state(self) -> JobState:
        """The machine's memory, to be read by those that look on, and not to be written."""
        return self._state

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All incidents so far; the last one may be open."""
        return tuple(self._state.history.incidents)

    def status(self, now: float) -> JobStatus:
        """Return what `midstep status` shows."""
        state = self._state
        failures = state.accounts.failures(state.policy.node, now)
        return JobStatus(
            job=state.job.job,
            at_s=now,
            phase=state.phase.value,
            generation=state.generation,
            term=state.term,
            committed=state.progress.committed,
            median_step_s=state.progress.median_step_s,
            ranks=tuple(
                RankStatus(
                    rank=h.rank,
                    node=h.node,
                    pid=h.pid,
                    incarnation=h.incarnation,
                    state=h.state.shown,
                    step=h.committed,
                    activity="",
                    role=state.ladder.roles.role_of(h.rank),
                )
                for h in state.world.holders
            ),
            nodes=tuple(_node_status(state, node, failures[node.name]) for node in state.world.nodes.values()),
            budgets=state.ladder.budgets(state.spent, now),
            incidents=self.incidents,
            refused=dict(state.history.ignored),
            faults=state.book.standing(),
            exit_code=state.result.exit_code if state.result is not None else None,
            reason=state.result.reason if state.result is not None else "",
            ranks_asked=state.job.world_size,
            holds=tuple(state.history.holds),
            controls=state.controls,
            rules=state.rules,
            policy_changes=applied_number(state),
            held=state.planned.holding,
        )


def _node_status(state: JobState, node: Node, failures: int) -> NodeStatus:
    """Return a node as status shows it, with what is to be known of it beside its state."""
    ranks = tuple(holder.rank for holder in state.world.on(node.name))
    unwell = state.planned.unwell.get(node.name)
    seen = () if unwell is None else (f"{state.planned.what_is_wrong(node.name)}: {unwell.report.detail}", unwell.note)
    note = "; ".join(filter(None, (*seen, node.note)))
    prepared = () if node.state is NodeState.LOST else tuple(node.prepared.values())
    return NodeStatus(node.name, node.failure_domain, node.state.value, ranks, failures, note, prepared)


def _looks_ahead(state: JobState) -> bool:
    """Return whether it is time for what is planned: a suspicion or an incident comes first."""
    return state.phase is Phase.RUNNING or state.can_restart_larger


# --- what topics come to together -------------------------------------------------------------------------------------


class _Parts:
    """All that a machine's topics declare, by what it is looked up by."""

    def __init__(self, topics: tuple[Topic, ...]) -> None:
        self.topics = topics
        self.rows = (
            *(row for topic in topics for row in topic.takes),
            Row(ALIVE, DeadlinePassed, self._on_deadline),
            Row(tuple(Phase), ControllerStarted, self._on_controller_started),
        )
        self.table: dict[tuple[Phase, type], _Handler] = {
            (phase, row.event): row.handler for row in self.rows for phase in row.phases
        }
        self.answers: dict[type[Recommendation], _Handler] = {
            kind: answer for topic in topics for kind, answer in topic.answers.items()
        }
        rules = [rule for topic in topics for rule in topic.rules]
        self.rules: Mapping[Phase, tuple[Rule, ...]] = {
            phase: tuple(rule for rule in rules if phase in rule.phases) for phase in Phase
        }
        self.tidies = tuple(topic.tidies for topic in topics if topic.tidies is not None)
        self.follows = tuple(topic.follows for topic in topics if topic.follows is not None)
        self.deadlines = tuple(each for topic in topics for each in topic.deadlines if not each.ahead)
        self.ahead = tuple(each for topic in topics for each in topic.deadlines if each.ahead)
        self.limits: dict[Phase, PhaseLimit] = {
            phase: limit for topic in topics for phase, limit in topic.limits.items()
        }

    def _on_deadline(self, state: JobState, _: DeadlinePassed) -> Recs:
        """Time has run out: for what an incident waits for, for the present phase, or for something planned."""
        for deadline in self.deadlines:
            at_s = deadline.due(state)
            if at_s is not None and at_s <= state.now:
                deadline.drop(state)
                return deadline.overdue(state)
        if state.due.phase_s is not None and state.due.phase_s <= state.now:
            state.limit(None)
            return self.limits[state.phase].overdue(state)
        for deadline in self.ahead if _looks_ahead(state) else ():
            at_s = deadline.due(state)
            if at_s is not None and at_s <= state.now:
                deadline.drop(state)
                return deadline.overdue(state)
        state.ignore("deadline that was met")
        return None

    def _on_controller_started(self, state: JobState, event: ControllerStarted) -> Recs:
        """A controller has taken over: send what is owed. Deadlines that passed without a controller start again."""
        if state.generation > 0 and state.phase is not Phase.ENDED:
            self._renew(state)
        state.term = event.term
        for receiver, command in self.owed(state):
            state.send(receiver, command)
        if state.phase is Phase.ENDED:
            state.finish()
        return None

    def _renew(self, state: JobState) -> None:
        """Give those that are waited for their time once more."""
        limit, at_s = self.limits.get(state.phase), state.due.phase_s
        fresh_s = None if limit is None else limit.fresh_s(state)
        if fresh_s is not None and at_s is not None:
            state.limit_until(max(at_s, state.now + fresh_s))
        for deadline in (*self.deadlines, *self.ahead):
            at_s, fresh_s = deadline.due(state), deadline.fresh_s(state)
            if at_s is not None and fresh_s is not None:
                deadline.at_time(state, max(at_s, state.now + fresh_s))

    def owed(self, state: JobState) -> Iterator[Owed]:
        """Yield every command that follows from the state and may not have arrived, in the order in which it is sent.

        Commands are done at most once, by incarnation and generation, so one that has arrived does no harm.
        """
        if state.phase is Phase.ENDED:
            assert state.result is not None
            order = m.EndJob(state.result.exit_code, state.result.reason)
            yield from ((node_address(name), order) for name in state.world.named(*REACHABLE))
            yield from ((PLATFORM, m.DeleteNode(name)) for name in state.world.given_back())
            yield PLATFORM, order
            return
        for topic in self.topics:
            yield from topic.owes(state)
        owes_rank = [topic.owes_rank for topic in self.topics if topic.owes_rank is not None]
        for holder in state.world.holders:
            for owes in owes_rank:
                yield from owes(state, holder)


_PARTS = _Parts(TOPICS)
TABLE: Mapping[tuple[Phase, type], _Handler] = _PARTS.table
ROWS: tuple[Row, ...] = _PARTS.rows


def owed(state: JobState) -> Iterator[Owed]:
    """Yield what the state owes to others."""
    return _PARTS.owed(state)


# --- memory -----------------------------------------------------------------------------------------------------------

# What a job was founded with is not part of its memory.
_FOUNDED = frozenset({"job", "ladder", "policy", "device_links"})
_STARTED = "started"

_encode = msgspec.msgpack.Encoder().encode

_decode_parts = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode

_DECODERS: dict[str, Callable[[msgspec.Raw], Any]] = {
    name: msgspec.msgpack.Decoder(kind).decode
    for name, kind in {**get_type_hints(JobState), _STARTED: bool}.items()
    if name not in _FOUNDED
}


def _encoded(state: JobState, started: bool) -> bytes:
    """Return the memory of a machine between two events. `started`: it has had its first one."""
    return _encode({name: started if name == _STARTED else getattr(state, name) for name in _DECODERS})


def _restore(memory: bytes, state: JobState) -> bool:
    """Fill the state of a machine of the same job; say whether it has had its first event.

    All or nothing. Raises SnapshotUnreadable: a field is missing, unknown, or not of its type.
    """
    try:
        parts = _decode_parts(memory)
        if parts.keys() != _DECODERS.keys():
            other = ", ".join(sorted(parts.keys() ^ _DECODERS.keys()))
            raise SnapshotUnreadable(f"it was written by another version of midstep (other fields: {other})")
        values = {name: decode(parts[name]) for name, decode in _DECODERS.items()}
    except msgspec.MsgspecError as error:
        raise SnapshotUnreadable(f"it is not what this version of midstep writes: {error}") from error
    started = bool(values.pop(_STARTED))
    for name, value in values.items():
        setattr(state, name, value)
    return started
