"""Run the lanes of tests that a change can have broken, and record what passed.

A lane is a `make` target and the folders that it depends on (`tests/lanes.toml`). It passed with certain contents of
these folders, which `.ci/passed.json` remembers as a hash; while the contents are the same, there is no need to run it
again. If nothing but some of its test files differ, only these run. If more differs, a lane that has parts runs one.

    python -m tests.lanes              what has changed since it passed, as `.ci/run` does
    python -m tests.lanes ray soak     these, whole
    python -m tests.lanes --all        everything, the lanes that only a release needs among them

Standard library only (docs/decisions/0170-ci-in-lanes.md).
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "lanes.toml"
RECORD = ROOT / ".ci" / "passed.json"
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
AGAIN = "--last-failed --last-failed-no-failures none"
FILES_NAMED = 8  # in a line
RUNS_REMEMBERED = 10  # a test that needs a second run twice in as many runs is broken
_CLOSING = re.compile(r"^(=+ )?\d+ (passed|failed|skipped|error|deselected).* in [\d.]+s.*$")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Lane(NamedTuple):
    """One `make` target with everything that its outcome depends on."""

    name: str
    target: str
    always: bool = False  # runs whatever has changed
    release: bool = False  # runs only with everything else, or by name
    folders: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()  # folders with test files of its own, which can run one by one
    cut: tuple[str, ...] = ()  # test files that run always
    parts: int = 1  # of its test files, of which a change runs one
    environment: tuple[tuple[str, str], ...] = ()
    programs: tuple[str, ...] = ()  # that have to be on the path ...
    packages: tuple[str, ...] = ()  # ... and what Debian calls them
    prepare: str = ""  # a module that makes what the lane needs, beside the lanes before it


class Contents(NamedTuple):
    """The hash of what a lane depends on, and of each of its test files."""

    shared: str
    tests: dict[str, str]


class Choice(NamedTuple):
    """What to do with a lane: nothing, all of it (no files), or some of its test files. And why."""

    runs: bool
    reason: str
    files: tuple[str, ...] = ()
    is_part: bool = False  # and so proves nothing of the rest


def read_lanes(table: Path = TABLE) -> list[Lane]:
    """Read the table of lanes, in the order in which they run; `@group` stands for the folders of a group."""
    entries: dict[str, dict[str, Any]] = tomllib.loads(table.read_text())
    groups = entries.pop("groups", {})
    return [_lane(name, entry, groups) for name, entry in entries.items()]


def _lane(name: str, entry: dict[str, Any], groups: dict[str, list[str]]) -> Lane:
    known: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "folders":
            known[key] = tuple(path for each in value for path in (groups[each[1:]] if each[0] == "@" else [each]))
        elif key == "environment":
            known[key] = tuple(value.items())
        else:
            known[key] = tuple(value) if isinstance(value, list) else value
    return Lane(name, **known)


def contents(lane: Lane, root: Path = ROOT) -> Contents:
    """Hash what a lane depends on: its entry, the dependencies of the project, its folders and its test files."""
    shared = hashlib.sha256(_entry(lane).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        shared.update(_requirements(root / name))
    own: dict[str, str] = {}
    for folder in (*lane.folders, *lane.tests):
        for path in _files(root / folder):
            name = str(path.relative_to(root))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            if folder in lane.tests and path.name.startswith("test_"):
                own[name] = digest
            else:
                shared.update(f"{name} {digest}\n".encode())
    return Contents(shared.hexdigest()[:16], own)


def _entry(lane: Lane) -> str:
    """Return what the table says of a lane; how much of it a change runs is no matter of what has passed."""
    fields = lane._asdict()  # written as `repr` has them: hashes that are on record stay what they are
    del fields["parts"]
    return f"Lane({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _requirements(path: Path) -> bytes:
    """Return the part of a file that says what is installed: lists of packages and settings of tools are no part."""
    if not path.is_file():
        return b""
    if path.suffix == ".toml":
        return json.dumps(tomllib.loads(path.read_text()).get("project", {}), sort_keys=True).encode()
    return path.read_bytes()


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for folder, folders, names in os.walk(place):
        folders[:] = sorted(each for each in folders if not each.startswith((".", "__")))
        yield from (Path(folder, name) for name in sorted(names) if not name.endswith(".pyc"))


def choose(lane: Lane, present: Contents, passed: dict[str, Any] | None) -> Choice:
    """Decide what a lane has to run, by what it passed with last."""
    if lane.release or lane.always:
        return Choice(lane.always, "it always runs" if lane.always else "only `make ci-all` runs it")
    if passed is None:
        return Choice(True, "it is not on record that it passed")
    before = f"{passed['commit']}, with which it passed in {passed['minutes']} minutes"
    changed = [name for name, digest in present.tests.items() if passed["tests"].get(name) != digest]
    if passed["contents"] != present.shared:
        reason = f"what it depends on differs from {before}"
        if lane.parts == 1:
            return Choice(True, reason)
        number, part = part_of(lane, present)
        files = tuple(dict.fromkeys((*lane.cut, *part, *changed)))
        return Choice(True, f"part {number} of {lane.parts}, as {reason}", files, is_part=True)
    files = tuple(dict.fromkeys((*lane.cut, *changed)))
    if changed:
        return Choice(True, f"{len(changed)} of its test files differ from {before}", files)
    return Choice(bool(files), f"nothing that it depends on differs from {before}", files)


def part_of(lane: Lane, present: Contents) -> tuple[int, list[str]]:
    """Return the number of the part of a lane that runs with these contents, from 1, and its test files.

    Any change chooses another one by chance, and CI, which cannot write down what it ran, the same one again.
    """
    number = int(present.shared, 16) % lane.parts
    return number + 1, sorted(present.tests)[number :: lane.parts]


class Record:
    """What passed, in `.ci/passed.json`: written after each lane, committed by whoever has run them."""

    def __init__(self, path: Path = RECORD) -> None:
        """Read the record; without one, nothing has passed."""
        self._path = path
        known = json.loads(path.read_text()) if path.is_file() else {}
        self.lanes: dict[str, dict[str, Any]] = known.get("lanes", {})
        self.run: int = known.get("run", 0) + 1
        self.second_runs: list[dict[str, Any]] = [
            each for each in known.get("second_runs", []) if each["run"] > self.run - RUNS_REMEMBERED
        ]

    def passed(self, lane: Lane, with_contents: Contents, commit: str, minutes: float) -> None:
        """Note that a lane has passed, whole or in those parts that had changed."""
        self.lanes[lane.name] = {
            "contents": with_contents.shared,
            "commit": commit,
            "minutes": round(minutes, 1),
            "tests": {} if lane.always else dict(sorted(with_contents.tests.items())),
        }

    def may_run_again(self, test: str) -> bool:
        """Say whether a test that failed gets a second run: one that needed it twice of late is broken."""
        return all(each["test"] != test for each in self.second_runs)

    def ran_again(self, test: str, commit: str) -> None:
        """Note that a test passed only when it ran a second time."""
        self.second_runs.append({"test": test, "run": self.run, "commit": commit})

    def write(self) -> None:
        """Write all of it; where the checkout cannot be written, the run is none the worse."""
        text = json.dumps({"run": self.run, "second_runs": self.second_runs, "lanes": self.lanes}, indent=1)
        try:
            self._path.write_text(text + "\n")
        except OSError as error:
            say(f"the record was not written: {error}")


class Preparations:
    """Environments and programs that lanes need, made one after another at the lowest priority while others run."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        """Begin with the first."""
        self._lanes = [lane for lane in lanes if lane.prepare]
        self._ready = {lane.name: threading.Event() for lane in self._lanes}
        threading.Thread(target=self._work, daemon=True).start()

    def wait(self, lane: Lane) -> None:
        """Return when a lane has what it needs, or when that has failed: the lane tries again, and tells why."""
        if lane.name in self._ready:
            self._ready[lane.name].wait()

    def _work(self) -> None:
        for lane in self._lanes:
            began_s = time.monotonic()
            command = ["nice", "-n", "19", sys.executable, "-m", *lane.prepare.split()]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            say(f"{lane.name}: prepared in {_minutes(began_s):.1f} minutes beside the others, status {done.returncode}")
            if done.returncode != 0:
                say(f"{lane.name}: {done.stderr.strip()[-1000:]}")
            self._ready[lane.name].set()


def run_lane(lane: Lane, files: tuple[str, ...], record: Record, commit: str) -> bool:
    """Run a lane, and the one test that failed a second time. Say whether it passed."""
    if absent := [name for name in lane.programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        say(f"{lane.name}: {', '.join(absent)} not found, {', '.join(lane.packages)} will be installed")
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *lane.packages]):
            subprocess.run(["apt-get", "-qq", *command], stdout=subprocess.DEVNULL, check=False)
    LAST_FAILED.unlink(missing_ok=True)
    if _make(lane, f"FILES={' '.join(files)}"):
        return True
    failed = list(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.is_file() else []
    if len(failed) != 1:
        return False
    if not record.may_run_again(failed[0]):
        say(f"{lane.name}: {failed[0]} has failed twice in {RUNS_REMEMBERED} runs: it is broken")
        return False
    say(f"{lane.name}: SECOND RUN of {failed[0]}. If it passes, it is a bug that shows rarely")
    if not _make(lane, f"FILES={failed[0].partition('::')[0]}", f"TESTS={AGAIN}"):
        return False
    record.ran_again(failed[0], commit)
    return True


def _make(lane: Lane, *settings: str) -> bool:
    """Run the target of a lane with its output passed on, and repeat pytest's closing lines at the end."""
    command = ["make", "--no-print-directory", *lane.target.split(), *(each for each in settings if each[-1] != "=")]
    variables = {**os.environ, **dict(lane.environment)}
    closing = []
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if _CLOSING.match(plain := _COLOURS.sub("", line).strip()):
                closing.append(plain)
    for line in closing:
        say(f"{lane.name}: {line}")
    return process.returncode == 0


def run_lanes(lanes: list[Lane], chosen: Callable[[Lane, Contents], Choice], record: Record, *, go_on: bool) -> int:
    """Run those lanes that are chosen, in order; stop at the first failure, or go on. Return the exit status."""
    commit = head()
    before = {lane.name: contents(lane) for lane in lanes}
    choices = {lane.name: chosen(lane, before[lane.name]) for lane in lanes}
    preparations = Preparations(lane for lane in lanes if choices[lane.name].runs)
    told = []
    for lane in lanes:
        choice, began_s = choices[lane.name], time.monotonic()
        if not choice.runs:
            told.append(f"{lane.name}: skipped: {choice.reason}")
            say(told[-1])
            continue
        say(f"{lane.name}: {named(choice.files)} runs: {choice.reason}")
        preparations.wait(lane)
        good = run_lane(lane, choice.files, record, commit)
        told.append(f"{lane.name}: {'passed' if good else 'FAILED'} in {_minutes(began_s):.1f} minutes")
        say(told[-1])
        if good and not choice.is_part and contents(lane) == before[lane.name]:
            record.passed(lane, before[lane.name], commit, _minutes(began_s))
        record.write()
        if not good and not go_on:
            break
    print("\n".join(["", "lanes of this run:", *told]), flush=True)
    return 1 if any("FAILED" in each for each in told) else 0


def named(files: tuple[str, ...]) -> str:
    """Return what a line says of the files of a choice."""
    return "all of it" if not files else ", ".join(files) if len(files) <= FILES_NAMED else f"{len(files)} test files"


def head() -> str:
    """Name the commit that is checked out, with a mark if the tree has been changed since."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "an unknown commit"


def say(line: str) -> None:
    """Print a line that stands out from the output of tests."""
    print(f"LANE {line}", flush=True)


def _minutes(since_s: float) -> float:
    return (time.monotonic() - since_s) / 60


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="LANE", help="run these whole; without: what has changed")
    parser.add_argument("--all", action="store_true", help="run all lanes whole, and go on when one fails")
    options = parser.parse_args()
    lanes = read_lanes()
    if unknown := set(options.names) - {lane.name for lane in lanes}:
        parser.error(f"there is no lane {', '.join(sorted(unknown))}: {', '.join(lane.name for lane in lanes)}")
    if options.names:
        lanes = [lane for lane in lanes if lane.name in options.names]
    record = Record()
    if options.all or options.names:
        return run_lanes(lanes, lambda *_: Choice(True, "it was asked for"), record, go_on=True)
    passed = dict(record.lanes)
    return run_lanes(lanes, lambda lane, now: choose(lane, now, passed.get(lane.name)), record, go_on=False)


if __name__ == "__main__":
    sys.exit(main())
