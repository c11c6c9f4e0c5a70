"""The directory of a job's sockets and keys

Every test has a private $XDG_RUNTIME_DIR: what is in /tmp is never touched.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from midstep.launch.job import PreparedJob, Start, create_job, make_job_directory
from midstep.policies.schema import default_policy
from midstep.protocol.errors import ConfigurationError

from .attack import attack

DEAD_PID = 2**22 + 1  # beyond what Linux gives out
FOREIGN_UID = 54321
PATIENCE_S = 60.0

HOLD = """
import sys, time
from pathlib import Path
from midstep.protocol.run_directories import claim
held = claim(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where midstep makes run directories: in a private runtime directory of the test's own, with a short path."""
    with tempfile.TemporaryDirectory(prefix="ms-") as made:
        runtime = Path(made)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        (runtime / "midstep").mkdir(mode=0o700)
        yield runtime / "midstep"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of the user's, with what must not be lost."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").write_text("secret")
    os.utime(home / ".ssh", (0, 0))  # long there
    return home


@pytest.fixture
def start(tmp_path: Path, place: Path) -> Iterator["Starter"]:
    """Start jobs as far as `midstep run` does before anything runs, and clear away what they made."""
    starter = Starter(tmp_path, place)
    yield starter
    for job in starter.jobs:
        job.held.remove()


class Starter:
    """Founds jobs."""

    def __init__(self, root: Path, place: Path) -> None:
        self._root = root
        self._place = place
        self.jobs: list[PreparedJob] = []
        (root / "train.py").touch()

    def __call__(self, name: str) -> PreparedJob:
        directory = self._root / f"job-{len(self.jobs)}"
        job = create_job(Start(command=(str(self._root / "train.py"),), job=name, job_directory=directory))
        self.jobs.append(job)
        assert job.run_directory == self._place / name
        return job


def assert_whole(victim: Path) -> None:
    """Nothing of the user's is lost."""
    assert (victim / ".ssh" / "id").read_text() == "secret"


@attack(
    "puts a link to a user's home where run directories are",
    holds="the link is left, and nothing behind it is touched",
    reads="which entries have no mark of midstep and are left",
)
def test_a_link_beside_run_directories_is_not_followed(
    place: Path, victim: Path, start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the link leads to, a starting job leaves it."""
    (place / "evil").symlink_to(victim)
    (place / "stranger").mkdir()

    start("gpt")

    assert_whole(victim)
    assert (place / "evil").is_symlink()
    assert (place / "stranger").is_dir()
    assert "this has no mark of midstep, and is left: 'evil', 'stranger'" in caplog.text


@attack(
    "makes the place of run directories itself a link, before the first job",
    holds="no job starts, and nothing behind the link is touched",
    reads="that it is a link, and what to do",
)
def test_a_link_in_the_place_of_run_directories_is_refused(place: Path, victim: Path, start: Starter) -> None:
    """A job is not started in a place that somebody else chose."""
    place.rmdir()
    place.symlink_to(victim)

    with pytest.raises(ConfigurationError, match=r"is a link or a file.*Remove it, or set XDG_RUNTIME_DIR"):
        start("gpt")

    assert_whole(victim)
    assert [path.name for path in victim.iterdir()] == [".ssh"]


@attack(
    "opens the place of run directories to everybody, or owns it",
    holds="no job starts there",
    reads="owner and mode, and what to do",
)
def test_a_place_of_another_user_s_is_refused(place: Path, start: Starter) -> None:
    """Keys are not written where others can read or replace them."""
    place.chmod(0o777)
    with pytest.raises(ConfigurationError, match=r"open to others \(owner \d+, mode 777\)"):
        start("gpt")
    place.chmod(0o700)
    if os.getuid() == 0:
        os.chown(place, FOREIGN_UID, -1)
        with pytest.raises(ConfigurationError, match=f"owner {FOREIGN_UID}, mode 700"):
            start("gpt")


@attack(
    "a container with process ids of its own starts a job beside a live one",
    holds="the live job's directory stays, whatever its process id means here",
)
def test_a_live_job_of_another_container_keeps_its_directory(place: Path, start: Starter) -> None:
    """The lock says who lives, and process ids do not."""
    live = start("live")
    (live.run_directory / "launcher.pid").write_text(str(DEAD_PID))

    start("other")
    assert (live.run_directory / "keys").is_dir()
    with pytest.raises(ConfigurationError, match="a job named live is running on this machine"):
        start("live")
    assert (live.run_directory / "keys").is_dir()


@attack(
    "kills the launcher, and gives its process id to another process",
    holds="the next job removes the directory that was left",
)
def test_what_a_killed_launcher_leaves_is_removed(place: Path, start: Starter) -> None:
    """The lock ends with the process that held it."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(place), "killed"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"held\n"
        (place / "killed" / "launcher.pid").write_text(str(os.getpid()))
        start("while-it-lives")
        assert (place / "killed").is_dir()
        child.send_signal(signal.SIGKILL)
        assert child.wait(PATIENCE_S) == -signal.SIGKILL

    start("killed")
    assert sorted(path.name for path in place.iterdir()) == ["killed", "while-it-lives"]


@attack(
    "puts links, also broken ones, into the directory of a job that has died",
    holds="the links are removed, and nothing behind them is touched",
)
def test_links_in_an_abandoned_directory_are_not_followed(place: Path, victim: Path, start: Starter) -> None:
    """Removal goes name by name, and into no link."""
    dead = start("dead")
    (dead.run_directory / "node0").mkdir()
    (dead.run_directory / "node0" / "home").symlink_to(victim)
    (dead.run_directory / "id").symlink_to(victim / ".ssh" / "id")
    (dead.run_directory / "broken").symlink_to(victim / "nothing")
    dead.held.close()

    start("next")

    assert_whole(victim)
    assert not dead.run_directory.exists()


@attack(
    "mounts a user's home inside the directory of a job that has died",
    holds="nothing is removed across a mount",
    reads="which directory cannot be removed whole",
)
def test_a_mount_in_an_abandoned_directory_is_left(
    place: Path, victim: Path, start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    """A bind mount has the device of its source, and is seen all the same."""
    dead = start("dead")
    mounted = dead.run_directory / "mounted"
    mounted.mkdir()
    if subprocess.run(["mount", "--bind", str(victim), str(mounted)], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs privileges")
    try:
        dead.held.close()
        start("next")
        assert_whole(victim)
        assert "cannot be removed whole, and is left: 'dead'" in caplog.text
    finally:
        subprocess.run(["umount", str(mounted)], check=True)

    start("after")
    assert not dead.run_directory.exists()


@attack(
    "swaps directories and links while they are being removed",
    holds="nothing behind the links is touched",
)
def test_what_is_swapped_during_the_removal_is_not_followed(tmp_path: Path, victim: Path) -> None:
    """A directory that becomes a link between two looks is unlinked."""
    from midstep.protocol.run_directories import remove_tree

    root, aside, link = tmp_path / "root", tmp_path / "aside", tmp_path / "link"
    link.symlink_to(victim)
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            for source in (aside, link):
                aside.mkdir(exist_ok=True)
                try:
                    source.rename(root / "swapped")
                except OSError:
                    continue
                finally:
                    if not link.is_symlink():
                        link.symlink_to(victim)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(300):
            (root / "below").mkdir(parents=True, exist_ok=True)
            remove_tree(root)
    finally:
        over.set()
        swapper.join(PATIENCE_S)
    assert_whole(victim)


@attack(
    "two launchers start jobs of one name at once, and remove abandoned directories meanwhile",
    holds="one of them gets the name, and no live job loses its directory",
    reads="a job named NAME is running on this machine",
)
def test_of_launchers_that_start_at_once_one_gets_the_name(place: Path) -> None:
    """A directory appears under its name with its lock held."""
    from midstep.protocol.run_directories import RunDirectory, claim, clear_abandoned

    def begin(_: int) -> RunDirectory | None:
        clear_abandoned(place)
        try:
            return claim(place, "gpt")
        except ConfigurationError:
            return None

    with ThreadPoolExecutor(8) as launchers:
        for _ in range(25):
            winners = [held for held in launchers.map(begin, range(8)) if held is not None]
            assert len(winners) == 1
            assert [path.name for path in place.iterdir()] == ["gpt"]
            assert (place / "gpt" / "launcher.lock").is_file()
            winners[0].close()


@attack(
    "an agent of a killed launcher ends late, when the next job of the same name has begun",
    holds="it removes neither the new job's directory nor one that midstep has not made",
)
def test_a_late_agent_removes_only_what_is_abandoned(place: Path, start: Starter) -> None:
    """The lock of the new launcher keeps it out."""
    from midstep.protocol.run_directories import Fate, remove_abandoned

    job = start("gpt")
    (place / "stranger").mkdir()

    assert remove_abandoned(job.run_directory) is Fate.IN_USE
    assert remove_abandoned(place / "stranger") is Fate.NOT_OURS
    assert (job.run_directory / "keys").is_dir()
    job.held.close()
    assert remove_abandoned(job.run_directory) is Fate.REMOVED
    assert [path.name for path in place.iterdir()] == ["stranger"]


@attack(
    "has a runtime directory of another user's, one open to others, or one with a long path",
    holds="the next place is taken; a job whose sockets fit nowhere does not start",
    reads="how long a job's name may be",
)
def test_a_runtime_directory_that_does_not_fit_is_passed_over(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets' paths are short enough before anything starts."""
    from midstep.launch.directories import place_for

    runtime, shared = place.parent, Path(f"/tmp/midstep-{os.getuid()}")
    assert place_for("gpt") == place
    runtime.chmod(0o755)
    assert place_for("gpt") == shared
    runtime.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert place_for("gpt") == shared
    long = tmp_path / ("l" * 90)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert place_for("gpt") == shared
    monkeypatch.setattr(os, "getuid", lambda: 10**9)
    with pytest.raises(ConfigurationError, match=r"Choose a name of at most 56 characters; --job-dir is free"):
        place_for("g" * 64)


@attack(
    "the user of a job under nohup logs out, and systemd removes /run/user/UID",
    holds="the job has its sockets elsewhere, unless its user is allowed to linger",
)
def test_a_directory_that_ends_with_the_login_is_passed_over(tmp_path: Path) -> None:
    """What is not systemd's own stays for as long as its owner wants."""
    import pwd

    from midstep.launch.directories import outlives_the_login

    its_own = Path(f"/run/user/{os.getuid()}")
    assert not outlives_the_login(its_own, tmp_path)
    assert outlives_the_login(tmp_path, tmp_path)
    (tmp_path / pwd.getpwuid(os.getuid()).pw_name).touch()
    assert outlives_the_login(its_own, tmp_path)


@attack(
    "another user of the machine reads `launcher.pid`, or writes another process id into it for `kill`",
    holds="the file is its owner's alone (mode 0600), as the directory around it is",
)
def test_the_file_with_the_launcher_s_process_id_is_the_owner_s_alone(place: Path, start: Starter) -> None:
    """It is what `kill` is given, so nobody else reads or writes it."""
    directory = start("gpt").run_directory
    assert (directory / "launcher.pid").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700


@attack(
    "makes a link `logs` or `checkpoints` in the directory that a job is to have, to a place of its user's",
    holds="the job is refused, and nothing is written there",
    reads="... is a link that another user has made: remove it, or choose another --job-dir.",
)
@pytest.mark.parametrize("name", ["logs", "checkpoints"])
def test_a_link_of_another_user_s_in_the_job_directory_is_not_followed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A link of the job's own user, to a larger disk, is taken."""
    job = tmp_path / "jobs" / "job"
    job.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.mkdir()
    (job / name).symlink_to(victim)
    make_job_directory(job, default_policy())
    monkeypatch.setattr(os, "getuid", lambda: FOREIGN_UID)
    with pytest.raises(ConfigurationError, match="a link that another user has made"):
        make_job_directory(job, default_policy())
