"""Users' scripts of a simulated job: a resilient train function, and a script that is a plain one.

The train function ends each step in the product's own order. A plain script is restarted as a whole, as by torchrun.
"""

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...processor.exceptions import Finding, Reaction, reaction
from ...processor.rank_loop import Ended
from ...processor.step_order import Act
from ...protocol.errors import CommunicatorError, CommunicatorFailed, Interrupted, MidstepError
from ...protocol.messages import StepCommitted
from ...protocol.types import Activity, FaultKind, FaultLevel
from .network import Thread

if TYPE_CHECKING:
    from .process import Process

MEDIAN_STEP_S = 0.1
ROUND_S = 0.2
COLLECTIVE_S = 1800.0  # torch's own limit
EXIT_RAISED = 1
COMPUTES_S = (0.02, 0.1)
LEAVING_S = (0.0, 0.1, 0.1, 0.1)  # until a rank that has lost a vote leaves: the others hear of it mostly, too
MENDABLE = frozenset({FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT, FaultKind.LINK})


class StepPoint(enum.Enum):
    """Where in a step something can go wrong."""

    COMPUTING = "while it computes"
    BARRIER = "at the commit barrier"
    MET = "between commit barrier and update"
    UPDATE = "in its update"


class Raised(MidstepError):
    """An error that a step raises, with the fault behind it."""

    def __init__(self, kind: FaultKind) -> None:
        super().__init__("made up")
        self.kind = kind


class TrainFunction:
    """The train function of one process, and the checkpoint that waits to be made complete."""

    def __init__(self, process: "Process", hold: Callable[[], Thread[bool]]) -> None:
        """`hold` says, at a broken commit barrier, whether to apply the update."""
        self._process = process
        self._world = process.world
        self._hold = hold
        self._first_step = False
        self._to_publish = 0

    def run(self) -> Thread[Ended]:
        """Do the steps that are left. Raises what its process is to end with."""
        process = self._process
        self._first_step = True
        try:
            while process.standing.count < self._world.setting.total_steps:
                yield from self._step(process.steps.begin())
        except Interrupted:
            return Ended.INTERRUPTED
        except (CommunicatorError, Raised) as error:
            kind = error.kind if isinstance(error, Raised) else FaultKind.COMMUNICATION
            what_now = self._judge(kind)
            if what_now is Reaction.LEAVE:
                yield from process.flush()
                raise
            return Ended.FAILED if what_now is Reaction.REPORT else Ended.INTERRUPTED
        return Ended.RETURNED

    def publish(self) -> None:
        """Complete the last checkpoint with what every rank has written."""
        if self._to_publish:
            self._world.disk.complete(self._to_publish)
        self.forget_checkpoint()

    def forget_checkpoint(self) -> None:
        """Return whether every rank has written for the last checkpoint is not known any more."""
        self._to_publish = 0

    # --- a step -------------------------------------------------------------------------------------------------

    def _step(self, index: int) -> Thread[None]:
        process, world = self._process, self._world
        process.doing(Activity.COMPUTING)
        process.step_since_s = world.timeline.now
        process.own.begin(world.timeline.now)
        process.agent.watch_step(process, first=self._first_step)
        world.rank_watch.computing(process)
        yield from process.audits.repeats_others(index)
        process.integrity.begins(index, audited=process.audits.audits.is_due(index))
        yield process.sleep(world.chance.uniform(*COMPUTES_S) * process.slowness)
        if process.raising:
            process.raising = False
            raise Raised(FaultKind.EXCEPTION)
        self._let_fail(StepPoint.COMPUTING)
        group = yield from process.enter(Activity.COLLECTIVE)
        process.integrity.computes(group, index)
        process.audits.computes(group, index)
        if world.plays_times and (late_s := process.links.send()):
            yield process.sleep(late_s)
        yield lambda go: group.enter(("gradients", index), process, lambda: go(None))
        process.in_collective = False
        process.integrity.computed(group, index)
        process.memory.gradients = index + 1
        end = process.steps.end(index)
        try:
            act = next(end)
            while True:
                act = end.send((yield from self._carry_out(act)))
        except StopIteration:
            pass
        yield from self._update()

    def _carry_out(self, act: Act) -> Thread[bool]:
        """Do what the end of a step asks for; return whether it went well."""
        step = self._process.standing.count + 1
        match act:
            case Act.CAPTURE:
                self._process.place.keep_local(step, step)
            case Act.PUBLISH:
                self.publish()
            case Act.SWAP:
                return (yield from self._swap(step))
            case Act.MEET:
                return (yield from self._meet(step))
            case Act.HOLD:
                applies = yield from self._hold()
                if applies:
                    self._process.integrity.held()
                return applies
            case Act.FINISH:
                pass
        return True

    def _swap(self, step: int) -> Thread[bool]:
        process = self._process
        self._world.reached("ready")
        self._let_fail(StepPoint.BARRIER)
        peer = process.copied_rank
        try:
            group = yield from process.enter(Activity.COMMITTING)
            group.post(("own", step, process.rank), step)
            if peer is not None:
                blob: int = yield lambda go: group.receive(("own", step, peer), go)
                process.place.keep_peer(peer, step, blob)
        except CommunicatorError:
            return False
        return True

    def _meet(self, step: int) -> Thread[bool]:
        process, world, group = self._process, self._world, self._process.group
        assert group is not None
        world.rank_watch.meets(process)
        process.copies.says(group.votes, step)
        process.integrity.says(group, step)
        process.audits.says(group, step)
        try:
            yield lambda go: group.enter(("commit", step), process, lambda: go(None))
        except CommunicatorError:
            return False
        process.in_collective = False
        try:
            process.integrity.hears(group, step)
            process.audits.hears(group, step)
        except Interrupted:
            yield process.sleep(world.chance.choice(LEAVING_S))
            raise
        process.copies.hears(group.votes, step)
        self._let_fail(StepPoint.MET)
        return True

    def _update(self) -> Thread[None]:
        process, world = self._process, self._world
        process.doing(Activity.UPDATING)
        world.rank_watch.updating(process)
        world.reached("updating")
        yield process.sleep(world.chance.uniform(0.001, 0.02))
        self._let_fail(StepPoint.UPDATE)
        process.audits.updates(process.group, process.standing.count)
        process.memory.update()
        process.integrity.updated()
        goes_on = process.steps.commit()
        process.times = process.own.end(world.timeline.now, 0.0)
        world.rank_watch.committed(process)
        if not goes_on:
            return
        count = process.standing.count
        if process.loop.commits_first_step():
            self._first_step = False
            now, generation = process.agent.wall_s, process.session.generation
            process.post(StepCommitted(process.rank, generation, process.incarnation, count, now, MEDIAN_STEP_S))
        process.copies.take(count)
        every = world.setting.checkpoint_every
        if every and count % every == 0:
            process.doing(Activity.CHECKPOINTING)
            self._to_publish = count
            process.integrity.writes(count)
            slow = world.setting.slow_checkpoints
            yield process.sleep(world.chance.choice((0.02, 0.05, 8.0 if slow else 0.3)))

    # --- what goes wrong ----------------------------------------------------------------------------------------

    def _let_fail(self, point: StepPoint) -> None:
        """Let happen what was injected at this point. Raises it."""
        process = self._process
        if point not in process.armed:
            return
        kind = process.armed.pop(point)
        if point is StepPoint.UPDATE:
            process.memory.tear()
        if kind in {FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT}:
            process.memory.lose()
        raise Raised(kind)

    def _judge(self, kind: FaultKind) -> Reaction:
        """Say what follows from what a step has raised, and report it if it is news."""
        process, mendable = self._process, kind in MENDABLE
        finding = Finding("made up", kind, FaultLevel.SOFTWARE, mendable, "", "made up")
        what_now = reaction(finding, collateral=process.interrupted() or process.failed is not None)
        if what_now is not Reaction.WAIT:
            process.report_fault(kind, "made up", mendable=mendable)
        return what_now


def plain_script(process: "Process") -> Thread[None]:
    """Work for a round, then meet the others, until all is done. Raises CommunicatorError."""
    world, group = process.world, process.group
    assert group is not None
    for done in range(world.setting.total_steps):
        if process.raising:
            break
        yield process.sleep(world.chance.uniform(0.0, ROUND_S) * process.slowness)
        if process.failed is not None:
            process.end(EXIT_RAISED)
            return
        process.in_collective = True
        error = CommunicatorFailed(f"not over within {COLLECTIVE_S} s")
        key = ("round", done + 1)
        yield process.within(COLLECTIVE_S, lambda go, key=key: group.enter(key, process, lambda: go(None)), error)  # type: ignore[misc]
        process.in_collective = False
    if process.raising:
        process.end(EXIT_RAISED)
        return
    world.rank_watch.finished_plainly(process)
    process.end(0)
