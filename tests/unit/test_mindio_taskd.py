"""What TaskD tells MindIO's controller is a signal of the dialogue; what the job reports is a callback of TaskD's."""

import logging
from io import BytesIO
from typing import Any

import pytest

from midstep.adapters.mindio import controller
from midstep.detectors import clusterd_signals as d
from midstep.detectors.clusterd_lines import LineClient, encode_line, read_report, read_signal
from midstep.protocol import environment as names

RANKS = (d.FaultyRank(1, "1"), d.FaultyRank(3, "0"))


class Sent:
    """Stands for the bridge."""

    def __init__(self) -> None:
        self.signals: list[d.Signal] = []

    def send(self, kind: d.SignalType, **fields: Any) -> int:
        self.signals.append(d.Signal("u", kind, **fields))
        return 0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    bridge = Sent()
    monkeypatch.setattr(controller._Steering, "bridge", bridge)
    return bridge


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    monkeypatch.setattr(controller, "_callbacks", kept)
    return kept


def test_each_call_of_taskd_is_a_signal(sent: Sent) -> None:
    """As TaskD's manager makes them: ranks with numbers, and the bound of a pause in seconds."""
    ranks = {1: 1, 3: 0}
    assert controller.tft_notify_controller_stop_train(ranks, "stop") == 0
    assert controller.tft_notify_controller_stop_train({}, "pause", 900) == 0
    assert controller.tft_notify_controller_on_global_rank(ranks) == 0
    assert controller.tft_notify_controller_change_strategy("recover", "") == 0
    assert controller.tft_notify_controller_change_strategy("continue") == 0
    assert controller.tft_notify_controller_dump() == 0
    assert sent.signals == [
        d.Signal("u", "stopTrain", RANKS),
        d.Signal("u", "stopTrain", actions=("pause_train",), timeout_s=900),
        d.Signal("u", "globalFault", RANKS),
        d.Signal("u", "changeStrategy", strategy="recover"),
        d.Signal("u", "changeStrategy", strategy="continue"),
        d.Signal("u", "saveAndExit"),
    ]


def test_what_no_job_offers_is_refused_and_not_sent(sent: Sent) -> None:
    assert controller.tft_notify_controller_stop_train({}, "another") == 1
    assert controller.tft_notify_controller_change_strategy("downgrade") == 1
    assert controller.tft_notify_controller_prepare_action("hot switch", {1: 1}) == 1
    assert sent.signals == []


@pytest.mark.parametrize(
    ("report", "action", "arguments"),
    [
        (d.ReportProcessFault(RANKS), "report_fault_ranks", ({1: 1, 3: 0}, {})),
        (d.ReportStopComplete(0, "stopped", RANKS), "report_stop_complete", (0, "stopped", {1: 1, 3: 0})),
        (
            d.ReportRecoverStrategy(RANKS, (d.RecoverStrategy.RECOVER, d.RecoverStrategy.EXIT)),
            "report_strategies",
            ({1: 1, 3: 0}, ["recover", "exit"]),
        ),
        (d.ReportRecoverStatus("retry", 405, "no"), "report_result", (405, "no", {}, "retry")),
    ],
)
def test_each_report_is_a_callback(report: d.Report, action: str, arguments: tuple[Any, ...]) -> None:
    """And is one still after it came as a line."""
    assert controller.called_with(read_report(encode_line(report))) == (action, arguments)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, None),
        ({names.JOB_DIRECTORY: "/jobs/gpt"}, ("/jobs/gpt",)),
        ({names.JOB_DIRECTORY: "/jobs/gpt", names.AGENT_SOCKET: "ipc://agent"}, None),
        ({"MIDSTEP_CONTROLLER": "m0:29400"}, ()),
        ({"MIDSTEP_CONTROLLER": "m0:29400", names.AGENT_SOCKET: "ipc://agent"}, None),
    ],
    ids=["no job", "a directory", "a rank", "a controller", "a rank with a controller"],
)
def test_taskd_steers_the_job_that_its_process_names_and_a_rank_steers_none(
    environment: dict[str, str], words: tuple[str, ...] | None
) -> None:
    assert controller.job_named(environment) == words


def test_a_rank_hears_that_its_calls_have_no_effect(
    callbacks: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(names.AGENT_SOCKET, "ipc://agent")
    monkeypatch.setenv(names.JOB_DIRECTORY, "/jobs/gpt")
    for action in controller.ACTIONS:
        assert controller.tft_register_mindx_callback(action, print) == 0
    controller.tft_start_controller("127.0.0.1", 8000)
    assert controller.tft_notify_controller_stop_train({1: 1}) == 1
    assert "has no effect" in caplog.text


def test_without_all_callbacks_nothing_is_steered(
    callbacks: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MindIO's controller goes without TaskD then."""
    monkeypatch.setenv(names.JOB_DIRECTORY, "/jobs/gpt")
    monkeypatch.delenv(names.AGENT_SOCKET, raising=False)
    assert controller.tft_register_mindx_callback("report_result", print) == 0
    assert controller.tft_register_mindx_callback("report_nothing", print) == 1
    controller.tft_start_controller("127.0.0.1", 8000)
    assert "report_fault_ranks, report_stop_complete, report_strategies" in caplog.text
    assert controller._Steering.bridge is None


def test_a_bridge_hears_the_lines_of_taskd_until_it_leaves() -> None:
    signal, out = d.Signal("u", "stopTrain", RANKS), BytesIO()
    client = LineClient(BytesIO(encode_line(signal) + b"\n"), out)
    client.start()
    assert client.signals.get(timeout=10.0) == signal
    assert client.has_left.wait(10.0)
    client.tell(d.ReportStopComplete(0, "stopped", RANKS))
    assert read_report(out.getvalue()) == d.ReportStopComplete(0, "stopped", RANKS)
    assert read_signal(encode_line(signal)) == signal


def test_a_line_that_is_no_signal_ends_the_dialogue(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        client = LineClient(BytesIO(b"{}\n"), BytesIO())
        client.start()
        assert client.has_left.wait(10.0)
    assert "not understood" in caplog.text
