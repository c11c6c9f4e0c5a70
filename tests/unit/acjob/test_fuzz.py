"""Whatever an AscendJob says, it becomes a policy that can be loaded, or an error that names the file."""

from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstep.policies.acjob.reading import Strategy
from midstep.policies.acjob.translation import Translation, translate
from midstep.policies.files import parse_policy
from midstep.protocol.errors import PolicyError
from midstep.protocol.types import Rung

PROCESS_RUNGS = {"retry": Rung.RETRY_STEP, "recover-in-place": Rung.RECOVER_IN_PLACE, "recover": Rung.RECOVER}

words = st.lists(st.sampled_from([strategy.value for strategy in Strategy]), min_size=1, max_size=6)
right_labels = st.fixed_dictionaries(
    {},
    optional={
        "fault-scheduling": st.sampled_from(["grace", "force", "off"]),
        "fault-retry-times": st.integers(0, 2**31 - 1).map(str),
        "pod-rescheduling": st.sampled_from(["on", "off"]),
        "process-recover-enable": st.sampled_from(["on", "pause", "off"]),
        "subHealthyStrategy": st.sampled_from(["ignore", "graceExit", "forceExit", "hotSwitch"]),
        "app": st.text(max_size=5),
    },
)
right_annotations = st.fixed_dictionaries(
    {},
    optional={
        "recover-strategy": words.map(",".join),
        "wait-reschedule-timeout": st.integers(30, 270).map(str),
        "huawei.com/recover_policy_path": st.just("pod"),
    },
)
right_specs = st.fixed_dictionaries(
    {},
    optional={
        "runPolicy": st.fixed_dictionaries({"backoffLimit": st.integers(-(2**31), 2**31 - 1)}),
        "replicaSpecs": st.fixed_dictionaries(
            {
                "Master": st.fixed_dictionaries(
                    {
                        "replicas": st.integers(0, 2000),
                        "template": st.fixed_dictionaries(
                            {
                                "spec": st.fixed_dictionaries(
                                    {
                                        "terminationGracePeriodSeconds": st.integers(0, 2**31 - 1),
                                        "containers": st.lists(
                                            st.fixed_dictionaries(
                                                {
                                                    "name": st.text(max_size=3),
                                                    "env": st.just([{"name": "TTP_PORT", "value": "\n\x85: {"}]),
                                                    "resources": st.just({"limits": {"huawei.com/Ascend910": 8}}),
                                                }
                                            ),
                                            max_size=2,
                                        ),
                                    }
                                )
                            }
                        ),
                    }
                )
            }
        ),
    },
)
right = st.fixed_dictionaries(
    {
        "apiVersion": st.just("mindxdl.gitee.com/v1"),
        "kind": st.just("AscendJob"),
        "metadata": st.fixed_dictionaries(
            {"name": st.text(max_size=8), "labels": right_labels, "annotations": right_annotations}
        ),
        "spec": right_specs,
    }
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


def whole(found: Translation) -> None:
    """The text is the policy, and the policy ends."""
    assert parse_policy(found.text, "made") == found.policy
    assert found.policy.ladder[-1].rung is Rung.STOP
    assert all("\n" not in note.text for note in found.notes)


@settings(max_examples=150, deadline=None)
@given(right)
def test_every_right_document_becomes_the_policy_that_it_asks_for(document: dict[str, Any]) -> None:
    """The rungs follow from three labels and two annotations, whatever else is said."""
    found = translate(yaml.safe_dump(document, allow_unicode=True), "job.yaml")
    labels, annotations = document["metadata"]["labels"], document["metadata"]["annotations"]
    on = labels.get("fault-scheduling", "off") != "off"
    pods = "huawei.com/recover_policy_path" in annotations
    processes = labels.get("process-recover-enable", "on") == "on"
    expected = {
        *(rung for word, rung in PROCESS_RUNGS.items() if word in annotations.get("recover-strategy", "").split(",")),
    } if on and processes else set()  # fmt: skip
    expected |= {Rung.RESCHEDULE_POD} if on and (pods or labels.get("pod-rescheduling") == "on") else set()
    expected |= {Rung.RESCHEDULE_JOB} if on and not pods else set()

    whole(found)
    assert {entry.rung for entry in found.policy.ladder} == expected | {Rung.STOP}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_document_with_anything_anywhere_is_translated_or_refused(data: st.DataObject) -> None:
    """One or two places of a right document are overwritten with whatever YAML can hold."""
    document = data.draw(right)
    for _ in range(data.draw(st.integers(1, 2))):
        place: Any = document
        for _ in range(data.draw(st.integers(0, 8))):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            inner = [key for key in keys if isinstance(place[key], dict | list) and place[key]]
            if not inner:
                break
            place = place[data.draw(st.sampled_from(inner))]
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if keys:
            place[data.draw(st.sampled_from(keys))] = data.draw(anything)
    translated_or_refused(yaml.safe_dump(document, allow_unicode=True))


@settings(max_examples=200, deadline=None)
@example('kind: "\\r"')
@given(st.text(max_size=300) | st.text(alphabet="{}[]:-&*<>!|'\"#\n abAscendJobkind", max_size=80))
def test_any_text_at_all_is_translated_or_refused(text: str) -> None:
    """Nothing else comes out of it."""
    translated_or_refused(text)
    translated_or_refused(f"apiVersion: mindxdl.gitee.com/v1\nkind: AscendJob\nmetadata:\n  {text}")


def translated_or_refused(text: str) -> None:
    """A policy, or an error that begins with the file's name and has something to say."""
    refused = ""
    try:
        whole(translate(text, "job.yaml"))
    except PolicyError as error:
        refused = str(error)
    assert all(line.startswith("job.yaml: ") and len(line) > 15 for line in refused.splitlines())
