"""The launcher's own files: modes, keys, and the run directory"""

import asyncio
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from midstep.cli import main as cli
from midstep.controller.endpoints.discovery_files import JobResult
from midstep.launch import directories, launcher
from midstep.launch.directories import (
    JobFile,
    place_for,
    read_group,
    read_job_file,
    run_directory_of,
    write_job_file,
)
from midstep.launch.job import PreparedJob, Start, create_job
from midstep.protocol.errors import ConfigurationError

from .attack import attack


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A job that could be founded, under a umask of 002."""
    (tmp_path / "train.py").write_text("")
    name = f"owner-{secrets.token_hex(4)}"
    before = os.umask(0o002)
    yield Start(command=(str(tmp_path / "train.py"),), job=name, job_directory=tmp_path / "new" / "job")
    os.umask(before)
    shutil.rmtree(f"/tmp/midstep-{os.getuid()}/{name}", ignore_errors=True)


def modes(root: Path) -> dict[str, str]:
    """Return what below a directory is open to others, and how."""
    return {
        str(path.relative_to(root)): f"{stat.S_IMODE(path.stat().st_mode):o}"
        for path in [root, *root.rglob("*")]
        if path.stat().st_mode & 0o077
    }


def test_a_job_is_founded_for_its_owner_only(start: Start, tmp_path: Path) -> None:
    """The umask is left as it was: it is for what the training writes."""
    job = create_job(start)
    assert modes(tmp_path / "new") == {}
    assert stat.S_IMODE(job.run_directory.stat().st_mode) == 0o700  # what is in it may be open
    assert os.umask(0o002) == 0o002


@attack(
    "the job directory was made before, and the user's group can write to it",
    holds="what is made in it is for the owner only, and the job runs",
    reads="/shared/job can be written by others (mode 775): they can change the job's results; chmod 700 it",
)
def test_a_directory_that_others_can_write_to_is_warned_of(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Midstep does not change the mode of what it has not made."""
    directory = start.job_directory
    assert directory is not None
    directory.mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        create_job(start)
    assert f"{directory} can be written by others (mode 775)" in caplog.text
    assert set(modes(directory)) == {"."}


@attack(
    "a log of the job is a link to another file of the user, or a pipe",
    holds="nothing is written to it, and the launcher does not wait for it",
)
def test_a_log_is_a_file_or_none(tmp_path: Path) -> None:
    """Who can write to the directory could have put it there."""
    from midstep.protocol.private_files import open_for_appending

    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "link.log").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "directory.log").mkdir()
    for name in ("link", "pipe", "directory"):
        with pytest.raises(OSError, match=name):
            open_for_appending(tmp_path / f"{name}.log")
    for line in (b"one\n", b"two\n"):
        with open(open_for_appending(tmp_path / "good.log"), "ab") as log:
            log.write(line)
    assert (tmp_path / "good.log").read_text() == "one\ntwo\n"
    assert precious.read_text() == "as it was"


@attack(
    "the journal or `job.json` cannot be written when a job is started",
    holds="the keys that were made for it are removed",
    reads="Error: /shared/job cannot be written: ... Choose another --job-dir.",
)
def test_keys_of_a_job_that_is_not_founded_are_removed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would lie there until the next job is started."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directories, "write_job_file", fail)
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*No space left on device"):
        create_job(start)
    assert start.job is not None
    assert not (place_for(start.job) / start.job).exists()


class Platform:
    """Stands for the local platform. Its nodes cannot be cleared away."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing runs."""

    def start(self, nodes: int) -> None:
        """Start nothing."""

    async def close(self) -> None:
        """Fail."""
        raise RuntimeError("the nodes cannot be ended")


class Supervisor:
    """Stands for the supervisor of a controller that ends the job at once."""

    def __init__(self, job: PreparedJob, **_: Any) -> None:
        """Its controller serves already."""
        self._job = job
        self.served = asyncio.Event()
        self.served.set()

    async def run(self) -> JobResult:
        """Return the end of the job."""
        await asyncio.sleep(0.1)
        return JobResult(self._job.spec.job, 0, "all ranks have finished", 1, time.time())

    def stop(self, reason: str) -> None:
        """Hear of a signal."""

    async def close(self) -> None:
        """End nothing."""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have launchers whose controllers and nodes are played."""
    monkeypatch.setattr(launcher, "LocalPlatform", Platform)
    monkeypatch.setattr(launcher, "Supervisor", Supervisor)
    monkeypatch.setattr(launcher, "read_endpoint", lambda _: "tcp://127.0.0.1:1")


@attack(
    "clearing away fails half-way: a node that cannot be ended, a log that cannot be opened",
    holds="each part is cleared away by itself; keys and run directory are removed whatever happens",
)
@pytest.mark.usefixtures("played")
def test_keys_are_removed_whatever_fails(start: Start) -> None:
    """They are the last thing that is removed."""
    job = create_job(start)
    with pytest.raises(RuntimeError, match="the nodes cannot be ended"):
        asyncio.run(launcher.Launcher(job).run())
    assert not job.run_directory.exists()


@attack(
    "the watch over fault sources fails for a reason that no code foresees",
    holds="the job continues without that watch, and ends with its own exit code",
    reads="midstep: the fault sources are not watched any more, and the job continues without: ...",
)
@pytest.mark.usefixtures("played")
def test_a_watch_over_fault_sources_that_fails_is_not_the_job_s_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said when it fails."""

    async def close(_: Platform) -> None:
        """End nothing."""

    async def fail(_: PreparedJob) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(Platform, "close", close)
    monkeypatch.setattr(launcher, "watch_faults", fail)
    job = create_job(msgspec.structs.replace(start, fault_sources=(tmp_path,)))
    assert asyncio.run(launcher.Launcher(job).run()).exit_code == 0
    assert "the fault sources are not watched any more" in caplog.text
    assert not job.run_directory.exists()


@attack(
    "puts a `job.json` or `group.json` of another user's where the user looks at a job, or writes into the user's own",
    holds="each command refuses it before it connects to the run directory, etcd or volume that it names; nor does it "
    "wait for a pipe, or follow a link",
    reads="Error: .../job.json belongs to user 4711, and neither to 1000 nor to root: it names what is connected to",
)
@pytest.mark.parametrize("how", ["of another user", "writable by the group", "writable by all", "a link", "a pipe"])
@pytest.mark.parametrize("name", ["job.json", "group.json"])
def test_a_job_file_that_others_could_have_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, name: str
) -> None:
    """A file of the user's own, or of root's, is read as ever."""
    directory = tmp_path / "theirs"
    directory.mkdir()
    path = directory / name
    path.touch(0o600)
    write_job_file(directory, JobFile(str(tmp_path / "run"), "etcd://attacker:2379", "demo"))
    assert run_directory_of(directory) == tmp_path / "run"
    if how == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif how == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        if os.stat(path).st_uid == 0:
            os.chown(path, 4712, -1)
    else:
        path.chmod(0o620 if how == "writable by the group" else 0o602)

    read = {"job.json": read_job_file, "group.json": read_group}[name]
    with pytest.raises(ConfigurationError, match=name):
        read(directory)


@pytest.mark.parametrize("words", [["status"], ["report"], ["stop"], ["watch"], ["inject", "--rank", "0"]], ids=str)
def test_each_command_that_looks_for_a_job_refuses_a_foreign_one(tmp_path: Path, words: list[str]) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir()
    (directory / "journal.sqlite").touch()
    write_job_file(directory, JobFile(str(tmp_path / "run"), "etcd://attacker.invalid:2379", "demo"))
    (directory / "job.json").chmod(0o666)

    done = CliRunner().invoke(cli.main, [words[0], str(directory), *words[1:]])

    assert done.exit_code != 0
    assert "job.json can be written by others (mode 666): it names what is connected to" in done.output
