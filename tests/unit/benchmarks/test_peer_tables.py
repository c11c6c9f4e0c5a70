"""Attempts of a comparison become rows and tables, which say also what was not tried, what failed, and who won."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from midstep.benchmarks.peers import __main__ as command
from midstep.benchmarks.peers import environment, report, results, summary, table
from midstep.benchmarks.peers.kinds import Fault, Setting, Trial
from midstep.benchmarks.peers.outcome import Outcome
from midstep.benchmarks.peers.registry import PEERS, SHARDED
from midstep.benchmarks.peers.results import Attempt, Results
from midstep.benchmarks.peers.summary import Bits, Row, row_of

OURS = Trial("midstep", Setting.DEFAULT, Fault.KILL, 4)
THEIRS = Trial("torchft", Setting.TUNED, Fault.KILL, 4)
SHRINKS = Trial("inprocess", Setting.TUNED, Fault.KILL, 4)


def attempt(trial: Trial, excess_s: float, *, world: int = 4, digest: str = "plain", step_s: float = 1.0) -> Attempt:
    """One that recovered."""
    return Attempt(trial, 0.1, Outcome(step_s, world, digest, excess_s + step_s, excess_s, excess_s + 0.1))


def row(trial: Trial, excess_s: float, world: int = 4) -> Row:
    """A row of three attempts."""
    return row_of(trial, [attempt(trial, excess_s + more, world=world) for more in (0.0, 0.2, 0.1)], {"plain"})


def test_a_row_has_the_median_of_its_attempts() -> None:
    found = row(OURS, 0.4)
    assert str(found.excess_s) == "0.50 (0.40-0.60)"
    assert (found.recovered, found.attempts, found.bits) == (3, 3, Bits.EQUAL)


def test_one_attempt_with_other_bits_is_enough() -> None:
    attempts = [attempt(OURS, 1.0), attempt(OURS, 1.0, digest="other")]
    assert row_of(OURS, attempts, {"plain"}).bits is Bits.OTHER
    assert row_of(OURS, attempts, ()).bits is Bits.UNKNOWN


def test_bits_are_compared_with_runs_of_the_same_size() -> None:
    plain = Trial("plain", Setting.DEFAULT, Fault.NONE, 2)
    found = [attempt(plain, 0.0, digest="of two"), attempt(Trial("plain", Setting.DEFAULT, Fault.NONE, 4), 0.0)]
    assert summary.undisturbed_digests(found, "midstep", 4) == {"plain"}
    assert summary.undisturbed_digests(found, "midstep", 2) == {"of two"}


def test_a_failed_attempt_is_told_beside_those_that_recovered() -> None:
    attempts = [attempt(OURS, 1.0), Attempt(OURS, 0.1, why="it did not finish\nthe last lines")]
    text = table.faults([row_of(OURS, attempts, ())], PEERS)
    assert "1 of 2 failed: it did not finish |" in text
    assert "the last lines" not in text


def test_what_was_not_tried_says_why() -> None:
    never = Trial("torchrun", Setting.DEFAULT, Fault.STOP, 4)
    text = table.faults([row_of(never, [], (), "not tried: gloo waits 30 minutes")], PEERS)
    assert "| torchrun --max-restarts, default | not tried: gloo waits 30 minutes | | | | | |" in text


@pytest.mark.parametrize(("ours_s", "first"), [(0.4, "midstep"), (9.0, "torchft nightly")])
def test_the_quickest_is_first_and_bold_whichever_tool_it_is(ours_s: float, first: str) -> None:
    lines = table.faults([row(THEIRS, 3.0), row(OURS, ours_s)], PEERS).splitlines()
    assert lines[2].startswith(f"| {first}, ")
    assert [line.count("**") for line in lines[2:]] == [2, 0]


def test_the_best_other_is_one_that_restores_all_ranks() -> None:
    rows = [row(OURS, 0.4), row(THEIRS, 3.9), row(SHRINKS, 1.0, world=3)]
    assert summary.best_of_others(rows, Fault.KILL, 4) == rows[1]
    assert "torchft nightly, tuned 4.00 (3.90-4.10) | 0.12 |" in table.ratios(rows, PEERS)
    assert "| **3** |" in table.faults(rows, PEERS)


def test_a_ratio_of_steps_is_taken_within_a_round() -> None:
    """So it does not matter that the machine was slower in one of them."""
    plain, ours = (Trial(peer, Setting.DEFAULT, Fault.NONE, 4) for peer in ("plain", "midstep"))
    found = [
        attempt(trial, 0.0, step_s=step_s) for trial, step_s in ((plain, 1.0), (ours, 1.1), (plain, 5.0), (ours, 5.5))
    ]
    by_peer = {each.trial.peer: each for each in summary.step_rows(found)}
    assert str(by_peer["midstep"].ratio) == "1.10 (1.10-1.10)"
    assert str(by_peer["plain"].ratio) == "1.00 (1.00-1.00)"


def test_a_comparison_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    found = results.load(file, {"cores": 2})
    found.attempts += [attempt(OURS, 1.0), attempt(THEIRS, 3.0), attempt(OURS, 1.1)]
    results.save(found, file)
    again = results.load(file, {})
    assert again == found
    assert list(again.left([OURS, THEIRS], repeat=3)) == [THEIRS, OURS, THEIRS]
    assert list(again.left([OURS, THEIRS], repeat=1)) == []


def test_the_page_has_all_peers_for_each_fault_that_was_tried() -> None:
    """Those too that cannot be tried or installed; plain DDP only where a step is measured."""
    stopped = Trial("midstep", Setting.DEFAULT, Fault.STOP, 4)
    found = Results({"cores": 2}, [attempt(stopped, 2.9)], {"dlrover": "cannot be installed here: no wheel"})
    page = report.page(found, PEERS)
    assert "cores 2" in page
    assert "| torchrun --max-restarts, default | not tried: gloo waits 30 minutes" in page
    assert "| DLRover flash checkpoint, tuned | not tried: cannot be installed here: no wheel |" in page
    assert "plain DDP" not in page
    assert "SIGKILL" not in page


def test_tools_that_shard_the_model_have_tables_of_their_own() -> None:
    """Each beside a plain run that shards it as well."""
    killed = {peer: Trial(peer, Setting.TUNED, Fault.KILL, 4) for peer in ("hsdp.midstep", "hsdp.torchft")}
    calm = {peer: Trial(peer, Setting.DEFAULT, Fault.NONE, 4) for peer in ("hsdp.plain", "hsdp.midstep")}
    found = Results(
        {},
        [
            *(attempt(trial, 0.0) for trial in calm.values()),
            *(attempt(trial, excess_s) for trial, excess_s in zip(killed.values(), (0.5, 5.0), strict=True)),
        ],
    )
    page = report.page(found, SHARDED)
    assert "| 4, kill | tuned 0.50 (0.50-0.50) | torchft nightly, tuned 5.00 (5.00-5.00) | 0.10 |" in page
    assert "| midstep, tuned | **0.50** (0.50-0.50) | 0.60 (0.60-0.60) | 0 | 0 | 4 | equal |" in page
    assert "step, ms | to plain HSDP |" in page


@pytest.mark.parametrize(
    ("given", "names"),
    [("hsdp", tuple(SHARDED)), ("hsdp.midstep, hsdp.plain", ("hsdp.midstep", "hsdp.plain")), ("plain", ("plain",))],
)
def test_all_peers_of_a_comparison_have_one_workload(given: str, names: tuple[str, ...]) -> None:
    context = click.Context(command.main)
    assert command.peers_named(context, command.main.params[0], given) == names


@pytest.mark.parametrize("given", ["midstep,hsdp.midstep", "hsdp.dlrover", ""])
def test_a_mixture_of_workloads_is_refused_with_the_names_of_each(given: str) -> None:
    context = click.Context(command.main)
    with pytest.raises(click.BadParameter, match=r"there are midstep, .*; and, with another workload, hsdp\.midstep"):
        command.peers_named(context, command.main.params[0], given)


@pytest.mark.parametrize("ranks", ["2", "4,5"])
def test_a_sharded_model_wants_two_rows(ranks: str) -> None:
    """Before anything is installed or run."""
    done = CliRunner().invoke(command.main, ["--peers", "hsdp", "--ranks", ranks])
    assert done.exit_code == 2
    assert "give --ranks 4" in done.output


def test_what_is_kept_has_no_logs() -> None:
    """They name directories and machines."""
    found = Results({}, [Attempt(OURS, 0.1, why="it did not finish\n/home/somebody/log")])
    assert [each.why for each in report.without_logs(found).attempts] == ["it did not finish"]


def test_all_trials_take_turns() -> None:
    assert list(Results({}).left([OURS, THEIRS], repeat=2)) == [OURS, THEIRS, OURS, THEIRS]


def test_a_peer_that_cannot_be_installed_keeps_none_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row says why; only this one is tried again the next time."""
    asked: list[str] = []

    def failure(command: list[str]) -> str:
        asked.append(command[-1])
        return "cannot be installed here: no wheel" if "dlrover" in " ".join(command) else ""

    monkeypatch.setattr(environment, "_failure", failure)
    wanted = {name: PEERS[name] for name in ("midstep", "dlrover", "inprocess")}
    reasons = environment.make(wanted, tmp_path)
    assert reasons == {"dlrover": "cannot be installed here: no wheel"}
    asked.clear()
    assert environment.make(wanted, tmp_path) == reasons
    assert asked == ["tornado"]
