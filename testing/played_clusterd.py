"""ClusterD as a client of its service `Recover` meets it, played: one job, its state machine, and its ways.

Like the real one (MindCluster 26.1, `pkg/application/recover`) it takes in nothing of a job that has not registered,
forgets what it had begun when a subscription begins or ends, listens to a report only in the state that waits for it,
and gives up when none comes. Of a fault that it finds it says which processes are to end (`preExitProcess`), and no
more: it leads the fault once the job reports it; a fault that may be retried it leads at once. It has the job pause for
another network port or for a stress test, and takes a fault meanwhile, or a device that the test finds, as it takes one
that the job reports. Each fault that is through ends the subscription. Its waits are shorter, it says signals twice,
and what it would have Kubernetes do is only noted.
"""

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import Any, NamedTuple

import grpc

from ..detectors.clusterd_service import CALLS, LEADS, MESSAGES, SERVICE, SUBSCRIPTIONS

FLUSH_S = 0.2  # the real one waits for 10 s or more, for faults that belong together
FOUND_S = 10.0  # so long the real one waits before it says what it has found, unless it leads a fault already
REPORT_S = 60.0  # 15 minutes
KEEP_ALIVE_S = 1.0
TEST_S = 900
_OK, _UNREGISTERED, _UNKNOWN_JOB, _UNRECOVERABLE, _UNINITIALISED, _FAILED = 0, 400, 402, 406, 408, 499
_NORMAL = "1"
_FOUND, _STUCK = "2", frozenset({"3", "4"})  # codes of a stress test: the node is isolated; the rank is recovered
_PORTS, _TESTS = "SubscribeNotifySwitch", "SubscribeNotifyExecStressTest"
_Fault = tuple[list[int], str]


class _Found(NamedTuple):
    """Ranks that a device plugin or the like has found at fault."""

    ranks: list[int]
    kind: str


class PlayedClusterd:
    """Serves one job. `strategies`: those of its PodGroup. `path`: the signals sent and reports taken, in order."""

    def __init__(self, task: str, strategies: Sequence[str], *, ranks_per_pod: int = 1) -> None:
        """Serve nothing before `start`."""
        self.path: list[str] = []
        self.faults_told: list[tuple[int, str]] = []  # by the job itself
        self.results: list[tuple[str, int]] = []
        self.said: list[str] = []  # to the operator who asked for a switch or a test
        self.tested: dict[int, dict[int, tuple[str, str]]] = {}
        self.strategies = tuple(strategies)
        self.subscriptions = 0
        self._task = task
        self._ranks_per_pod = ranks_per_pod
        self._lock = threading.Lock()
        self._began = self._registered = False
        self._signals: queue.Queue[Any] | None = None
        self._expected: frozenset[str] = frozenset()
        self._reports: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._notices: dict[str, queue.Queue[Any]] = {name: queue.Queue(1) for name in (_PORTS, _TESTS)}
        self._work: queue.Queue[_Fault | _Found | Any] = queue.Queue()  # also messages: what is to be done in a pause
        self._epoch = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._lead, name="played-clusterd", daemon=True)

    def start(self) -> "PlayedClusterd":
        """Serve."""
        self._server.start()
        self._thread.start()
        return self

    def close(self) -> None:
        """End at once, as if killed."""
        self._closed.set()
        self._server.stop(0).wait()

    def find(self, ranks: Sequence[int], kind: str = _NORMAL) -> None:
        """Find ranks at fault, as by a device plugin."""
        self._work.put(_Found([*ranks], kind))

    def switch_ports(self, ranks: Mapping[int, bool]) -> None:
        """Have ranks use another network port, or their own again, as an operator of the cluster asks."""
        self._work.put(MESSAGES["SwitchRankList"](rankID=map(str, ranks), op=ranks.values(), jobId=self._task))

    def test(self, operations: Mapping[int, Sequence[int]]) -> None:
        """Have the devices of ranks tested, as an operator of the cluster asks."""
        params = {str(rank): MESSAGES["StressOpList"](ops=each) for rank, each in operations.items()}
        self._work.put(MESSAGES["StressTestRankParams"](stressParam=params, jobId=self._task))

    def kill_master(self) -> None:
        """Give the job up."""
        self._send(signalType="killMaster")

    def drop(self) -> None:
        """End the subscription."""
        with self._lock:
            signals = self._signals
        if signals is not None:
            signals.put(None)

    # --- its calls ----------------------------------------------------------------------------------------------------

    def _handlers(self) -> Any:
        calls = {
            "Init": self._init,
            "Register": self._register,
            "ReportStopComplete": self._stop_complete,
            "ReportRecoverStrategy": self._recover_strategy,
            "ReportRecoverStatus": self._recover_status,
            "ReportProcessFault": self._process_fault,
            "ReplySwitchNicResult": self._switched,
            "ReplyStressTestResult": self._is_tested,
        }
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                calls[name],
                request_deserializer=MESSAGES[takes].FromString,
                response_serializer=MESSAGES["Status"].SerializeToString,
            )
            for name, takes in CALLS.items()
        }
        streams: dict[str, Any] = {
            LEADS: self._subscribe,
            _PORTS: partial(self._notify, _PORTS),
            _TESTS: partial(self._notify, _TESTS),
        }
        for name, brings in SUBSCRIPTIONS.items():
            methods[name] = grpc.unary_stream_rpc_method_handler(
                streams[name],
                request_deserializer=MESSAGES["ClientInfo"].FromString,
                response_serializer=MESSAGES[brings].SerializeToString,
            )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _init(self, request: Any, _: Any) -> Any:
        if request.jobId != self._task:
            return _status(_UNKNOWN_JOB, f"job {request.jobId} not exist")
        self._began = True
        return _status(_OK, "init success")

    def _register(self, request: Any, _: Any) -> Any:
        if not self._began or request.jobId != self._task:
            return _status(_UNINITIALISED, f"job {request.jobId} not inited")
        self._registered = True
        return _status(_OK, "register success")

    def _subscribe(self, request: Any, context: Any) -> Iterator[Any]:
        if not self._registered or request.jobId != self._task:
            context.abort(grpc.StatusCode.UNKNOWN, f"job {request.jobId} not registered")
        mine: queue.Queue[Any] = queue.Queue()
        self._reset(mine)
        self.subscriptions += 1
        while context.is_active() and not self._closed.is_set():
            try:
                signal = mine.get(timeout=KEEP_ALIVE_S)
            except queue.Empty:
                signal = MESSAGES["ProcessManageSignal"](
                    uuid=f"{self._epoch}", jobId=self._task, signalType="keep-alive"
                )
            if signal is None:
                break
            yield signal
        with self._lock:
            if self._signals is mine:
                self._signals = None
                self._epoch += 1

    def _notify(self, name: str, request: Any, context: Any) -> Iterator[Any]:
        if not self._registered or request.jobId != self._task:
            context.abort(grpc.StatusCode.UNKNOWN, f"jobId={request.jobId} not registed, please wait agent register")
        epoch = self._epoch
        while context.is_active() and not self._closed.is_set() and epoch == self._epoch:
            try:
                yield self._notices[name].get(timeout=0.05)
            except queue.Empty:
                continue

    def _switched(self, request: Any, _: Any) -> Any:
        return self._report("switched", request)

    def _is_tested(self, request: Any, _: Any) -> Any:
        return self._report("tested", request)

    def _stop_complete(self, request: Any, _: Any) -> Any:
        return self._report("stopped", request)

    def _recover_strategy(self, request: Any, _: Any) -> Any:
        return self._report("strategies", request)

    def _recover_status(self, request: Any, _: Any) -> Any:
        return self._report("status", request)

    def _process_fault(self, request: Any, _: Any) -> Any:
        if not self._registered:
            return _status(_UNREGISTERED, "not registered")
        told = [(int(each.rankId), each.faultType) for each in request.faultRanks]
        self.faults_told += told
        self.path.append("told")
        self._work.put(([rank for rank, _kind in told], told[0][1]))
        return _status(_OK, "")

    def _report(self, name: str, request: Any) -> Any:
        if not self._registered:
            return _status(_UNREGISTERED, "not registered")
        with self._lock:
            is_expected = name in self._expected
        if not is_expected:
            self.path.append(f"{name} too early or too late")
            return _status(_OK, "")  # the real one answers so, too, and keeps it in a channel that is emptied later
        self._reports.put((name, request))
        return _status(_OK, "")

    # --- its state machine --------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        while not self._closed.is_set():
            try:
                work = self._work.get(timeout=0.05)
            except queue.Empty:
                continue
            epoch = self._epoch
            try:
                if isinstance(work, _Found):
                    self._take_in(work)
                    continue
                fault = work if isinstance(work, tuple) else self._maintain(work, epoch)
                if fault is not None:
                    ranks, kind = fault
                    self._one_fault(ranks, kind, epoch)
            except _Forgotten as error:
                self.path.append(f"forgotten: {error}")

    def _take_in(self, found: _Found) -> None:
        """Have the processes at fault end: the job is to report them. What may be retried is led at once."""
        if found.kind != _NORMAL and "retry" in self.strategies:
            self._work.put((found.ranks, found.kind))
            return
        deadline = time.monotonic() + FOUND_S
        while self._signals is None and time.monotonic() < deadline:
            self._closed.wait(0.05)
        self.path.append("preExitProcess")
        faults = [MESSAGES["FaultRank"](rankId=str(rank), faultType=_NORMAL) for rank in found.ranks]
        pods = sorted({str(rank // self._ranks_per_pod) for rank in found.ranks})
        actions = ["pre exit process"]
        self._send(
            uuid=f"{self._epoch}-{len(self.path)}",
            signalType="preExitProcess",
            actions=actions,
            faultRanks=faults,
            nodeRankIds=pods,
        )

    def _maintain(self, notice: Any, epoch: int) -> _Fault | None:
        """Have something done in a pause; return the fault that it leads to."""
        is_test = notice.DESCRIPTOR.name == "StressTestRankParams"
        asked: dict[str, Any] = {"actions": ["pause_train"], "timeout": TEST_S if is_test else 0}
        stopped = self._exchange("stopTrain", "stopped", epoch, **asked)
        if stopped.status.code == _FAILED:
            self._give_up("pause train failed")
            return None
        self._expect("status", "tested" if is_test else "switched")
        self._notices[_TESTS if is_test else _PORTS].put(notice)
        if is_test:
            self._send(uuid=f"{epoch}-agents", signalType="pauseStartAgent", actions=["pause start agent"])
        name, taken = self._take(epoch)
        is_broken = name == "status"
        if is_broken:
            assert taken.status.code == _UNRECOVERABLE
            self.said.append("a fault meanwhile")
            if is_test:
                taken = self._take(epoch)[1]
        found = self._found_in(taken) if is_test else []
        if is_broken or found or not (is_test or taken.result):
            self.said.append("failed")
            return found, _NORMAL
        going = self._exchange("changeStrategy", "status", epoch, changeStrategy="continue")
        if going.status.code == _FAILED:
            self._give_up("continue train failed")
            return None
        self.said.append("finished")
        self.drop()
        return None

    def _found_in(self, tested: Any) -> list[int]:
        """Return the ranks of nodes that are isolated, else those that were stuck."""
        self._send(uuid=f"{self._epoch}-agents-on", signalType="continueStartAgent", actions=["continue start agent"])
        self.tested = {
            int(rank): {int(each): (found.code, found.result) for each, found in results.rankResult.items()}
            for rank, results in tested.stressResult.items()
        }
        codes = {rank: {code for code, _ in each.values()} for rank, each in self.tested.items()}
        size = self._ranks_per_pod
        pods = {rank // size for rank, each in codes.items() if _FOUND in each}
        isolated = [rank for pod in sorted(pods) for rank in range(pod * size, (pod + 1) * size)]
        return isolated or [rank for rank, each in codes.items() if each & _STUCK]

    def _give_up(self, why: str) -> None:
        self.said.append(why)
        self._send(signalType="killMaster")
        self.path.append("killMaster")

    def _one_fault(self, ranks: list[int], kind: str, epoch: int) -> None:
        stopped = self._exchange("stopTrain", "stopped", epoch, ranks, kind, actions=["stop_train"])
        if stopped.status.code != _OK:
            self._send(signalType="killMaster")
            self.path.append("killMaster")
            return
        self._closed.wait(FLUSH_S)
        pods = sorted({str(rank // self._ranks_per_pod) for rank in ranks})
        in_place = "recover-in-place" in self.strategies
        nodes = [] if kind != _NORMAL or in_place else pods
        reported = self._exchange("globalFault", "strategies", epoch, ranks, kind, nodeRankIds=nodes)
        able = {*reported.strategies, "exit"}
        tried: list[str] = []
        while True:
            strategy = self._choose(kind if ranks else "", able, tried)
            tried.append(strategy)
            if strategy == "exit":
                self._send(signalType="changeStrategy", changeStrategy="exit")
                self.path.append("changeStrategy exit")
                return
            result = self._exchange("changeStrategy", "status", epoch, ranks, kind, changeStrategy=strategy)
            self.results.append((result.strategy, result.status.code))
            if result.status.code == _OK or strategy == "dump":
                self.drop()
                return

    def _choose(self, kind: str, able: set[str], tried: list[str]) -> str:
        wanted = ["retry"] if kind != _NORMAL else []
        for strategy in (*wanted, "recover", "dump"):
            configured = strategy in self.strategies or (
                strategy == "recover" and "recover-in-place" in self.strategies
            )
            if configured and strategy in able and strategy not in tried:
                return strategy
        return "exit"

    def _exchange(
        self, signal: str, report: str, epoch: int, ranks: Sequence[int] = (), kind: str = _NORMAL, **fields: Any
    ) -> Any:
        """Send a signal, twice, and return the report that it asks for. Raises _Forgotten."""
        if epoch != self._epoch:
            raise _Forgotten(signal)
        self._expect(report)
        faults = [MESSAGES["FaultRank"](rankId=str(rank), faultType=kind) for rank in ranks]
        more = fields.get("changeStrategy") or ("pause" if "pause_train" in fields.get("actions", ()) else "")
        self.path.append(" ".join((signal, *more.split())))
        for _ in range(2):
            self._send(uuid=f"{epoch}-{len(self.path)}", signalType=signal, faultRanks=faults, **fields)
        return self._take(epoch)[1]

    def _expect(self, *names: str) -> None:
        with self._lock:
            self._expected, self._reports = frozenset(names), queue.Queue()

    def _take(self, epoch: int) -> tuple[str, Any]:
        """Return the next report that is expected, which then is so no longer. Raises _Forgotten."""
        for _ in range(int(REPORT_S / 0.05)):
            try:
                name, taken = self._reports.get(timeout=0.05)
            except queue.Empty:
                if epoch != self._epoch or self._closed.is_set():
                    break
            else:
                with self._lock:
                    self._expected -= {name}
                self.path.append(name)
                return name, taken
        raise _Forgotten(", ".join(self._expected))

    def _reset(self, signals: "queue.Queue[Any]") -> None:
        with self._lock:
            self._epoch += 1
            self._signals, self._expected = signals, frozenset()

    def _send(self, **fields: Any) -> None:
        with self._lock:
            signals = self._signals
        if signals is not None:
            signals.put(MESSAGES["ProcessManageSignal"](jobId=self._task, **fields))


class _Forgotten(Exception):
    """A subscription began or ended, or no report came."""


def _status(code: int, info: str) -> Any:
    return MESSAGES["Status"](code=code, info=info)
