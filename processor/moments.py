"""Faults on purpose, inside a training process: at a moment of a step or of a recovery.

The same points serve `midstep inject`, the demo and the chaos tests, so what is tested is what users can try. With
nothing armed a point costs one look at an empty list.
"""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterable

from ..protocol.errors import ConfigurationError, InjectedFault
from ..protocol.injuries import DEVICE_INJURIES, ArmedFault, Injury, Moment

# They strike the train thread, so they need it at a certain place.
_IN_THE_TRAIN_THREAD = DEVICE_INJURIES | {Injury.RAISE, Injury.HANG}


def _cannot(injury: Injury) -> None:
    raise ConfigurationError(f"{injury} can only be caused on the fake device (`midstep run --device fake`)")


class Moments:
    """The armed faults of one process. Each fires once, unless it has a rate."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        armed: Iterable[ArmedFault] = (),
        harm: Callable[[Injury], None] = _cannot,
    ) -> None:
        """`harm` causes a fault of the device; it may raise what the device would raise."""
        self._rank = rank
        self._incarnation = incarnation
        self._harm = harm
        self._dice = random.Random(f"{rank}/{incarnation}")
        self._armed: list[ArmedFault] = []
        self._now: list[ArmedFault] = []
        for fault in armed:
            self.arm(fault)

    @property
    def armed(self) -> tuple[ArmedFault, ...]:
        """The faults that wait for their moment."""
        return tuple(self._armed)

    def arm(self, fault: ArmedFault) -> None:
        """Take a fault that is meant for this life of this rank; any other is ignored. From any thread."""
        if fault.rank != self._rank or fault.incarnation not in {None, self._incarnation}:
            return
        if fault.moment is None and fault.injury not in _IN_THE_TRAIN_THREAD:
            self._injure(fault)
            return
        self._armed.append(fault)

    def waits_for(self, moment: Moment, step: int) -> bool:
        """Say whether a fault is armed for this moment of this step."""
        return any(_fits(fault, moment, step) for fault in self._armed)

    def reached(self, moment: Moment, step: int, operation: str = "", group: tuple[int, ...] = ()) -> None:
        """The train thread is at a moment of a step: fire what is armed for it.

        `operation` and `group` say which collective it is, at the moment of one. Raises InjectedFault for `raise` and
        what the device raises for a fault of the device; the other injuries do not come back.
        """
        if not self._armed:
            return
        for fault in self._armed:
            if not _fits(fault, moment, step) or not _concerns(fault, operation, group):
                continue
            if fault.rate > 0:
                if self._dice.random() >= fault.rate:
                    continue
            else:
                self._armed.remove(fault)
            self._injure(fault)
            return

    def _injure(self, fault: ArmedFault) -> None:
        if fault.injury in DEVICE_INJURIES:
            self._harm(fault.injury)
        elif fault.injury is Injury.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.injury is Injury.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.injury is Injury.EXIT:
            os._exit(1)
        elif fault.injury is Injury.KILL_NODE:
            # The agent is the parent, and takes everything on the node with it.
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.injury is Injury.HANG:
            threading.Event().wait()
        else:
            at = f"at {fault.moment} " if fault.moment else ""
            step = "" if fault.step is None else f"of step {fault.step} "
            raise InjectedFault(f"injected {at}{step}in rank {fault.rank}")


def _fits(fault: ArmedFault, moment: Moment, step: int) -> bool:
    return fault.moment in {None, moment} and fault.step in {None, step}


def _concerns(fault: ArmedFault, operation: str, group: tuple[int, ...]) -> bool:
    return fault.operation in {"", operation} and (not fault.group or fault.group == group)
