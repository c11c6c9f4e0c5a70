"""Checks that a job that runs does so on sound hardware, as far as its controller has been told."""

from typing import TYPE_CHECKING

from ..controller.recovery.state import Phase
from ..controller.world import NodeState
from ..policies.fault_levels import Treatment
from .invariants import Invariant

if TYPE_CHECKING:
    from .world import World

_TO_BE_LEFT = frozenset({Treatment.LEAVE})


def check(world: "World") -> None:
    """Nobody trains where a fault stands that asks for the node to be left; one that is about to be dealt with may."""
    machine = world.machine
    state, due_s = machine.state, machine.next_deadline()
    if machine.phase is not Phase.RUNNING or (due_s is not None and due_s <= world.timeline.now):
        return
    for name in state.world.named(NodeState.ACTIVE):
        devices = {holder.rank % world.ranks_per_node for holder in state.world.on(name)}
        for fault in state.book.on(name, _TO_BE_LEFT):
            if devices and (fault.device is None or fault.device in devices):
                world.fail(Invariant.SOUND_NODES, f"{fault.level} of {name} stands, and ranks train there")
