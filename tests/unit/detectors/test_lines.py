"""Lines of other programs: what is told of a stream, and which options of `midstep detect` do not fit together."""

import asyncio

import pytest
from click.testing import CliRunner

from midstep.cli.detect import command
from midstep.detectors.lines import MAX_LINE_BYTES, LineDetector, parse_line
from midstep.protocol.types import Assertion, FaultReport


def test_every_good_line_of_a_stream_is_told_and_every_wrong_one_is_counted() -> None:
    async def story() -> tuple[list[FaultReport], int]:
        stream = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        stream.feed_data(b'{"code": "C1", "node": "n", "detector": "somebody-else"}\n\nwhat?\n')
        stream.feed_data(b'{"level": "RestartNPU", "rank": 0, "assertion": "once"}')
        stream.feed_eof()
        detector, told = LineDetector("bmc", stream), list[FaultReport]()
        await detector.watch(told.append)
        return told, detector.refused

    told, refused = asyncio.run(story())
    assert [(report.code, report.rank, report.assertion) for report in told] == [
        ("C1", None, Assertion.OCCUR),
        (None, 0, Assertion.ONCE),
    ]
    assert {report.seen_by for report in told} == {"detector/bmc"}  # whose connection it is
    assert refused == 1


@pytest.mark.parametrize(("at_s", "meant"), [("1000.5", 1000.5), ("1700000000123", 1700000000.123), ("9e99", 2e9)])
def test_a_time_is_in_seconds_or_milliseconds_and_never_to_come(at_s: str, meant: float) -> None:
    assert parse_line(b'{"code": "C", "node": "n", "at_s": %s}' % at_s.encode(), "d", 2e9).age_s == 2e9 - meant


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "name a --source PATH, --config-maps NAMESPACE, --npu-smi, --kernel-log, or --lines"),
        (["--lines", "--config-maps", "x"], "start one for each"),
        (["--lines", "--source", "x"], "start one for each"),
        (["--lines", "--keys", "x"], "--keys goes with --controller"),
        (["--make-keys", "--controller", "h:1"], "leave --controller out"),
        (["--lines", "--keys", "x", "--controller", "tcp://h:1"], "name the job"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_to_do(arguments: list[str], remedy: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert remedy in result.output
