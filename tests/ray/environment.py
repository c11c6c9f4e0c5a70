"""The environment of the Ray tests: midstep[torch,ray]. Prints where its programs are.

python -m tests.ray.environment [VERSION]
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from ..versions.environments import INSTALL_S, ROOT, NotHere, find_python, key

RAY = "2.60.0"
PYTHONS = ("3.11", "3.12", "3.13", "3.10")
REQUIRED = "MIDSTEP_REQUIRE_RAY"  # set where the tests have to run: a skipped one is a failed one then


def require_ray(required: bool) -> None:
    """Skip the test where there is no Ray, with what to do; fail it where it has to run."""
    if find_spec("ray") is not None:
        return
    reason = "no Ray in this environment: `make test SUITE=ray` makes one"
    if required:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def make(version: str) -> str:
    """Make the environment, or take the one that is there; return its folder of programs. Raises NotHere."""
    interpreter = next(filter(None, map(find_python, PYTHONS)), "")
    if not interpreter:
        raise NotHere(f"no Python {', '.join(PYTHONS)} is at hand")
    place = ROOT / ".versions" / f"ray-{version}"
    done = place / "installed"
    wishes = [f"ray[default,train]=={version}", "--editable", f"{ROOT}[torch,test,ray]"]  # default: `ray job submit`
    wanted = key(interpreter, *wishes)
    if not done.is_file() or done.read_text() != wanted:
        program = str(place / "bin" / "python")
        pip = [program, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        for command in ([interpreter, "-m", "venv", str(place)], [*pip, *wishes]):
            ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if ended.returncode != 0:
                raise NotHere(f"it cannot be installed: {ended.stderr.strip()[-300:]}")
        done.write_text(wanted)
    return str(place / "bin")


if __name__ == "__main__":
    print(make(sys.argv[1] if len(sys.argv) > 1 else RAY))
