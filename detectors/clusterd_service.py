"""ClusterD's service `Recover`, as a client calls it: its messages, subscriptions that come back, and the reports.

The messages are made from the table below and not from generated code, so that what is installed with midstep needs no
compiler, and no release of protobuf but one that grpcio takes.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from ..protocol.errors import ConfigurationError
from . import clusterd_signals as d

SERVICE = "Recover"
CALL_S = 10.0
AGAIN_S, LONGEST_AGAIN_S = 1.0, 30.0
MOST_SIGNALS = 1024
MOST_S = 7200  # of a pause
_TEXT, _NUMBER, _LARGE, _YES = "string", "int32", "int64", "bool"
_MAP = "map<string, "  # to a message
# Message -> its fields in order: name, type (a message's name, too), and whether there are several.
FIELDS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "Status": (("code", _NUMBER, False), ("info", _TEXT, False)),
    "ClientInfo": (("jobId", _TEXT, False), ("role", _TEXT, False)),
    "FaultRank": (("rankId", _TEXT, False), ("faultType", _TEXT, False)),
    "ProcessManageSignal": (
        ("uuid", _TEXT, False),
        ("jobId", _TEXT, False),
        ("signalType", _TEXT, False),
        ("actions", _TEXT, True),
        ("faultRanks", "FaultRank", True),
        ("changeStrategy", _TEXT, False),
        ("timeout", _LARGE, False),
        ("nodeRankIds", _TEXT, True),
        ("extraParams", _TEXT, False),
    ),
    "StopCompleteRequest": (("jobId", _TEXT, False), ("status", "Status", False), ("faultRanks", "FaultRank", True)),
    "RecoverStrategyRequest": (("jobId", _TEXT, False), ("faultRanks", "FaultRank", True), ("strategies", _TEXT, True)),
    "RecoverStatusRequest": (
        ("jobId", _TEXT, False),
        ("status", "Status", False),
        ("strategy", _TEXT, False),
        ("isolateRankIds", _TEXT, True),
    ),
    "ProcessFaultRequest": (("jobId", _TEXT, False), ("faultRanks", "FaultRank", True)),
    "SwitchRankList": (("rankID", _TEXT, True), ("op", _YES, True), ("jobId", _TEXT, False)),
    "SwitchResult": (("jobId", _TEXT, False), ("result", _YES, False)),
    "StressOpList": (("ops", _LARGE, True),),
    "StressTestRankParams": (("stressParam", "map<string, StressOpList>", False), ("jobId", _TEXT, False)),
    "StressTestResult": (("jobId", _TEXT, False), ("stressResult", "map<string, StressTestRankResult>", False)),
    "StressTestRankResult": (("rankResult", "map<string, StressTestOpResult>", False),),
    "StressTestOpResult": (("code", _TEXT, False), ("result", _TEXT, False)),
}
# Call -> the message that it takes. All are answered with a Status.
CALLS = {
    "Init": "ClientInfo",
    "Register": "ClientInfo",
    "ReportStopComplete": "StopCompleteRequest",
    "ReportRecoverStrategy": "RecoverStrategyRequest",
    "ReportRecoverStatus": "RecoverStatusRequest",
    "ReportProcessFault": "ProcessFaultRequest",
    "ReplySwitchNicResult": "SwitchResult",
    "ReplyStressTestResult": "StressTestResult",
}
LEADS = "SubscribeProcessManageSignal"
# Subscription -> the messages that come. All take ClientInfo. The last two end with each fault.
SUBSCRIPTIONS = {
    LEADS: "ProcessManageSignal",
    "SubscribeNotifySwitch": "SwitchRankList",
    "SubscribeNotifyExecStressTest": "StressTestRankParams",
}
_log = logging.getLogger(__name__)


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="midstep/clusterd_recover.proto", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars: dict[str, Any] = {
        _TEXT: kinds.TYPE_STRING,
        _NUMBER: kinds.TYPE_INT32,
        _LARGE: kinds.TYPE_INT64,
        _YES: kinds.TYPE_BOOL,
    }
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, several) in enumerate(fields, 1):
            label: Any = kinds.LABEL_REPEATED if several else kinds.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            made.type = scalars.get(kind, kinds.TYPE_MESSAGE)
            if kind.startswith(_MAP):
                made.label = kinds.LABEL_REPEATED
                made.type_name = f".{name}.{_add_entry(message, field, kind[len(_MAP) : -1])}"
            elif kind not in scalars:
                made.type_name = f".{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in FIELDS}


def _add_entry(message: Any, field: str, kind: str) -> str:
    """Add the type of a map's entries to a message, and return its name: protobuf prescribes both."""
    kinds = descriptor_pb2.FieldDescriptorProto
    name = f"{field[0].upper()}{field[1:]}Entry"
    entry = message.nested_type.add(name=name, options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
    value = entry.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE)
    value.type_name = f".{kind}"
    return name


MESSAGES = _messages()


class ClusterdAddress(msgspec.Struct, frozen=True):
    """Where ClusterD listens, `HOST:PORT`, and the job's name there. `certificate`: by which it is known, or no TLS."""

    server: str
    task: str
    role: str = "master"
    certificate: Path | None = None


class ClusterdRefused(ConfigurationError):
    """ClusterD does not take the job in: it does not know it, or its recovery is switched off there."""


class RecoverClient:
    """A connection to ClusterD. `signals` has what it says; None: a new subscription began."""

    def __init__(self, place: ClusterdAddress) -> None:
        """Connect nothing yet. Raises ConfigurationError when the certificate cannot be read."""
        self.signals: queue.Queue[d.Heard | None] = queue.Queue(MOST_SIGNALS)
        self._place = place
        self._closed = threading.Event()
        self._channel = _channel(place)
        self._calls: dict[str, Callable[..., Any]] = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=MESSAGES[takes].SerializeToString,
                response_deserializer=MESSAGES["Status"].FromString,
            )
            for name, takes in CALLS.items()
        }
        self._subscribe: dict[str, Callable[..., Any]] = {
            name: self._channel.unary_stream(
                f"/{SERVICE}/{name}",
                request_serializer=MESSAGES["ClientInfo"].SerializeToString,
                response_deserializer=MESSAGES[brings].FromString,
            )
            for name, brings in SUBSCRIPTIONS.items()
        }
        self._streams: dict[str, Any] = {}
        self._threads = [
            threading.Thread(target=self._listen, args=(name,), name=f"midstep-clusterd-{number}", daemon=True)
            for number, name in enumerate(SUBSCRIPTIONS)
        ]

    def start(self) -> None:
        """Register, and listen from now on. Raises ClusterdRefused, grpc.RpcError."""
        self._register()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        self._closed.set()
        for stream in [*self._streams.values()]:
            stream.cancel()
        self._channel.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CALL_S)

    def tell(self, report: d.Report) -> None:
        """Make a report. A refusal, or a connection that fails, is logged: a new subscription begins all again."""
        name, fields = _report(report)
        try:
            status = self._call(name, **fields)
        except grpc.RpcError as error:
            _log.warning("%s was not heard: %s", name, error)
            return
        log = _log.info if status.code == d.OK else _log.warning
        log("%s: ClusterD answers %d %s", name, status.code, status.info)

    def _register(self) -> None:
        for name in ("Init", "Register"):
            status = self._call(name, role=self._place.role)
            if status.code != d.OK:
                raise ClusterdRefused(
                    f"ClusterD at {self._place.server} does not take in {self._place.task} ({name}: {status.code} "
                    f"{status.info}). The job's PodGroup has to have the label process-recover-enable: on, and the "
                    "name has to be MINDX_TASK_ID, the uid of the acjob."
                )

    def _call(self, name: str, **fields: Any) -> Any:
        message = MESSAGES[CALLS[name]](jobId=self._place.task, **fields)
        return self._calls[name](message, timeout=CALL_S)

    def _listen(self, name: str) -> None:
        wait_s = AGAIN_S
        while not self._closed.is_set():
            try:
                for signal in self._subscription(name):
                    wait_s = AGAIN_S
                    self.signals.put(signal, timeout=CALL_S)
                _log.log(min(_level(name), logging.INFO), "ClusterD has ended %s", name)  # as with each fault
            except (grpc.RpcError, ClusterdRefused, queue.Full) as error:
                if self._closed.is_set():
                    return
                text = error.details() if isinstance(error, grpc.Call) else str(error)
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    _log.warning("ClusterD at %s has no %s", self._place.server, name)
                    return
                said = "no word from ClusterD at %s (%s): %s; again in %g s"
                _log.log(_level(name), said, self._place.server, name, text, wait_s)
            except ValueError:  # the channel was closed
                return
            self._closed.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_AGAIN_S)

    def _subscription(self, name: str) -> Iterator[d.Heard | None]:
        if name == LEADS:
            self._register()  # a ClusterD that was started again knows no job
        self._streams[name] = self._subscribe[name](
            MESSAGES["ClientInfo"](jobId=self._place.task, role=self._place.role)
        )
        if name == LEADS:
            yield None
        for message in self._streams[name]:
            try:
                yield _READ[name](message)
            except ValueError as error:
                _log.warning("a message of ClusterD's %s is dropped: %s", name, error)


def _level(name: str) -> int:
    """Return how much it matters that a subscription ends: ClusterD ends the lesser ones with each fault."""
    return logging.WARNING if name == LEADS else logging.DEBUG


def _channel(place: ClusterdAddress) -> Any:
    if place.certificate is None:
        return grpc.insecure_channel(place.server)
    try:
        roots = place.certificate.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{place.certificate}: the certificate cannot be read: {error.strerror}.") from error
    return grpc.secure_channel(place.server, grpc.ssl_channel_credentials(roots))


def _signal(message: Any) -> d.Signal:
    """Raise ValueError for a signal that names no ranks or nodes, as the other two do."""
    return d.Signal(
        uuid=message.uuid,
        type=message.signalType,
        ranks=tuple(d.FaultyRank(_natural(each.rankId), each.faultType) for each in message.faultRanks),
        nodes=tuple(_natural(each) for each in message.nodeRankIds),
        strategy=message.changeStrategy,
        actions=tuple(message.actions),
        timeout_s=max(0, min(message.timeout, MOST_S)),
        extra=message.extraParams,
    )


def _switch(message: Any) -> d.SwitchNics:
    if len(message.rankID) != len(message.op):
        raise ValueError(f"{len(message.rankID)} ranks, and {len(message.op)} operations")
    return d.SwitchNics(tuple(_natural(each) for each in message.rankID), tuple(message.op))


def _stress_test(message: Any) -> d.StressTest:
    return d.StressTest({_natural(rank): tuple(each.ops) for rank, each in message.stressParam.items()})


_READ: dict[str, Callable[[Any], d.Heard]] = {
    LEADS: _signal,
    "SubscribeNotifySwitch": _switch,
    "SubscribeNotifyExecStressTest": _stress_test,
}


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"{text[:40]!r} is no rank")
    return int(text)


def _report(report: d.Report) -> tuple[str, dict[str, Any]]:
    """Return the call of a report, and the fields of its message."""
    if isinstance(report, d.ReportStopComplete):
        return "ReportStopComplete", {"status": _status(report.code, report.info), "faultRanks": _ranks(report.ranks)}
    if isinstance(report, d.ReportRecoverStrategy):
        return "ReportRecoverStrategy", {
            "faultRanks": _ranks(report.ranks),
            "strategies": [strategy.value for strategy in report.strategies],
        }
    if isinstance(report, d.ReportRecoverStatus):
        status = _status(report.code, report.info)
        return "ReportRecoverStatus", {"status": status, "strategy": str(report.strategy)}
    if isinstance(report, d.ReportProcessFault):
        return "ReportProcessFault", {"faultRanks": _ranks(report.ranks)}
    if isinstance(report, d.ReplySwitchNicResult):
        return "ReplySwitchNicResult", {"result": report.succeeded}
    return "ReplyStressTestResult", {
        "stressResult": {str(rank): _rank_result(each) for rank, each in report.results.items()}
    }


def _rank_result(results: dict[int, tuple[str, str]]) -> Any:
    made = MESSAGES["StressTestOpResult"]
    found = {str(each): made(code=code, result=result[:1000]) for each, (code, result) in results.items()}
    return MESSAGES["StressTestRankResult"](rankResult=found)


def _status(code: int, info: str) -> Any:
    return MESSAGES["Status"](code=code, info=info[:1000])


def _ranks(ranks: tuple[d.FaultyRank, ...]) -> list[Any]:
    return [MESSAGES["FaultRank"](rankId=str(each.rank), faultType=str(each.type)) for each in ranks]
