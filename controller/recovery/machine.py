"""The recovery machine: the pure heart of the controller.

Events in, actions out; the clock is an argument. It reads no clock, opens nothing, and remembers only what the events
told it, so its journal is the truth about it: replay the events, and it stands where it stood.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, get_type_hints

import msgspec

from ...policies.ladder import Ladder
from ...policies.schema import Policy
from ...protocol.errors import SnapshotUnreadable
from ...protocol.incidents import Incident, JobStatus, RankStatus
from ...protocol.messages import NodeEnrolled
from ...protocol.types import JobSpec
from ..changes.generation import wait_for_nodes
from ..changes.planned_changes import follow, node_status
from ..changes.spares import prepare
from ..handlers.barriers import advance
from ..handlers.table import TABLE
from .decision import failure_counts
from .events import Action, Event
from .fault_book import FaultBook
from .state import Arrivals, JobState, Meeting, Phase
from .world import World

_FOUNDED = frozenset({"job", "ladder"})


class Machine(Protocol):
    """What a driver needs of the recovery machine."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in an event; return what is to be done."""

    def next_deadline(self) -> float | None:
        """Return when DeadlinePassed is due."""

    def status(self, now: float) -> JobStatus:
        """Return how the job stands."""

    @property
    def is_quiet(self) -> bool:
        """Whether training continues and nothing is wrong."""

    def memory(self) -> bytes:
        """Return everything that the events so far have left in it."""

    def restore(self, memory: bytes) -> None:
        """Stand where the machine stood whose memory this is. Raises SnapshotUnreadable."""


class RecoveryMachine:
    """Decides what is to be done about everything that happens to one job."""

    def __init__(
        self, policy: Policy, job: JobSpec, *, can_create_nodes: bool = False, rendezvous_key: bytes = b""
    ) -> None:
        """Begin a job. `rendezvous_key`: what the secrets of its generations are derived from."""
        world = World(size=job.world_size, ranks_per_node=job.ranks_per_node)
        book = FaultBook(job.ranks_per_node, policy.faults.too_often)
        self._state = JobState(
            job,
            Ladder(policy),
            world,
            book,
            Meeting(rendezvous_key),
            arrivals=Arrivals(can_be_created=can_create_nodes),
        )
        self._started = False

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at `now` (seconds, never going back) and return what is to be done, in order.

        Never raises for what comes from outside: an event that does not fit the phase changes nothing and is counted.
        """
        state = self._state
        if isinstance(event, NodeEnrolled):
            return []  # a node counts when it joins; its admission is in the journal for the next controller
        if not self._started:
            self._started = True
            wait_for_nodes(state, now)
        state.turn.now, state.turn.came_in = now, state.phase
        row = TABLE.get((state.turn.came_in, type(event)))
        if row is None:
            state.ignore(f"{type(event).__name__} while {state.turn.came_in}")
            return []
        row.handler(state, event, now)
        advance(state, now)
        follow(state, now)
        prepare(state)
        actions, state.turn.actions = state.turn.actions, []
        return actions

    def next_deadline(self) -> float | None:
        """Return when `DeadlinePassed` is due, on the clock of `handle`; None: nothing is waited for.

        What waits for no answer is due since ever: it is not put off while answers cannot arrive.
        """
        state = self._state
        looks_ahead = state.phase is Phase.RUNNING or state.can_restart_larger
        planned = (state.plans.due_s, state.plans.grow_due_s, state.arrivals.refill_due_s) if looks_ahead else ()
        if state.has_put_off:
            return -math.inf
        replacements = (state.due.newcomers_s, state.due.devices_s, state.due.nodes_s)
        return min((at for at in (state.due.phase_s, *replacements, *planned) if at is not None), default=None)

    @property
    def is_quiet(self) -> bool:
        """Whether training continues and nothing is wrong: a moment for what takes long."""
        return self.phase is Phase.RUNNING and self._state.history.open is None

    def memory(self) -> bytes:
        """Return everything that the events so far have left in it, for `restore`. Not in the middle of an event."""
        return _encoded(self._state, self._started)

    def restore(self, memory: bytes) -> None:
        """Stand where the machine of the same job stood whose memory this is. Raises SnapshotUnreadable."""
        self._started = _restore(memory, self._state)

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
        """The machine's memory, to be read by tests and the simulator, and not to be written."""
        return self._state

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All incidents so far; the last one may be open."""
        return tuple(self._state.history.incidents)

    def status(self, now: float) -> JobStatus:
        """Return what `midstep status` shows."""
        state = self._state
        failures = failure_counts(state, now)
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
            nodes=tuple(node_status(state, node, failures.get(node.name, 0)) for node in state.world.nodes.values()),
            budgets=state.ladder.budgets(state.spent, now),
            incidents=self.incidents,
            refused=dict(state.history.ignored),
            faults=state.book.standing(),
            exit_code=state.result.exit_code if state.result is not None else None,
            reason=state.result.reason if state.result is not None else "",
            ranks_asked=state.job.world_size,
            holds=tuple(state.history.holds),
        )


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
