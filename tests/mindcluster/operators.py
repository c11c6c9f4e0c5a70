"""The operator of a cluster, who asks ClusterD for other network ports and for stress tests by calls of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from midstep.detectors.clusterd_service import MESSAGES, SERVICE

_CALL_S = 10.0
_ANSWER_S = 100.0


class Operator:
    """Asks for one job."""

    def __init__(self, server: str, task: str) -> None:
        self._channel = grpc.insecure_channel(server)
        self._task = _text(1, task.encode())

    def switch_ports(self, devices: Mapping[str, Mapping[str, bool]]) -> str:
        """Have devices of nodes use their other port, or their own again; return what came of it."""
        listed = {
            node: b"".join(_text(1, each.encode()) for each in of_node) + _text(2, bytes(of_node.values()))
            for node, of_node in devices.items()
        }
        return self._ask("SwitchNicTrack", "SubscribeSwitchNicSignal", listed)

    def test(self, operations: Mapping[str, Sequence[int]]) -> str:
        """Have nodes tested; return what came of it."""
        listed = {node: _text(1, bytes(numbers)) for node, numbers in operations.items()}
        return self._ask("StressTest", "SubscribeStressTestResponse", listed)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _ask(self, call: str, answer: str, by_node: Mapping[str, bytes]) -> str:
        entries = (_text(2, _text(1, node.encode()) + _text(2, value)) for node, value in by_node.items())
        ask: Any = self._channel.unary_unary(f"/{SERVICE}/{call}", response_deserializer=MESSAGES["Status"].FromString)
        status = ask(self._task + b"".join(entries), timeout=_CALL_S)
        assert status.code == 0, status
        # A response has a job's name and a text, as a client's information has.
        listen: Any = self._channel.unary_stream(
            f"/{SERVICE}/{answer}", response_deserializer=MESSAGES["ClientInfo"].FromString
        )
        response = next(iter(listen(self._task, timeout=_ANSWER_S)))
        return str(response.role)


def _text(number: int, value: bytes) -> bytes:
    """Return a field of a message with texts, messages or several numbers, as protobuf writes a short one."""
    assert len(value) < 128
    return bytes((number << 3 | 2, len(value))) + value
