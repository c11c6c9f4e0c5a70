"""Checks worlds that get another size, or start again: nothing is lost, none is smaller than it has to be.

A world that grows in place keeps the processes of the ranks that it had.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...controller.recovery.events import Action, ControllerStarted, Event, Send
from ...controller.recovery.state import Phase
from ...controller.recovery.world import NodeState
from ...policies.budgets import WORLD_RESTARTS
from ...protocol.messages import Rejoin, SaveCheckpoint, StartProcess, StopProcess
from ...protocol.types import RestoreSource, Rung
from ..invariants import Invariant

if TYPE_CHECKING:
    from .process import Process
    from .world import SimulatedWorld

QUIET_S = 1.0  # what was said has arrived by then
LOSSY_S = 15.0  # and has been resent often enough where messages are lost


class ScalingWatch:
    """Looks on after every event. `sizes`: of all worlds so far."""

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self.sizes: list[int] = [world.setting.size]
        self._changed_s = self._started_s = 0.0  # when the world got its size, and when its controller took over
        self._growing = False
        self._grown_from = 0  # the size before it grew in place, if it did so last
        self._prepares, self._prepared_s = False, 0.0  # whether new ranks get ready beside the world; when last
        self._on_disk = 0  # the newest checkpoint when the present world was started
        self._ever = False  # whether one had been complete by then
        self._started_generation = 0
        self._failures = 0  # of checkpoints, before the one under way
        self._saving = False

    def handled(self, event: Event, before: Phase, actions: Sequence[Action]) -> None:
        """Check what can be seen after each event."""
        if isinstance(event, ControllerStarted):
            self._started_s = self._world.timeline.now
        orders = [action.body for action in actions if isinstance(action, Send)]
        self._note_the_checkpoint(orders)
        self._growth_is_in_time(before)
        seated = [order for order in orders if isinstance(order, StartProcess) and order.connected]
        started = bool(seated) and seated[0].generation != self._started_generation  # and not only asked for again
        if self._ends_all(before, started=started):
            self._survivors_have_saved()
        if seated and seated[0].world_size != self.sizes[-1]:
            self._is_as_large_as_it_can_be(seated[0].world_size)
            self._survivors_have_saved()
            self.sizes.append(seated[0].world_size)
            self._grown_from = 0
            self._changed_s = self._world.machine.state.planned.scaled_s
        elif not seated and self._world.machine.state.world.size != self.sizes[-1]:
            self._has_grown_in_place(orders)
        if started:
            self._started_generation = seated[0].generation
            self._on_disk = max((step for step in self._world.disk.steps if step <= self.trusted), default=0)
            self._ever = self._world.disk.ever
        self._the_checkpoint_is_loaded([order for order in orders if isinstance(order, Rejoin) and order.connected])
        self._no_process_is_left_behind()

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def trusted(self) -> float:
        """The newest step to which all may go back."""
        trusted = self._world.machine.state.incident.trusted_step
        return float("inf") if trusted is None else trusted

    def _ends_all(self, before: Phase, *, started: bool) -> bool:
        """Return whether a rung that saves first has just ended all processes, to wait for nodes or to start."""
        machine, policy = self._world.machine, self._world.policy
        if before is Phase.WAITING or not machine.incidents or not machine.state.ever_resilient:
            return False
        rung, waits = machine.incidents[-1].rung, machine.phase is Phase.WAITING
        if waits and rung is Rung.RESCHEDULE_POD and policy.scale.min_nodes is not None:
            return True
        saves = policy.save_before_reschedule and RestoreSource.CHECKPOINT in policy.restore
        return saves and rung in WORLD_RESTARTS and (waits or started)

    def _note_the_checkpoint(self, orders: Sequence[object]) -> None:
        saving = self._world.machine.phase is Phase.SAVING
        if saving and not self._saving:
            self._failures = self._world.disk.failures
        self._saving = saving or any(isinstance(order, SaveCheckpoint) for order in orders)

    def _growth_is_in_time(self, before: Phase) -> None:
        """The size does not change to and fro."""
        plan = self._world.machine.state.planned.current
        self._growing = self._growing and self._world.machine.phase is Phase.PAUSING
        if plan is None or not plan.nodes or self._growing or self._world.machine.phase is not Phase.PAUSING:
            return
        self._growing = True
        least_s = self._world.policy.scale.min_interval_s
        since_s = self._world.timeline.now - self._changed_s
        if len(self.sizes) > 1 and since_s < least_s:
            what = f"the world is about to grow {since_s:.1f} s after it got another size, {least_s} s are the least"
            self._world.fail(Invariant.SIZE_FITS, what)

    def _is_as_large_as_it_can_be(self, size: int) -> None:
        """No smaller than the policy allows, no larger than asked, and no node is left idle that it could use."""
        world, state = self._world, self._world.machine.state.world
        asked, least = world.setting.size, world.policy.scale.min_nodes
        nodes = len(state.named(NodeState.ACTIVE, NodeState.SPARE))
        if least is None or not least * world.ranks_per_node <= size <= asked:
            world.fail(Invariant.SIZE_FITS, f"a world of {size} ranks, {asked} were asked for, {least} nodes are least")
        if size != min(asked, nodes * world.ranks_per_node):
            world.fail(Invariant.SIZE_FITS, f"a world of {size} ranks, and {nodes} nodes are there for it")

    def _has_grown_in_place(self, orders: Sequence[object]) -> None:
        """The ranks that were there keep their processes, where the policy lets a world grow so."""
        world, before, size = self._world, self.sizes[-1], self._world.machine.state.world.size
        ended = [each.rank for each in orders if isinstance(each, StopProcess | StartProcess) and each.rank < before]
        if not world.policy.scale.in_place or not before < size <= world.setting.size or ended:
            what = f"a world of {before} ranks has {size} now, and the processes of ranks {ended} were ordered to end"
            world.fail(Invariant.SIZE_FITS, what)
        self.sizes.append(size)
        self._grown_from, self._changed_s = before, world.machine.state.planned.scaled_s

    def _survivors_have_saved(self) -> None:
        """Nothing lost: what is whole on processes without a fault is on the disk."""
        world, sizes = self._world, {self.sizes[-1], self._grown_from}
        if world.disk.failures > self._failures or world.disk.damaged or not world.network.has_delivered:
            return
        survivors = [each for each in world.living() if each.world_size in sizes and self._is_well(each)]
        size = min((each.former_size for each in survivors), default=0)
        stands = [(process.memory.stands or 0, process) for process in survivors]
        newest = max((step for step, _ in stands), default=0)
        current = [process for step, process in stands if step == newest]
        shards = {shard for process in current for shard in process.memory.left}
        own = {copy.rank for process in survivors for copy in process.place.copies() if copy.step == newest}
        whole = own >= set(range(size)) and all(shards.issuperset(world.shards(rank, size)) for rank in range(size))
        saved = max(world.disk.steps, default=0)
        if whole and newest > saved and newest <= self.trusted:
            who = [process.rank for process in current]
            what = f"all processes end for a new start, and step {newest} is whole on ranks {who}, not on disk"
            world.fail(Invariant.NOTHING_LOST, f"{what}, where the newest is {saved}")

    def _is_well(self, process: "Process") -> bool:
        agent = process.agent
        told = agent.alive and not agent.broken and not (agent.deaf_until_s or agent.mute_until_s)
        told = told and not self._world.allowed.given_up(process)
        memory = process.memory
        whole = memory.stands is not None and len(memory.left) == len(memory.shards)
        doing = whole and not process.hung and not process.suspended
        faulty = process.faulty or process.rank % self._world.ranks_per_node in agent.reported
        return told and doing and not faulty and self._world.controller_watch.held(process)

    def _no_process_is_left_behind(self) -> None:
        """Nothing left: the processes of a world of another size have been told to end."""
        world, now = self._world, self._world.timeline.now
        told_s = LOSSY_S if world.setting.loss else QUIET_S
        if self._prepares:
            self._prepared_s = now
        change = world.machine.state.planned.current
        self._prepares = change is not None and bool(change.joins)
        if len(self.sizes) == 1 or now < max(self._changed_s, self._started_s, self._prepared_s) + told_s:
            return
        for process in world.living():
            agent = process.agent
            cut_off = agent.deaf_until_s or agent.mute_until_s or now < agent.isolated_until_s + LOSSY_S
            reachable = world.network.has_delivered and not cut_off
            parked = world.policy.scale.in_place and world.controller_watch.held(process)  # until it hears of the size
            if process.world_size != self.sizes[-1] and reachable and not parked:
                what = (
                    f"pid {process.pid}, rank {process.rank} of {process.world_size}, lives in a world of {world.size}"
                )
                world.fail(Invariant.NOTHING_LEFT, what)

    def _the_checkpoint_is_loaded(self, rejoins: Sequence[Rejoin]) -> None:
        """Nothing lost: a world that starts again continues from the newest checkpoint, and begins only without any."""
        if rejoins and rejoins[0].part.target_step == 0 and self._ever:
            self._world.fail(Invariant.NOTHING_LOST, "training begins again, and a checkpoint has been complete")
        if not rejoins or RestoreSource.CHECKPOINT not in self._world.policy.restore:
            return
        target = rejoins[0].part.target_step
        if target < self._on_disk and not self._world.disk.damaged:
            what = f"the world starts from step {target}, and a checkpoint of step {self._on_disk} was there"
            self._world.fail(Invariant.NOTHING_LOST, what)
