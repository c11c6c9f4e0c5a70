"""A process's part in the votes of an exploration: the product's own, on what the process holds."""

from typing import TYPE_CHECKING, Any

from midstep.processor.framework import ShardDigest
from midstep.processor.votes import Votes
from midstep.protocol.types import Activity, FaultKind, FaultLevel, JobSettings

from .snapshot import digest

if TYPE_CHECKING:
    from .life import Life

_ONE_OF = 2**63


class Voting:
    """It stands for the runtime and the framework of one process. `said`: at the commit barrier of its step."""

    changes_in_updates_alone = True

    def __init__(self, life: "Life") -> None:
        self._life = life
        self.rank, self.world_size = life.rank, life.birth.order.world_size
        self.settings = JobSettings(integrity_every_steps=1)
        self.step_clock = self.black_box = self
        self.votes = Votes(self, self, life.step_state)  # type: ignore[arg-type]
        self.said: bytes | None = None
        self._was_wrong = False

    # --- what the votes ask for ---------------------------------------------------------------------------------

    activity = Activity.COMPUTING

    def doing(self, activity: Activity) -> None:
        """Be a step clock."""

    def set_votes(self, step: int, unchecked: int) -> None:
        """A vote has passed here."""
        if self._was_wrong:
            self._life.holdings.broken.append(f"10 no wrong state passes: rank {self.rank} passes one of step {step}")

    def shards(self) -> list[Any]:
        """Nothing is left out of the votes."""
        return []

    def digests(self) -> dict[str, ShardDigest]:
        """Hash what is held."""
        holdings = self._life.holdings
        value = int.from_bytes(digest((holdings.step, holdings.wrong))[:8], "big") % _ONE_OF
        return {self._life.birth.shard: ShardDigest(value, value)}

    def report_fault(self, kind: FaultKind, detail: str, level: FaultLevel = FaultLevel.SOFTWARE, **more: Any) -> None:
        """Report what a vote has found, if it is there."""
        if kind is FaultKind.ODD_COPY and not self._life.holdings.flipped:
            self._life.holdings.broken.append(
                f"11 the right rank is blamed: rank {self.rank}, where nothing has flipped"
            )
        self._life.report(kind, level=level, **more)

    # --- a step -------------------------------------------------------------------------------------------------

    def resumed(self) -> None:
        """Begin to train."""
        self.said = None
        self.votes.resumed(self._life.step_state.count)

    def begins(self) -> None:
        """Hash what is here, if the step has a vote."""
        self.said = None
        self.votes.begins(self._life.step_state.count, wanted=False)

    def enters(self) -> None:
        """Come to the commit barrier."""
        ballot = self.votes.ballot(step_s=0.1)
        self._was_wrong = self._life.holdings.wrong
        self.said = None if ballot is None else ballot.said()
        self._ballot = ballot

    def hears(self, said: tuple[bytes, ...]) -> None:
        """Pass it. Raises Interrupted where the vote is lost."""
        if self._ballot is not None:
            for each in said:
                self._ballot.heard(each)
            self.votes.counted(self._life.step_state.count, self._ballot)

    @property
    def everything(self) -> list[object]:
        """All that decides what will ever be said."""
        votes = self.votes
        found = {name: each.whole for name, each in (votes._found or {}).items()}
        sets = [sorted(each) for each in (votes._received, votes._proven, votes._left_out, votes._reported)]
        doubtful = sorted(votes._doubtful.items())
        return [self.said, self._was_wrong, votes.agreed, votes._resumed, votes._steady, found, sets, doubtful]
