"""CI runs what a change can have broken, and nothing is left out by mistake."""

import ast
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .. import lanes
from ..conftest import pytest_collection_modifyitems, slow_tests
from ..lanes import ROOT, Choice, Contents, Lane, Record, choose, contents, read_lanes

LANE = Lane("ray", "test SUITE=ray", folders=("product",), tests=("tests/ray",))
COMMIT = "0123456789ab"


def everything(lane: Lane, present: Contents) -> Choice:
    """Run all of it."""
    return Choice(True, "it was asked for")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository."""
    for name in ("product/a.py", "product/part/b.py", "other/c.py", "tests/ray/conftest.py", "tests/ray/test_d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch"]\n[tool.ruff]\nline-length = 120\n')
    return tmp_path


def chosen(root: Path, record: Record, lane: Lane = LANE) -> Choice:
    """What is to run of a lane, by what is on record."""
    return choose(lane, contents(lane, root), record.lanes.get(lane.name))


@pytest.fixture
def record(root: Path) -> Record:
    """A record of the lane's having passed with what is there."""
    record = Record(root / "passed.json")
    record.passed(LANE, contents(LANE, root), COMMIT, 11.25)
    return record


def test_a_lane_that_has_passed_is_skipped_and_its_commit_named(root: Path, record: Record) -> None:
    assert not chosen(root, record).runs
    assert COMMIT in chosen(root, record).reason
    assert "11.2 minutes" in chosen(root, record).reason


def test_a_lane_that_is_not_on_record_runs_whole(root: Path) -> None:
    assert chosen(root, Record(root / "passed.json")) == Choice(True, "it is not on record that it passed")


@pytest.mark.parametrize("name", ["product/a.py", "product/part/b.py", "product/new.py", "tests/ray/conftest.py"])
def test_a_change_of_what_a_lane_depends_on_runs_all_of_it(root: Path, record: Record, name: str) -> None:
    (root / name).write_text("changed")
    choice = chosen(root, record)
    assert choice.runs
    assert choice.files == ()


def test_a_change_runs_one_part_of_a_lane_with_parts_and_every_file_is_in_one(root: Path, record: Record) -> None:
    """Another change runs another part by chance. Test files that have changed run, too."""
    lane = LANE._replace(parts=3)
    files = [f"tests/ray/test_{letter}.py" for letter in "defghij"]
    for name in files:
        (root / name).write_text(name)
    record.passed(lane, contents(lane, root), COMMIT, 30.0)
    assert not chosen(root, record, lane).runs
    found: dict[str, set[str]] = {}
    for number in range(40):
        (root / "product/a.py").write_text(str(number))
        choice = chosen(root, record, lane)
        assert choice.runs
        assert choice.is_part
        found[choice.reason.partition(" of ")[0]] = set(choice.files)
    assert sorted(found) == ["part 1", "part 2", "part 3"]
    assert sorted(name for part in found.values() for name in part) == files

    absent = next(name for name in files if name not in choice.files)
    (root / absent).write_text("changed")
    assert absent in chosen(root, record, lane).files


def test_in_how_many_parts_a_lane_runs_is_no_change_of_it(root: Path, record: Record) -> None:
    assert not chosen(root, record, LANE._replace(parts=3)).runs
    assert chosen(root, record, LANE._replace(environment=(("A", "1"),))).runs


def test_a_part_that_has_passed_is_not_on_record_as_the_lane(make: "Makefile", tmp_path: Path) -> None:
    record = Record(tmp_path / "passed.json")
    part = Choice(True, "part 1 of 3", ("tests/ray/test_d.py",), is_part=True)
    make.fails(0)
    assert lanes.run_lanes([LANE], lambda *_: part, record, go_on=False) == 0
    assert "ray" not in record.lanes


def test_a_file_that_is_gone_is_a_change(root: Path, record: Record) -> None:
    (root / "product/part/b.py").unlink()
    assert chosen(root, record).runs


@pytest.mark.parametrize("name", ["other/c.py", "product/__pycache__/a.pyc"])
def test_a_change_elsewhere_runs_nothing(root: Path, record: Record, name: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("changed")
    assert not chosen(root, record).runs


def test_of_changed_test_files_only_these_run(root: Path, record: Record) -> None:
    for name in ("tests/ray/test_new.py", "tests/ray/test_d.py"):
        (root / name).write_text("changed")
    assert chosen(root, record).files == ("tests/ray/test_d.py", "tests/ray/test_new.py")


def test_a_cut_of_a_lane_runs_always(root: Path, record: Record) -> None:
    lane = LANE._replace(cut=("tests/ray/test_d.py",))
    record.passed(lane, contents(lane, root), COMMIT, 1.0)
    assert chosen(root, record, lane).files == ("tests/ray/test_d.py",)


def test_another_dependency_runs_all_and_another_setting_of_a_tool_does_not(root: Path, record: Record) -> None:
    project = root / "pyproject.toml"
    project.write_text(project.read_text().replace("120", "100"))
    assert not chosen(root, record).runs
    project.write_text(project.read_text().replace("torch", "numpy"))
    assert chosen(root, record).runs


def test_a_lane_of_the_release_runs_only_when_it_is_asked_for(root: Path, record: Record) -> None:
    assert not chosen(root, record, LANE._replace(release=True)).runs


def test_a_record_that_was_written_is_read_again(root: Path, record: Record) -> None:
    record.ran_again("tests/ray/test_d.py::test_it", COMMIT)
    record.write()
    again = Record(root / "passed.json")
    assert not chosen(root, again).runs
    assert not again.may_run_again("tests/ray/test_d.py::test_it")
    assert again.may_run_again("tests/ray/test_d.py::test_other")


def test_a_second_run_is_forgotten_after_ten_runs(root: Path, record: Record) -> None:
    record.ran_again("tests/ray/test_d.py::test_it", COMMIT)
    for _ in range(lanes.RUNS_REMEMBERED):
        record.write()
        record = Record(root / "passed.json")
    assert record.may_run_again("tests/ray/test_d.py::test_it")


def test_a_record_that_cannot_be_written_fails_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(root / "passed.json")
    (root / "passed.json").mkdir()
    record.write()
    assert "not written" in capsys.readouterr().out


class Makefile:
    """Stands for `make`: fails as often as it is told to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tool = folder / "bin" / "make"
        self._tool.parent.mkdir()
        self.failed = folder / "lastfailed"
        self.calls = folder / "calls"
        monkeypatch.setenv("PATH", f"{self._tool.parent}:/usr/bin:/bin")
        monkeypatch.setattr(lanes, "LAST_FAILED", self.failed)

    def fails(self, times: int, *tests: str) -> None:
        """Fail the first calls, with these tests."""
        known = json.dumps(dict.fromkeys(tests, True))
        self._tool.write_text(
            f'#!/bin/sh\necho "$@" >> {self.calls}\necho "=== 1 failed, 2 passed in 3.00s ==="\n'
            f"[ $(wc -l < {self.calls}) -gt {times} ] || {{ echo '{known}' > {self.failed}; exit 2; }}\n"
        )
        self._tool.chmod(0o755)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Makefile:
    """A `make` of our own."""
    return Makefile(tmp_path, monkeypatch)


def test_one_failed_test_runs_a_second_time_and_is_written_down(make: Makefile, tmp_path: Path) -> None:
    make.fails(1, "tests/ray/test_d.py::test_it")
    record = Record(tmp_path / "passed.json")
    assert lanes.run_lane(LANE, (), record, COMMIT)
    first, second = make.calls.read_text().splitlines()
    assert first.split() == ["--no-print-directory", "test", "SUITE=ray"]
    assert second.endswith(f"FILES=tests/ray/test_d.py TESTS={lanes.AGAIN}")
    assert [each["test"] for each in record.second_runs] == ["tests/ray/test_d.py::test_it"]


def test_a_test_that_needs_a_second_run_again_fails_the_lane(make: Makefile, tmp_path: Path) -> None:
    make.fails(1, "tests/ray/test_d.py::test_it")
    record = Record(tmp_path / "passed.json")
    record.ran_again("tests/ray/test_d.py::test_it", COMMIT)
    assert not lanes.run_lane(LANE, (), record, COMMIT)


@pytest.mark.parametrize("failed", [[], ["a::b", "a::c"]])
def test_none_or_two_failed_tests_get_no_second_run(make: Makefile, tmp_path: Path, failed: list[str]) -> None:
    make.fails(1, *failed)
    assert not lanes.run_lane(LANE, (), Record(tmp_path / "passed.json"), COMMIT)


def test_the_closing_line_of_pytest_is_repeated(
    make: Makefile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make.fails(0)
    assert lanes.run_lanes([LANE], everything, Record(tmp_path / "passed.json"), go_on=False) == 0
    assert "LANE ray: === 1 failed, 2 passed in 3.00s ===" in capsys.readouterr().out


def test_a_run_ends_at_the_first_failure_unless_all_was_asked_for(make: Makefile, tmp_path: Path) -> None:
    record = Record(tmp_path / "passed.json")
    two = [LANE, LANE._replace(name="etcd")]
    make.fails(2)
    assert lanes.run_lanes(two, everything, record, go_on=False) == 1
    assert len(make.calls.read_text().splitlines()) == 1
    assert lanes.run_lanes(two, everything, record, go_on=True) == 1
    assert set(Record(tmp_path / "passed.json").lanes) == {"etcd"}


def test_what_a_lane_needs_is_made_beside_the_lanes_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    lane = LANE._replace(prepare="this")
    preparations = lanes.Preparations([LANE._replace(name="etcd"), lane])
    preparations.wait(LANE._replace(name="etcd"))  # needs nothing
    preparations.wait(lane)
    assert re.search(r"LANE ray: prepared in [\d.]+ minutes beside the others, status 0", capsys.readouterr().out)


def test_a_preparation_that_failed_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    lane = LANE._replace(prepare="tests.no_such_module")
    lanes.Preparations([lane]).wait(lane)
    said = capsys.readouterr().out
    assert "status 1" in said
    assert re.search(r"LANE ray: .*No module named tests.no_such_module", said)


# --- the table -------------------------------------------------------------------------------------------------------


def test_everything_that_a_lane_depends_on_is_there() -> None:
    """What has moved has to move in the table as well."""
    named = {path for lane in read_lanes() for path in (*lane.folders, *lane.tests, *lane.cut)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_folder_of_the_product_is_in_a_lane() -> None:
    ignored = {"benchmarks", "docs", "forecast", "simulation", "testing", "tests", "typings"}
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - ignored
    assert folders - {folder for lane in read_lanes() for folder in lane.folders} == set()


def test_every_folder_of_tests_is_run_by_a_lane_or_always() -> None:
    always = {"contract", "exploration", "mutants", "simulation", "typing", "unit"}
    lanes_of = {folder.removeprefix("tests/") for lane in read_lanes() for folder in lane.tests}
    by_hand = {"cuda", "mindcluster", "mindspeed"}  # CI has no GPU, and no checkouts
    assert {path.parent.name for path in (ROOT / "tests").glob("*/*.py")} - always - lanes_of - by_hand == set()


@pytest.mark.parametrize("lane", read_lanes(), ids=lambda lane: lane.name)
def test_every_lane_has_a_target(lane: Lane) -> None:
    command = ["make", "-n", "-o", ".venv/installed", *lane.target.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python" in done.stdout or "midstep" in done.stdout or "ruff" in done.stdout


# --- the tests that `make test` leaves out ---------------------------------------------------------------------------


def test_every_slow_test_that_is_named_is_there_once_and_no_other_mark_leaves_it_out() -> None:
    """What has another name by now would be run, and what is marked is left out without being named."""
    named = slow_tests()
    assert named == sorted(set(named))
    for each in named:
        path, name = each.split("::")
        (function,) = (
            node
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name == name
        )
        assert "pytest.mark.soak" not in map(ast.unparse, function.decorator_list), each


def test_slow_tests_are_left_out_where_that_is_asked_for_and_nowhere_else() -> None:
    """Of `make test`, with all of their parameters; a suite runs all."""
    slow = slow_tests()[-1]
    names = [slow, f"{slow}[a-b]", f"{slow}_and_more", "tests/unit/test_lanes.py::test_a"]

    def kept(*, without_slow: bool) -> list[str]:
        items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
        told: list[Any] = []

        def deselected(items: list[Any]) -> None:
            told.extend(items)

        hook = SimpleNamespace(pytest_deselected=deselected)
        config: Any = SimpleNamespace(getoption=lambda _: without_slow, hook=hook)
        pytest_collection_modifyitems(config, items)
        assert len(items) + len(told) == len(names)
        return [item.nodeid for item in items]

    assert kept(without_slow=False) == names
    assert kept(without_slow=True) == names[2:]
    said = {
        suite: subprocess.run(["make", "-n", suite], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for suite in ("pytest", "suite-chaos")
    }
    assert [suite for suite in said if "--without-slow" in said[suite]] == ["pytest"]
