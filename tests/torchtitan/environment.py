"""The environment of the torchtitan tests: midstep[torch] and one torchtitan. Prints where its programs are.

python -m tests.torchtitan.environment [VERSION]
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from ..versions.environments import INSTALL_S, ROOT, NotHere, find_python, key

TORCHTITAN = "0.3.0"
PYTHONS = ("3.11", "3.12", "3.13")
REQUIRED = "MIDSTEP_REQUIRE_TORCHTITAN"  # set where the tests have to run: a skipped one is a failed one then


def require_torchtitan(required: bool) -> None:
    """Skip the test where there is no torchtitan, with what to do; fail it where it has to run."""
    if find_spec("torchtitan") is not None:
        return
    reason = "no torchtitan in this environment: `make test SUITE=torchtitan` makes one"
    if required:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def make(version: str) -> str:
    """Make the environment, or take the one that is there; return its folder of programs. Raises NotHere."""
    interpreter = next(filter(None, map(find_python, PYTHONS)), "")
    if not interpreter:
        raise NotHere(f"no Python {', '.join(PYTHONS)} is at hand")
    place = ROOT / ".versions" / f"torchtitan-{version}"
    done = place / "installed"
    wanted = key(interpreter, version)
    if not done.is_file() or done.read_text() != wanted:
        program = str(place / "bin" / "python")
        pip = [program, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        wishes = [f"torchtitan=={version}", "--editable", f"{ROOT}[torch,test]"]
        for command in ([interpreter, "-m", "venv", str(place)], [*pip, *wishes]):
            try:
                ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            except subprocess.TimeoutExpired:
                raise NotHere(f"`{' '.join(command[1:4])}` took more than {INSTALL_S:.0f} s") from None
            if ended.returncode != 0:
                raise NotHere(f"it cannot be installed: {ended.stderr.strip()[-300:]}")
        done.write_text(wanted)
    return str(place / "bin")


if __name__ == "__main__":
    print(make(sys.argv[1] if len(sys.argv) > 1 else TORCHTITAN))
