"""Policy files: what is read, what is refused and with which words, and what reaches agents and processors."""

from importlib import resources
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from midstep.devices import kinds
from midstep.policies import schema
from midstep.policies.files import MAX_FILE_BYTES, load_policy, parse_policy, render
from midstep.policies.reading import problems_of
from midstep.policies.rules import advice, job_settings
from midstep.policies.schema import Budget, CheckpointPolicy, Policy, RungPolicy, StandbyPolicy, default_policy
from midstep.protocol.errors import PolicyError
from midstep.protocol.types import JobSettings, RestoreSource, Rung, StandbyDepth

# They lie beside them, and are about something else.
NO_POLICIES = {
    "exceptions.yaml",
    "fault_codes.yaml",
    "faults.yaml",
    "npu_fault_codes.yaml",
    "prometheus-alerts.yaml",
}
CONFIGS = sorted(
    path for path in Path(str(resources.files("midstep.configs"))).glob("*.yaml") if path.name not in NO_POLICIES
)


def refused(text: str) -> list[str]:
    """The lines of the error that `text` gives."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "job.yaml")
    return str(caught.value).splitlines()


def keys_in(tree: object) -> set[str]:
    """The paths of all keys of a YAML tree; items of a list share one."""
    if isinstance(tree, dict):
        return {f"{key}.{rest}".rstrip(".") for key, inner in tree.items() for rest in keys_in(inner) | {""}}
    if isinstance(tree, list | tuple):
        return {path for inner in tree for path in keys_in(inner)}
    return set()


def test_the_names_that_policies_go_by_are_those_of_the_kinds() -> None:
    """They stand in both, so that the machine need not ask which packages are installed."""
    assert (schema.CPU, schema.GLOO, schema.EXTERNAL) == (kinds.CPU, kinds.GLOO, kinds.EXTERNAL)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_that_comes_along_is_a_policy_that_survives_rendering(path: Path) -> None:
    policy = load_policy(path)
    assert parse_policy(render(policy), "rendered") == policy


def test_there_are_configs() -> None:
    names = {path.name for path in CONFIGS}
    assert names >= {"default.yaml", "small-cluster.yaml", "fragile-network.yaml", "demo.yaml"}


def test_the_default_config_is_the_default_policy_and_names_every_key() -> None:
    (path,) = [path for path in CONFIGS if path.name == "default.yaml"]
    assert load_policy(path) == default_policy()
    assert keys_in(yaml.safe_load(path.read_text())) == keys_in(msgspec.to_builtins(default_policy()))


def test_files_of_webhooks_are_found_from_the_policy(tmp_path: Path) -> None:
    """Nothing is read from them, as they may lie on the controllers' machines only."""
    path = tmp_path / "job.yaml"
    path.write_text("notify: {webhooks: [{name: a, url_file: keys/url, header_file: /etc/header}]}")
    (webhook,) = load_policy(path).notify.webhooks
    assert (webhook.url_file, webhook.header_file) == (str(tmp_path / "keys" / "url"), "/etc/header")


def test_the_demo_config_has_the_ladder_and_checkpoints_that_the_demo_is_about() -> None:
    (path,) = [path for path in CONFIGS if path.name == "demo.yaml"]
    policy = load_policy(path)
    assert policy.checkpoint.every_steps == 20
    assert all(policy.rung(rung) for rung in Rung)


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n"])
def test_an_empty_file_is_the_default_policy(text: str) -> None:
    assert parse_policy(text, "job.yaml") == default_policy()


def test_a_file_changes_only_what_it_names() -> None:
    policy = parse_policy("deadlines: {quiesce_s: 20}", "job.yaml")
    assert policy.deadlines.quiesce_s == 20
    assert msgspec.structs.replace(policy, deadlines=default_policy().deadlines) == default_policy()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("laddr: []", "job.yaml: laddr: unknown key; allowed: ladder, roles, node, incident,"),
        ("laddr: []", "did you mean ladder?"),
        ("7: 1", "job.yaml: 7: unknown key"),
        (
            "ladder: [{rung: recover_inplace}]",
            "job.yaml: ladder[0].rung: found the text 'recover_inplace'; allowed: ",
        ),
        ("ladder: [{rung: recover_inplace}]", "did you mean recover_in_place?"),
        (
            "ladder: [{rung: stop, budget: {per_rank: 0}}]",
            "ladder[0].budget.per_rank: found 0; allowed: a whole ",
        ),
        ("ladder: [{rung: stop, budget: {per_rank: 0}}]", "or null"),
        ("ladder: [{attempts: 1}]", "job.yaml: ladder[0].rung: missing; allowed: retry_step"),
        ("ladder: stop", "job.yaml: ladder: found the text 'stop'; allowed: a list"),
        ("ladder: [stop]", "job.yaml: ladder[0]: found the text 'stop'; allowed: a mapping with the keys rung"),
        ("ladder: []", "job.yaml: ladder: empty"),
        ("ladder: [{rung: recover}]", "job.yaml: ladder[0].rung: the last rung must be stop"),
        ("ladder: [{rung: stop}, {rung: stop}]", "job.yaml: ladder[1].rung: stop is on the ladder already"),
        ("ladder: [{rung: stop}, {rung: recover}]", "job.yaml: ladder[1].rung: recover is cheaper than stop"),
        ("deadlines: {quiesce_s: 0}", "job.yaml: deadlines.quiesce_s: found 0; allowed: a number above 0"),
        ("deadlines: {quiesce_s: .inf}", "job.yaml: deadlines.quiesce_s: found inf; allowed"),
        ("deadlines: {quiesce_s: .nan}", "job.yaml: deadlines.quiesce_s: found nan; allowed"),
        ("deadlines: {quiesce_s: true}", "job.yaml: deadlines.quiesce_s: found true; allowed"),
        ("deadlines: {quiesce_s: 0.2}", "job.yaml: deadlines.quiesce_s: found 0.2; allowed: above deadlines.suspect_s"),
        ("deadlines: {rejoin_s: 5}", "job.yaml: deadlines.rejoin_s: found 5; allowed: above communicator.link_up_s x"),
        ("deadlines: {orders_s: 300}", "job.yaml: deadlines.orders_s: found 300; allowed: above deadlines.quiesce_s +"),
        ("deadlines: 5", "job.yaml: deadlines: found 5; allowed: a mapping with the keys suspect_s"),
        (
            "communicator: {collective_s: 1}",
            "job.yaml: communicator.collective_s: found 1; allowed: above stall",
        ),
        ("notify: {webhooks: [{name: a}]}", "job.yaml: notify.webhooks[0].url_file: missing; allowed: a text"),
        (
            "notify: {webhooks: [{name: On Call, url_file: u}]}",
            "job.yaml: notify.webhooks[0].name: found the text 'On Call'; allowed: up to 32 lower-case letters",
        ),
        (
            "notify: {webhooks: [{name: a, url_file: u}, {name: a, url_file: v}]}",
            "job.yaml: notify.webhooks[1].name: a is the name of notify.webhooks[0]",
        ),
        (
            "notify: {webhooks: [{name: a, url_file: u, events: [budgets]}]}",
            "job.yaml: notify.webhooks[0].events[0]: found the text 'budgets'; allowed: asked, budget",
        ),
        (
            "notify: {webhooks: [{name: a, url_file: u, events: []}]}",
            "job.yaml: notify.webhooks[0].events: empty; allowed: asked, budget, no_spare",
        ),
        (
            "notify: {webhooks: [{name: a, url_file: ' '}]}",
            "job.yaml: notify.webhooks[0].url_file: empty; allowed: the path of a file",
        ),
        (
            f"notify: {{webhooks: [{', '.join(f'{{name: h{n}, url_file: u}}' for n in range(9))}]}}",
            "job.yaml: notify.webhooks: found 9; allowed: up to 8",
        ),
        (
            "{notify: {checkpoint_age_s: 60}, checkpoint: {every_steps: 0}}",
            "job.yaml: notify.checkpoint_age_s: needs checkpoints that midstep writes, and checkpoint.every_steps is 0",
        ),
        ("notify: {budget_share: 0}", "job.yaml: notify.budget_share: found 0; allowed: a number above 0 and at most"),
        (
            "agent: {spare_s: 5}",
            "job.yaml: agent.spare_s: found 5; allowed: above deadlines.nodes_s, which is 270",
        ),
        (
            "communicator: {name: mpi}",
            "job.yaml: communicator.name: found the text 'mpi'; allowed: external, fake, gloo",
        ),
        (
            "{device: npu, communicator: {name: tcp}}",
            "job.yaml: communicator.name: found tcp; allowed: hccl, which is what the device npu has",
        ),
        (
            "communicator: {name: hccl}",
            "job.yaml: communicator.name: found hccl; allowed: gloo or tcp, which is what the device cpu has",
        ),
        ("device: tpu", "job.yaml: device: found the text 'tpu'; allowed: cpu, cuda"),
        ("checkpoint: {keep: 1.5}", "job.yaml: checkpoint.keep: found 1.5; allowed: a whole number"),
        ("checkpoint: {directory: 3}", "job.yaml: checkpoint.directory: found 3; allowed: a text, or null"),
        ("standby: {preload: torch}", "job.yaml: standby.preload: found the text 'torch'; allowed: a list"),
        ("standby: {warm: false, depth: built}", "standby.depth: found built, which needs standby.warm: true"),
        ("standby: {depth: deep}", "job.yaml: standby.depth: found the text 'deep'; allowed: imported, built"),
        ("standby: {warm: 1}", "job.yaml: standby.warm: found 1; allowed: true, false"),
        ("restore: []", "job.yaml: restore: empty; allowed: replica, host_copy, checkpoint"),
        ("restore: [nothing]", "job.yaml: restore[0]: found nothing; allowed: replica, host_copy, checkpoint"),
        (
            "host_copy: {every_steps: 0}",
            "found 0; allowed: a whole number of at least 1 and at most 1000000000, or auto",
        ),
        (
            "host_copy: {every_steps: often}",
            "host_copy.every_steps: found the text 'often'; allowed: a whole number of",
        ),
        ("{communicator: {name: external}, restore: [host_copy]}", "restore[0]: found host_copy, and midstep does not"),
        ("checkpoint: {asynchronous: true}", "checkpoint.asynchronous: found true; such checkpoints are written from"),
        ("replica: budy", "job.yaml: replica: found the text 'budy'; allowed: buddy, mesh; did you mean buddy?"),
        ("{communicator: {name: external}, replica: buddy}", "replica: found buddy, and midstep does not see what"),
        ("restore: [replica, replica]", "job.yaml: restore[1]: replica is listed already"),
        ("stall: {factor: 1}", "job.yaml: stall.factor: found 1; allowed: a number above 1"),
        ("- ladder", "job.yaml: found a list; allowed: a mapping"),
        ("device: cpu\ndevice: cpu", "job.yaml: line 2, column 1: key `device` stands twice"),
        ("standby:\n  warm: true\n  warm: false", "job.yaml: line 3, column 3: key `warm` stands twice"),
        ("ladder: [", "job.yaml: line 1, column 10:"),
        ("a: !!python/object/apply:os.getcwd []", "job.yaml: line 1, column 4: has a YAML tag"),
        ("[" * 3000, "job.yaml: line 1, column 65: is nested deeper than 64 levels"),
        ("device: 2026-13-45", "job.yaml: device: found the text '2026-13-45'"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_what_is_allowed(text: str, line: str) -> None:
    assert any(line in found for found in refused(text))


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    lines = refused("device: gpu\nstall: {factor: x}\nladder: [{rung: stop, attempts: 0}]")
    assert [line.split(": ")[1] for line in lines] == ["device", "stall.factor", "ladder[0].attempts"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"device: \xff")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for name, words in [
        ("none.yaml", "No such file"),
        ("latin.yaml", "byte 8"),
        ("large.yaml", "larger"),
        ("", "direc"),
    ]:
        with pytest.raises(PolicyError, match=words):
            load_policy(tmp_path / name)


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(list(Rung)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["ladder", "rung", "budget", "per_job", "deadlines", "start_s", "restore", "x"]), inner
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60) | yaml_values.map(repr) | yaml_values.map(str))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    try:
        outcome: object = parse_policy(text, "job.yaml")
    except PolicyError as error:
        outcome = str(error)
    assert isinstance(outcome, Policy) or str(outcome).startswith("job.yaml:")


@settings(deadline=None, max_examples=200)
@given(tree=yaml_values)
def test_what_has_no_problem_is_what_msgspec_takes(tree: object) -> None:
    problems = problems_of(tree)
    try:
        msgspec.convert(tree, Policy)
    except msgspec.ValidationError:
        assert problems
    else:
        assert not problems or has_odd_float(tree)


def has_odd_float(tree: object) -> bool:
    """Whether a whole number is written as 3.0, which msgspec takes for an integer and the file's reader does not."""
    if isinstance(tree, dict):
        return any(has_odd_float(inner) for inner in tree.values())
    if isinstance(tree, list):
        return any(has_odd_float(inner) for inner in tree)
    return isinstance(tree, float)


@settings(deadline=None)
@given(
    per_rank=st.none() | st.integers(1, 9),
    window_s=st.floats(0, 1e6),
    preload=st.lists(st.text("abc._", min_size=1), max_size=3),
)
def test_rendering_and_reading_again_gives_the_same_policy(
    per_rank: int | None, window_s: float, preload: list[str]
) -> None:
    policy = Policy(
        ladder=(RungPolicy(Rung.RECOVER, budget=Budget(per_rank, window_s=window_s)), RungPolicy(Rung.STOP)),
        standby=StandbyPolicy(preload=tuple(preload)),
    )
    assert parse_policy(render(policy), "rendered") == policy


def test_settings_of_the_default_policy_are_the_defaults_of_agents_and_processors() -> None:
    found = job_settings(default_policy(), "/jobs/one")
    expected = JobSettings(checkpoint_directory="/jobs/one/checkpoints", checkpoint_every_steps=1000)
    assert found == expected


@pytest.mark.parametrize(
    ("directory", "expected"),
    [("saved", "/jobs/one/saved"), ("/big/disk", "/big/disk"), (None, "/jobs/one/checkpoints")],
)
def test_a_relative_checkpoint_directory_starts_in_the_job_directory(directory: str | None, expected: str) -> None:
    policy = Policy(checkpoint=CheckpointPolicy(directory=directory))
    assert job_settings(policy, Path("/jobs/one")).checkpoint_directory == expected


def test_a_job_may_do_without_warm_processes() -> None:
    assert not job_settings(parse_policy("standby: {warm: false}", "job.yaml"), "/j").warm_standby


@pytest.mark.parametrize(
    ("text", "learns"),
    [
        ("", True),
        ("stall: {suspended_s: 7, after_steps: 9}", True),
        ("stall: {grace_s: 60}", False),  # a limit that was chosen is kept
        ("stall: {factor: 5}", False),
        ("stall: {factor: 2, grace_s: 0.5, learns: true}", True),
        ("stall: {learns: false}", False),
    ],
)
def test_the_limit_of_a_stall_is_learned_unless_one_was_chosen(text: str, *, learns: bool) -> None:
    assert job_settings(parse_policy(text or "{}", "job.yaml"), "/j").stall_learns is learns


def test_settings_carry_every_key_that_the_file_sets() -> None:
    text = """
restore: [checkpoint]
standby: {preload: [numpy], depth: built}
stall: {factor: 4, grace_s: 2, after_steps: 6, suspended_s: 7}
heartbeat: {interval_s: 0.25}
communicator: {link_up_s: 2, collective_s: 900}
deadlines: {orders_s: 700, stop_grace_s: 1}
checkpoint: {every_steps: 7, keep: 9, directory: /d}
black_box_bytes: 8192
"""
    assert job_settings(parse_policy(text, "job.yaml"), "/j") == JobSettings(
        checkpoint_directory="/d",
        checkpoint_every_steps=7,
        checkpoint_keep=9,
        preload=("numpy",),
        standby_depth=StandbyDepth.BUILT,
        heartbeat_s=0.25,
        stall_factor=4.0,
        stall_grace_s=2.0,
        stall_after_steps=6,
        stall_learns=False,
        stall_suspended_s=7.0,
        orders_s=700.0,
        link_up_s=2.0,
        collective_s=900.0,
        stop_grace_s=1.0,
        black_box_bytes=8192,
        restore=(RestoreSource.CHECKPOINT.value,),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{device: fake, communicator: {name: fake}, standby: {depth: built}}", "half of the device's memory"),
        ("checkpoint: {every_steps: 0}", "starts from its first step"),
        ("restore: [replica]", "restore is without checkpoint"),
        ("host_copy: {every_steps: 5}", "restore is without host_copy: no copies are made"),
        ("ladder: [{rung: stop}]", "ladder is without recover"),
        ("ladder: [{rung: recover, budget: {per_rank: 5, per_job: 3}}, {rung: stop}]", "can never be reached"),
        ("ladder: [{rung: recover, budget: {per_job: null}}, {rung: stop}]", "has no limit in the job"),
    ],
)
def test_what_is_perhaps_not_meant_is_noted_and_not_refused(text: str, words: str) -> None:
    assert any(words in note for note in advice(parse_policy(text, "job.yaml")))


def test_the_default_policy_needs_no_advice() -> None:
    assert advice(default_policy()) == ()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("integrity: {strikes: 3}", "every_steps is 0: ranks do not vote"),
        ("{integrity: {every_steps: 4}, checkpoint: {every_steps: 0}}", "no state is there to go back to"),
        ("{integrity: {every_steps: 4}, communicator: {name: external}}", "midstep does not see what the script holds"),
        ("{integrity: {audit_steps: 4}, communicator: {name: external}}", "ranks do not repeat steps"),
    ],
)
def test_votes_that_help_little_are_named(text: str, note: str) -> None:
    """The policy is allowed, and perhaps not meant."""
    assert any(note in each for each in advice(parse_policy(text, "job.yaml")))


def test_votes_with_copies_to_go_back_to_need_no_advice() -> None:
    """Nor does a policy without votes."""
    text = "{integrity: {every_steps: 4}, restore: [replica, host_copy, checkpoint], checkpoint: {every_steps: 0}}"
    assert not any("integrity" in each for each in advice(parse_policy("integrity: {audit_steps: 9}", "job.yaml")))
    assert not any("integrity" in each for each in (*advice(parse_policy(text, "job.yaml")), *advice(Policy())))
