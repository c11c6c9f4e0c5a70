"""`midstep policy`: the command line, and the questions it can be asked."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from midstep.cli.policy import command
from midstep.policies.explain import SupposedWorld, parse_fault, suppose, typical
from midstep.policies.ladder import Ladder
from midstep.policies.schema import default_policy
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.types import FaultKind, FaultLevel, Rung


def midstep_policy(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def answer(*arguments: str | Path) -> dict[str, object]:
    """The decision of one question, from `--json`."""
    result = midstep_policy("explain", "--json", *arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)
    decision = found["decision"]
    assert isinstance(decision, dict)
    return decision


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text("ladder: [{rung: recover_in_place, budget: {per_rank: 2}}, {rung: stop}]\n")
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("laddr: 3\nstall: {factor: 0}\n")
    return path


def test_a_right_file_is_ok_with_its_ladder_and_notes(good: Path) -> None:
    result = midstep_policy("check", good)
    assert result.exit_code == 0
    assert f"{good}: ok (recover_in_place -> stop)" in result.output
    assert f"{good}: note: ladder is without recover" in result.output


def test_a_wrong_file_ends_with_1_and_each_mistake_on_one_line(good: Path, bad: Path) -> None:
    result = midstep_policy("check", good, bad)
    assert result.exit_code == 1
    mistakes = [line for line in result.output.splitlines() if line.startswith(str(bad))]
    assert [line.removeprefix(f"{bad}: ").split(":")[0] for line in mistakes] == ["laddr", "stall.factor"]
    assert "ok" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("check",),
        ("explain", "--fault", "kind=exitt,rank=0"),
        ("explain", "--fault", "kind=exit,rank=99"),
        ("explain", "--fault", "kind=exit"),
        ("explain", "--spent", "recover=x"),
        ("explain", "--nodes", "100000", "--ranks-per-node", "1024"),
        ("nothing",),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert midstep_policy(*arguments).exit_code == 2


@pytest.mark.parametrize("verb", ["explain", "show"])
def test_a_wrong_file_cannot_be_explained_or_shown(verb: str, bad: Path) -> None:
    result = midstep_policy(verb, bad)
    assert result.exit_code == 1
    assert "did you mean ladder?" in result.stderr


def test_show_prints_what_check_takes(good: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(midstep_policy("show", good).output)
    assert midstep_policy("check", shown).exit_code == 0
    assert "window_s: 3600.0" in shown.read_text()


def test_without_a_fault_each_typical_one_is_explained_with_all_cheaper_rungs(good: Path) -> None:
    result = midstep_policy("explain", good)
    assert result.exit_code == 0
    for case in typical(SupposedWorld()):
        assert case.title in result.output
    assert "not recover_in_place: node node-1 is lost" in result.output


@pytest.mark.parametrize(
    "world",
    [
        SupposedWorld(),
        SupposedWorld(nodes=1, ranks_per_node=1, spares=0, can_create_nodes=False),
        SupposedWorld(nodes=8, ranks_per_node=8, spares=4),
    ],
)
def test_every_typical_fault_has_an_answer_in_any_world(world: SupposedWorld) -> None:
    ladder = Ladder(default_policy())
    for case in typical(world):
        assert ladder.decide(suppose(case.faults, case.world)).reason


def test_the_typical_faults_show_five_of_the_rungs_of_the_default_policy() -> None:
    ladder = Ladder(default_policy())
    taken = {ladder.decide(suppose(case.faults, case.world)).rung for case in typical(SupposedWorld())}
    assert taken == {Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER, Rung.RESCHEDULE_POD}


@pytest.mark.parametrize(
    ("copies", "faults", "words"),
    [
        (None, ["kind=exit,rank=3"], None),
        (1, ["kind=exit,rank=3"], "what no other rank holds comes from copies in host memory"),
        (
            1,
            ["kind=node_lost,node=node-1"],
            "from a checkpoint: the copies of ranks 2, 3 in host memory were on node node",
        ),
        (2, ["kind=node_lost,node=node-1"], "those of ranks 2, 3 are with ranks 0, 1 on other nodes"),
        (
            2,
            ["kind=node_lost,node=node-0", "kind=node_lost,node=node-1"],
            "comes from a checkpoint: the copies of ranks",
        ),
        (2, ["kind=communication"], None),
    ],
)
def test_where_state_without_a_replica_comes_from_is_explained(
    tmp_path: Path, copies: int | None, faults: list[str], words: str | None
) -> None:
    """If the policy asks for copies in host memory, by the pairs that the job would have."""
    file = tmp_path / "policy.yaml"
    asks = f"restore: [replica, host_copy, checkpoint]\nhost_copy: {{copies: {copies}}}\n"
    file.write_text("" if copies is None else asks)
    arguments = [argument for fault in faults for argument in ("--fault", fault)]
    done = midstep_policy("explain", file, "--spares", "2", *arguments)
    assert done.exit_code == 0, done.output
    assert words in done.output if words is not None else "no other rank holds" not in done.output


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (["kind=exit,rank=3"], "comes from its buddy on another node, and no step is lost"),
        (["kind=exit,rank=1", "kind=exit,rank=3"], "is lost with its buddy (ranks 1, 3): all go back"),
        (["kind=communication"], None),
    ],
)
def test_an_answer_says_what_a_buddy_saves(faults: list[str], words: str | None, tmp_path: Path) -> None:
    """If the policy asks for one, by the pairs that the job would have."""
    file = tmp_path / "policy.yaml"
    file.write_text("replica: buddy\n")
    arguments = [argument for fault in faults for argument in ("--fault", fault)]
    done = midstep_policy("explain", file, "--nodes", "2", "--ranks-per-node", "2", *arguments)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert words in said if words is not None else "buddy" not in said


def test_a_failed_rung_and_a_spent_budget_can_be_supposed(good: Path) -> None:
    assert answer("--fault", "kind=exit,rank=3")["rung"] == "recover_in_place"
    assert answer("--fault", "kind=exit,rank=3", "--failed", "recover_in_place")["rung"] == "recover"
    spent = answer(good, "--fault", "kind=exit,rank=3", "--spent", "recover_in_place=2")
    assert spent["rung"] == "stop"
    assert "budget per_rank of rank 3 is spent: 2 of 2" in str(spent["reason"])


def test_several_faults_are_one_incident() -> None:
    found = answer("--fault", "kind=exit,rank=0", "--fault", "kind=node_lost,node=node-1")
    assert found["rung"] == "recover"
    assert "in place: rank 0" in str(found["reason"])


def test_a_level_alone_means_a_device_fault() -> None:
    fault = parse_fault("level=RestartNPU, rank=2, code=80E01801")
    assert (fault.kind, fault.level, fault.rank, fault.code) == (
        FaultKind.DEVICE,
        FaultLevel.RESTART_NPU,
        2,
        "80E01801",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "kind is missing; allowed: exception"),
        ("kind=exitt", "did you mean exit?"),
        ("kind=device", "needs a level"),
        ("level=restartnpu", "allowed: Software"),
        ("kind=exit,rank=x", "whole number"),
        ("kind=exit,rank=²", "whole number"),
        ("kind=exit,kind=exit", "stands twice"),
        ("kind", "not of the form"),
        ("knd=exit", "did you mean kind?"),
    ],
)
def test_a_fault_that_is_none_is_refused_with_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_fault(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind=exit,rank=4", "there is no rank 4; allowed: 0 to 3"),
        ("kind=node_lost,node=node-7", "there is no node 'node-7'; allowed: node-0, node-1"),
        ("kind=exit,rank=0,node=node-1", "rank 0 is on node-0"),
        ("kind=exit", "needs a rank=... or a node=..."),
    ],
)
def test_a_fault_outside_the_supposed_world_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        suppose([parse_fault(text)], SupposedWorld())
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("then", "says"),
    [("rollback", "all go back, and the repetition tells which"), ("report", "it is shown, and training continues")],
)
def test_with_votes_it_is_said_which_layouts_they_do_not_check(tmp_path: Path, then: str, says: str) -> None:
    """The policy knows no job, so it names layouts; the shards themselves are named by `midstep status`."""
    file = tmp_path / "votes.yaml"
    file.write_text(f"integrity: {{every_steps: auto, then: {then}}}\n")
    text = midstep_policy("explain", file).output
    assert "the copies of a shard are not equal\n  no process is touched\n    a shard that three ranks or more" in text
    assert says in text
    assert "one rank holds (FSDP on one mesh dimension, or Megatron with replica none or" in text
    assert "it is not checked by votes" in text
    *_, last = json.loads(midstep_policy("explain", "--json", file).output)
    assert (last["decision"], len(last["said"])) == (None, 3)


@pytest.mark.parametrize("arguments", [(), ("--fault", "kind=exit,rank=0")])
def test_without_votes_nothing_is_said_of_copies(arguments: tuple[str, ...]) -> None:
    assert "the copies of a shard" not in midstep_policy("explain", *arguments).output
