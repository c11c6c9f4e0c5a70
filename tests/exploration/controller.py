"""The real recovery machine as a value: what it becomes by an event is found out once, and remembered.

Different orders of messages lead to the same machine with other messages under way, so most of what would be computed
has been computed before.
"""

from dataclasses import dataclass

from midstep.controller.recovery.events import Action, Event
from midstep.controller.recovery.machine import RecoveryMachine
from midstep.controller.recovery.state import Phase
from midstep.testing.invariants import contradictions
from midstep.testing.transitions import is_known

from .snapshot import copied, digest, fingerprint

MOST_REMEMBERED = 30_000  # steps; a machine takes some 20 KiB


@dataclass(frozen=True, eq=False, slots=True)
class Controller:
    """A machine between two events. `memory` stands for all that it will ever do. `broken`: its contradictions."""

    machine: RecoveryMachine
    memory: bytes
    phase: Phase
    term: int
    due_s: float | None
    broken: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """What an event has led to."""

    controller: Controller
    actions: tuple[Action, ...]
    decided: tuple[str, ...]  # rungs that were taken, but those that only widen the attempt under way


class Controllers:
    """Remembers the latest steps of all machines of one exploration."""

    def __init__(self) -> None:
        self._steps: dict[tuple[bytes, bytes, float], Step] = {}

    def first(self, machine: RecoveryMachine) -> Controller:
        """Return a machine as a value."""
        return _controller(machine)

    def after(self, controller: Controller, event: Event, now: float) -> Step:
        """Return what an event leads to."""
        key = (controller.memory, digest((type(event).__name__, event)), now)
        step = self._steps.get(key)
        if step is None:
            machine = copied(controller.machine)
            before = sum(len(incident.decisions) for incident in machine.incidents)
            actions = machine.handle(event, now)
            decisions = [decision for incident in machine.incidents for decision in incident.decisions][before:]
            widens = controller.phase is Phase.QUIESCING
            decided = () if widens else tuple(decision.rung.value for decision in decisions)
            if len(self._steps) >= MOST_REMEMBERED:
                self._steps.clear()
            unknown: tuple[str, ...] = ()
            if not is_known(controller.phase, type(event), machine.phase):
                unknown = (f"no way from {controller.phase} to {machine.phase} by {type(event).__name__}",)
            step = self._steps[key] = Step(_controller(machine, unknown), tuple(actions), decided)
        return step


def _controller(machine: RecoveryMachine, broken: tuple[str, ...] = ()) -> Controller:
    return Controller(
        machine,
        fingerprint(machine),
        machine.phase,
        machine.state.term,
        machine.next_deadline(),
        (*broken, *contradictions(machine.state)),
    )


__all__ = ["Controller", "Controllers", "Step"]
