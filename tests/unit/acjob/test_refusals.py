"""Wrong AscendJobs: each mistake with file, line, key, what was found, and what is allowed."""

import pytest

from midstep.policies.acjob.translation import translate
from midstep.policies.files import MAX_FILE_BYTES
from midstep.protocol.errors import PolicyError

HEAD = "apiVersion: mindxdl.gitee.com/v1\nkind: AscendJob\n"


def refused(text: str, job: str | None = None) -> list[str]:
    """The lines of the error that `text` gives."""
    with pytest.raises(PolicyError) as caught:
        translate(text, "job.yaml", job)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("rest", "line"),
    [
        (
            "metadata: {labels: {fault-scheduling: gracee}}",
            "job.yaml: line 3: metadata.labels.fault-scheduling: found the text 'gracee'; allowed: grace, force, off; "
            "did you mean grace?",
        ),
        (
            "metadata:\n  labels:\n    pod-rescheduling: on",
            "job.yaml: line 5: metadata.labels.pod-rescheduling: found on; allowed: a text, so put it into quotes: "
            "Kubernetes takes nothing else here",
        ),
        ("metadata: {labels: {fault-retry-times: 10}}", "fault-retry-times: found 10; allowed: a text, so put it"),
        ('metadata: {labels: {fault-retry-times: "-1"}}', "found the text '-1'; allowed: a whole number from \"0\" to"),
        ('metadata: {labels: {fault-retry-times: "ten"}}', "found the text 'ten'; allowed: a whole number"),
        ('metadata: {labels: {process-recover-enable: "yes"}}', "allowed: on, pause, off"),
        ("metadata: {labels: {subHealthyStrategy: graceexit}}", "did you mean graceExit?"),
        (
            "metadata: {annotations: {recover-strategy: 'retry,recover_in_place'}}",
            "allowed: retry, recover-in-place, recover, elastic-training, dump, exit, with commas between them; "
            "did you mean recover-in-place?",
        ),
        ("metadata: {annotations: {recover-strategy: ''}}", "recover-strategy: found the text ''; allowed: retry"),
        ("metadata: {annotations: {recover-strategy: [retry]}}", "recover-strategy: found a list; allowed: a text"),
        (
            'metadata: {annotations: {wait-reschedule-timeout: "300"}}',
            'wait-reschedule-timeout: found the text \'300\'; allowed: a whole number from "30" to "270"',
        ),
        (
            "metadata: {labels: {recover-strategy: retry}}",
            "recover-strategy: MindCluster does not look for it here; allowed: under metadata.annotations",
        ),
        ("metadata: {annotations: {pod-rescheduling: 'on'}}", "allowed: under metadata.labels"),
        (
            "spec: {runPolicy: {backoffLimit: '3'}}",
            "spec.runPolicy.backoffLimit: found the text '3'; allowed: a whole number from -2147483648 to 2147483647, "
            "without quotes",
        ),
        ("spec: {runPolicy: {backoffLimit: 1.5}}", "backoffLimit: found 1.5; allowed: a whole number"),
        (
            "spec: {replicaSpecs: {Master: {template: {metadata: {labels: {huawei.com/recover_policy_path: job}}}}}}",
            "job.yaml: line 3: spec.replicaSpecs.Master.template.metadata.labels['huawei.com/recover_policy_path']: "
            "found the text 'job'; allowed: pod",
        ),
        (
            "spec: {replicaSpecs: {Master: {template: {spec: {terminationGracePeriodSeconds: soon}}}}}",
            "spec.replicaSpecs.Master.template.spec.terminationGracePeriodSeconds: found the text 'soon'; allowed",
        ),
        (
            "spec: {replicaSpecs: {Master: {template: {spec: {containers: [{env: "
            "[{name: TTP_NORMAL_ACTION_TIME_LIMIT, value: '5'}]}]}}}}}",
            "spec.replicaSpecs.Master.template.spec.containers[0].env[0].value: found the text '5'; allowed: a whole "
            'number from "30" to "1800"',
        ),
        ("metadata: {labels: [fault-scheduling]}", "metadata.labels: found a list; allowed: a mapping"),
        ("metadata: 3", "metadata: found 3; allowed: a mapping"),
        (
            "metadata:\n  labels: {fault-scheduling: grace, fault-scheduling: 'off'}",
            "job.yaml: line 4: metadata.labels.fault-scheduling: stands twice in this mapping",
        ),
        ("metadata: {labels: {fault-scheduling: }}", "fault-scheduling: found nothing; allowed: a text"),
    ],
)
def test_a_wrong_value_is_refused_with_key_line_and_what_is_allowed(rest: str, line: str) -> None:
    """MindCluster would take most of these for `off`."""
    assert any(line in found for found in refused(HEAD + rest))


def test_all_mistakes_of_a_document_are_told_at_once() -> None:
    """Four mistakes, four lines."""
    lines = refused(
        "kind: AscendJob\napiVersion: v1\nmetadata: {labels: {fault-scheduling: 1, pod-rescheduling: x}}\n"
        "spec: {runPolicy: {backoffLimit: x}}"
    )

    assert [line.split(": ")[2] for line in lines] == [
        "apiVersion", "metadata.labels.fault-scheduling", "metadata.labels.pod-rescheduling",
        "spec.runPolicy.backoffLimit",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "job", "words"),
    [
        ("", None, "job.yaml: kind: found nothing; allowed: a document of kind AscendJob"),
        ("kind: Pod\n---\n{}", None, "kind: found Pod, a document without kind; allowed"),
        ("apiVersion: batch.volcano.sh/v1alpha1\nkind: Job", None, "found Job; allowed: a document of kind AscendJob"),
        (
            "kind: AscendJob",
            None,
            "job.yaml: line 1: the document: apiVersion is missing; allowed: mindxdl.gitee.com/v1",
        ),
        (
            f"{HEAD}---\n{HEAD}metadata: {{name: b}}",
            None,
            "2 documents of kind AscendJob: the one on line 1, b; choose",
        ),
        (f"{HEAD}metadata: {{name: b}}", "c", "no AscendJob named 'c'; it has: b"),
        (f"{HEAD}metadata: {{name: b}}\n---\n{HEAD}metadata: {{name: b}}", "b", "2 AscendJob named 'b'"),
        ("a: [", None, "job.yaml: line 1, column 5:"),
        ("[" * 3000, None, "job.yaml: line 1, column 65: is nested deeper than 64 levels"),
        ("a: \x07", None, "job.yaml: line 1, column 4: the character 0x07 is not allowed"),
        ("#" * (MAX_FILE_BYTES + 1), None, "larger than"),
    ],
)
def test_a_file_without_the_one_ascendjob_is_refused(text: str, job: str | None, words: str) -> None:
    """What it has instead is named."""
    (line,) = refused(text, job)

    assert words in line


def test_anchors_that_repeat_each_other_cost_nothing() -> None:
    """What looks like a few lines can be billions of keys once it is built, so it is not built."""
    anchors = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30)
    )

    assert translate(f"{anchors}{HEAD}metadata: {{labels: {{<<: *a29, fault-scheduling: grace}}}}", "job.yaml")
