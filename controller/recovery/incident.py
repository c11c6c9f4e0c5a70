"""The open incident as one frozen value, and the record of all incidents.

Decisions are made from `OpenIncident`: who is at fault, what was tried, and what cannot help any more. It is empty
while nothing is wrong, and empty again when the job has resumed. `History` is what operators read (`midstep report`):
it turns what happens into `Incident` records with phases, decisions and reasons. The two are kept apart so that
deciding and remembering do not mix.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ...policies.budgets import Spent
from ...protocol.compat import StrEnum
from ...protocol.incidents import HoldRecord, Incident, Outcome, PhaseRecord, RankPhase
from ...protocol.types import Decision, FaultReport, RestoreSource, Rung


class Verdict(StrEnum):
    """The verdict on a rank at fault."""

    CULPRIT = "culprit"  # its process has to be replaced
    MENDING = "mending"  # its process can mend the fault itself, and has not been asked to
    MENDED = "mended"  # its process has been asked to mend the fault itself


class Case(msgspec.Struct, frozen=True):
    """A rank at fault, and by which report."""

    verdict: Verdict
    report: FaultReport


class Attempt(msgspec.Struct, frozen=True):
    """One way from a fault to barrier one and on. Ranks that fail before all are stopped widen it.

    `replaced` are the ranks at fault that get another process by it, each with its fault; `cost` is what its rungs take
    from the budgets.
    """

    rungs: tuple[Rung, ...] = ()
    cost: tuple[Spent, ...] = ()
    replaced: dict[int, FaultReport] = {}


class OpenIncident(msgspec.Struct, frozen=True):
    """The facts of the incident under way; each change returns another value.

    `cases`: ranks at fault that no generation has dealt with, and those that mend themselves. `suspicions`: something
    is wrong, and no rank is at fault yet. `replaced`: ranks that have got another process. `taken`: the rungs of
    earlier attempts; `attempt`: the one under way. `ruled_out`: rungs that have failed, or cannot help, and why.
    `trusted_step`: later state may be made of struck memory, on all ranks.
    """

    cases: dict[int, Case] = {}
    suspicions: tuple[FaultReport, ...] = ()
    replaced: frozenset[int] = frozenset()
    taken: tuple[Rung, ...] = ()
    attempt: Attempt = Attempt()
    ruled_out: dict[Rung, str] = {}
    relinks: int = 0  # how often the communicators were linked anew
    over_devices: bool = False  # a repair over the devices' own links was ordered
    trusted_step: int | None = None
    rank_failures: dict[int, int] = {}  # how often each rank has failed
    node_failures: dict[str, int] = {}  # the most often that a rank of each node has

    @property
    def culprits(self) -> dict[int, FaultReport]:
        """The ranks whose process has to be replaced, each with its fault."""
        return self.held(Verdict.CULPRIT)

    def held(self, *verdicts: Verdict) -> dict[int, FaultReport]:
        """Return the ranks of which one of these is held, each with its fault."""
        return {rank: case.report for rank, case in self.cases.items() if case.verdict in verdicts}

    def verdict(self, rank: int | None) -> Verdict | None:
        """Return what is held of a rank; None: nothing."""
        case = None if rank is None else self.cases.get(rank)
        return None if case is None else case.verdict

    # --- what is seen -----------------------------------------------------------------------------------------------

    def suspect(self, report: FaultReport) -> "OpenIncident":
        """Something is wrong, and it is not known whose fault it is."""
        return replace(self, suspicions=(*self.suspicions, report))

    def suspect_only(self, suspicions: Iterable[FaultReport] = ()) -> "OpenIncident":
        """All other suspicions are answered."""
        return replace(self, suspicions=tuple(suspicions))

    def blame(self, rank: int, report: FaultReport) -> "OpenIncident":
        """A rank's process has to be replaced; the first fault that says so counts."""
        if self.verdict(rank) is Verdict.CULPRIT:
            return self
        others = {each: case for each, case in self.cases.items() if each != rank}
        return replace(self, cases={**others, rank: Case(Verdict.CULPRIT, report)})

    def let_mend(self, rank: int, report: FaultReport) -> "OpenIncident":
        """A rank's process can mend its fault itself."""
        if self.verdict(rank) is Verdict.MENDING:
            return self
        return replace(self, cases={**self.cases, rank: Case(Verdict.MENDING, report)})

    def doubt(self, step: int) -> "OpenIncident":
        """State of later steps may be made of struck memory."""
        return replace(self, trusted_step=step if self.trusted_step is None else min(step, self.trusted_step))

    def failed(self, ranks: Mapping[int, str]) -> tuple["OpenIncident", list[str]]:
        """Ranks have failed, each on its node; return also the nodes of which that is one more failure.

        Processes of a node that fail together are one failure of the node, and so are those that follow in the same
        incident; a process that was started again in it and fails again is another one.
        """
        of_ranks, of_nodes, more = {**self.rank_failures}, {**self.node_failures}, []
        for rank, node in ranks.items():
            of_ranks[rank] = times = of_ranks.get(rank, 0) + 1
            if node and times > of_nodes.get(node, 0):
                of_nodes[node] = times
                more.append(node)
        return replace(self, rank_failures=of_ranks, node_failures=of_nodes), more

    # --- what is done about it --------------------------------------------------------------------------------------

    def rule_out(self, rung: Rung, reason: str) -> "OpenIncident":
        """A rung has failed, or cannot help; the first reason counts."""
        return replace(self, ruled_out={**self.ruled_out, rung: self.ruled_out.get(rung, reason)})

    def take(self, rung: Rung, charges: tuple[Spent, ...]) -> "OpenIncident":
        """Take a rung in the attempt under way, for which each rung is charged once, whatever it is widened by."""
        cost = {(spent.rung, spent.role): spent for spent in self.attempt.cost}
        for spent in charges:
            known = cost.get((spent.rung, spent.role), spent)
            ranks, nodes = {*known.ranks, *spent.ranks}, {*known.nodes, *spent.nodes}
            cost[spent.rung, spent.role] = replace(spent, ranks=tuple(sorted(ranks)), nodes=tuple(sorted(nodes)))
        rungs = tuple(dict.fromkeys((*self.attempt.rungs, rung)))
        return replace(self, attempt=replace(self.attempt, rungs=rungs, cost=tuple(cost.values())))

    def treat(self, ranks: Iterable[int]) -> "OpenIncident":
        """The attempt under way replaces these ranks; others that can mend themselves do so."""
        ranks = dict.fromkeys(ranks)
        faults = {rank: self.cases[rank].report for rank in ranks if rank in self.cases}
        mended = {
            rank: Case(Verdict.MENDED, case.report) if case.verdict is Verdict.MENDING else case
            for rank, case in self.cases.items()
            if rank not in ranks or case.verdict is Verdict.CULPRIT  # until the generation is opened
        }
        attempt = replace(self.attempt, replaced={**self.attempt.replaced, **faults})
        return replace(self, attempt=attempt, cases=mended)

    def link_again(self, limit: int) -> tuple["OpenIncident", bool]:
        """The communicators could not be linked; say also whether that may be tried once more."""
        again = self.relinks + 1 < limit
        return replace(self, relinks=self.relinks + 1 if again else 0), again

    def repair_over_devices(self) -> "OpenIncident":
        """Lost shards are ordered to travel over the devices' own links."""
        return replace(self, over_devices=True)

    def return_replaced(self) -> "OpenIncident":
        """The attempt under way has failed, and no further rank is at fault: those that it was about are."""
        cases = {rank: Case(Verdict.CULPRIT, report) for rank, report in self.attempt.replaced.items()}
        return replace(self, cases={**self.cases, **cases})

    def replaces_all(self, size: int) -> "OpenIncident":
        """Every rank of a world of `size` gets another process, as soon as there are nodes for them."""
        return replace(self, replaced=self.replaced.union(range(size)))

    def opened(self, replaced: Iterable[int]) -> "OpenIncident":
        """A generation is opened, in which these ranks get another process: the culprits are dealt with."""
        cases = {rank: case for rank, case in self.cases.items() if case.verdict is not Verdict.CULPRIT}
        return replace(self, cases=cases, suspicions=(), replaced=self.replaced.union(replaced))


MAX_INCIDENTS = 1000
MAX_REPORTS_PER_INCIDENT = 200
MAX_ROWS = 100_000  # of all incidents that have ended: what each rank did, and its process ids


@dataclass
class History:
    """All incidents of a job; the last one may be open."""

    holds: list[HoldRecord] = field(default_factory=list)  # the latest ones
    ignored: dict[str, int] = field(default_factory=dict)  # reports that changed nothing, by the reason
    _incidents: list[Incident] = field(default_factory=list)
    # Of the latest incident, not yet in it: there is one for each rank and phase.
    _rows: list[RankPhase] = field(default_factory=list)

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, the latest ones of a long history."""
        self._enter_rows()
        return self._incidents

    @property
    def open(self) -> Incident | None:
        """The incident that has not ended, if there is one."""
        if self._incidents and self._incidents[-1].outcome is Outcome.OPEN:
            return self._incidents[-1]
        return None

    def report(self, report: FaultReport, pids: Mapping[int, int], now: float, committed: int) -> bool:
        """Add a fault report to the open incident, or open one with it; say whether one was opened."""
        opened = self.open is None
        if opened:
            self._enter_rows()
            number = self._incidents[-1].number + 1 if self._incidents else 1
            self._incidents.append(Incident(number, began_s=now, pids_before=dict(pids), committed_before=committed))
            del self._incidents[:-MAX_INCIDENTS]
            self._shorten()
        current = self._incidents[-1]
        if len(current.reports) < MAX_REPORTS_PER_INCIDENT:
            self._change(reports=(*current.reports, report), began_s=min(current.began_s, report.at_s))
        return opened

    def plan(self, report: FaultReport, pids: Mapping[int, int], now: float, committed: int) -> None:
        """Open an incident that begins now, whenever its cause was seen: what was prepared while all went on."""
        self.report(report, pids, now, committed)
        self._change(began_s=now)

    def decided(self, decision: Decision) -> None:
        """Remember what was decided, with its reasons."""
        if self.open:
            self._change(decisions=(*self.open.decisions, decision))

    def opened(self, generation: int, replaced: Iterable[int]) -> None:
        """Remember that a generation was opened and whose processes it replaces."""
        if self.open:
            ranks = tuple(sorted({*self.open.replaced, *replaced}))
            self._change(generations=(*self.open.generations, generation), replaced=ranks)

    def replaced(self, ranks: Iterable[int]) -> None:
        """Remember whose processes end, also of ranks that the next generation does not have."""
        if self.open:
            self._change(replaced=tuple(sorted({*self.open.replaced, *ranks})))

    def entered(self, name: str, generation: int, now: float) -> None:
        """Close the phase that was under way and begin the next."""
        if self.open:
            phases = [self._ended(phase, now) for phase in self.open.phases]
            self._change(phases=(*phases, PhaseRecord(generation, name, now)))

    def rank_phases(self, generation: int, rank: int, phases_s: Mapping[str, float]) -> None:
        """Add one rank's own timings."""
        if self.open:
            self._rows += (RankPhase(generation, rank, name, duration) for name, duration in phases_s.items())

    def planned(
        self, restore: RestoreSource, reasons: tuple[str, ...], target: int, committed: int, *, is_current: bool
    ) -> None:
        """Remember where state comes from, and the step that will be repeated.

        `is_current`: `committed` is how far training was when it was interrupted, and not only what was last known.
        """
        if self.open:
            self._change(
                restore=restore,
                repair_reasons=reasons,
                resumed_step=target,
                committed_before=max(self.open.committed_before, committed),
                committed_is_known=is_current,
            )

    def moved(self, size_bytes: int, *, over_devices: int = 0) -> None:
        """Add bytes that a rank received, and how many of these came over the devices' own links."""
        if self.open and size_bytes:
            of_devices = self.open.bytes_over_devices + over_devices
            self._change(bytes_moved=self.open.bytes_moved + size_bytes, bytes_over_devices=of_devices)

    def resumed(self, at_s: float, pids: Mapping[int, int], median_step_s: float) -> None:
        """Close the incident: the first new step is committed everywhere, at `at_s`, but not before what led to it."""
        if self.open:
            at_s = max(at_s, self.open.began_s, *(phase.began_s for phase in self.open.phases))
            self._change(resumed_s=at_s, pids_after=dict(pids), median_step_s=median_step_s)
            self._close(at_s, Outcome.RESUMED, "all ranks have committed the repeated step")

    def dismissed(self, now: float, reason: str) -> None:
        """Close the incident: nothing was wrong."""
        if self.open:
            self._close(now, Outcome.DISMISSED, reason)

    def stopped(self, now: float, pids: Mapping[int, int], reason: str) -> None:
        """Close the incident: the job stops."""
        if self.open:
            self._change(pids_after=dict(pids))
            self._close(now, Outcome.STOPPED, reason)

    def _enter_rows(self) -> None:
        if self._rows:
            self._change(rank_phases=(*self._incidents[-1].rank_phases, *self._rows))
            self._rows = []

    def _shorten(self) -> None:
        """Leave out what each rank did in the earliest incidents, so that the history of a big job stays small."""
        room = MAX_ROWS
        for index in range(len(self._incidents) - 2, -1, -1):
            incident = self._incidents[index]
            if incident.abridged:
                return
            room -= len(incident.rank_phases) + len(incident.pids_before) + len(incident.pids_after)
            if room < 0:
                self._incidents[index] = incident.without_ranks()

    def _close(self, now: float, outcome: Outcome, reason: str) -> None:
        phases = tuple(self._ended(phase, now) for phase in self._incidents[-1].phases)
        self._change(phases=phases, outcome=outcome, ended_reason=reason)

    @staticmethod
    def _ended(phase: PhaseRecord, now: float) -> PhaseRecord:
        return phase if phase.ended_s is not None else replace(phase, ended_s=max(now, phase.began_s))

    def _change(self, **fields: object) -> None:
        self._incidents[-1] = replace(self._incidents[-1], **fields)
