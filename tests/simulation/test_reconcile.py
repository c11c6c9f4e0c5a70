"""A controller that takes over needs nothing but the state: what was sent and may not have arrived follows from it."""

from typing import Any

import pytest

from midstep.controller.recovery.events import Action, Event, Send
from midstep.controller.recovery.machine import RecoveryMachine, owed
from midstep.controller.recovery.state import Phase
from midstep.protocol.messages import ArmFault, Command, IntroduceNode, KillNode, NodeJoined, StopProcess
from midstep.testing.simulation.campaign import run_seeds

SEEDS = range(4)  # for each phase that the faults wait for
# A process that should not run is ended when its agent, welcomed again, tells of it; the others are an operator's.
ASKED_ANEW = (StopProcess, IntroduceNode, KillNode, ArmFault)


@pytest.mark.timeout(600)
def test_what_was_sent_is_owed_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every event: each command that it led to is among those that the next controller would send."""
    forgotten: list[tuple[Event, Command]] = []
    handle = RecoveryMachine.handle

    def watched(machine: RecoveryMachine, event: Event, now: float, *more: Event) -> list[Action]:
        actions = handle(machine, event, now, *more)
        due: list[Any] = list(owed(machine.state))
        sent = [(each.receiver, each.body) for each in actions if isinstance(each, Send)]
        if not (isinstance(event, NodeJoined) and machine.phase is Phase.ENDED):  # it joins the next controller, too
            forgotten.extend(
                (event, body) for to, body in sent if not isinstance(body, ASKED_ANEW) and (to, body) not in due
            )
        return actions

    monkeypatch.setattr(RecoveryMachine, "handle", watched)
    for focus in (None, *Phase):
        assert run_seeds(SEEDS, focus=focus).broken == []
    assert forgotten == []
