"""The state that a process of an exploration really holds, whatever it says: it is judged by that."""

from midstep.protocol.errors import CommunicatorFailed, StateLost
from midstep.protocol.messages import RankReady, SaveCheckpoint
from midstep.protocol.types import LocalStateCopy, RepairPart, RestoreSource, StepReport

from .inputs import Linked

WORTHLESS, TORN = -1, -2  # what a newcomer holds, and what is left of an update or a repair that ended halfway


class Holdings:
    """The step that the shards of a process are of, the step of its gradients, and its black box.

    `broken`: the rules that it has broken since it was asked last.
    """

    def __init__(self, rank: int, ward: int, box: tuple[LocalStateCopy, ...], *, connected: bool) -> None:
        """`connected`: it begins with the others, and holds what all begin with."""
        self.rank, self.ward = rank, ward
        self.step = 0 if connected else WORTHLESS
        self.gradients: int | None = None
        self.box = box
        self.wrong = False  # and nothing has said so
        self.flipped = False  # something has become wrong here by itself
        self.struck = False  # the device says that what was here is lost
        self.broken: list[str] = []

    def keep(self, rank: int, step: int) -> None:
        """Write a local state into the black box: later steps are dropped, the two last writes stay."""
        others = [copy for copy in self.box if copy.rank != rank]
        kept = [copy for copy in self.box if copy.rank == rank and copy.step < step]
        copies = [*others, *kept[-1:], LocalStateCopy(rank, step)]
        self.box = tuple(sorted(copies, key=lambda copy: (copy.rank, copy.step)))

    def update(self, step: int, *, allowed: bool, torn: bool) -> None:
        """Apply an update. `allowed`: all were ready for it."""
        if self.gradients != step or not allowed:
            self.broken.append(f"2 same step: rank {self.rank} begins update {step} before all were ready for it")
        self.step, self.gradients, self.struck = TORN if torn else step, None, torn

    def repair(self, part: RepairPart, arriving: Linked) -> None:
        """Bring back what is lost. Raises CommunicatorFailed."""
        step, incoming = part.target_step, [each for each in part.transfers if each.destination == self.rank]
        if part.restore is RestoreSource.CHECKPOINT:
            if step not in arriving.checkpoints:
                self.broken.append(f"3 nothing lost: rank {self.rank} is to load step {step}, which no checkpoint has")
            self.step, self.wrong = step, False
        elif part.restore is RestoreSource.NOTHING:
            if self.step not in {0, WORTHLESS}:
                self.broken.append(f"4 same numbers: rank {self.rank} begins at the first step, and holds {self.step}")
            self.step = 0
        elif arriving.cut:
            self.step = TORN if incoming else self.step
            raise CommunicatorFailed("cut")
        elif incoming:
            if set(arriving.shards) != {step}:
                self.broken.append(f"4 same numbers: rank {self.rank} gets steps {arriving.shards} for {step}")
            self.step, self.wrong = step, arriving.wrong

    def recall(self, step: int, part: RepairPart | None, arriving: Linked) -> None:
        """Find the local state as of a step. Raises StateLost."""
        replica = part is not None and part.restore is RestoreSource.REPLICA
        if replica and not arriving.own and LocalStateCopy(self.rank, step) not in self.box:
            raise StateLost(f"no copy of the local state as of step {step}")

    def roll_back(self, step: int) -> None:
        """Be as of a step, and hand the local state to the peer that keeps it."""
        self.keep(self.rank, step)
        self.keep(self.ward, step)
        self.gradients, self.struck = None, False

    # --- what is said of it -------------------------------------------------------------------------------------

    def judge_report(self, report: StepReport) -> None:
        """Hold against it what is said at barrier one."""
        finals = self.gradients == report.committed + 1
        if (report.clean and self.step != report.committed) or report.ready > finals:
            what = f"says {report.committed}, ready {report.ready}, and holds {self.step}, {self.gradients}"
            self.broken.append(f"4 same numbers: rank {self.rank} {what}")
        if finals and report.clean and not report.ready and not self.wrong:
            self.broken.append(f"3 nothing lost: rank {self.rank} could finish update {self.gradients}, and denies it")

    def judge_ready(self, ready: RankReady, linked: int) -> None:
        """Hold against it what is said at barrier two. `linked`: the generation whose links it has."""
        if (self.step, linked) != (ready.step, ready.generation):
            what = f"is ready for {ready.step} in {ready.generation}, and holds {self.step} in {linked}"
            self.broken.append(f"4 same numbers: rank {self.rank} {what}")

    def judge_barrier(self, step: int) -> None:
        """Whoever enters the commit barrier has its own local state and the one that it keeps for a peer."""
        if not {LocalStateCopy(self.rank, step), LocalStateCopy(self.ward, step)} <= {*self.box}:
            self.broken.append(f"3 nothing lost: rank {self.rank} enters the commit barrier without the peer copy")

    def judge_training(self, step: int, count: int, *, linked: bool) -> None:
        """Whoever trains stands where all resume, and has links to all."""
        if (self.step, count) != (step, step):
            self.broken.append(f"2 same step: rank {self.rank} holds {self.step} and resumes at {step}")
        if not linked:
            self.broken.append(f"1 one generation: rank {self.rank} trains without links")

    def judge_saving(self, order: SaveCheckpoint) -> None:
        """What is saved is of the step that it is said to be of."""
        if order.shards and self.step != order.step:
            self.broken.append(f"4 same numbers: rank {self.rank} saves {self.step} as step {order.step}")
