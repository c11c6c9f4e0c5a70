"""ClusterD as a client of its service `Recover` meets it, played: one job, its state machine, and its ways.

Like the real one (MindCluster 26.1, `pkg/application/recover`) it takes in nothing of a job that has not registered,
forgets what it had begun when a subscription begins or ends, says some signals twice, listens to a report only in the
state that waits for it, and gives up when none comes. Its waits are shorter, and what it would have Kubernetes do is
only noted.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc

from ..detectors.clusterd_service import CALLS, MESSAGES, SERVICE, SUBSCRIPTION

FLUSH_S = 0.2  # the real one waits for 10 s or more, for faults that belong together
REPORT_S = 60.0  # 15 minutes
KEEP_ALIVE_S = 1.0
_OK, _UNREGISTERED, _UNKNOWN_JOB, _UNINITIALISED = 0, 400, 402, 408
_NORMAL = "1"


class PlayedClusterd:
    """Serves one job. `strategies`: those of its PodGroup. `path`: the signals sent and reports taken, in order."""

    def __init__(self, task: str, strategies: Sequence[str], *, ranks_per_pod: int = 1) -> None:
        """Serve nothing before `start`."""
        self.path: list[str] = []
        self.faults_told: list[tuple[int, str]] = []  # by the job itself
        self.results: list[tuple[str, int]] = []
        self.strategies = tuple(strategies)
        self.subscriptions = 0
        self._task = task
        self._ranks_per_pod = ranks_per_pod
        self._lock = threading.Lock()
        self._began = self._registered = False
        self._signals: queue.Queue[Any] | None = None
        self._reports: dict[str, queue.Queue[Any]] = {}
        self._faults: queue.Queue[tuple[list[int], str]] = queue.Queue()
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
        self._faults.put(([*ranks], kind))

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
        }
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                calls[name],
                request_deserializer=MESSAGES[takes].FromString,
                response_serializer=MESSAGES["Status"].SerializeToString,
            )
            for name, takes in CALLS.items()
        }
        methods[SUBSCRIPTION] = grpc.unary_stream_rpc_method_handler(
            self._subscribe,
            request_deserializer=MESSAGES["ClientInfo"].FromString,
            response_serializer=MESSAGES["ProcessManageSignal"].SerializeToString,
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
                signal = MESSAGES["ProcessManageSignal"](jobId=self._task, signalType="keep-alive")
            if signal is None:
                break
            yield signal
        with self._lock:
            if self._signals is mine:
                self._signals = None
                self._epoch += 1

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
        self._faults.put(([rank for rank, _kind in told], told[0][1]))
        return _status(_OK, "")

    def _report(self, name: str, request: Any) -> Any:
        if not self._registered:
            return _status(_UNREGISTERED, "not registered")
        with self._lock:
            waiting = self._reports.get(name)
        if waiting is None:
            self.path.append(f"{name} too early or too late")
            return _status(_OK, "")  # the real one answers so, too, and keeps it in a channel that is emptied later
        waiting.put(request)
        return _status(_OK, "")

    # --- its state machine --------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        while not self._closed.is_set():
            try:
                ranks, kind = self._faults.get(timeout=0.05)
            except queue.Empty:
                continue
            epoch = self._epoch
            try:
                self._one_fault(ranks, kind, epoch)
            except _Forgotten as error:
                self.path.append(f"forgotten: {error}")

    def _one_fault(self, ranks: list[int], kind: str, epoch: int) -> None:
        stopped = self._exchange("stopTrain", "stopped", epoch, ranks, kind)
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
            strategy = self._choose(kind, able, tried)
            tried.append(strategy)
            if strategy == "exit":
                self._send(signalType="changeStrategy", changeStrategy="exit")
                self.path.append("changeStrategy exit")
                return
            result = self._exchange("changeStrategy", "status", epoch, ranks, kind, changeStrategy=strategy)
            self.results.append((result.strategy, result.status.code))
            if result.status.code == _OK or strategy == "dump":
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

    def _exchange(self, signal: str, report: str, epoch: int, ranks: list[int], kind: str, **fields: Any) -> Any:
        """Send a signal, twice, and return the report that it asks for. Raises _Forgotten."""
        waiting: queue.Queue[Any] = queue.Queue(1)
        with self._lock:
            if epoch != self._epoch:
                raise _Forgotten(signal)
            self._reports = {report: waiting}
        faults = [MESSAGES["FaultRank"](rankId=str(rank), faultType=kind) for rank in ranks]
        self.path.append(" ".join((signal, *fields.get("changeStrategy", "").split())))
        for _ in range(2):
            self._send(uuid=f"{epoch}-{len(self.path)}", signalType=signal, faultRanks=faults, **fields)
        for _ in range(int(REPORT_S / 0.05)):
            try:
                taken = waiting.get(timeout=0.05)
            except queue.Empty:
                if epoch != self._epoch or self._closed.is_set():
                    break
            else:
                with self._lock:
                    self._reports = {}
                self.path.append(report)
                return taken
        raise _Forgotten(report)

    def _reset(self, signals: "queue.Queue[Any]") -> None:
        with self._lock:
            self._epoch += 1
            self._signals, self._reports = signals, {}

    def _send(self, **fields: Any) -> None:
        with self._lock:
            signals = self._signals
        if signals is not None:
            signals.put(MESSAGES["ProcessManageSignal"](jobId=self._task, **fields))


class _Forgotten(Exception):
    """A subscription began or ended, or no report came."""


def _status(code: int, info: str) -> Any:
    return MESSAGES["Status"](code=code, info=info)
