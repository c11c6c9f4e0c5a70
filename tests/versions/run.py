"""Run contract tests and the demo with the oldest, the newest and two releases between: `make test SUITE=versions`.

python -m tests.versions.run [--short] [NAME...]     NAME: part of an environment's name, as torch-2.7
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from .environments import ENVIRONMENTS, NEWEST, OLDEST, ROOT, Environment, Made, NotHere, make

FOLDER = ROOT / ".versions"
SHORT_INSTALL_S = 900.0  # 400 were too few beside other lanes on two cores
CHECK_S = 2400.0
_PYTEST = ("python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile")


class Check(NamedTuple):
    """Something that is run in an environment: a name for the table, and a command of its `bin`."""

    name: str
    command: tuple[str, ...]


# Two instances with fp16, and tensor 2 x pipeline 2 x data 2 with a buddy.
SHAPES = ("tests/chaos/megatron/test_shapes.py", "-k", "instances or (pipeline and buddy)")
CHECKS = (
    Check("contract tests", (*_PYTEST, "tests/contract")),
    Check("demo", ("midstep", "demo")),
    Check("demo --megatron", ("midstep", "demo", "--megatron")),
    Check(
        "Megatron jobs",
        (*_PYTEST, "-m", "not nightly", *SHAPES),
    ),
)
_OF_GLOO = (*_PYTEST, "tests/contract/gloo", "tests/contract/test_building.py")
SHORT = {
    OLDEST: (Check("contract tests of gloo and of building", _OF_GLOO),),
    NEWEST: (
        Check("contract tests of gloo and of building", _OF_GLOO),
        # Apart from those: their processes are forks, which a process that has trained cannot have.
        Check(
            "contract tests of sharded models",
            (*_PYTEST, "tests/contract/test_sharded_state.py", "tests/unit/test_piece_copies.py"),
        ),
        Check("demo", ("midstep", "demo")),
    ),
}


def main() -> int:
    """Make the environments, run all checks in each, print a table. Exit status 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names; all without")
    parser.add_argument(
        "--short", action="store_true", help="some checks with the oldest and the newest that can be made"
    )
    parser.add_argument("--only-make", action="store_true", help="make the environments, and run nothing in them")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments are made, and kept")
    parser.add_argument("--remove", action="store_true", help="remove each environment when its checks are done")
    options = parser.parse_args()
    chosen: tuple[Environment, ...] = tuple(SHORT) if options.short else ENVIRONMENTS
    chosen = tuple(each for each in chosen if not options.names or any(name in each.name for name in options.names))
    rows, bad = [], False
    for environment in chosen:
        checks = () if options.only_make else SHORT[environment] if options.short else CHECKS
        lines, failed = _run_in(environment, options.folder.absolute(), checks, short=options.short)
        rows += lines
        bad |= failed
        if options.remove:
            shutil.rmtree(options.folder.absolute() / environment.name, ignore_errors=True)
    print("\n".join(["", *rows]), flush=True)
    return 1 if bad else 0


def _run_in(
    environment: Environment, folder: Path, checks: tuple[Check, ...], *, short: bool
) -> tuple[list[str], bool]:
    """Return a line for each check, and whether one failed. What cannot be made fails, but not when it is `short`."""
    began_s = time.monotonic()
    try:
        made = make(environment, folder, SHORT_INSTALL_S) if short else make(environment, folder)
    except NotHere as reason:
        return [f"{environment.name}: not run, {reason}"], not short
    what = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    print(f"{what}: made in {time.monotonic() - began_s:.0f} s", flush=True)
    lines, failed = [], False
    for check in checks:
        began_s = time.monotonic()
        good = _passes(check, made)
        failed |= not good
        lines.append(f"{what}: {check.name} {'passed' if good else 'FAILED'} in {time.monotonic() - began_s:.0f} s")
        print(lines[-1], flush=True)
    return lines, failed


def _passes(check: Check, made: Made) -> bool:
    command = [str(made.bin / check.command[0]), *check.command[1:]]
    environment = {**os.environ, "PATH": f"{made.bin}{os.pathsep}{os.environ['PATH']}"}
    print(f"$ {' '.join(command)}", flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=CHECK_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"stopped after {CHECK_S:.0f} s", flush=True)
        return False


if __name__ == "__main__":
    sys.exit(main())
