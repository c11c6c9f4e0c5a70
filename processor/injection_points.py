"""Inject faults into this training process, at injection points of a step or of a recovery.

The same points serve `midstep inject`, the demo and the chaos tests, so what is tested is what users can try. With
nothing armed a point costs one look at an empty list.

Faults in the middle of a forward or backward pass fire in hooks, which are registered only while one is armed, and
remove themselves.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.errors import ConfigurationError, InjectedFault
from ..protocol.faults import DEVICE_FAULT_ACTIONS, FLIP_ACTIONS, ArmedFault, FaultAction, InjectionPoint

if TYPE_CHECKING:
    import torch

    from .framework import OpenShard

# They strike the train thread, so they need it at a certain place.
_IN_THE_TRAIN_THREAD = DEVICE_FAULT_ACTIONS | FLIP_ACTIONS | {FaultAction.RAISE, FaultAction.HANG, FaultAction.SLOW}


def _cannot(action: FaultAction) -> None:
    raise ConfigurationError(f"{action} can only be caused on the fake device (`midstep run --device fake`)")


def _cannot_spoil(_sent: "dict[str, OpenShard]", fault: ArmedFault) -> "dict[str, OpenShard]":
    _cannot_flip(fault)
    return {}


def _cannot_flip(fault: ArmedFault) -> None:
    raise ConfigurationError(f"{fault.action} needs a train state of which midstep knows the tensors")


class InjectionPoints:
    """The armed faults of one process. Each fires once, unless it has a rate."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        armed: Iterable[ArmedFault] = (),
        harm: Callable[[FaultAction], None] = _cannot,
    ) -> None:
        """Arm faults. `harm` causes a fault of the device; it may raise what the device would raise."""
        self._rank = rank
        self._incarnation = incarnation
        self._harm = harm
        # Set when there is a train state.
        self.flip: Callable[[ArmedFault], None] = _cannot_flip
        self.spoil: Callable[[dict[str, OpenShard], ArmedFault], dict[str, OpenShard]] = _cannot_spoil
        self._dice = random.Random(f"{rank}/{incarnation}")
        self._armed: list[ArmedFault] = []
        self.replaying = False  # a step of another rank: what is armed for one of this rank's waits
        for fault in armed:
            self.arm(fault)

    @property
    def armed(self) -> tuple[ArmedFault, ...]:
        """The faults that wait for their injection points."""
        return tuple(self._armed)

    def arm(self, fault: ArmedFault) -> None:
        """Take a fault that is meant for this incarnation of this rank; ignore any other. From any thread."""
        if fault.rank != self._rank or fault.incarnation not in {None, self._incarnation}:
            return
        if fault.point is None and fault.action not in _IN_THE_TRAIN_THREAD:
            self._inject(fault)
            return
        self._armed.append(fault)

    def waits_for(self, point: InjectionPoint, step: int) -> bool:
        """Say whether a fault is armed for this injection point in this step."""
        return any(self._fits(fault, point, step) for fault in self._armed)

    def reached(self, point: InjectionPoint, step: int, operation: str = "", group: tuple[int, ...] = ()) -> None:
        """Fire what is armed for this injection point. In the train thread.

        `operation` and `group` say which collective it is, if it is one. Raises InjectedFault for `raise` and
        what the device raises for a fault of the device; the other fault actions do not return.
        """
        if not self._armed:
            return
        for fault in self._armed:
            if not self._fits(fault, point, step) or not _concerns(fault, operation, group):
                continue
            if fault.rate > 0:
                if self._dice.random() >= fault.rate:
                    continue
            else:
                self._armed.remove(fault)
            self._inject(fault)
            return

    def sent(self, shards: "dict[str, OpenShard]") -> "dict[str, OpenShard]":
        """Return what is handed over in a repair: these shards, or copies in which bits have flipped."""
        for fault in self._armed if shards else ():
            if fault.action is FaultAction.FLIP_REPAIR:
                self._armed.remove(fault)
                return self.spoil(shards, fault)
        return shards

    def _fits(self, fault: ArmedFault, point: InjectionPoint, step: int) -> bool:
        """Say whether a fault is meant for this place. One that strikes again and again does so in a replay, too."""
        elsewhere = fault.point not in {None, point} or fault.step not in {None, step}
        if elsewhere or fault.action is FaultAction.FLIP_REPAIR:
            return False
        of_replay = point is InjectionPoint.REPLAY
        return of_replay or fault.rate > 0 if self.replaying else not of_replay

    def _inject(self, fault: ArmedFault) -> None:
        if fault.action in DEVICE_FAULT_ACTIONS:
            self._harm(fault.action)
        elif fault.action in FLIP_ACTIONS:
            self.flip(fault)
        elif fault.action is FaultAction.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action is FaultAction.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action is FaultAction.EXIT:
            os._exit(1)
        elif fault.action is FaultAction.KILL_NODE:
            # The agent is the parent, and takes everything on the node with it.
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action is FaultAction.HANG:
            threading.Event().wait()
        elif fault.action is FaultAction.SLOW:
            time.sleep(fault.for_s)
        else:
            at = f"at {fault.point} " if fault.point else ""
            step = "" if fault.step is None else f"of step {fault.step} "
            raise InjectedFault(f"injected {at}{step}in rank {fault.rank}")


def _concerns(fault: ArmedFault, operation: str, group: tuple[int, ...]) -> bool:
    return fault.operation in {"", operation} and (not fault.group or fault.group == group)


class _Halfway:
    """Fires once: after half of the expected calls, or when the pass ends."""

    def __init__(self, expected: int, fire: Callable[[], None]) -> None:
        self.handles: list[Any] = []
        self._left = max(1, (expected + 1) // 2)
        self._fire: Callable[[], None] | None = fire

    def pass_by(self, *_: Any) -> None:
        """Count one module or gradient."""
        self._left -= 1
        if self._left <= 0:
            self.last_chance()

    def last_chance(self, *_: Any) -> None:
        """Fire if that has not happened, and remove the hooks."""
        fire, self._fire = self._fire, None
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if fire is not None:
            fire()


def fire_in_forward(modules: "Sequence[torch.nn.Module]", fire: Callable[[], None]) -> None:
    """Call `fire` when half of the first module's layers have computed."""
    leaves = [layer for module in modules[:1] for layer in module.modules() if not list(layer.children())]
    halfway = _Halfway(len(leaves), fire)
    halfway.handles += [layer.register_forward_hook(halfway.pass_by) for layer in leaves]
    halfway.handles += [
        module.register_forward_hook(halfway.last_chance) for module in modules[:1] if module not in leaves
    ]


def fire_in_backward_of_layers(layers: "Sequence[torch.nn.Module]", fire: Callable[[], None]) -> None:
    """Call `fire` when the backward pass comes to the output of the layer in the middle.

    For modules whose own parameters take no part in the computation: sharded ones, of which a gathered copy does.
    """
    handles: list[Any] = []

    def arm(_layer: Any, _inputs: Any, output: Any) -> None:
        for handle in handles:
            handle.remove()
        first = output if not isinstance(output, tuple | list) else output[0]
        if first.requires_grad:
            first.register_hook(lambda _: fire())

    handles.append(layers[len(layers) // 2].register_forward_hook(arm))


def fire_in_backward(modules: "Sequence[torch.nn.Module]", fire: Callable[[], None]) -> None:
    """Call `fire` when half of the first module's gradients have been computed."""
    parameters = [p for module in modules[:1] for p in module.parameters() if p.requires_grad]
    halfway = _Halfway(len(parameters), fire)
    attach: list[Any] = [parameter.register_hook for parameter in parameters]
    halfway.handles += [hook(halfway.pass_by) for hook in attach]
