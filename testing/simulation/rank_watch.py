"""Checks what the processes do, and what they say of themselves, against what they really hold."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from ...controller.recovery.world import Holder
from ...processor.session import SessionStage
from ...protocol.messages import Rejoin, Resume
from ...protocol.types import StepReport
from ..invariants import Invariant

if TYPE_CHECKING:
    from .network import Group
    from .process import Process
    from .world import SimulatedWorld


class RankWatch:
    """Looks on at every step, commit barrier, update and report."""

    def __init__(self, world: "SimulatedWorld") -> None:
        self._world = world
        self._met: defaultdict[tuple[Group | None, int], set[int]] = defaultdict(set)  # ranks in each commit barrier
        self._resume_steps: dict[int, int] = {}  # generation -> the step that it resumes at
        self._resumed_generation = 0
        self.commits: Counter[int] = Counter()  # how many ranks have committed a step in the present line of history
        self.done: set[int] = set()  # ranks whose train function has returned with all steps

    def holder(self, rank: int) -> Holder:
        """Return what holds a rank; an empty holder, where the world has no such rank any more."""
        return self._world.machine.state.world.holder(rank) or Holder(rank)

    def is_current(self, process: "Process") -> bool:
        """Return whether a process holds its rank, to the present controller."""
        holder = self.holder(process.rank)
        return holder.incarnation == process.incarnation and holder.node == process.agent.name

    # --- one generation, same step ----------------------------------------------------------------------------------

    def computing(self, process: "Process") -> None:
        """One generation: no two ranks compute in different generations at once."""
        generation, step, memory = process.session.generation, process.standing.count, process.memory
        self._resumed_generation = max(self._resumed_generation, generation)
        self._is_of_the_newest(process, "computes")
        if not memory.is_of(step):
            what = f"rank {process.rank} computes step {step} with {memory.shards}, own {memory.own}"
            self._world.fail(Invariant.SAME_NUMBERS, what)

    def resumed(self, process: "Process", order: Resume) -> None:
        """Same step: all ranks resume at one step, and all stand there."""
        step, stands = self._resume_steps.setdefault(order.generation, order.step), process.standing.count
        if step != order.step or stands != step:
            what = f"rank {process.rank} resumes at {stands}, ordered {order.step}, others {step}"
            self._world.fail(Invariant.SAME_STEP, what)
        for other in self._world.living():
            stage = other.session.stage
            if other.incarnation != self.holder(other.rank).incarnation:
                continue
            if other.session.generation == order.generation and stage in {SessionStage.PARKED, SessionStage.REJOINING}:
                what = f"rank {process.rank} resumes while rank {other.rank} is {stage}"
                self._world.fail(Invariant.SAME_STEP, what)

    def committed(self, process: "Process") -> None:
        """A rank has applied an update."""
        count = process.standing.count
        if self.is_current(process):  # a world that was given up unheard may train on for a while
            self.commits[count] += 1
        if process.memory.stands != count:
            what = f"rank {process.rank} says {count} updates, and holds {process.memory.shards}"
            self._world.fail(Invariant.SAME_NUMBERS, what)
        self._is_of_the_newest(process, "commits")

    def _is_of_the_newest(self, process: "Process", does: str) -> None:
        generation, newest = process.session.generation, self._resumed_generation
        if generation < newest and not self._world.allowed.computing(process):
            what = f"rank {process.rank} {does} in generation {generation} after {newest}"
            self._world.fail(Invariant.ONE_GENERATION, what)

    # --- a step and its end -----------------------------------------------------------------------------------------

    def meets(self, process: "Process") -> None:
        """Nothing lost: a rank enters the commit barrier with final gradients, its local state and its peer copy."""
        step, peer = process.standing.count + 1, process.copied_rank
        own = all(process.place.copy_of(rank, step) is not None for rank in (process.rank, peer) if rank is not None)
        if process.memory.gradients != step or not own:
            what = f"rank {process.rank} enters the commit barrier of step {step}, and is not ready"
            self._world.fail(Invariant.NOTHING_LOST, what)
        self._met[process.group, step].add(process.rank)

    def updating(self, process: "Process") -> None:
        """Same step: no rank begins an update before all have entered its commit barrier."""
        step = process.standing.count + 1
        missing = set(range(process.world_size)) - self._met[process.group, step]
        if process.memory.gradients != step or missing:
            what = f"rank {process.rank} begins update {step} before ranks {sorted(missing)} were ready for it"
            self._world.fail(Invariant.SAME_STEP, what)

    def finished(self, process: "Process") -> None:
        """A train function has returned."""
        if process.memory.is_of(self._world.setting.total_steps):
            self.done.add(process.rank)

    def finished_plainly(self, process: "Process") -> None:
        """A script without midstep has ended well."""
        self.done.add(process.rank)

    # --- what it says -----------------------------------------------------------------------------------------------

    def reports(self, process: "Process", report: StepReport) -> None:
        """Same numbers: what a rank says at barrier one is what it holds."""
        memory, step = process.memory, report.committed
        finals = memory.gradients == step + 1
        held = all(memory.shards[hold.shard_id] == step for hold in report.holds)
        if (report.clean and memory.stands != step) or report.ready > finals or not held:
            what = f"rank {process.rank} reports {report}, and holds {memory.shards}, gradients of {memory.gradients}"
            self._world.fail(Invariant.SAME_NUMBERS, what)
        whole = len(memory.left) == len(memory.shards)  # an update of what was lost is worth nothing
        whole = whole and not process.integrity.all_marks  # so are gradients of what has silently gone wrong
        if finals and whole and report.clean and not report.ready:
            what = f"rank {process.rank} could finish update {step + 1}, and denies it"
            self._world.fail(Invariant.NOTHING_LOST, what)

    def ready(self, process: "Process", order: Rejoin) -> None:
        """Same numbers: a rank that is ready holds everything as of the target, and nothing else."""
        target, memory = order.part.target_step, process.memory
        if process.standing.count != target or not memory.is_of(target):
            what = f"rank {process.rank} is ready for step {target} with {memory.shards}, local state of {memory.own}"
            self._world.fail(Invariant.SAME_NUMBERS, what)
