"""A whole job under `| head`, a full disk, `ps` and a umask of 002"""

import contextlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from midstep.agent.fork_server import PRELOAD_STORE
from midstep.launch.directories import run_directory_of
from midstep.processor.checkpoints import archive
from midstep.protocol.environment import PRELOAD

from ..chaos.conftest import StartJob, device, start_job  # noqa: F401 - fixtures
from ..chaos.jobs import MARK, PATIENCE_S, ROOMY, TRAINING
from .attack import attack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SECRETS = {"FILE_TOKEN": "from-the-file-c0ffee", "SHELL_TOKEN": "from-the-shell-c0ffee"}
SCRIPT = """
import os, sys, time
from pathlib import Path
go, written = map(Path, sys.argv[1:])
print("first", flush=True)
while not go.exists():
    print("more", flush=True)
    time.sleep(0.02)
written.write_text(" ".join((os.environ["FILE_TOKEN"], os.environ["SHELL_TOKEN"])))
"""


class Seen(msgspec.Struct, frozen=True):
    """What was seen of the job while it ran, and afterwards."""

    exit_code: int
    first_line: bytes
    lines_after_head: int
    command_lines: tuple[str, ...]
    run_directory: Path
    root: Path

    @property
    def written(self) -> Path:
        """What the rank has written by itself."""
        return self.root / "written"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A job whose output is read for one line, whose stderr is full, and whose user has a umask of 002."""
    root = tmp_path_factory.mktemp("one-job")
    mark = f"attack-{os.getpid()}"
    (root / "train.py").write_text(SCRIPT)
    (root / "env").write_text(f"# of the cluster\n\nFILE_TOKEN={SECRETS['FILE_TOKEN']}\n")
    (root / "env").chmod(0o600)
    job_directory, log = root / "jobs" / "job", root / "jobs" / "job" / "logs" / "rank-0.1.log"
    options = ["--job", mark, "--job-dir", str(job_directory), "--env-file", str(root / "env"), "--env", "SHELL_TOKEN"]
    script = root / "train.py", root / "go", root / "written"
    with open("/dev/full", "wb") as full:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "midstep.cli.main", "run", *options, *map(str, script)],
            env={**os.environ, MARK: mark, "SHELL_TOKEN": SECRETS["SHELL_TOKEN"], PRELOAD: PRELOAD_STORE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=full,
            start_new_session=True,
            umask=0o002,
        )
    try:
        assert launcher.stdout is not None
        with launcher.stdout:
            first_line = launcher.stdout.readline()
        had = lines_of(log)
        deadline = time.monotonic() + PATIENCE_S
        while lines_of(log) < had + 100 and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        run_directory = run_directory_of(job_directory)
        assert run_directory is not None
        command_lines = tuple(command_lines_of(mark))
        went_on = lines_of(log) - had
        (root / "go").touch()
        yield Seen(launcher.wait(PATIENCE_S), first_line, went_on, command_lines, run_directory, root)
    finally:
        launcher.kill()
        launcher.wait(10)


def lines_of(log: Path) -> int:
    """Count the lines of a log that may not be there yet."""
    return log.read_bytes().count(b"\n") if log.exists() else 0


def command_lines_of(mark: str) -> Iterator[str]:
    """Yield what `ps` shows of all processes of the job."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield " ".join(process.cmdline())


@attack(
    "`midstep run ... | head -1`, with standard error on a full disk",
    holds="the job trains to its end and the exit code is 0; keys and run directory are gone",
)
def test_a_job_without_a_reader_ends_well(seen: Seen) -> None:
    """It printed a hundred lines more, each of them into its log."""
    assert seen.first_line == b"[rank 0] first\n"
    assert seen.lines_after_head >= 100
    assert seen.exit_code == 0
    assert not seen.run_directory.exists()


@attack(
    "another user looks for secrets with `ps`",
    holds="no value of `--env-file FILE` or `--env NAME` is on a command line of the job, and the ranks have them",
)
def test_no_command_line_of_a_job_has_a_secret(seen: Seen) -> None:
    """Launcher, controller, agent, fork server, store and rank."""
    assert len(seen.command_lines) >= 5, seen.command_lines
    assert not [line for line in seen.command_lines if "c0ffee" in line]
    assert seen.written.read_text() == " ".join(SECRETS.values())


@attack(
    "somebody of the user's group, under a umask of 002, writes another result or reads a log",
    holds="all that midstep makes is for its owner only; what the ranks write by themselves has the user's own umask",
)
def test_what_midstep_makes_is_for_its_owner_only(seen: Seen) -> None:
    """Directories too, as who can write to one can replace what lies in it."""
    open_to_others = {
        str(path.relative_to(seen.root)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in [seen.root / "jobs", *(seen.root / "jobs").rglob("*")]
        if path.stat().st_mode & 0o077
    }
    assert not open_to_others
    made = {path.name for path in (seen.root / "jobs").rglob("*")}
    assert {"policy.yaml", "job.json", "result.json", "journal.sqlite", "controller.log", "rank-0.1.log"} <= made
    assert stat.S_IMODE(seen.written.stat().st_mode) == 0o664


RAISING = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(TRAINING.parent)!r})
from training import augmented, train

def on_a_slow_disk(descriptor, fsync=os.fsync):
    time.sleep(0.7)
    fsync(descriptor)

def augment(samples):
    calls.append(samples)
    if os.environ["RANK"] == "1" and len(calls) == last:
        raise ValueError("a tensor of shape [/x], \\033]0;renamed\\007 and [red]more[/]")
    return augmented(samples)

os.fsync = on_a_slow_disk
calls, last = [], 12 if os.environ["MIDSTEP_INCARNATION"] == "1" else 1
train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), augment=augment)
"""


@attack(
    "an exception whose text is markup or an escape sequence ends a job, while its last checkpoint is being written",
    holds="the emergency checkpoint is complete, and the text is shown as it is",
    reads="midstep: incident 1: stop - ... ValueError: a tensor of shape [/x], ?]0;renamed? and [red]more[/]",
)
def test_the_text_of_an_exception_does_not_cost_the_emergency_checkpoint(
    start_job: StartJob,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The display used to fail on it, the launcher with the display, and the ranks that wrote with the launcher."""
    script = tmp_path / "raising.py"
    script.write_text(RAISING)
    ladder = [{"rung": "recover_in_place", "attempts": 2}, {"rung": "stop"}]
    job = start_job(script=script, nodes=1, policy={**ROOMY, "ladder": ladder, "checkpoint": {}})
    assert job.wait() == 1, job.said()
    job.assert_nothing_left()
    said = job.output.read_text()
    assert "incident 1: stop - " in said, said
    assert "ValueError: a tensor of shape [/x], ?]0;renamed? and [red]more[/]" in said
    assert archive.complete_steps(job.directory / "checkpoints") == (11,)
