"""A job's own patterns of exceptions: checked with the policy, and tried before those that come along."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from midstep.policies.files import parse_policy, render
from midstep.policies.rules import KINDS, MAX_PATTERNS, job_settings
from midstep.processor.exceptions import Reaction
from midstep.processor.train_thread import ExceptionPolicy
from midstep.protocol.errors import PolicyError
from midstep.protocol.types import FaultKind, FaultLevel, JobSettings

OWN = """
exceptions:
  - name: loader_lost
    types: [DataStoreError]
    meaning: the data store has closed the connection; the step can be repeated
    fault: {kind: communication, mendable: true}
  - name: our_link
    regex: "fabric (?:down|gone) on port [0-9]+"
    meaning: a link of our own fabric failed
    fault: {kind: link, level: RestartRequest, mendable: true}
"""


class DataStoreError(Exception):
    """Of a library that midstep does not know."""


class Process:
    """A training process, as far as exceptions go."""

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        self.reported: list[tuple[FaultKind, FaultLevel, bool]] = []
        self.communicator = SimpleNamespace(failed=None)
        self.debug_log = SimpleNamespace(note=lambda *_: None)
        self.device = SimpleNamespace(memory_error_raised=lambda: None)

    def interrupted(self) -> bool:
        return False

    def report_fault(self, kind: FaultKind, detail: str, level: FaultLevel, *, mendable: bool, **_: Any) -> None:
        self.reported.append((kind, level, mendable))


def process_of(policy: str) -> Process:
    """A process of a job with this policy, whose settings came over the wire."""
    settings = job_settings(parse_policy(policy, "job.yaml"), "/job")
    return Process(msgspec.json.decode(msgspec.json.encode(settings), type=JobSettings))


def test_an_exception_that_only_the_job_knows_is_what_its_policy_says() -> None:
    process: Any = process_of(OWN)
    policy = ExceptionPolicy(process)
    assert policy.in_training(DataStoreError("gone")) is Reaction.REPORT
    assert policy.in_training(RuntimeError("fabric gone on port 7")) is Reaction.REPORT
    assert process.reported == [
        (FaultKind.COMMUNICATION, FaultLevel.SOFTWARE, True),
        (FaultKind.LINK, FaultLevel.RESTART_REQUEST, True),
    ]


def test_the_jobs_own_patterns_come_before_those_that_come_along() -> None:
    own = "{name: ours, text: UCE ERROR, meaning: we know better, fault: {kind: device, level: RestartNPU}}"
    process: Any = process_of(f"exceptions: [{own}]")
    assert ExceptionPolicy(process).in_training(RuntimeError("UCE ERROR.")) is Reaction.LEAVE
    assert process.reported == [(FaultKind.DEVICE, FaultLevel.RESTART_NPU, False)]


def test_a_policy_with_patterns_is_shown_as_one_that_can_be_read() -> None:
    policy = parse_policy(OWN, "job.yaml")
    assert parse_policy(render(policy), "shown") == policy


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("{name: a, meaning: what, text: abc}", "exceptions[0]: either fault or stopped"),
        ("{name: a, meaning: what, stopped: true}", "exceptions[0]: one of text, regex and types"),
        ("{name: a, meaning: what, stopped: true, regex: '(abc'}", "exceptions[0]: regex"),
        ("{name: a, meaning: what, stopped: true, text: abc, library: torch}", "leave them out"),
        ("{name: a, meaning: what, stopped: true, text: abc, colour: red}", "exceptions[0].colour: unknown key"),
        ("{name: a, meaning: what, text: abc, fault: {kind: meteor}}", "exceptions[0].fault.kind: found the text"),
        ("{name: a, meaning: what, text: abc, fault: {kind: node_lost}}", "which no exception stands for"),
        ("{name: A B, meaning: what, text: abc, stopped: true}", "exceptions[0].name"),
        ("{name: a, text: abc, stopped: true}", "exceptions[0].meaning: missing"),
    ],
)
def test_a_mistake_is_named_with_its_key(entry: str, complaint: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse_policy(f"exceptions: [{entry}]", "job.yaml")
    assert complaint in str(refused.value)


def test_a_name_that_stands_twice_and_too_many_patterns_are_refused() -> None:
    one = "{name: a, meaning: what, text: abc, stopped: true}"
    with pytest.raises(PolicyError, match=r"exceptions\[1\].name: a is the name of exceptions\[0\]"):
        parse_policy(f"exceptions: [{one}, {one}]", "job.yaml")
    many = ", ".join(one.replace("name: a", f"name: a{number}") for number in range(MAX_PATTERNS + 1))
    with pytest.raises(PolicyError, match=f"up to {MAX_PATTERNS}"):
        parse_policy(f"exceptions: [{many}]", "job.yaml")


def test_every_kind_that_the_patterns_which_come_along_have_is_allowed() -> None:
    from midstep.processor.exceptions import known_patterns

    assert {pattern.fault.kind for pattern in known_patterns() if pattern.fault is not None} <= KINDS
