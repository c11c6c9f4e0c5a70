"""Small files: logs, notices, pid files and whatever else midstep writes beside its journal and its checkpoints"""

import contextlib
import errno
import io
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstep.agent.training_process import LossyFile
from midstep.cli.display.log_follower import LogFollower
from midstep.controller.endpoints.discovery_files import RESULT_NAME, JobResult, read_result, write_result
from midstep.platforms.processes import open_log
from midstep.protocol.errors import AgentError, MidstepError
from midstep.protocol.keys import JobKeys
from midstep.protocol.messages import NodeJoined

from ..chaos.agent.conftest import Site
from ..chaos.agent.test_local_platform import nodes_of
from ..chaos.conftest import StartJob
from ..chaos.controller.conftest import Cluster
from .attack import attack

Play = Callable[..., None]

RESULT = JobResult("gpt", 0, "all ranks have finished", 1, 1.0)
HELLO = "print('hello from the rank', flush=True)\n"
GATE = 20


def directory_in_the_way(path: Path) -> None:
    path.mkdir(parents=True)


def pipe_in_the_way(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def file_above(path: Path) -> None:
    path.parent.write_text("a file where the directory should be")


OBSTACLES = [directory_in_the_way, pipe_in_the_way, file_above]


@contextlib.contextmanager
def full_file_system(place: Path) -> Iterator[Callable[[], None]]:
    """Mount a small file system at `place`; the function that is yielded fills it."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(place)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a file system")

    def fill() -> None:
        with contextlib.suppress(OSError), (place / "filling").open("wb", 0) as file:
            while file.write(b"x" * 4096):
                pass
        assert os.statvfs(place).f_bfree == 0

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@attack(
    "a directory, a named pipe or a file lies where a log is to be opened",
    holds="the process is started, and nothing waits for a reader of the pipe",
    reads="`cannot write ...rank-0.1.log: Is a directory; its lines are written here instead`, in the agent's log",
)
@pytest.mark.parametrize("obstruct", OBSTACLES)
def test_a_log_that_cannot_be_opened_is_written_to_the_parents_stderr(
    tmp_path: Path, obstruct: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever lies in a log's place, its writer gets the stderr of its parent."""
    path = tmp_path / "logs" / "rank-0.1.log"
    obstruct(path)

    with open(open_log(path), "w") as log:
        log.write("what the rank says")

    assert "what the rank says" in capfd.readouterr().err


def test_a_log_is_continued_where_it_can_be(tmp_path: Path) -> None:
    """A log is made with its directory, and appended to."""
    path = tmp_path / "logs" / "rank-0.1.log"
    for text in ("one ", "two"):
        with open(open_log(path), "w") as log:
            log.write(text)

    assert path.read_text() == "one two"


@attack(
    "the file system of the logs is full while ranks print",
    holds="`print` does not raise, and no rank is at fault for it",
    reads="`midstep: 28 bytes of output were lost: No space left on device`, in the rank's log, when there is room",
)
def test_what_a_full_file_system_does_not_take_of_a_log_is_dropped_and_counted(tmp_path: Path) -> None:
    """A print to a full disk costs its line; the next one that is taken is preceded by how much is missing."""
    log = os.open("/dev/full", os.O_WRONLY)
    stream = io.TextIOWrapper(io.BufferedWriter(LossyFile(log, "<stdout>")), line_buffering=True)
    print("lost" * 4, file=stream)
    print("lost again", file=stream)
    room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(room, log)
    print("kept", file=stream)
    stream.close()
    os.close(room)
    os.close(log)

    said = (tmp_path / "log").read_text()
    assert said == "midstep: 28 bytes of output were lost: No space left on device\nkept\n"


def test_a_descriptor_that_the_script_has_closed_is_still_its_own_error() -> None:
    """Only what the file system refuses is dropped."""
    log = os.open(os.devnull, os.O_WRONLY)
    file = LossyFile(log, "<stdout>")
    os.close(log)

    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        file.write(b"x")


@attack(
    "a file or directory lies where `result.json` and its directory should be",
    holds="writing and reading it fail with midstep's own error, which their callers expect",
)
@pytest.mark.parametrize("obstruct", [directory_in_the_way, file_above])
def test_a_result_that_cannot_be_written_or_read_is_one_error(tmp_path: Path, obstruct: Callable[[Path], None]) -> None:
    """Neither the draft's removal nor the read lets another error out."""
    directory = tmp_path / "job"
    obstruct(directory / RESULT_NAME)

    with pytest.raises(MidstepError, match="cannot be written"):
        write_result(directory, RESULT)
    with pytest.raises(MidstepError):
        read_result(directory)


def test_a_log_that_cannot_be_read_does_not_stop_the_others_from_being_shown(tmp_path: Path) -> None:
    """The launcher follows logs; a directory among them is passed over."""
    (tmp_path / "rank-0.1.log").mkdir()
    (tmp_path / "rank-1.1.log").write_text("hello\n")
    shown: list[tuple[int, bytes]] = []

    LogFollower(tmp_path, lambda rank, line: shown.append((rank, line))).look()

    assert shown == [(1, b"hello")]


def test_an_order_without_a_descriptor_for_it_is_an_agents_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent at its limit of open files reports a start that failed, and lives."""
    from midstep.agent import channel
    from midstep.protocol.blackbox import BlackBox

    def exhausted(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", exhausted)
    ours, theirs = channel.pair()
    with ours, theirs, pytest.raises(AgentError, match="Too many open files"):
        channel.send(ours, channel.ProcessIdle(1))
    with pytest.raises(AgentError, match="no shared memory for the black box of rank 3"):
        BlackBox.create(3, 4096)


@attack(
    "the directory of the logs is replaced by a file while a node and a rank are started",
    holds="the agent and the rank start all the same",
    reads="the rank's lines in its agent's log, or on the stderr of `midstep run`",
)
@pytest.mark.chaos
def test_nodes_and_ranks_start_without_a_place_for_their_logs(play: Play, capfd: pytest.CaptureFixture[str]) -> None:
    """An agent without a log writes to the launcher's stderr; a rank without one to its agent's."""

    async def scenario(site: Site) -> None:
        blocked = site.root / "job"
        blocked.write_text("a file where the job directory should be")
        with nodes_of(site, log_directory=str(blocked / "logs")) as platform:
            platform.start(1)
            await site.controller.until(NodeJoined)
            site.welcome(HELLO, job_directory=str(blocked))
            site.start(0)
            assert (await site.exited(0)).status == 0
            await platform.close()

    play(scenario)
    assert "hello from the rank" in capfd.readouterr().err


@attack(
    "the run directory is full when a controller takes over",
    holds="it comes up where the last one listened, without writing that down again",
)
@pytest.mark.chaos
def test_a_controller_takes_over_in_a_run_directory_without_room(cluster: Cluster) -> None:
    """The endpoint is known already, so a file that cannot be written again keeps no controller from starting."""
    with full_file_system(cluster.run_directory) as fill:
        JobKeys.create(cluster.keys, ["node/node0", "node/node1", "platform"])
        try:
            cluster.start()
            fill()
            cluster.kill_controller()
            cluster.start_controller()
            cluster.until(lambda: cluster.status().term == 2)
            cluster.until(lambda: cluster.phase() == "running")
        finally:
            cluster.kill_controller()


@attack(
    "the directory of the logs is replaced by a file and `result.json` by a directory, then a rank and the controller "
    "are killed",
    holds="one rank is replaced, the next controller ends the job well, and what was done again has the same bits",
    reads="the result, as ever: it is in the journal, too",
)
@pytest.mark.soak
@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_a_job_directory_that_takes_no_small_file_costs_no_process(start_job: StartJob) -> None:
    """Only the small files are missing; the exit code of `midstep run` is still that of the job."""
    job = start_job(gates=[GATE], steps=GATE + 20)
    job.held_at(GATE)
    shutil.move(job.directory / "logs", job.directory / "logs.away")
    (job.directory / "logs").write_text("a file where the directory should be")
    (job.directory / RESULT_NAME).mkdir()
    job.rank_process(1).send_signal(signal.SIGKILL)
    job.until(lambda status: bool(status.incidents), "the incident")
    os.kill(job.controller_pid(), signal.SIGKILL)
    job.open_gate(GATE)

    assert job.wait() == 0, job.said()
    job.assert_nothing_left()
    report = job.report()
    assert [set(incident["replaced"]) for incident in report["incidents"]] == [{1}]
    record = job.record()
    assert sorted(record.ends) == [0, 1, 2, 3]
    assert all(len(found) == 1 for steps in record.steps.values() for found in steps.values())
