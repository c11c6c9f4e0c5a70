"""`midstep watch`: other programs are told of what changes, and keep the last answer."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import midstep
from midstep.cli.main import main
from midstep.launch import watching
from midstep.launch.watching import JobView, watch
from midstep.protocol.errors import MidstepError
from midstep.protocol.incidents import ControllerPhase, ControllerStatus, JobStatus

QUIET = JobStatus("demo", 0.0, "running", 1, 1, 5, 0.1, (), (), (), ())
Look = tuple[JobStatus, str] | MidstepError


def led_by(name: str, term: int, phase: str = "running") -> JobStatus:
    controllers = (
        ControllerStatus("aside", 1, "m9", ControllerPhase.COLD, 0, 0.0),
        ControllerStatus(name, 1, "m0", ControllerPhase.HOT, term, 0.0),
    )
    return msgspec.structs.replace(QUIET, controllers=controllers, term=term, phase=phase)


def ended(status: JobStatus) -> JobStatus:
    return msgspec.structs.replace(status, exit_code=0, phase="ended")


@dataclasses.dataclass
class Job:
    """A job whose status is played, one look after the other."""

    name: str
    looks: list[Look]

    def look(self, _: object) -> tuple[JobStatus, str]:
        look = self.looks.pop(0)
        if isinstance(look, MidstepError):
            raise look
        return look


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    def played(*looks: Look) -> Job:
        job = Job("demo", list(looks))
        monkeypatch.setattr(watching, "look", job.look)
        monkeypatch.setattr(watching, "reached", lambda *_: job)
        return job

    return played


def test_a_program_is_called_back_on_changes_of_leader_term_and_phase(play: Callable[..., Job]) -> None:
    first, second = led_by("m0", 1), led_by("m1", 2)
    busy = led_by("m1", 2, "quiescing")
    play((first, ""), (first, ""), (second, ""), (busy, ""), (busy, ""), (ended(second), "the job has ended"))
    seen: list[JobView] = []

    last = watch(seen.append, every_s=0.0)

    assert [(view.leader, view.term, view.phase) for view in seen] == [
        ("m0", 1, "running"),
        ("m1", 2, "running"),
        ("m1", 2, "quiescing"),
        ("m1", 2, "ended"),
    ]
    assert (last, last.exit_code, last.host) == (seen[-1], 0, "m0")


def test_a_program_may_be_called_back_on_each_beat(play: Callable[..., Job]) -> None:
    play((QUIET, ""), (QUIET, ""), (ended(QUIET), ""))
    seen: list[JobView] = []
    watch(seen.append, every_s=0.0, on_each_beat=True)
    assert len(seen) == 3


def test_the_last_answer_is_kept_while_no_controller_answers(play: Callable[..., Job]) -> None:
    """What the journal says meanwhile may be older than what a controller has said."""
    live, stale = led_by("m0", 3), led_by("", 2)
    play((live, ""), (stale, "no controller answers"), MidstepError("nothing listens"), (live, ""), (ended(live), ""))
    seen: list[JobView] = []
    watch(seen.append, every_s=0.0)
    assert [(view.leader, view.term, view.answered) for view in seen] == [
        ("m0", 3, True),
        ("m0", 3, False),
        ("m0", 3, True),
        ("m0", 3, True),
    ]


def test_a_job_of_which_nothing_is_heard_is_given_up_with_the_reason(play: Callable[..., Job]) -> None:
    play((QUIET, ""), *[MidstepError("nothing listens at m0")] * 3)
    with pytest.raises(MidstepError, match="no controller has answered for 0 s: nothing listens at m0"):
        watch(lambda view: None, every_s=0.0, give_up_s=0.0)


def test_what_a_callback_raises_ends_the_watch(play: Callable[..., Job]) -> None:
    play((QUIET, ""))

    def refuse(view: JobView) -> None:
        raise RuntimeError(view.phase)

    with pytest.raises(RuntimeError, match="running"):
        midstep.watch(refuse, every_s=0.0)


HOOK = (
    "import os, sys; assert 'MIDSTEP_TOKEN' not in os.environ; "
    "print(os.environ['MIDSTEP_LEADER'], sys.stdin.read(), file=open(sys.argv[1], 'a'), end='')"
)


def test_a_command_is_run_on_each_change_with_what_is_known_and_without_the_token(
    play: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTEP_TOKEN", "secret")
    play((led_by("m0", 1), ""), (led_by("m1", 2), ""), (ended(QUIET), ""))
    (tmp_path / "hook.py").write_text(HOOK)
    log = tmp_path / "log"
    words = ["watch", "demo", "--every", "0.1", "--on-change", f"{sys.executable} {tmp_path / 'hook.py'} {log}"]

    done = CliRunner().invoke(main, words)

    assert done.exit_code == 0
    lines = log.read_text().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["m0", "m1", ""]
    assert [json.loads(line.partition(" ")[2])["term"] for line in lines] == [1, 2, 1]
    assert [json.loads(line)["term"] for line in done.stdout.splitlines()] == [1, 2, 1]


def test_a_command_that_fails_is_reported_and_the_watch_continues(play: Callable[..., Job]) -> None:
    play((QUIET, ""), (led_by("m0", 2), ""), (ended(QUIET), ""))
    done = CliRunner().invoke(main, ["watch", "demo", "--every", "0.1", "--on-change", "/none/such"])
    assert done.exit_code == 0
    assert done.stderr.count("midstep watch: /none/such: ") == 3
