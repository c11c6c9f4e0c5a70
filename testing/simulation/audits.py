"""Wrong gradients of a simulated job, and the audits that find them: ranks repeat a step of their neighbour.

What a rank computes is a text, whose hash stands for what a reduction gets. Who computes wrongly gets another text:
once, or each time on a device that is wrong. The verdicts are the product's own (`processor/audits.py`), and so is what
follows from them. They are held against what was wrong: no update is applied in an audited step with a wrong gradient,
and a rank is blamed only for what it has computed.
"""

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import xxhash

from ...controller.recovery.state import Phase
from ...processor.audits import Audits, Pass
from ...processor.evidence import Contribution, Evidence
from ...protocol.errors import ConfigurationError
from ...protocol.faults import EACH_TIME
from ...protocol.types import Activity, FaultKind
from ..invariants import Invariant
from .network import Thread
from .scripts import COMPUTES_S, Raised

if TYPE_CHECKING:
    from .network import Group
    from .process import Process
    from .world import SimulatedWorld

OF_AUDITS = frozenset({FaultKind.WRONG_GRADIENT, FaultKind.GRADIENTS_DIFFER})


class WrongGradients:
    """All that was computed wrongly in one job. `struck`: how often, by rank and node."""

    def __init__(self) -> None:
        self.struck: Counter[tuple[int, str]] = Counter()
        self.computed = 0  # that were wrong, repetitions included
        self.last_step = -1  # in which something was
        self.unseen = 0  # of them, those in steps that are not audited
        self.left: set[int] = set()  # audited steps that were left for one
        self.blamed = 0  # times that a rank was named for one

    @property
    def caught(self) -> int:
        """How many steps were left for one."""
        return len(self.left)


class PlayedAudits:
    """A process's part in the audits, and what it computes. It stands for its runtime, too."""

    def __init__(self, process: "Process") -> None:
        self._process, self._world = process, process.world
        self._of_job = process.world.wrong_gradients
        self.rank = process.rank
        self.settings = process.world.job.settings
        self.audits = Audits(self)  # type: ignore[arg-type]
        self.is_wrong_next = False  # what it computes next
        self._evidence: Evidence | None = None

    @property
    def world_size(self) -> int:
        """How many ranks the world has, as this one knows."""
        return self._process.world_size

    def report_fault(self, kind: FaultKind, detail: str, *given: Any, **named: Any) -> None:
        """Report what an audit has found; it must be there."""
        struck, node = self._of_job.struck, self._process.agent.name
        self._of_job.blamed += kind is FaultKind.WRONG_GRADIENT
        if not struck or (kind is FaultKind.WRONG_GRADIENT and (self.rank, node) not in struck):
            what = f"rank {self.rank} on {node} reports {kind}, and has computed nothing wrong: {detail}"
            self._world.fail(Invariant.RIGHT_RANK_BLAMED, what)
        if named.get("code") == EACH_TIME and self.rank not in self._process.agent.wrong_gradients:
            what = f"rank {self.rank} on {node} was wrong once, and is taken for one that is wrong each time: {detail}"
            self._world.fail(Invariant.RIGHT_RANK_BLAMED, what)
        each_time = any(each.wrong_gradients for each in self._world.agents.values())
        if kind is FaultKind.GRADIENTS_DIFFER and each_time:  # for two of which one may have to leave
            self._process.faulty = True
        self._process.report_fault(kind, detail, *given, **named)

    # --- a step -------------------------------------------------------------------------------------------------

    def repeats_others(self, step: int) -> Thread[None]:
        """Repeat what others compute, before this rank's own step."""
        self.audits.begin()
        if not self.audits.is_due(step):
            return
        process, peer = self._process, (self.rank - 1) % self.world_size
        for subject in self.audits.subjects(peer):
            if subject == peer:
                group = yield from process.enter(Activity.COMMITTING)
                group.post(("inputs", step, self.rank), step)
                yield lambda go, group=group: group.receive(("inputs", step, peer), go)  # type: ignore[misc]
                process.in_collective = False
                process.doing(Activity.COMPUTING)
            yield process.sleep(self._world.chance.uniform(*COMPUTES_S) * process.slowness)
            self._has_computed(subject, step)

    def computes(self, group: "Group", step: int) -> None:
        """Give this rank's own gradient to the others."""
        if self.audits.is_on and self._has_computed(self.rank, step):
            group.marks.setdefault(("wrong gradients", step), set()).add(f"rank {self.rank}")

    def says(self, group: "Group", step: int) -> None:
        """Say at the commit barrier what was computed here."""
        self._evidence = self.audits.evidence(step - 1)
        if self._evidence is not None:
            group.evidence.setdefault(step, []).append(self._evidence.said())

    def hears(self, group: "Group", step: int) -> None:
        """Hear it of all others, at the end of the barrier. Raises Interrupted if they differ, or Raised if always."""
        evidence, self._evidence = self._evidence, None
        if evidence is None:
            return
        for said in group.evidence[step]:
            evidence.heard(said)
        try:
            self.audits.counted(step - 1, evidence)
        except ConfigurationError as error:
            raise Raised(FaultKind.REFUSED) from error
        except BaseException:
            self._of_job.left.add(step)
            raise

    def updates(self, group: "Group | None", step: int) -> None:
        """Apply the update of a step."""
        wrong = sorted(group.marks.get(("wrong gradients", step), ())) if group is not None else []
        if not wrong:
            return
        if self.audits.is_due(step) and self.audits.proven:
            what = f"rank {self.rank} applies the update of step {step}, which is audited, with what {wrong} got wrong"
            self._world.fail(Invariant.NO_WRONG_STATE_PASSES, what)
        self._of_job.unseen += self.rank == 0

    def _has_computed(self, subject: int, step: int) -> bool:
        """Keep the hash of what was computed; return whether it is wrong."""
        process = self._process
        each_time = process.rank in process.agent.wrong_gradients
        wrong, self.is_wrong_next = each_time or self.is_wrong_next, False
        text = f"{subject} {step}"
        process.faulty = process.faulty or each_time
        if wrong:
            self._of_job.computed += 1
            self._of_job.last_step = step
            alike = each_time and self._world.seed % 2  # some devices are wrong in the same way each time
            text += f", wrong on {process.agent.name}" if alike else f", wrong {self._of_job.computed}"
        done = Pass(subject)
        done.contributions.append(Contribution("played", xxhash.xxh3_64_intdigest(text.encode())))
        if self.audits.is_due(step):
            self.audits.add(done)
        return wrong


# --- what goes wrong --------------------------------------------------------------------------------------------------


def _victim(world: "SimulatedWorld", chance: random.Random) -> "Process | None":
    """Draw a rank of a job that runs, and whose self-test is over; none in a step in which another one is wrong."""
    living = [each for each in world.living() if world.rank_watch.is_current(each)]
    waits = any(each.audits.is_wrong_next or each.agent.wrong_gradients for each in living)
    waits = waits or any(each.standing.count <= world.wrong_gradients.last_step for each in living)
    if waits or world.machine.phase is not Phase.RUNNING or not all(each.audits.audits.proven for each in living):
        return None
    return chance.choice(sorted(living, key=lambda each: each.rank)) if living else None


def wrong_once(world: "SimulatedWorld", chance: random.Random) -> str:
    """Have a rank get wrong what it computes next: its own gradient, or one that it repeats."""
    process = _victim(world, chance)
    if process is None:
        return "no rank to compute a wrong gradient"
    process.audits.is_wrong_next = True
    struck, place = world.wrong_gradients.struck, (process.rank, process.agent.name)
    struck[place] += 1
    process.faulty = process.faulty or struck[place] >= world.policy.integrity.strikes
    return f"what rank {process.rank} computes next is wrong, in step {process.standing.count}, {process.activity}"


def wrong_each_time(world: "SimulatedWorld", chance: random.Random) -> str:
    """Have a rank get wrong all that it computes on its device, whatever its process."""
    process = _victim(world, chance)
    if process is None:
        return "no rank to compute wrong gradients"
    process.agent.wrong_gradients.add(process.rank)
    world.wrong_gradients.struck[process.rank, process.agent.name] += 1
    process.faulty = True
    return f"all that rank {process.rank} computes is wrong, from step {process.standing.count} on"
