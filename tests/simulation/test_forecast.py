"""Forecasts: the real ladder over a played fleet, told in numbers that add up."""

import json
import random
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from click.testing import CliRunner, Result

from midstep.cli.kept_forecast import kept_forecast
from midstep.cli.main import main
from midstep.controller.time_account import time_spent
from midstep.forecast.fault_trace import FaultTrace, Kind, Model, TimedFault, faults_of, load_trace
from midstep.forecast.forecast import Cluster, Forecast
from midstep.forecast.outlook import Loss, Outlook
from midstep.launch.reached_job import HereJob
from midstep.policies.schema import (
    Budget,
    CheckpointPolicy,
    HostCopyPolicy,
    IntegrityPolicy,
    Policy,
    RungPolicy,
    ScalePolicy,
    default_policy,
)
from midstep.protocol.errors import PolicyError
from midstep.protocol.time_spent import TimeCategory
from midstep.protocol.types import FaultLevel, RestoreSource, Rung

EXAMPLE = Path(__file__).parents[2] / "configs" / "faults.yaml"
SMALL = Cluster(nodes=2, ranks_per_node=2, spares=1)


def forecast(*faults: TimedFault, policy: Policy | None = None, hours: float = 24.0) -> Outlook:
    """Play a small job with the given faults."""
    trace = FaultTrace(faults=faults)
    return Forecast(policy or default_policy(), SMALL, trace, hours=hours, seed=1).run()


def run(*arguments: str) -> Result:
    """Call the command line."""
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_without_faults_only_checkpoints_cost_time() -> None:
    outlook = forecast()
    assert outlook.incidents == 0
    assert outlook.lost_s[Loss.CHECKPOINT] > 0
    assert outlook.goodput > 0.99


def test_a_killed_process_is_restarted_in_place_and_no_step_is_lost() -> None:
    outlook = forecast(TimedFault(3.0, Kind.PROCESS))
    assert [took.rung for took in outlook.timeline] == [Rung.RECOVER_IN_PLACE]
    assert outlook.steps_lost == 0
    assert outlook.lost_s[Loss.RECOVERY] == pytest.approx(Model().start_s + Model().rejoin_s)


def test_a_lost_node_moves_to_the_spare() -> None:
    assert [took.rung for took in forecast(TimedFault(3.0, Kind.NODE)).timeline] == [Rung.RECOVER]


def corrupted(every_steps: int | Literal["auto"], replicas: int = 3) -> Outlook:
    """Play a small job in which what a rank holds becomes wrong twice."""
    policy = msgspec.structs.replace(default_policy(), integrity=IntegrityPolicy(every_steps=every_steps))
    faults = (TimedFault(3.0, Kind.CORRUPTION), TimedFault(20.0, Kind.CORRUPTION))
    model = Model(silent_seen_h=24.0, replicas=replicas)
    return Forecast(policy, SMALL, FaultTrace(faults=faults, model=model), hours=48.0, seed=1).run()


def test_what_is_corrupted_is_trained_on_until_a_person_sees_it() -> None:
    """Without votes. What was trained since the first one is given up once."""
    outlook = corrupted(0)
    assert (outlook.incidents, outlook.faults[Kind.CORRUPTION]) == (0, 2)
    assert outlook.lost_s[Loss.WRONG] == pytest.approx(41 * 3600)
    assert outlook.goodput < 0.2


def test_votes_find_what_is_corrupted_with_every_process_kept() -> None:
    """In every step: the step is repeated. Rarely: all go back to the state that passed the last vote or checkpoint."""
    each, rare = corrupted(1), corrupted(500)
    assert [took.rung for took in each.timeline] == [took.rung for took in rare.timeline] == [Rung.RETRY_STEP] * 2
    assert (each.lost_s[Loss.WRONG], rare.lost_s[Loss.WRONG]) == (0.0, 0.0)
    assert each.steps_lost <= 2
    assert rare.steps_lost > 100
    assert each.goodput > rare.goodput > 0.9


def test_votes_cost_what_hashing_takes_and_with_auto_less_than_half_a_percent() -> None:
    """Steps of 10 s and votes of 0.2 s: one in every 5 steps. What is wrong is found 5 steps later at most."""
    model, goodput = Model(vote_s=0.2), list[float]()
    settings: tuple[tuple[int | Literal["auto"], float], ...] = ((0, 0.0), (1, 0.2), ("auto", 0.04))
    for every, cost_s in settings:
        policy = msgspec.structs.replace(default_policy(), integrity=IntegrityPolicy(every_steps=every))
        outlook = Forecast(policy, SMALL, FaultTrace(model=model), hours=48.0, seed=1).run()
        assert outlook.lost_s.get(Loss.VOTES, 0.0) == pytest.approx(outlook.steps_done * cost_s, rel=0.001)
        goodput.append(outlook.goodput)
    never, always, auto = goodput
    assert 1 - auto / never == pytest.approx(0.004, abs=0.0002)
    assert 1 - always / never == pytest.approx(0.02, abs=0.0005)
    found = corrupted("auto")
    assert [took.rung for took in found.timeline] == [Rung.RETRY_STEP] * 2
    assert found.lost_s[Loss.WRONG] == 0.0


def test_of_two_copies_none_is_blamed_and_one_is_not_voted_on() -> None:
    """As in a job: both go back to what was right, in place; and what no other rank holds is trained on."""
    two, one = corrupted(1, replicas=2), corrupted(1, replicas=1)
    assert [took.rung for took in two.timeline] == [Rung.RETRY_STEP] * 2
    assert (two.lost_s[Loss.WRONG], two.steps_lost > 100) == (0.0, True)
    assert one.lost_s[Loss.WRONG] == corrupted(0).lost_s[Loss.WRONG]


def test_a_rate_of_corruptions_leaves_the_other_faults_as_they_are() -> None:
    """So that a forecast with it and one without can be compared."""
    plain, more = (
        list(faults_of(FaultTrace(mtbf_h=3.0, silent_h=silent_h), 720.0, 4, random.Random(1)))
        for silent_h in (None, 100.0)
    )
    corruptions = [each for each in more if each.kind is Kind.CORRUPTION]
    others = [(each.at_h, each.kind) for each in more if each.kind is not Kind.CORRUPTION]
    assert others == [(each.at_h, each.kind) for each in plain]
    assert 3 <= len(corruptions) <= 14


RESTORE = (RestoreSource.REPLICA, RestoreSource.HOST_COPY, RestoreSource.CHECKPOINT)


@pytest.mark.parametrize(
    ("kind", "copies", "steps_lost"),
    [(Kind.PROCESS, None, 80), (Kind.PROCESS, 1, 2), (Kind.NODE, 1, 80), (Kind.NODE, 2, 2)],
)
def test_copies_in_host_memory_save_the_steps_since_the_checkpoint(
    kind: Kind, copies: int | None, steps_lost: int
) -> None:
    """Where one rank holds each shard; of a lost node only if each copy is on two nodes."""
    policy = default_policy()
    if copies is not None:
        policy = msgspec.structs.replace(policy, restore=RESTORE, host_copy=HostCopyPolicy(1, copies))
    trace = FaultTrace(faults=(TimedFault(3.0, kind),), model=Model(replicas=1))
    outlook = Forecast(policy, SMALL, trace, hours=24.0, seed=1).run()
    assert len(outlook.timeline) == 1
    assert steps_lost / 2 <= outlook.steps_lost <= steps_lost, outlook.steps_lost


@pytest.mark.parametrize(("ranks", "least"), [((0,), 0), ((0, 2), 40)], ids=["one of the two nodes", "both of them"])
def test_a_buddy_brings_back_what_one_rank_held_without_a_step_lost(ranks: tuple[int, ...], least: int) -> None:
    """It is on another node; with both of them gone the steps since the checkpoint are."""
    policy = msgspec.structs.replace(default_policy(), replica="buddy")
    faults = tuple(TimedFault(3.0, Kind.NODE, rank=rank) for rank in ranks)
    trace = FaultTrace(faults=faults, model=Model(replicas=1))
    outlook = Forecast(policy, Cluster(nodes=2, ranks_per_node=2, spares=2), trace, hours=24.0, seed=1).run()
    assert outlook.steps_lost >= least
    assert (outlook.steps_lost == 0) is (least == 0)


def test_a_buddys_copy_is_voted_on() -> None:
    """Two copies can be told apart from none, and all go back to what was right."""
    integrity = msgspec.structs.replace(default_policy().integrity, every_steps=1)
    policy = msgspec.structs.replace(default_policy(), replica="buddy", integrity=integrity)
    trace = FaultTrace(faults=(TimedFault(3.0, Kind.CORRUPTION),), model=Model(replicas=1))
    outlook = Forecast(policy, SMALL, trace, hours=24.0, seed=1).run()
    assert ([took.rung for took in outlook.timeline], outlook.lost_s[Loss.WRONG]) == ([Rung.RETRY_STEP], 0.0)


def test_the_loss_of_both_nodes_with_a_copy_costs_the_steps_since_the_checkpoint() -> None:
    """Nothing is forecast to come back from a node that is gone."""
    policy = msgspec.structs.replace(default_policy(), restore=RESTORE, host_copy=HostCopyPolicy(1, 2))
    faults = (TimedFault(3.0, Kind.NODE, rank=0), TimedFault(3.0, Kind.NODE, rank=2))
    trace = FaultTrace(faults=faults, model=Model(replicas=1))
    outlook = Forecast(policy, Cluster(nodes=2, ranks_per_node=2, spares=2), trace, hours=24.0, seed=1).run()
    assert outlook.steps_lost > 40


def test_a_broken_link_repeats_the_step() -> None:
    assert [took.rung for took in forecast(TimedFault(3.0, Kind.LINK)).timeline] == [Rung.RETRY_STEP]


def test_a_stall_costs_the_time_until_it_is_seen() -> None:
    outlook = forecast(TimedFault(3.0, Kind.STALL))
    assert [took.rung for took in outlook.timeline] == [Rung.RECOVER_IN_PLACE]
    assert outlook.lost_s[Loss.DETECTION] >= 3 * Model().step_s


def test_a_device_to_be_separated_leaves_its_node() -> None:
    fault = TimedFault(3.0, Kind.DEVICE, level=FaultLevel.SEPARATE_NPU)
    assert [took.rung for took in forecast(fault).timeline] == [Rung.RECOVER]


def test_a_spent_budget_stops_the_job_and_it_is_submitted_again() -> None:
    """From its emergency checkpoint, and the time until then is counted."""
    ladder = (RungPolicy(Rung.RECOVER_IN_PLACE, budget=Budget(per_job=1, window_s=0)), RungPolicy(Rung.STOP))
    faults = (TimedFault(3.0, Kind.PROCESS), TimedFault(4.0, Kind.PROCESS), TimedFault(9.0, Kind.PROCESS))
    outlook = forecast(*faults, policy=Policy(ladder=ladder))
    assert [took.rung for took in outlook.timeline] == [Rung.RECOVER_IN_PLACE, Rung.STOP, Rung.RECOVER_IN_PLACE]
    assert len(outlook.stops) == 1
    assert outlook.spent == 1
    assert outlook.lost_s[Loss.STOPPED] == Model().resubmit_s


ELASTIC = Policy(scale=ScalePolicy(min_nodes=1, min_interval_s=600.0))
ALONE = Cluster(nodes=2, ranks_per_node=2, spares=0)


def test_a_smaller_world_trains_on_until_its_machine_is_repaired() -> None:
    """Half of the ranks do half of the work, from the loss until the node is back."""
    trace = FaultTrace(faults=(TimedFault(3.0, Kind.NODE),))
    outlook = Forecast(ELASTIC, ALONE, trace, hours=24.0, seed=1).run()
    assert [took.rung for took in outlook.timeline] == [Rung.RESCHEDULE_POD, Rung.RESCHEDULE_POD]
    assert outlook.stops == []
    repair_h = Model().node_repair_s / 3600
    assert outlook.smaller_hours == pytest.approx(repair_h, rel=0.02)
    assert outlook.lost_s[Loss.FEWER] == pytest.approx(repair_h * 3600 / 2, rel=0.02)
    stiff = Forecast(default_policy(), ALONE, trace, hours=24.0, seed=1).run()
    assert outlook.goodput > stiff.goodput
    assert outlook.violations == stiff.violations == []


def test_a_job_that_needs_every_machine_waits_for_the_repair() -> None:
    trace = FaultTrace(faults=(TimedFault(3.0, Kind.NODE),))
    outlook = Forecast(default_policy(), ALONE, trace, hours=24.0, seed=1).run()
    assert len(outlook.stops) == 1
    assert outlook.lost_s[Loss.STOPPED] == pytest.approx(Model().node_repair_s, rel=0.01)


def test_a_fault_of_a_rank_that_a_smaller_world_does_not_have_strikes_nobody() -> None:
    faults = (TimedFault(3.0, Kind.NODE), TimedFault(4.0, Kind.PROCESS, rank=3))
    outlook = Forecast(ELASTIC, ALONE, FaultTrace(faults=faults), hours=5.0, seed=1).run()
    assert outlook.faults_missed == 1


@pytest.mark.parametrize("policy", [default_policy(), ELASTIC], ids=["default", "elastic"])
def test_what_is_trained_and_what_is_lost_make_up_the_time(policy: Policy) -> None:
    """Nothing is counted twice and nothing forgotten, but for the job's starts and the fractions of steps."""
    trace = FaultTrace(mtbf_h=1.0)
    outlook = Forecast(policy, Cluster(4, 4, 2, 2), trace, hours=200, seed=3).run()
    assert outlook.incidents > 100
    told_s = (outlook.steps_done - outlook.steps_lost) * Model().step_s + sum(outlook.lost_s.values())
    assert told_s == pytest.approx(200 * 3600, rel=0.01)
    assert outlook.violations == []


def test_the_same_seed_gives_the_same_forecast() -> None:
    one, other = (
        Forecast(default_policy(), SMALL, FaultTrace(mtbf_h=2.0), hours=100, seed=5).run().as_json() for _ in range(2)
    )
    assert one == other


def test_the_drawn_faults_come_at_about_the_mean_time() -> None:
    faults = list(faults_of(FaultTrace(mtbf_h=2.0), 2000.0, 8, random.Random(1)))
    assert 850 < len(faults) < 1150
    assert {fault.kind for fault in faults} == set(Kind) - {Kind.CORRUPTION}
    assert [fault.at_h for fault in faults] == sorted(fault.at_h for fault in faults)


def test_the_example_has_every_key_with_its_default() -> None:
    trace = load_trace(EXAMPLE, 16)
    assert (trace.mix, trace.levels, trace.model) == (FaultTrace().mix, FaultTrace().levels, Model())


def test_every_mistake_of_a_trace_is_told_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "trace.yaml"
    file.write_text("mtbf: 3\nmix: {process: -1}\nfaults: [{at_h: 1, kind: nod, rank: 2}]\n")
    with pytest.raises(PolicyError) as error:
        load_trace(file, 4)
    text = str(error.value)
    assert "mtbf: unknown key" in text
    assert "mix.process: found -1" in text
    assert "faults[0].kind: found the text 'nod'" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("faults: [{at_h: 1, kind: node, rank: 4}]", "faults[0].rank: found 4; allowed: 0 to 3"),
        ("mix: {process: 0, exception: 0, stall: 0, link: 0, node: 0, device: 0}", "all weights are 0"),
    ],
)
def test_what_only_the_job_can_tell_is_refused_too(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "trace.yaml"
    file.write_text(text)
    with pytest.raises(PolicyError) as error:
        load_trace(file, 4)
    assert said in str(error.value)


def test_the_command_writes_tables_json_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made, drawn = tmp_path / "out.json", tmp_path / "out.png"
    done = run("--nodes", "2", "--mtbf", "12h", "--hours", "100", "--json", str(made), "--picture", str(drawn))
    assert done.exit_code == 0, done.output
    assert "goodput" in done.output
    assert "no invariant was violated" in done.output
    outlook = json.loads(made.read_text())
    assert outlook["violations"] == []
    assert outlook["incidents"] == sum(rung["incidents"] for rung in outlook["rungs"].values())
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_forecast_is_shown_beside_a_real_job_and_kept_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `midstep status` counts it."""
    job = tmp_path / "gpt"
    job.mkdir()
    (job / "journal.sqlite").touch()
    so_far = time_spent(0.0, 100.0, {TimeCategory.TRAINING: 98.9, TimeCategory.START: 1.1}, trained=True)
    monkeypatch.setattr("midstep.cli.simulate._time_of", lambda beside: so_far)
    done = run("--nodes", "2", "--mtbf", "12h", "--hours", "100", "--beside", str(job), "--keep")
    assert done.exit_code == 0, done.output
    kept = kept_forecast(HereJob(job))
    assert kept is not None
    assert kept.goodput is not None
    assert f"forecast {100 * kept.goodput:.1f} %, so far 98.9 %" in done.output
    assert sum(kept.seconds.values()) == pytest.approx(kept.wall_s, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ((), "nothing goes wrong", 2),
        (("--mtbf", "3h", "--keep"), "name it with --beside JOB", 2),
        (("--mtbf", "3 hours"), "is not a duration", 2),
        (("--mtbf", "3h", "--nodes", "60000", "--ranks-per-node", "8"), "more than 200000 ranks", 2),
        (("--mtbf", "3h", "--faults", "/nowhere.yaml"), "/nowhere.yaml", 1),
        (("--mtbf", "3h", "--policy", "/nowhere.yaml"), "/nowhere.yaml", 1),
        (("--mtbf", "3h", "--hours", "1", "--picture", "x.bmp"), "a picture ends with", 1),
    ],
)
def test_wrong_wishes_are_refused(arguments: tuple[str, ...], said: str, status: int) -> None:
    done = run(*arguments)
    assert done.exit_code == status
    assert said in done.output


def test_a_seed_of_the_test_suite_is_replayed_with_its_transcript() -> None:
    done = run("--replay", "11")
    assert done.exit_code == 0
    assert "ControllerStarted" in done.output
    assert "seed 11: all invariants hold" in done.output


def test_training_does_not_stand_still_for_asynchronous_checkpoints() -> None:
    """They are complete a while later, so what is lost with all copies is a little more."""
    fault = TimedFault(3.0, Kind.PROCESS)
    ladder = (RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP))
    policy = Policy(ladder=ladder, save_before_reschedule=False, checkpoint=CheckpointPolicy(every_steps=10))
    beside = msgspec.structs.replace(policy, checkpoint=CheckpointPolicy(every_steps=10, asynchronous=True))
    waited, continued = forecast(fault, policy=policy), forecast(fault, policy=beside)
    assert waited.lost_s[Loss.CHECKPOINT] > 0 == continued.lost_s.get(Loss.CHECKPOINT, 0.0)
    assert continued.steps_done > waited.steps_done


def test_a_rung_that_restarts_everybody_saves_first_and_that_is_in_the_forecast() -> None:
    """It costs the time of a checkpoint, and no step; without it all steps since the last checkpoint."""
    policy = Policy(ladder=(RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP)))
    saved = forecast(TimedFault(3.0, Kind.PROCESS), policy=policy)
    at_once = forecast(
        TimedFault(3.0, Kind.PROCESS), policy=msgspec.structs.replace(policy, save_before_reschedule=False)
    )
    assert saved.steps_lost == 0 < at_once.steps_lost
    cost_s = saved.lost_s[Loss.RECOVERY] - at_once.lost_s[Loss.RECOVERY]
    assert Model().checkpoint_s <= cost_s < 3 * Model().checkpoint_s
