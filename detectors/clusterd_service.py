"""ClusterD's service `Recover`, as a client calls it: its messages, a subscription that comes back, and the reports.

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
from . import clusterd as d

SERVICE = "Recover"
CALL_S = 10.0
AGAIN_S, LONGEST_AGAIN_S = 1.0, 30.0
MOST_SIGNALS = 1024
_TEXT, _NUMBER, _LARGE = "string", "int32", "int64"
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
}
# Call -> the message that it takes. All are answered with a Status, but for the subscription.
CALLS = {
    "Init": "ClientInfo",
    "Register": "ClientInfo",
    "ReportStopComplete": "StopCompleteRequest",
    "ReportRecoverStrategy": "RecoverStrategyRequest",
    "ReportRecoverStatus": "RecoverStatusRequest",
    "ReportProcessFault": "ProcessFaultRequest",
}
SUBSCRIPTION = "SubscribeProcessManageSignal"
_log = logging.getLogger(__name__)


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="midstep/clusterd_recover.proto", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars: dict[str, Any] = {_TEXT: kinds.TYPE_STRING, _NUMBER: kinds.TYPE_INT32, _LARGE: kinds.TYPE_INT64}
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, several) in enumerate(fields, 1):
            label: Any = kinds.LABEL_REPEATED if several else kinds.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            made.type = scalars.get(kind, kinds.TYPE_MESSAGE)
            if kind not in scalars:
                made.type_name = f".{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in FIELDS}


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
        self.signals: queue.Queue[d.Signal | None] = queue.Queue(MOST_SIGNALS)
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
        self._subscribe = self._channel.unary_stream(
            f"/{SERVICE}/{SUBSCRIPTION}",
            request_serializer=MESSAGES["ClientInfo"].SerializeToString,
            response_deserializer=MESSAGES["ProcessManageSignal"].FromString,
        )
        self._stream: Any = None
        self._thread = threading.Thread(target=self._listen, name="midstep-clusterd", daemon=True)

    def start(self) -> None:
        """Register, and listen from now on. Raises ClusterdRefused, grpc.RpcError."""
        self._register()
        self._thread.start()

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        self._closed.set()
        if self._stream is not None:
            self._stream.cancel()
        self._channel.close()
        if self._thread.is_alive():
            self._thread.join(CALL_S)

    def tell(self, action: d.Action) -> None:
        """Make a report. What ClusterD answers to it is logged if it is a refusal. Raises grpc.RpcError."""
        name, fields = _report(action)
        status = self._call(name, **fields)
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

    def _listen(self) -> None:
        wait_s = AGAIN_S
        while not self._closed.is_set():
            try:
                for signal in self._subscription():
                    wait_s = AGAIN_S
                    self.signals.put(signal, timeout=CALL_S)
                _log.warning("ClusterD has ended the subscription")
            except (grpc.RpcError, ClusterdRefused, queue.Full) as error:
                if self._closed.is_set():
                    return
                text = error.details() if isinstance(error, grpc.Call) else str(error)
                _log.warning("no word from ClusterD at %s: %s; again in %g s", self._place.server, text, wait_s)
            except ValueError:  # the channel was closed
                return
            self._closed.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_AGAIN_S)

    def _subscription(self) -> Iterator[d.Signal | None]:
        self._register()  # a ClusterD that was started again knows no job
        self._stream = self._subscribe(MESSAGES["ClientInfo"](jobId=self._place.task, role=self._place.role))
        yield None
        for message in self._stream:
            signal = _signal(message)
            if signal is not None:
                yield signal


def _channel(place: ClusterdAddress) -> Any:
    if place.certificate is None:
        return grpc.insecure_channel(place.server)
    try:
        roots = place.certificate.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{place.certificate}: the certificate cannot be read: {error.strerror}.") from error
    return grpc.secure_channel(place.server, grpc.ssl_channel_credentials(roots))


def _signal(message: Any) -> d.Signal | None:
    """Return a signal as the dialogue takes it; None, and a line in the log, for one that names no ranks or nodes."""
    try:
        return d.Signal(
            uuid=message.uuid,
            type=message.signalType,
            ranks=tuple(d.FaultyRank(_natural(each.rankId), each.faultType) for each in message.faultRanks),
            nodes=tuple(_natural(each) for each in message.nodeRankIds),
            strategy=message.changeStrategy,
            actions=tuple(message.actions),
            extra=message.extraParams,
        )
    except ValueError as error:
        _log.warning("ClusterD's signal %s is dropped: %s", message.signalType, error)
        return None


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"{text[:40]!r} is no rank")
    return int(text)


def _report(action: d.Action) -> tuple[str, dict[str, Any]]:
    """Return the call of a report, and the fields of its message."""
    if isinstance(action, d.ReportStopComplete):
        return "ReportStopComplete", {"status": _status(action.code, action.info), "faultRanks": _ranks(action.ranks)}
    if isinstance(action, d.ReportRecoverStrategy):
        return "ReportRecoverStrategy", {
            "faultRanks": _ranks(action.ranks),
            "strategies": [strategy.value for strategy in action.strategies],
        }
    if isinstance(action, d.ReportRecoverStatus):
        status = _status(action.code, action.info)
        return "ReportRecoverStatus", {"status": status, "strategy": str(action.strategy)}
    if isinstance(action, d.ReportProcessFault):
        return "ReportProcessFault", {"faultRanks": _ranks(action.ranks)}
    raise TypeError(f"{type(action).__name__} is no report to ClusterD")


def _status(code: int, info: str) -> Any:
    return MESSAGES["Status"](code=code, info=info[:1000])


def _ranks(ranks: tuple[d.FaultyRank, ...]) -> list[Any]:
    return [MESSAGES["FaultRank"](rankId=str(each.rank), faultType=str(each.type)) for each in ranks]
