"""`midstep inject --device-fault`: what is reported, by code or level, and what is refused with a remedy."""

import click
import pytest
from click.testing import CliRunner

from midstep.cli.inject import command, report_of
from midstep.protocol.types import Assertion, FaultKind, FaultLevel


@pytest.mark.parametrize("name", ["RestartNPU", "restartnpu"])
def test_a_level_is_reported_as_a_level(name: str) -> None:
    report = report_of(name, 1, None, None).report
    assert (report.level, report.code, report.rank) == (FaultLevel.RESTART_NPU, None, 1)
    assert (report.seen_by, report.assertion) == ("detector/inject", Assertion.OCCUR)


def test_anything_else_is_reported_as_a_code() -> None:
    report = report_of("80E01801", None, "node1", 3).report
    assert (report.level, report.code, report.node, report.device) == (FaultLevel.SOFTWARE, "80E01801", "node1", 3)
    assert report_of("SeparateFault", None, "node1", None).report.kind is FaultKind.NODE


def test_the_same_options_name_the_fault_that_recovers() -> None:
    occurred, recovered = report_of("80E01801", 1, None, None), report_of("80e01801", 1, None, None, recover=True)
    assert occurred.report.fault_id == recovered.report.fault_id
    assert recovered.report.assertion is Assertion.RECOVER


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("X", None, None, None), "either --rank R or --node NAME"),
        (("X", 1, "node1", None), "either --rank R or --node NAME"),
        (("X", 1, None, 2), "--device is for --node"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_to_do(options: tuple, remedy: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(click.UsageError) as caught:
        report_of(*options)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--rank", "1", "--recover"], "are for --device-fault"),
        (["--rank", "1", "--device-fault", "X", "--at", "update"], "leave out --do, --at, --step"),
        (["--rank", "1", "--flip", "repair:sign", "--step", "9"], "in the next repair of another rank"),
        (["--rank", "1", "--device-fault", "X", "--once", "--recover"], "--once and --recover exclude each other"),
    ],
)
def test_the_command_line_keeps_reported_and_done_faults_apart(arguments: list[str], remedy: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert remedy in result.output
