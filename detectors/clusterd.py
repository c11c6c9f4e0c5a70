"""The dialogue with ClusterD, MindCluster's recovery service, which hears of faults first and has the last word. Pure.

ClusterD leads the processes of a job through one fault after the other: `stopTrain`, a report that they have stopped,
`globalFault` with all ranks that are hurt, a report of what they can do, `changeStrategy` with what they are to do, and
a report of what came of it. Usually TaskD's manager is at the other end. Here it is midstep, whose controller decides
by its own ladder and recovers at once, so:

- What ClusterD says of devices and nodes becomes a report of a fault. It first names the processes that are to end
  (`preExitProcess`), and begins to lead their fault when it hears that they have ended.
- What ClusterD asks is answered from the job's status: as soon as that shows that the ranks have stopped, which rungs
  are left, and what became of the incident.
- `dump`, `exit` and `killMaster` end the job, whatever the ladder would do: the platform has decided so.
- ClusterD hears of a fault that midstep knows first if its rung needs a node from the platform.

What ClusterD has done while all ranks stand still is no fault, and has a dialogue of its own (`clusterd_maintenance`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from ..protocol.incidents import Incident, JobStatus, Outcome
from ..protocol.types import NO_EMERGENCY_CHECKPOINT, Assertion, FaultKind, FaultLevel, FaultReport, Rung
from . import clusterd_signals as d
from .clusterd_maintenance import Maintenance

STOPPED_S = 5.0  # a fault that stops no rank within this time is one that none needs to stop for
_NEEDS_A_NODE = frozenset({Rung.RECOVER, Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB})


class _Question(NamedTuple):
    """A signal that waits for an answer, since when, and how many incidents there were before."""

    signal: d.Signal
    asked_s: float
    incidents: int


class Dialogue:
    """The job's side of the dialogue. `name`: the detector in whose name faults are reported. Any clock will do."""

    def __init__(self, name: str, ranks_per_node: int) -> None:
        self._name = name
        self._ranks_per_node = ranks_per_node
        self._question: _Question | None = None
        self._last: d.Signal | None = None
        self._asserted: dict[str, FaultReport] = {}
        self._listens = True  # ClusterD: it forgets what it hears before it takes a subscription in
        self._is_forgotten = False  # by ClusterD, what is asserted
        self._led = 0  # the incident of the fault that ClusterD leads, or the next one
        self._named: frozenset[int] = frozenset()  # ranks that ClusterD knows of from this side
        self._told = 0  # the latest incident that ClusterD knows of, or need not know
        self._incidents: int | None = None  # at the last look
        self._maintenance = Maintenance()

    @property
    def is_waiting(self) -> bool:
        """Say whether ClusterD waits for something that the job will show."""
        return self._question is not None or self._maintenance.is_waiting

    def began(self) -> None:
        """Begin again: a new subscription has ClusterD forget whatever it had begun."""
        self._question = self._last = None
        self._named = frozenset()
        self._listens = False
        self._is_forgotten = bool(self._asserted)
        self._told = 0 if self._incidents is None else max(0, self._told - 1)
        self._maintenance.leave()

    def refused(self, action: d.Steer, why: str) -> list[d.Action]:
        """Take in that the job does not do what was asked for."""
        return [*self._maintenance.refused(action.control, why)]

    def heard(self, signal: d.Heard, status: JobStatus, now: float) -> list[d.Action]:
        """Take in a signal. `status` is the job's, just before."""
        if isinstance(signal, d.SwitchNics):
            return [*self._maintenance.switch_nics(signal, status)]
        if isinstance(signal, d.StressTest):
            return [*self._maintenance.test(signal, status)]
        self._listens = True
        if signal.uuid and signal == self._last:
            return []  # sent twice
        self._last = signal if signal.type != d.SignalType.KEEP_ALIVE else self._last
        known = _SIGNALS.get(signal.type)
        if known is None:
            return [
                d.Remark(
                    f"ClusterD's signal {signal.type} {list(signal.actions)} is not obeyed: see docs/mindcluster.md"
                )
            ]
        return [*known(self, signal, status, now)]

    def looked(self, status: JobStatus, now: float) -> list[d.Action]:
        """Take in the job's status; answer what it answers."""
        actions: list[d.Action] = []
        latest = status.incidents[-1] if status.incidents else None
        if self._incidents is None and latest is not None and latest.outcome is not Outcome.OPEN:
            self._told = latest.number  # what was over before this began is no news
        self._incidents = 0 if latest is None else latest.number
        question = self._question
        if question is None:
            actions += self._news(latest) if self._listens else ()
        else:
            answer = _ANSWERS[question.signal.type](self, question, status, now)
            if answer is not None:
                self._question = None
                actions += answer
        return [*actions, *self._maintenance.looked(status, now)]

    def _news(self, latest: Incident | None) -> Iterator[d.Action]:
        if latest is None or latest.number <= self._told or latest.rung not in _NEEDS_A_NODE:
            return
        self._told = latest.number
        if any(report.seen_by == self._name or report.kind is FaultKind.REQUESTED for report in latest.reports):
            return
        ranks = {report.rank: _type_of(report.kind) for report in latest.reports if report.rank is not None}
        if ranks and latest.outcome is Outcome.OPEN:
            self._named = frozenset(ranks)
            self._led = latest.number
            yield d.ReportProcessFault(tuple(d.FaultyRank(rank, kind) for rank, kind in sorted(ranks.items())))

    def _ask(self, signal: d.Signal, status: JobStatus, now: float) -> None:
        self._question = _Question(signal, now, status.incidents[-1].number if status.incidents else 0)

    # --- signals ------------------------------------------------------------------------------------------------------

    def _stop_train(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        if d.PAUSE_TRAIN in signal.actions:
            yield from self._maintenance.pause(signal, now)
            return
        self._maintenance.leave()
        self._ask(signal, status, now)
        known, self._named = self._named, frozenset()
        if not known:
            self._led = _current(status)
        yield from self._end_processes(signal.ranks, _being_replaced(status) | known)

    def _pre_exit_process(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        """End the processes at fault, and tell ClusterD, which begins to lead their fault when it hears of them."""
        ranks = tuple(each for each in signal.ranks if each.rank // self._ranks_per_node in signal.nodes)
        if not self._named:
            self._led = _current(status)
        yield from self._end_processes(ranks, _being_replaced(status) | self._named)
        if any(each.rank not in self._named for each in ranks):
            self._named |= {each.rank for each in ranks}
            yield d.ReportProcessFault(ranks)

    def _end_processes(self, ranks: Iterable[d.FaultyRank], hurt: frozenset[int]) -> Iterator[d.Action]:
        for rank, kind in ranks:
            if rank not in hurt:
                yield self._assert(f"rank{rank}", _kind_of(kind), _level_of(kind), rank=rank)

    def _global_fault(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        yield from self._leave_nodes(signal, status, now)
        strategies = tuple(strategy for strategy in d.RecoverStrategy if _is_left(strategy, status))
        yield d.ReportRecoverStrategy(signal.ranks, strategies)

    def _leave_nodes(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        """Have the nodes left whose processes are to end. The platform is about to give the job others."""
        latest = status.incidents[-1] if status.incidents else None
        have_moved = latest is not None and latest.number >= self._led and latest.rung in _NEEDS_A_NODE
        for index in signal.nodes:
            ranks = range(index * self._ranks_per_node, (index + 1) * self._ranks_per_node)
            if latest is not None and have_moved and not set(ranks).isdisjoint(latest.replaced):
                continue  # they are on another node by now
            nodes = dict.fromkeys(each.node for each in status.ranks if each.rank in ranks and each.node)
            for node in nodes:
                yield self._assert(f"node/{node}", FaultKind.NODE, FaultLevel.SEPARATE_NPU, node=node)

    def _change_strategy(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        if signal.strategy == d.CONTINUE:
            yield from self._maintenance.train_on(now)
            return
        if signal.strategy in {d.RecoverStrategy.EXIT, d.RecoverStrategy.DUMP}:
            yield d.StopJob(f"ClusterD has decided to {signal.strategy}")
        else:
            yield from self._withdraw()
        if signal.strategy != d.RecoverStrategy.EXIT:  # of that no report is asked for
            self._ask(signal, status, now)

    def _save_and_exit(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        yield from self._change_strategy(msgspec.structs.replace(signal, strategy=d.RecoverStrategy.DUMP), status, now)

    def _kill_master(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        self._question = None
        yield d.StopJob("ClusterD has given the job up (killMaster)", insist=True)

    def _keep_alive(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        """Tell ClusterD again of what it has found and forgotten, now that it listens; take back what is recovered."""
        if not self._is_forgotten:
            return
        self._is_forgotten = False
        latest = status.incidents[-1] if status.incidents else None
        if latest is None or latest.outcome is not Outcome.OPEN:
            yield from self._withdraw()
            return
        ranks = {each.rank: _type_of(each.kind) for each in self._asserted.values() if each.rank is not None}
        if ranks:
            self._named |= ranks.keys()
            yield d.ReportProcessFault(tuple(d.FaultyRank(rank, kind) for rank, kind in sorted(ranks.items())))

    def _nothing(self, signal: d.Signal, status: JobStatus, now: float) -> Iterator[d.Action]:
        return iter(())

    def _assert(
        self, fault_id: str, kind: FaultKind, level: FaultLevel, *, rank: int | None = None, node: str | None = None
    ) -> d.Action:
        report = FaultReport(
            kind=kind,
            at_s=0.0,
            seen_by=self._name,
            detail="ClusterD has found it",
            rank=rank,
            node=node,
            level=level,
            fault_id=fault_id,
            assertion=Assertion.OCCUR,
        )
        self._asserted[fault_id] = report
        return d.TellFault(report)

    def _withdraw(self) -> Iterator[d.Action]:
        """Take back what was asserted: devices are well, or the ranks are elsewhere, when ClusterD says what to do."""
        for report in self._asserted.values():
            yield d.TellFault(msgspec.structs.replace(report, assertion=Assertion.RECOVER))
        self._asserted = {}
        self._named = frozenset()

    # --- answers ------------------------------------------------------------------------------------------------------

    def _stopped(self, question: _Question, status: JobStatus, now: float) -> Iterable[d.Action] | None:
        ranks = question.signal.ranks
        if status.exit_code is not None:
            return [d.ReportStopComplete(d.NOT_READY, f"the job has ended: {status.reason}", ranks)]
        is_new = bool(status.incidents) and status.incidents[-1].number > question.incidents
        if is_new and status.incidents[-1].outcome is not Outcome.OPEN:
            return [d.ReportStopComplete(d.OK, "stopped, and recovered", ranks)]
        if status.phase not in d.TRAINING:
            return [d.ReportStopComplete(d.OK, f"the job is {status.phase}", ranks)]
        if now - question.asked_s >= STOPPED_S and not is_new:
            return [d.ReportStopComplete(d.OK, "no rank has to stop for it", ranks)]
        return None

    def _changed(self, question: _Question, status: JobStatus, now: float) -> Iterable[d.Action] | None:
        strategy = question.signal.strategy
        if strategy == d.RecoverStrategy.DUMP or question.signal.type == d.SignalType.SAVE_AND_EXIT:
            return self._dumped(status)
        failed = d.RETRY_FAILED if strategy == d.RecoverStrategy.RETRY else d.UNRECOVERABLE
        if status.exit_code is not None:
            return [d.ReportRecoverStatus(strategy, d.UNRECOVERABLE, f"the job has ended: {status.reason}")]
        latest = status.incidents[-1] if status.incidents else None
        if latest is None or latest.outcome is not Outcome.OPEN:
            came = "nothing had to be recovered" if latest is None else f"incident {latest.number}: {latest.outcome}"
            return [d.ReportRecoverStatus(strategy, d.OK, came)]
        if strategy == d.RecoverStrategy.RETRY and latest.rung not in {None, Rung.RETRY_STEP}:
            return [d.ReportRecoverStatus(strategy, failed, f"the ladder is at {latest.rung}")]
        if now - question.asked_s >= d.REPORTED_S:
            return [d.ReportRecoverStatus(strategy, failed, f"incident {latest.number} is still open")]
        return None

    def _dumped(self, status: JobStatus) -> Iterable[d.Action] | None:
        if status.exit_code is None:
            return None
        failed = NO_EMERGENCY_CHECKPOINT in status.reason
        return [d.ReportRecoverStatus(d.RecoverStrategy.DUMP, d.DUMP_FAILED if failed else d.OK, status.reason)]


_Heard = Callable[[Dialogue, d.Signal, JobStatus, float], Iterator[d.Action]]
_Looked = Callable[[Dialogue, _Question, JobStatus, float], Iterable[d.Action] | None]
_SIGNALS: dict[str, _Heard] = {
    d.SignalType.STOP_TRAIN: Dialogue._stop_train,
    d.SignalType.GLOBAL_FAULT: Dialogue._global_fault,
    d.SignalType.CHANGE_STRATEGY: Dialogue._change_strategy,
    d.SignalType.SAVE_AND_EXIT: Dialogue._save_and_exit,
    d.SignalType.KILL_MASTER: Dialogue._kill_master,
    d.SignalType.FAULT_NODES_EXIT: Dialogue._leave_nodes,
    d.SignalType.PRE_EXIT_PROCESS: Dialogue._pre_exit_process,
    d.SignalType.KEEP_ALIVE: Dialogue._keep_alive,
    d.SignalType.PAUSE_START_AGENT: Dialogue._nothing,
    d.SignalType.CONTINUE_START_AGENT: Dialogue._nothing,
}
_ANSWERS: dict[str, _Looked] = {
    d.SignalType.STOP_TRAIN: Dialogue._stopped,
    d.SignalType.CHANGE_STRATEGY: Dialogue._changed,
    d.SignalType.SAVE_AND_EXIT: Dialogue._changed,
}


def _current(status: JobStatus) -> int:
    """Return the number of the incident that is open, or of the next one."""
    latest = status.incidents[-1] if status.incidents else None
    return 1 if latest is None else latest.number + (latest.outcome is not Outcome.OPEN)


def _being_replaced(status: JobStatus) -> frozenset[int]:
    latest = status.incidents[-1] if status.incidents else None
    return frozenset(latest.replaced) if latest is not None and latest.outcome is Outcome.OPEN else frozenset()


def _kind_of(fault_type: str) -> FaultKind:
    kinds = {d.RankFaultType.MEMORY: FaultKind.MEMORY, d.RankFaultType.LINK: FaultKind.NETWORK}
    return (
        kinds.get(d.RankFaultType(fault_type), FaultKind.DEVICE)
        if fault_type in {*d.RankFaultType}
        else FaultKind.DEVICE
    )


def _level_of(fault_type: str) -> FaultLevel:
    """A link's operators are retried by the ranks, which say so themselves; all else is held until ClusterD decides."""
    return FaultLevel.NOT_HANDLE if fault_type == d.RankFaultType.LINK else FaultLevel.RESTART_REQUEST


def _type_of(kind: FaultKind) -> d.RankFaultType:
    if kind in {FaultKind.MEMORY, FaultKind.MEMORY_MULTI_BIT}:
        return d.RankFaultType.MEMORY
    return d.RankFaultType.LINK if kind in {FaultKind.LINK, FaultKind.COMMUNICATION} else d.RankFaultType.NORMAL


_RUNGS = {
    d.RecoverStrategy.RETRY: (Rung.RETRY_STEP,),
    d.RecoverStrategy.RECOVER: (Rung.RECOVER_IN_PLACE, Rung.RECOVER),
    d.RecoverStrategy.DUMP: (),
    d.RecoverStrategy.EXIT: (),
}


def _is_left(strategy: d.RecoverStrategy, status: JobStatus) -> bool:
    """Say whether a rung of a strategy has something left of each of its budgets; what needs no rung always is."""
    rungs = _RUNGS[strategy]
    spent = {each.name.partition(" ")[0] for each in status.budgets if each.used >= each.limit}
    return not rungs or any(rung not in spent for rung in rungs)
