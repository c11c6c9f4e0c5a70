"""AscendJobs as users have them: what becomes of each key, and what is said about the rest."""

import inspect
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from midstep.cli.job_options import asked_for
from midstep.cli.run import command as run
from midstep.devices.kinds import CPU, NPU
from midstep.launch.job import create_job, policy_of
from midstep.policies.acjob.translation import NoteKind, Translation, npu_policy, translate
from midstep.policies.files import parse_policy
from midstep.policies.schema import Budget, Policy, SubHealthAction, default_policy
from midstep.protocol.types import Rung

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "acjob.yaml"
DOCUMENTS = sorted((Path(__file__).parent / "documents").glob("*.yaml"))
HEAD = "apiVersion: mindxdl.gitee.com/v1\nkind: AscendJob\nmetadata:\n  name: small\n"


def translated(name: str, job: str | None = None) -> Translation:
    """The translation of one of the documents."""
    path = EXAMPLE if name == "example" else Path(__file__).parent / "documents" / f"{name}.yaml"
    return translate(path.read_text(), path.name, job)


def small(labels: str = "", annotations: str = "", rest: str = "") -> Translation:
    """The translation of a document with just these."""
    text = f"{HEAD}  labels: {{{labels}}}\n  annotations: {{{annotations}}}\n{rest}"
    return translate(text, "small.yaml")


def rungs(found: Translation) -> list[Rung]:
    """The ladder of a translation."""
    return [entry.rung for entry in found.policy.ladder]


def notes(found: Translation, kind: NoteKind) -> str:
    """All notes of a kind."""
    return "\n".join(note.text for note in found.notes if note.kind is kind)


@pytest.mark.parametrize("path", [EXAMPLE, *DOCUMENTS], ids=lambda path: path.stem)
def test_the_text_of_every_policy_made_is_that_policy(path: Path) -> None:
    """What is written can be given to `midstep run`, and loses nothing."""
    found = translate(path.read_text(), path.name, "paused" if path.stem == "paused_list" else None)

    assert parse_policy(found.text, "made") == found.policy


@pytest.mark.parametrize("path", [EXAMPLE, *DOCUMENTS], ids=lambda path: path.stem)
def test_every_line_that_a_comment_names_holds_what_it_says(path: Path) -> None:
    """`# line 26, recover-strategy: retry` can be looked up in the file."""
    lines = path.read_text().splitlines()
    found = translate(path.read_text(), path.name, "paused" if path.stem == "paused_list" else None)
    named = re.findall(r"line (\d+), ([\w./-]+): ([\w-]+)", found.text)

    for line, key, value in named:
        assert key in lines[int(line) - 1] or key.isupper()
        assert value in lines[int(line) - 1]
    assert named or path.stem == "no_recovery"


def test_each_word_of_recover_strategy_becomes_its_rung_in_the_order_of_the_ladder() -> None:
    """However the words are ordered and spaced."""
    ladder = rungs(small('fault-scheduling: grace, pod-rescheduling: "on"', 'recover-strategy: "recover , retry,exit"'))

    assert ladder == [Rung.RETRY_STEP, Rung.RECOVER, Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB, Rung.STOP]


def test_all_settings_together_become_the_whole_ladder() -> None:
    """The example has every strategy, and both ways to reschedule."""
    assert rungs(translated("example")) == list(Rung)


def test_a_job_that_may_not_be_rescheduled_as_a_whole_has_no_such_rung() -> None:
    """recover_policy_path: pod, in a template's annotations or labels, merged in or not."""
    assert rungs(translated("mindspore_pod_only")) == [
        Rung.RECOVER_IN_PLACE, Rung.RECOVER, Rung.RESCHEDULE_POD, Rung.STOP,
    ]  # fmt: skip
    assert rungs(translated("retry_only")) == [Rung.RETRY_STEP, Rung.RESCHEDULE_POD, Rung.STOP]


def test_without_pod_rescheduling_only_the_job_as_a_whole_is_rescheduled() -> None:
    """That is MindCluster's default."""
    assert rungs(translated("job_level_force")) == [Rung.RESCHEDULE_JOB, Rung.STOP]


def test_a_job_that_mindcluster_leaves_alone_stops_at_any_fault_and_is_told_so() -> None:
    """No fault-scheduling, or off: the strategies are of no use then."""
    assert rungs(translated("no_recovery")) == rungs(translated("paused_list", "other")) == [Rung.STOP]
    assert "fault-scheduling is not in the file" in notes(translated("no_recovery"), NoteKind.DIFFERENT)
    assert "line 65, fault-scheduling: off" in notes(translated("paused_list", "other"), NoteKind.DIFFERENT)


def test_paused_process_recovery_is_not_translated_and_that_is_said() -> None:
    """The label is what MindCluster follows at this moment."""
    found = translated("paused_list", "paused")

    assert rungs(found) == [Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB, Rung.STOP]
    assert "process-recover-enable: pause: recover-strategy is not translated" in notes(found, NoteKind.DIFFERENT)


@pytest.mark.parametrize(
    ("retry_times", "backoff", "limit"),
    [("10", 3, 3), ("2", 3, 2), ("10", 0, 10), ("10", -1, 10), ("0", 4, 4), (None, 4, 4), ("7", None, 7)],
)
def test_the_lower_limit_of_restarts_holds_over_the_whole_job(
    retry_times: str | None, backoff: int | None, limit: int
) -> None:
    """Zero and less are no limit, as in MindCluster; rungs that start no pods again keep midstep's own limits."""
    labels = "fault-scheduling: grace" + (f', fault-retry-times: "{retry_times}"' if retry_times else "")
    rest = "" if backoff is None else f"spec: {{runPolicy: {{backoffLimit: {backoff}}}}}\n"
    found = small(labels, "recover-strategy: 'recover,recover-in-place'", rest)
    budgets = {entry.rung: entry.budget for entry in found.policy.ladder}

    assert budgets[Rung.RECOVER] == budgets[Rung.RESCHEDULE_JOB] == Budget(per_job=limit, window_s=0)
    in_place = default_policy().rung(Rung.RECOVER_IN_PLACE)
    assert in_place is not None
    assert budgets[Rung.RECOVER_IN_PLACE] == in_place.budget


def test_without_a_limit_midsteps_budgets_hold_and_that_is_said() -> None:
    """MindCluster would go on for ever; a script that always fails must not."""
    found = small("fault-scheduling: grace", "recover-strategy: recover")

    assert found.policy.rung(Rung.RECOVER) == default_policy().rung(Rung.RECOVER)
    assert "sets a limit, so midstep's own budgets hold" in notes(found, NoteKind.DIFFERENT)


def test_times_become_deadlines() -> None:
    """The wait for a node, an action of MindIO, the grace of a pod; what must be larger grows with them."""
    npus = npu_policy().deadlines
    assert translated("example").policy.deadlines == replace(npus, nodes_s=240, stop_grace_s=360)
    assert translated("mindspore_pod_only").policy.deadlines == replace(
        npus, quiesce_s=300, stop_grace_s=600, orders_s=300 + 270 + 15 + 180 + 60
    )
    assert translated("job_level_force").policy.deadlines == replace(npus, stop_grace_s=0)
    assert limited(1800).policy.deadlines.rejoin_s == 1800


def limited(seconds: int, *, npus: int = 8) -> Translation:
    """A job whose actions may take so long."""
    container = f"env: [{{name: TTP_NORMAL_ACTION_TIME_LIMIT, value: '{seconds}'}}]"
    if npus:
        container += f", resources: {{limits: {{huawei.com/Ascend910: {npus}}}}}"
    spec = f"spec: {{replicaSpecs: {{Worker: {{template: {{spec: {{containers: [{{{container}}}]}}}}}}}}}}\n"
    return small("fault-scheduling: grace", "recover-strategy: recover, wait-reschedule-timeout: '230'", spec)


def test_a_job_that_asks_for_npus_gets_a_policy_for_npus() -> None:
    """Device and communicator, and the times that building communicators of NPUs takes."""
    policy = translated("example").policy
    assert (policy.device, policy.communicator) == (NPU, npu_policy().communicator)
    assert policy.stall == npu_policy().stall
    assert "device: npu # its pods ask for 8 NPUs each" in translated("example").text


def test_a_job_that_asks_for_none_computes_on_cpus() -> None:
    policy = limited(60, npus=0).policy
    assert (policy.device, policy.communicator) == (CPU, default_policy().communicator)
    assert policy.deadlines.rejoin_s == 60


@pytest.mark.parametrize("npus", [0, 8])
@pytest.mark.parametrize("seconds", [30, 59, 60, 180, 299, 300, 360, 361, 1800])
def test_whatever_times_are_asked_for_the_policy_is_one_that_run_takes(seconds: int, npus: int, tmp_path: Path) -> None:
    """A limit of MindIO below what building communicators takes would end every recovery by its deadline."""
    found = limited(seconds, npus=npus)
    assert found.policy.deadlines.quiesce_s == seconds
    assert taken_by_run(found, tmp_path) == found.policy


@pytest.mark.parametrize("path", [EXAMPLE, *DOCUMENTS], ids=lambda path: path.stem)
def test_midstep_run_takes_the_policy_and_the_options_that_it_names(path: Path, tmp_path: Path) -> None:
    """All that `midstep run` checks before anything is started."""
    found = translate(path.read_text(), path.name, "paused" if path.stem == "paused_list" else None)
    assert taken_by_run(found, tmp_path) == found.policy


def taken_by_run(found: Translation, directory: Path) -> Policy:
    """Have `midstep run` make a job of the policy, with the options that the policy's comment names."""
    file, script = directory / "policy.yaml", directory / "train.py"
    file.write_text(found.text)
    script.write_text("")
    named = re.search(r"midstep run ([^\n]*) --policy THIS_FILE", found.text)
    context = run.make_context("run", [*(named.group(1).split() if named else []), "--policy", str(file), str(script)])
    flags = dict(context.params)
    chosen = {name: flags[name] for name in inspect.signature(asked_for).parameters}
    start = replace(asked_for(**chosen), job_directory=directory / "job")
    if flags["rdzv_endpoint"]:  # on each machine: no keys and no place of this machine's alone
        return policy_of(start)
    job = create_job(start)
    job.held.remove()
    return job.policy


@pytest.mark.parametrize(
    ("strategy", "recover", "action"),
    [
        ("ignore", "recover", SubHealthAction.IGNORE),
        ("graceExit", "recover", SubHealthAction.DRAIN),
        ("hotSwitch", "recover", SubHealthAction.DRAIN),
        ("forceExit", "recover", SubHealthAction.LEAVE_NOW),
        ("graceExit", "retry", SubHealthAction.LEAVE_NOW),
        ("hotSwitch", "dump", SubHealthAction.LEAVE_NOW),
    ],
)
def test_what_is_done_about_nodes_that_are_not_well_follows_the_strategy(
    strategy: str, recover: str, action: SubHealthAction
) -> None:
    """A drain needs `recover`; without it the node is left at once, and that is said."""
    found = small(f"fault-scheduling: grace, subHealthyStrategy: {strategy}", f"recover-strategy: {recover}")

    assert found.policy.sub_health is action
    assert (strategy in notes(found, NoteKind.DIFFERENT)) == (strategy in ("graceExit", "hotSwitch"))


def test_nodes_that_are_not_well_are_ignored_where_mindcluster_would_ignore_them() -> None:
    """It is its default, also where midstep's is another; and with fault-scheduling off it does nothing at all."""
    assert small("fault-scheduling: grace").policy.sub_health is SubHealthAction.IGNORE
    assert small("subHealthyStrategy: forceExit").policy.sub_health is SubHealthAction.IGNORE


def test_elastic_training_keeps_the_size_of_the_world_and_says_how_to_change_that() -> None:
    """A policy that sets scale.min_nodes is refused by frameworks that cannot train in a world of another size."""
    assert translated("example").policy.scale.min_nodes is None
    assert "Megatron cannot), so the world keeps its size" in notes(translated("example"), NoteKind.NO_COUNTERPART)

    found = small("fault-scheduling: grace", "recover-strategy: elastic-training")
    assert "set scale.min_nodes, and pod-rescheduling to on" in notes(found, NoteKind.NO_COUNTERPART)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("example", "TTP_PORT: 8000"),
        ("mindspore_pod_only", "MS_ENABLE_TFT: {TTP:1,UCE:1,ARF:1}"),
        ("job_level_force", "restartPolicy: OnFailure"),
        ("job_level_force", "terminationGracePeriodSeconds: 120"),
        ("retry_only", "MINDIO_WAIT_MINDX_TIME: 60"),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason_in_the_policy_too(name: str, words: str) -> None:
    """Nothing is dropped in silence."""
    found = translated(name)

    assert words in notes(found, NoteKind.NO_COUNTERPART)
    assert words in found.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("example", "rank 0 is a rank like any other"),
        ("example", "a rung that fails hands over to the next one"),
        ("example", "backoffLimit: 3 limits each of recover, reschedule_pod, reschedule_job by itself"),
        ("example", "as dump asks for, and before reschedule_pod and reschedule_job: training continues from it"),
        ("job_level_force", "no rung keeps processes alive"),
        ("job_level_force", "passed over where the platform cannot create nodes"),
    ],
)
def test_what_midstep_does_differently_is_said(name: str, words: str) -> None:
    """So that nobody finds out in an incident."""
    assert words in notes(translated(name), NoteKind.DIFFERENT)


def test_the_size_of_the_job_is_told_as_options_of_run() -> None:
    """Pods that ask for NPUs are nodes; a scheduler's pod, and a job that asks for none, are not counted."""
    assert "--nnodes 2 --nproc-per-node 8" in translated("example").text
    assert "--nnodes 4 --nproc-per-node 8" in translated("mindspore_pod_only").text
    assert "--nnodes 16 --nproc-per-node 8" in translated("paused_list", "paused").text
    assert "--nnodes" not in translated("no_recovery").text


def test_a_key_that_is_nearly_mindclusters_is_pointed_out() -> None:
    """Labels are free, so it is no error."""
    found = small("fault-schedulling: grace")

    assert "did you mean fault-scheduling?" in notes(found, NoteKind.DIFFERENT)
