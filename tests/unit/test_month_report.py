"""The last 30 days of all jobs: what of each job's time lies in them, and the sum over jobs and over their ranks."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.controller.journal.records import JournalEntry
from midstep.controller.journal.sqlite_file import journal_path
from midstep.controller.journal.sqlite_store import found_journal, open_sqlite
from midstep.controller.recovery.events import ControllerStarted
from midstep.controller.time_account import TimeAccount
from midstep.protocol.time_spent import TimeCategory as C
from midstep.testing.fake_cluster import FakeCluster, job

HOUR_S, DAY_S = 3600.0, 24 * 3600.0


def ran(directory: Path, began_ago_s: float, waited_s: float, trained_s: float, ranks: int = 4) -> None:
    """Write the journal of a job that began so long ago, waited, trained, and was left without a controller."""
    cluster = FakeCluster(job(nodes=ranks // 2))
    cluster.now = time.time() - began_ago_s
    cluster.feed(ControllerStarted(1))
    cluster.now += waited_s
    cluster.join()
    cluster.pass_barrier_two(0)
    cluster.now += trained_s
    cluster.feed(cluster.exited(1))
    directory.mkdir()
    found_journal(journal_path(directory), cluster.job, cluster.policy, can_create_nodes=False)
    with open_sqlite(journal_path(directory)) as journal:
        for event, at_s in cluster.journal:
            journal.append([JournalEntry(event, "node/node0", 5, 0)], at_s)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of jobs: one of this week, a larger one that began before these days, one of long ago."""
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path))
    ran(tmp_path / "short", 3 * DAY_S, 1 * HOUR_S, 9 * HOUR_S)
    ran(tmp_path / "long", 40 * DAY_S, 5 * DAY_S, 15 * DAY_S, ranks=8)  # of these days it has trained for 10
    ran(tmp_path / "old", 90 * DAY_S, 1 * HOUR_S, 1 * HOUR_S)
    return tmp_path


def report(*options: str) -> str:
    """What `midstep report --all` says."""
    done = CliRunner().invoke(main, ["report", "--all", *options])
    assert done.exit_code == 0, done.output
    return done.output


def test_each_job_counts_for_what_of_it_lies_in_these_days(base: Path) -> None:
    """Those that had ended before are not shown; the sums are of the jobs, and of their ranks."""
    data = json.loads(report("--json"))
    found = {each["name"]: each for each in data["jobs"]}
    assert found["short"]["time"]["wall_s"] == pytest.approx(10 * HOUR_S, rel=0.01)
    assert found["short"]["time"]["goodput"] == pytest.approx(0.9, abs=0.01)
    assert found["long"]["time"]["wall_s"] == pytest.approx(10 * DAY_S, rel=0.01)
    assert found["long"]["time"]["goodput"] == pytest.approx(1.0, abs=0.01)
    assert found["old"]["time"] is None
    trained_s, wall_s = 9 * HOUR_S + 10 * DAY_S, 10 * HOUR_S + 10 * DAY_S
    assert data["all_jobs"]["goodput"] == pytest.approx(trained_s / wall_s, abs=0.001)
    assert sum(data["all_jobs"]["seconds"].values()) == pytest.approx(data["all_jobs"]["wall_s"])
    of_ranks = (4 * 9 * HOUR_S + 8 * 10 * DAY_S) / (4 * 10 * HOUR_S + 8 * 10 * DAY_S)
    assert data["all_ranks"]["goodput"] == pytest.approx(of_ranks, abs=0.001)


def test_it_is_told_in_a_line_each_and_a_sum(base: Path) -> None:
    """A job that cannot be read is named, and does not hide the others."""
    (base / "broken").mkdir()
    journal_path(base / "broken").write_bytes(b"no database")
    said = report()
    assert [line.split()[0] for line in said.splitlines()[1:4]].count("old") == 0
    assert any(line.startswith("short ") and line.endswith(" 90.0 %") for line in said.splitlines()), said
    assert "broken" in said
    assert (
        "effective training time ratio (ETTR) of the last 30 days, 2 jobs: 99.6 %; of their ranks: 99.8 %"
        in " ".join(said.split())
    )


def test_without_jobs_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path))
    assert "no job has run in the last 30 days" in report()
    assert json.loads(report("--json"))["all_jobs"] is None


@pytest.mark.parametrize("more", [["gpt"], ["--incident", "1"], ["--story"], ["--controller", "m0:29400"]])
def test_all_is_of_no_single_job(more: list[str]) -> None:
    done = CliRunner().invoke(main, ["report", "--all", *more])
    assert done.exit_code != 0
    assert "--all is of all jobs on this machine" in " ".join(done.output.split())


def test_the_time_since_a_moment_is_told_by_the_account(cluster: FakeCluster) -> None:
    """Of an hour in which the moment lies, an equal share; nothing of a job that was over by then."""
    began_s = cluster.times.began_s
    assert began_s is not None
    cluster.now += 10 * HOUR_S
    account, now = cluster.times, cluster.now
    whole = account.since(began_s - 1.0, now)
    assert whole == account.until(now)
    part = account.since(now - 90 * 60.0, now)
    assert part is not None
    assert part.seconds == pytest.approx({C.TRAINING: 5400.0})
    assert account.since(now, now) is None
    assert TimeAccount().since(0.0, now) is None
