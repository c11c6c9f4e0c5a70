"""Lines that processes of a comparison have written become figures, whatever way a tool recovers."""

from collections.abc import Iterable, Mapping

import pytest

from midstep.benchmarks.peers.notes import Began, Finished, Note, Process, Stepped, Writer, note_fault, read_faults
from midstep.benchmarks.peers.notes import read_processes as read
from midstep.benchmarks.peers.outcome import NoRecovery, finished, recovered, undisturbed

FAULT_STEP = 15
FAULT_S = 15.5  # step n ends at n + 1, on all ranks


def process(
    pid: int, steps: Mapping[int, float], *, began_s: float = 0.0, world: int = 2, digest: str | None = "same"
) -> Process:
    """A process that completed these steps at these times."""
    notes: list[Note] = [Began(began_s), *(Stepped(at_s, step, world) for step, at_s in steps.items())]
    if digest is not None:
        notes.append(Finished(max(steps.values(), default=began_s), digest))
    return Process(pid, tuple(notes))


def even(steps: Iterable[int], later_s: float = 0.0) -> dict[int, float]:
    """One step a second."""
    return {step: step + 1 + later_s for step in steps}


def test_a_run_without_a_fault_has_its_median_step_and_its_digest() -> None:
    outcome = undisturbed([process(1, even(range(20))), process(2, even(range(20)))], ranks=2)
    assert (outcome.step_s, outcome.world, outcome.digest) == (1.0, 2, "same")
    assert outcome.recovery_s == outcome.steps_repeated == outcome.processes_restarted == 0


def test_the_first_steps_are_in_no_median() -> None:
    slow_start = {step: 10.0 * step if step < 4 else 30.0 + step for step in range(20)}
    assert undisturbed([process(1, slow_start, world=1)], ranks=1).step_s == 1.0


def test_a_survivor_and_one_newcomer_repeat_the_step() -> None:
    """As midstep and torchft recover: nothing is done twice."""
    survivor = process(1, {**even(range(15)), **even(range(15, 20), later_s=0.7)})
    lost = process(2, even(range(15)), digest=None)
    newcomer = process(3, even(range(15, 20), later_s=0.75), began_s=15.8)
    outcome = recovered([survivor, lost, newcomer], 2, FAULT_S, FAULT_STEP)
    assert outcome.recovery_s == pytest.approx(16.75 - 15.5)
    assert outcome.excess_s == pytest.approx(0.25)
    assert outcome.wall_lost_s == pytest.approx(0.75)
    assert (outcome.steps_repeated, outcome.processes_restarted, outcome.world) == (0, 1, 2)


def test_a_process_that_was_built_ahead_is_a_newcomer_and_those_that_go_on_waiting_are_none() -> None:
    survivor = process(1, {**even(range(15)), **even(range(15, 20), later_s=0.7)})
    lost = process(2, even(range(15)), digest=None)
    newcomer = process(3, even(range(15, 20), later_s=0.75), began_s=2.0)
    waiting = [process(4, {}, began_s=2.1, digest=None), process(5, {}, began_s=16.0, digest=None)]
    outcome = recovered([survivor, lost, newcomer, *waiting], 2, FAULT_S, FAULT_STEP)
    assert outcome.excess_s == pytest.approx(0.25)
    assert outcome.processes_restarted == 1


def test_all_are_restarted_from_a_checkpoint() -> None:
    """As torchrun recovers: five steps are done again, and the lost time counts them."""
    old = [process(pid, even(range(15)), digest=None) for pid in (1, 2)]
    new = [process(pid, even(range(10, 20), later_s=10.0), began_s=18.0) for pid in (3, 4)]
    outcome = recovered(old + new, 2, FAULT_S, FAULT_STEP)
    assert outcome.recovery_s == pytest.approx(21.0 - 15.5)
    assert outcome.wall_lost_s == pytest.approx(26.0 - 15.0 - 1.0)
    assert (outcome.steps_repeated, outcome.processes_restarted) == (5, 2)


def test_the_same_processes_go_back_to_a_checkpoint() -> None:
    """As NVRx in-process recovers: no process is new, and the first time a step was done does not count."""
    notes: tuple[Note, ...] = (
        Began(0.0),
        *(Stepped(step + 1, step, 2) for step in range(15)),
        *(Stepped(step + 8, step, 2) for step in range(10, 20)),
        Finished(28.0, "same"),
    )
    outcome = recovered([Process(1, notes), Process(2, notes)], 2, FAULT_S, FAULT_STEP)
    assert outcome.recovery_s == pytest.approx(18.0 - 15.5)
    assert (outcome.steps_repeated, outcome.processes_restarted, outcome.world) == (5, 0, 2)


def test_a_world_that_shrinks_says_so() -> None:
    """The steps of the smaller world are counted for themselves."""
    survivor = Process(
        1,
        (
            Began(0.0),
            *(Stepped(step + 1, step, 2) for step in range(15)),
            *(Stepped(step + 3, step, 1) for step in range(15, 20)),
            Finished(23.0, "alone"),
        ),
    )
    outcome = recovered([survivor, process(2, even(range(15)), digest=None)], 2, FAULT_S, FAULT_STEP)
    assert (outcome.world, outcome.digest) == (1, "alone")
    assert outcome.recovery_s == pytest.approx(2.5)


def test_a_tool_may_leave_out_the_row_of_the_failed_rank() -> None:
    """Two of four ranks train on; with tools that leave out one rank at most this is no recovery."""
    together = {step: step + 1.0 for step in range(15)}
    row = [
        Process(
            pid,
            (
                Began(0.0),
                *(Stepped(at_s, step, 4) for step, at_s in together.items()),
                *(Stepped(step + 3.0, step, 2) for step in range(15, 20)),
                Finished(23.0, "two"),
            ),
        )
        for pid in (1, 2)
    ]
    lost = [process(pid, even(range(15)), world=4, digest=None) for pid in (3, 4)]
    assert recovered([*row, *lost], 4, FAULT_S, FAULT_STEP, fewest=2).world == 2
    with pytest.raises(NoRecovery, match="no world of 4 to 3 ranks"):
        recovered([*row, *lost], 4, FAULT_S, FAULT_STEP)


def test_ranks_that_do_not_agree_have_no_digest() -> None:
    ranks = [process(1, even(range(20)), digest="one"), process(2, even(range(20)), digest="other")]
    assert undisturbed(ranks, ranks=2).digest == ""


@pytest.mark.parametrize("last", [14, 15])
def test_a_job_that_does_not_come_to_its_end_has_not_recovered(last: int) -> None:
    survivor = process(1, even(range(last + 1)), digest=None)
    lost = process(2, even(range(15)), digest=None)
    with pytest.raises(NoRecovery, match="no world of 2 to 1 ranks"):
        recovered([survivor, lost], 2, FAULT_S, FAULT_STEP)


def test_a_job_that_failed_at_once_has_not_recovered() -> None:
    with pytest.raises(NoRecovery, match="too few steps"):
        recovered([process(1, {}, digest=None)], 2, FAULT_S, FAULT_STEP)


def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also while the processes still write."""
    folder = tmp_path_factory.mktemp("notes")
    assert read(folder) == []
    writer = Writer(folder)
    writer.stepped(0, 4)
    assert [type(note) for note in read(folder)[0].notes] == [Began, Stepped]
    assert finished(read(folder)) == 0
    writer.finished("digest")
    assert finished(read(folder)) == 1


def test_a_fault_happens_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("notes")
    assert read_faults(folder) == {}
    assert note_fault(folder, 0)
    first = read_faults(folder)
    assert not note_fault(folder, 0)
    assert read_faults(folder) == first
    assert note_fault(folder, 1)
    assert read_faults(folder).keys() == {0, 1}
