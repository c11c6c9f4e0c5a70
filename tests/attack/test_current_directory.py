"""A job that is started in a folder with files called as what midstep imports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from midstep.adapters.mindio.package import put_on_path
from midstep.launch.job import Start, policy_of
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.own_programs import _BEFORE_3_11

from .attack import attack

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("adapters", "agent", "cli", "communicators", "controller", "detectors", "launch", "platforms", "processor")
SHADOWED = ("yaml", "msgspec", "zmq", "psutil", "click", "rich", "watchfiles", "torch", "random", "logging")
CODE = """import os, sys
with open(os.path.join(os.path.dirname(__file__), "ran"), "a") as ran:
    ran.write(f"{__name__} in {sys.orig_argv}\\n")
"""
MIDSTEP = Path(sys.executable).parent / "midstep"


@attack(
    "files in the folder in which `midstep run` is typed are called as what midstep imports: `yaml.py`, `msgspec.py`",
    holds="controller, agent, fork server, detector and role launcher do not run them; the script has its own folder",
)
@pytest.mark.chaos
def test_code_in_the_current_directory_runs_in_none_of_midsteps_processes(tmp_path: Path) -> None:
    """Only the ranks import from a folder of the user's, which is that of the script."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for name in SHADOWED:
        (here / f"{name}.py").write_text(CODE)
    (there / "beside.py").write_text("WORD = 'beside'")
    (there / "train.py").write_text("import beside; print('imports', beside.WORD)")
    plan = {"until": ["a"], "roles": {"a": {"script": str(there / "train.py"), "ranks": 1}}}
    (there / "roles.yaml").write_text(yaml.safe_dump(plan))
    environment = {**os.environ, "MIDSTEP_HOME": str(tmp_path / "jobs")}
    for words in (["--fault-source", str(there), str(there / "train.py")], ["--roles", str(there / "roles.yaml")]):
        done = subprocess.run(
            [str(MIDSTEP), "run", *words], cwd=here, env=environment, capture_output=True, text=True, check=False
        )
        ran = here / "ran"
        assert not ran.exists(), ran.read_text()
        assert done.returncode == 0, done.stderr
        assert "imports beside" in done.stdout


def test_each_program_of_midstep_is_started_by_the_same_rule() -> None:
    """A `python -m` of its own would run what lies in the current directory."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"sys\.executable.*[\"']-m[\"']", line)
    ]
    assert found == []


def test_python_3_10_has_its_own_way(tmp_path: Path) -> None:
    """Arguments reach the module, and what is in the current directory does not run."""
    (tmp_path / "json.py").write_text(CODE)
    command = [sys.executable, "-c", _BEFORE_3_11, "json.tool", "--compact"]
    done = subprocess.run(command, cwd=tmp_path, input='{"a": 1}', capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '{"a":1}'
    assert not (tmp_path / "ran").exists()


@attack(
    "a `mindio_ttp` lies beside the script of `midstep run --mindio`",
    holds="the job is refused before it starts, and a rank that finds one ends: no script trains without recovery",
    reads="... would be imported in the place of midstep's",
)
@pytest.mark.parametrize("name", ["mindio_ttp.py", "mindio_ttp/__init__.py"])
def test_a_mindio_ttp_beside_the_script_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """The script would import it in the place of midstep's, and nothing would recover."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigurationError, match=r"mindio_ttp.* would be imported in the place of midstep's"):
        policy_of(Start(command=(str(tmp_path / "train.py"),), mindio=True))
    with pytest.raises(ConfigurationError, match="would be imported in the place of midstep's"):
        put_on_path(tmp_path)  # in the rank, as in a pod whose script the command cannot see
