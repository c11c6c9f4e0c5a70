"""A schedule of faults is drawn from a seed, and the lines of a run under it become figures and rows."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from midstep.benchmarks.peers import __main__ as command
from midstep.benchmarks.peers import course, report, schedule, schedule_table
from midstep.benchmarks.peers import picture as picture_module
from midstep.benchmarks.peers.course import Course
from midstep.benchmarks.peers.kinds import FAULT_STEP, TOTAL_STEPS, VICTIM, Draw, Fault, Setting, Trial
from midstep.benchmarks.peers.marks import NODE
from midstep.benchmarks.peers.notes import Began, Finished, Note, Process, Stepped
from midstep.benchmarks.peers.plan import Start
from midstep.benchmarks.peers.registry import PEERS
from midstep.benchmarks.peers.results import Attempt, Results
from midstep.benchmarks.peers.schedule import APART_STEPS, EDGE_STEPS, Planned, Schedule
from midstep.benchmarks.peers.summary import Bits

DRAWN = Draw(seed=1, faults=8, steps=120)
SHORT = Draw(seed=1, faults=1, steps=20)
OURS = Trial("midstep", Setting.TUNED, Fault.SCHEDULED, 4, SHORT)
THEIRS = Trial("torchrun", Setting.TUNED, Fault.SCHEDULED, 4, SHORT)


# --- the schedule -----------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_faults_each_time_and_another_one_others() -> None:
    assert schedule.draw(DRAWN, 4) == schedule.draw(DRAWN, 4)
    assert schedule.draw(DRAWN, 4) != schedule.draw(Draw(2, 8, 120), 4)


@pytest.mark.parametrize("seed", range(50))
def test_faults_are_apart_and_of_all_sorts_alike(seed: int) -> None:
    """None is so close to an end that a median step, or what comes after it, could not be seen."""
    faults = schedule.draw(Draw(seed, 8, 120), 4).faults
    steps = [planned.step for planned in faults]
    assert all(later - earlier >= APART_STEPS for earlier, later in itertools.pairwise(steps))
    assert steps[0] >= EDGE_STEPS
    assert steps[-1] < 120 - EDGE_STEPS
    assert {planned.place for planned in faults} <= {0, 1, 2, 3}
    assert all(sum(planned.fault is sort for planned in faults) == 2 for sort in DRAWN.sorts)


def test_as_many_faults_as_there_is_room_for() -> None:
    assert [planned.step for planned in schedule.draw(Draw(1, 4, 20), 2).faults] == [5, 8, 11, 14]
    with pytest.raises(ValueError, match="20 steps have no room for 5 faults"):
        schedule.draw(Draw(1, 5, 20), 2)


def test_a_trial_of_one_fault_is_a_schedule_too() -> None:
    once = Planned(FAULT_STEP, VICTIM, Fault.KILL)
    assert schedule.of(Trial("torchrun", Setting.DEFAULT, Fault.KILL, 2)) == Schedule(TOTAL_STEPS, (once,))
    assert schedule.of(Trial("torchrun", Setting.DEFAULT, Fault.NONE, 2)) == Schedule(TOTAL_STEPS)
    calm = Trial("torchrun", Setting.DEFAULT, Fault.NONE, 2, schedule_table.undisturbed(DRAWN))
    assert schedule.of(calm) == Schedule(120)


def test_a_rank_that_hangs_twice_hangs_at_one_place() -> None:
    faults = (Planned(5, 3, Fault.STOP), Planned(8, 3, Fault.SLEEP), Planned(11, 1, Fault.SLEEP))
    assert Schedule(20, (*faults, Planned(14, 0, Fault.KILL))).places_that_hang == 2


@pytest.mark.parametrize("peer", ["torchrun", "ft_launcher", "dlrover", "torchft"])
def test_no_launcher_runs_out_of_restarts_under_a_schedule(peer: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All others of a comparison are given as many as one fault needs."""
    trial = Trial(peer, Setting.TUNED, Fault.SCHEDULED, 4, DRAWN)
    start = Start(trial, tmp_path_factory.mktemp("notes"), tmp_path_factory.mktemp("programs"))
    launcher = PEERS[peer].plan(start).launchers[0].command
    assert launcher[[word.replace("_", "-") for word in launcher].index("--max-restarts") + 1] == "24"


@pytest.mark.parametrize("peer", ["torchrun", "ft_launcher", "dlrover", "torchft", "inprocess"])
def test_where_nodes_are_lost_each_has_launchers_of_its_own(
    peer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They have its mark, and are started again, but for ranks without a launcher."""
    drawn = Draw(1, 5, 120, (*DRAWN.sorts, Fault.NODE))
    trial = Trial(peer, Setting.TUNED, Fault.SCHEDULED, 4, drawn)
    assert trial.nodes == 2
    plan = PEERS[peer].plan(Start(trial, tmp_path_factory.mktemp("notes"), tmp_path_factory.mktemp("programs")))
    on_nodes = [launcher.environment[NODE] for launcher in plan.launchers]
    assert on_nodes == sorted(on_nodes)
    assert [on_nodes.count(node) for node in sorted(set(on_nodes))] == [len(on_nodes) // 2] * 2
    assert {launcher.of_node for launcher in plan.launchers} == {peer != "inprocess"}
    whole = PEERS[peer].plan(
        Start(
            Trial(peer, Setting.TUNED, Fault.SCHEDULED, 4, DRAWN),
            tmp_path_factory.mktemp("notes"),
            tmp_path_factory.mktemp("programs"),
        )
    )
    assert not any(NODE in launcher.environment or launcher.of_node for launcher in whole.launchers)


def test_all_on_a_node_are_lost_together(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those of other nodes stay."""
    folder = tmp_path_factory.mktemp("nodes")
    lost = [{NODE: f"{folder}/0"}] * 2
    code = "from midstep.benchmarks.peers.marks import lose_own_node; lose_own_node()"
    waiting = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, **each})
        for each in (*lost, {NODE: f"{folder}/1"})
    ]
    try:
        loser = subprocess.run([sys.executable, "-c", code], env={**os.environ, **lost[0]}, check=False, timeout=30)
        assert loser.returncode == -signal.SIGKILL
        assert [process.wait(10) for process in waiting[:2]] == [-signal.SIGKILL] * 2
        assert waiting[2].poll() is None
    finally:
        for process in waiting:
            process.kill()
            process.wait(10)


# --- a run under it ---------------------------------------------------------------------------------------------------


def process(pid: int, place: int, steps: Iterable[tuple[int, float]], *, world: int = 2, digest: str = "") -> Process:
    """A process that completed these steps at these times; with a digest it came to the end."""
    notes: list[Note] = [Began(100.0), *(Stepped(100 + at_s, step, world, place) for step, at_s in steps)]
    if digest:
        notes.append(Finished(notes[-1].at_s, digest))
    return Process(pid, tuple(notes))


def even(steps: Iterable[int], later_s: float = 0.0) -> list[tuple[int, float]]:
    """One step a second."""
    return [(step, step + 1 + later_s) for step in steps]


def test_nothing_is_lost_where_nothing_happens() -> None:
    found = course.of([process(pid, pid, even(range(20)), digest="same") for pid in (0, 1)], 20, 100.0, {})
    assert found.done_s == tuple(map(float, range(1, 21)))
    assert (found.step_s, found.lost_s(2), found.trained(2), found.goodput(2)) == (1.0, 0.0, 1.0, 1.0)
    assert (found.met, found.steps_repeated, found.processes_restarted, found.digest) == ((), 0, 0, "same")


def test_faults_one_after_another_are_added_up() -> None:
    """A newcomer repeats nothing; then both go back three steps."""
    survivor = process(0, 0, [*even(range(8)), *even(range(8, 12), 2.0)])
    lost = process(1, 1, even(range(8)))
    newcomer = process(2, 1, even(range(8, 12), 2.0))
    restarted = [process(pid, pid - 3, even(range(9, 20), 10.0), digest="same") for pid in (3, 4)]
    found = course.of([survivor, lost, newcomer, *restarted], 20, 100.0, {1: 112.5, 0: 108.5})
    assert found.done_s[-1] == 30.0
    assert found.lost_s(2) == pytest.approx(10.0)
    assert (found.met, found.steps_repeated, found.processes_restarted) == ((0, 1), 3, 3)
    assert found.goodput(2) == pytest.approx(20 / 30)


def test_a_step_is_complete_when_the_slowest_rank_has_done_it() -> None:
    found = course.of([process(0, 0, even(range(3))), process(1, 1, even(range(3), 0.5))], 3, 100.0, {})
    assert found.done_s == (1.5, 2.5, 3.5)


def test_a_line_that_a_rank_did_not_come_to_write_is_made_up_by_the_next_one() -> None:
    found = course.of([process(0, 0, even(range(5))), process(1, 1, even((0, 1, 3, 4)))], 5, 100.0, {})
    assert found.done_s == (1.0, 2.0, 4.0, 4.0, 5.0)


def test_a_world_that_shrinks_trains_less() -> None:
    survivor = Process(
        0,
        (
            *process(0, 0, even(range(10))).notes,
            *process(0, 0, even(range(10, 20), 3.0), world=1, digest="alone").notes[1:],
        ),
    )
    processes = [survivor, process(1, 1, even(range(10)))]
    found = course.of(processes, 20, 100.0, {0: 110.5})
    assert (found.worlds[9], found.worlds[10], found.trained(2), found.digest) == (2, 1, 0.75, "alone")
    assert found.goodput(2) == pytest.approx(0.75 * 20 / 23)
    assert found.lost_s(2) == pytest.approx(22.0 - 9 - 5)
    assert course.enough(processes, 20, 2) == 1
    assert course.enough(processes[1:], 20, 2) == 2


def test_a_run_that_gave_up_says_how_far_it_came() -> None:
    found = course.of([process(pid, pid, even(range(7))) for pid in (0, 1)], 20, 100.0, {0: 107.5})
    assert (len(found.done_s), found.digest) == (7, "")
    nothing = course.of([process(0, 0, [])], 20, 100.0, {})
    assert (nothing.done_s, nothing.lost_s(2), nothing.step_s, nothing.goodput(2)) == ((), 0.0, 0.0, 0.0)


def test_a_step_that_is_repeated_is_not_new() -> None:
    """A tool that goes back to the same checkpoint for ever comes no further."""
    first = process(0, 0, even(range(7)))
    assert course.newest_s([first, process(1, 0, even(range(3, 6), 50.0))]) == 107.0
    assert course.newest_s([process(0, 0, [])]) is None


# --- the table --------------------------------------------------------------------------------------------------------


def came(total_s: float, *, steps: int = 20, world: int = 4, digest: str = "same") -> Course:
    """A course of even steps that ends at some time."""
    return Course(tuple(total_s * (step + 1) / 20 for step in range(steps)), (world,) * steps, (0,), 2, 3, digest)


def attempts(trial: Trial, *courses: Course, why: str = "") -> list[Attempt]:
    """Runs of one kind."""
    return [Attempt(trial, 0.0, course=each, why=why) for each in courses]


def calm(peer: str, total_s: float, digest: str = "same") -> list[Attempt]:
    """A run without a fault."""
    return attempts(
        Trial(peer, Setting.DEFAULT, Fault.NONE, 4, schedule_table.undisturbed(SHORT)), came(total_s, digest=digest)
    )


def test_the_quickest_is_first_and_bold_whichever_tool_it_is() -> None:
    found = Results({}, [*calm("plain", 20.0), *attempts(OURS, came(80.0)), *attempts(THEIRS, came(40.0))])
    first, second = schedule_table.rows(found, PEERS, SHORT, 4)
    assert (first.trial, second.trial) == (THEIRS, OURS)
    assert [first.goodput, second.goodput] == pytest.approx([1.0, 1.0])
    lines = schedule_table.text(found, PEERS).splitlines()
    assert lines[-2].startswith("| torchrun --max-restarts, tuned | **40.0** |")
    assert lines[-1].startswith("| midstep, tuned | 80.0 |")


def test_several_runs_of_one_tool_are_one_row() -> None:
    """With those that did not come to the end."""
    found = Results({}, [*attempts(THEIRS, came(40.0), came(50.0), came(42.0)),
                         *attempts(THEIRS, came(9.0, steps=9), why="its programs ended")])  # fmt: skip
    line = schedule_table.text(found, PEERS).splitlines()[-1]
    assert "| **42.0** (40.0-50.0); 1 of 4 gave up at step 9 of 20 (kill of rank 0): its programs ended |" in line


def test_bits_are_compared_with_the_tool_s_own_run_without_faults() -> None:
    found = Results({}, [*calm("torchrun", 20.0, "own"), *attempts(THEIRS, came(40.0)), *attempts(OURS, came(30.0))])
    ours, theirs = schedule_table.rows(found, PEERS, SHORT, 4)
    assert (ours.bits, theirs.bits) == (Bits.UNKNOWN, Bits.OTHER)
    found.attempts += calm("plain", 20.0, "")
    assert [row.bits for row in schedule_table.rows(found, PEERS, SHORT, 4)] == [Bits.UNKNOWN, Bits.OTHER]
    found.attempts += calm("plain", 20.0)
    assert [row.bits for row in schedule_table.rows(found, PEERS, SHORT, 4)] == [Bits.EQUAL, Bits.EQUAL]


def test_a_tool_that_gave_up_stands_below_with_its_step_and_its_reason() -> None:
    default = Trial("torchrun", Setting.DEFAULT, Fault.SCHEDULED, 4, SHORT)
    found = Results(
        {},
        [
            *attempts(default, came(20.0, steps=9, digest=""), why="no new step in 150 s\nthe last lines"),
            *attempts(OURS, came(900.0, world=3)),
        ],
        {"dlrover": "cannot be installed here: no wheel"},
    )
    text = schedule_table.text(found, PEERS)
    lines = text.splitlines()
    assert lines[4].startswith("| midstep, tuned | **900.0** |")
    assert "| **3** |" in lines[4]
    assert "gave up at step 9 of 20 (kill of rank 0): no new step in 150 s |" in lines[5]
    assert "not tried: cannot be installed here: no wheel" in text
    assert "the last lines" not in text


def test_a_picture_has_a_line_for_each_tool_that_was_tried(tmp_path: Path) -> None:
    """Also for one that gave up; what could not be installed has none."""
    pytest.importorskip("matplotlib")
    found = Results(
        {},
        [*attempts(OURS, came(30.0)), *attempts(THEIRS, came(9.0, steps=9), why="its programs ended")],
        {"dlrover": "cannot be installed here: no wheel"},
    )
    picture = tmp_path / "progress.svg"
    picture_module.draw_progress(schedule_table.rows(found, PEERS, SHORT, 4), PEERS, picture)
    text = picture.read_text()
    assert ">midstep, tuned<" in text
    assert ">torchrun --max-restarts, tuned, gave up<" in text
    assert "DLRover" not in text


def test_runs_of_one_fault_and_of_a_schedule_are_told_apart() -> None:
    """They may be in one file; each has tables of its own, and is kept in a file of its own."""
    single = Attempt(Trial("midstep", Setting.DEFAULT, Fault.KILL, 4), 0.0, why="it did not finish")
    found = Results({"cores": 2}, [single, *attempts(OURS, came(30.0))])
    assert [each.trial for each in found.of(scheduled=True).attempts] == [OURS]
    assert found.of(scheduled=False).attempts == [single]
    assert "SIGKILL" in report.page(found.of(scheduled=False), PEERS)
    assert "goodput" not in report.page(found.of(scheduled=False), PEERS)
    page = report.page(found.of(scheduled=True), PEERS)
    assert "excess" not in page
    assert "4 ranks, 20 steps, 1 faults of seed 1" in page
    sorts = ((False, False), (False, True), (True, False))
    assert len({report.places(scheduled=scheduled, sharded=sharded)[0] for scheduled, sharded in sorts}) == 3


def test_an_undisturbed_run_of_each_tool_comes_first_and_once() -> None:
    wanted = command._scheduled(("midstep", "torchrun"), (Setting.TUNED,), (4,), SHORT)
    assert [(each.peer, each.setting.value, each.fault.value) for each in wanted] == [
        ("midstep", "default", "none"),
        ("torchrun", "default", "none"),
        ("midstep", "tuned", "scheduled"),
        ("torchrun", "tuned", "scheduled"),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--schedule 1 --steps 20", "20 steps have no room for 8 faults: give more --steps"),
        ("--schedule 1 --peers hsdp", "have no runs under a schedule"),
        ("--schedule 1 --faults none", "there is no sort of faults to draw from: give --faults"),
        ("--schedule 1 --faults node --ranks 4,3", "where nodes are lost there are 2, of as many ranks each"),
        ("--faults scheduled", "are asked for with --schedule"),
        ("--faults node", "nodes are lost under a schedule: give --schedule"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_installed_or_run(given: str, said: str) -> None:
    done = CliRunner().invoke(command.main, given.split())
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
