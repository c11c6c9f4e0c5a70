"""A process of a fake cluster: the session, rank state, step order and loop are the product's own.

How long things take is up to what drives the loop: the simulation in virtual time (`process.py`), the fake cluster
of the tests at once (`tests/fakes/answering.py`).
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from ...processor.rank_actions import Action, Actions
from ...processor.rank_loop import RankLoop
from ...processor.session import Session
from ...processor.step_order import StepOrder, StepState
from ...protocol.messages import StartProcess
from ...protocol.types import RunningProcess

Returned = TypeVar("Returned")
Wait = TypeVar("Wait")


class FakeProcess:
    """One incarnation of a rank."""

    def __init__(self, order: StartProcess, pid: int) -> None:
        self.rank, self.pid, self.incarnation = order.rank, pid, order.incarnation
        self.world_size = order.world_size
        self.session = Session(order.rank, order.incarnation, order.generation)
        self.standing = StepState(clean=order.connected)
        self.steps = StepOrder(self.standing, self)
        self.loop = RankLoop(self.session, self.standing, self.steps, early=order.early)

    @property
    def running(self) -> RunningProcess:
        """Its numbers, as its agent reports them."""
        return RunningProcess(self.rank, self.pid, self.incarnation, self.session.generation)

    def interrupted(self) -> bool:
        """Whether the controller wants the train thread to stop."""
        return self.session.quiescing

    def begins(self, step: int) -> bool:
        """Whether a step may be begun; False at a boundary at which all ranks stop."""
        return self.session.begins(step)


def drive(
    actions: Actions[Returned],
    at_once: Mapping[type[Action], Callable[[Any], object]],
    in_time: Mapping[type[Action], Callable[[Any], Generator[Wait, Any, Any]]],
    fails: type[Exception],
) -> Generator[Wait, Any, Returned]:
    """Carry out what the loop asks for, one action after the other, and return what it returns.

    `at_once`: what takes no time. `in_time`: what yields until it is done. What `fails` an action is thrown into the
    loop, as the product's train thread does.
    """
    try:
        action = next(actions)
        while True:
            try:
                if type(action) in at_once:
                    outcome = at_once[type(action)](action)
                else:
                    outcome = yield from in_time[type(action)](action)
            except fails as error:
                action = actions.throw(error)
            else:
                action = actions.send(outcome)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
