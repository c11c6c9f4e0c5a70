"""A support bundle of a real job has what is needed to look into it, and no secret, whatever has become of the job."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.launch.directories import read_job_file
from midstep.protocol.token import new_token, token_text

from .jobs import PATIENCE_S

pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(120)]

URL, HEADER = "https://hooks.example/planted-url-4711", "planted-header-4712"
VALUE, TYPED = "planted 4713", "planted4714"
SCRIPT = "echo said $PLANTED; echo 'Authorization: Bearer planted4715'; echo 'password=planted4716 step=7'; sleep 600"
POLICY = """\
notify:
  webhooks:
    - {name: oncall, url_file: %s, header_file: %s}
"""


def bundled(directory: Path, path: Path) -> dict[str, str]:
    """Return what is in a bundle of a job, by name, and nothing that is unpacked outside of its folder."""
    done = CliRunner().invoke(main, ["bundle", str(directory), "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert path.stat().st_mode & 0o777 == 0o600
    found = {}
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as tar:
        for entry in tar:
            file = tar.extractfile(entry)
            assert entry.isfile()
            assert file is not None
            found[entry.name.partition("/")[2]] = file.read().decode()
    return found


def test_a_bundle_has_what_is_needed_and_no_secret(tmp_path: Path) -> None:
    """Of a job that runs, of one whose controller and launcher were killed, of one whose journal is damaged."""
    secrets = {"url": URL, "header": f"Authorization: Bearer {HEADER}"}
    for name, text in secrets.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "policy.yaml").write_text(POLICY % (tmp_path / "url", tmp_path / "header"))
    (tmp_path / "secrets.env").write_text(f"PLANTED={VALUE}\n")
    (tmp_path / "secrets.env").chmod(0o600)
    directory = tmp_path / "job"
    options = ["--job-dir", str(directory), "--fixed-nodes", "--policy", str(tmp_path / "policy.yaml")]
    options += ["--env-file", str(tmp_path / "secrets.env"), "--no-python", "sh", "-c", SCRIPT, TYPED]
    token = token_text(new_token())
    with subprocess.Popen(
        [sys.executable, "-m", "midstep.cli.main", "run", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as launcher:
        log, deadline_s = directory / "logs" / "rank-0.1.log", time.monotonic() + PATIENCE_S
        while not log.exists() or "step=7" not in log.read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        with log.open("a") as more:
            more.write(f"my token is {token}\n")
        known = read_job_file(directory)
        assert known is not None
        key = json.loads((Path(known.run_dir) / "keys/server/server.json").read_text())["secret"]
        (directory / "logs" / "controller.log").open("a").write(f"key {key}\n")
        planted = [URL, "planted-url", HEADER, VALUE, TYPED, "planted471", token, token[9:40], key]
        try:
            running = bundled(directory, tmp_path / "running.tar.gz")
        finally:
            processes = [launcher.pid, *(child.pid for child in psutil.Process(launcher.pid).children(recursive=True))]
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):  # it ends with the one before
                    os.kill(pid, signal.SIGKILL)
    shutil.rmtree(known.run_dir)  # as the next `midstep run` of this machine does
    dead = bundled(directory, tmp_path / "dead.tar.gz")
    (directory / "journal.sqlite").write_bytes(b"no journal")
    damaged = bundled(directory, tmp_path / "damaged.tar.gz")

    for parts in (running, dead, damaged):
        assert [secret for secret in planted if any(secret in text for text in parts.values())] == []
        assert "key [removed]" in parts["logs/controller.log"]
        assert "rung: recover_in_place" in parts["policy.yaml"]
        assert json.loads(parts["about.json"])["python"]
    for parts in (running, dead):
        assert "said [removed]" in parts["logs/rank-0.1.log"]
        assert "password=[removed] step=7" in parts["logs/rank-0.1.log"]
    assert "logs/rank-0.1.log" not in damaged, "nobody knows what to take out of it"
    assert "node joined" in running["story.txt"]
    assert "node joined" in dead["story.txt"]
    before, after = (json.loads(parts["status.json"])["nodes"] for parts in (running, dead))
    for node in (*before, *after):
        node.pop("prepared")  # the next process may have been prepared meanwhile
    assert before == after != []
    assert json.loads(running["about.json"])["note"] == ""
    assert "no controller answers" in json.loads(dead["about.json"])["note"]
    assert "status.json" not in damaged
    assert any(each.startswith("the status: ") for each in json.loads(damaged["about.json"])["missing"])
