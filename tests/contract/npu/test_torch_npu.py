"""The published packages of torch-npu are as midstep takes them to be.

Nothing of them is run. For each release: every call that midstep makes is there with its parameters, the methods that
torch-npu itself calls on a backend are known, and the error texts are looked for in the compiled library.
"""

import ast
import re

import pytest
from tests.contract.npu.wheels import RELEASES, NotReachable, Sources, Wheel, wheel

from midstep.devices.npu_calls import BACKEND_METHODS, CALLS, Call
from midstep.processor.exceptions import known_patterns
from midstep.protocol.faults import ExceptionPattern

# Texts that no torch-npu library has in it: they come from CANN, below it, and are known from its documents only.
ONLY_DOCUMENTED = {"operator_timeout", "device_lost", "device_busy", "cann_link_port", "hccl_out_of_memory"}
# What a library must have in it for a pattern that is a regular expression.
LITERALS = {
    "multi_bit_ecc": ("HBM MULTI BIT ECC ERROR", "time is ", "time us= "),
    "cann_task_abort": ("reason=[device task abort]",),
    "cann_multi_bit_ecc": ("reason=[hbm Multi-bit ECC error]",),
    "cann_memory": ("reason=[device mem error]",),
    "cann_suspect_memory": ("reason=[suspect device mem error]",),
    "cann_operator_retry": ("reason=[hccl op retry failed]",),
    "cann_link": ("reason=[link error]",),
    "cann_suspect_remote": ("reason=[suspect remote error]",),
    "cann_link_port": ("reason=device ub mem error",),
    "device_busy": ("EJ0001",),
    "hccl_out_of_memory": ("EI0011",),
}
# The same without brackets, and a third one for links, as the newest release looks for them.
UNBRACKETED = ("reason=device task abort", "reason=hbm Multi-bit ECC error", "reason=device network link error")

pytestmark = pytest.mark.timeout(300)


def fetched(version: str) -> Wheel:
    try:
        return wheel(version)
    except NotReachable as reason:
        pytest.skip(f"the package registry was not reached: {reason}")


def disagreements(sources: Sources, call: Call) -> list[str]:
    """Return how a call differs from what the package declares; empty if it would be taken."""
    found = sources.signature(call.name)
    if found is None:
        return [f"{call.name} is not there"]
    wanted, there = call.parameters, found.parameters
    wrong = [f"{call.name} has no parameter {name}" for name in wanted if name not in there]
    if not wrong and tuple(name for name in there if name in wanted) != wanted:
        wrong.append(f"{call.name} takes {there}, not {wanted}")
    needed = [name for name in there if name not in found.optional and name not in wanted]
    return wrong + [f"{call.name} needs {name}, which midstep does not pass" for name in needed]


@pytest.mark.parametrize("version", RELEASES)
def test_every_call_that_midstep_makes_is_there_with_its_parameters(version: str) -> None:
    sources = Sources(fetched(version).sources)
    assert [line for call in CALLS for line in disagreements(sources, call)] == []


@pytest.mark.parametrize("version", RELEASES)
def test_what_torch_npu_calls_on_a_backend_is_what_midsteps_groups_hand_on(version: str) -> None:
    """A method that appears in a new version would be missing behind midstep's groups, and in the fake."""
    sources = Sources(fetched(version).sources)
    called = set()
    names = ("npu.stop_device", "npu.restart_device", "distributed.reinit_process_group")
    for name in (*names, "distributed.distributed_c10d._comm_switch_nic"):
        definition = sources.find(name)
        assert definition is not None
        called |= {
            node.func.attr
            for node in ast.walk(definition)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and "_get_backend" in ast.unparse(node.func.value)
        }
    assert called == set(BACKEND_METHODS)


CHANGES = [
    ("def stop_device(device_id)", "def stop_device(device_id, reason)", "needs reason"),
    ("def stop_device(", "def halt_device(", "stop_device is not there"),
    ("rebuild_all_resources", "rebuild", "no parameter rebuild_all_resources"),
    ("def check_uce_in_memory(device_id)", "def check_uce_in_memory()", "no parameter device_id"),
    ("group=None, rebuild_link=True", "rebuild_link=True, group=None", "takes"),
    ("def recorded_time(self)", "def recorded_time(self, unit)", "needs unit"),
]


@pytest.mark.parametrize(("before", "after", "complaint"), CHANGES, ids=[change[2] for change in CHANGES])
def test_a_signature_that_is_changed_by_hand_is_seen(before: str, after: str, complaint: str) -> None:
    """The check above would fail on a package that is not the one midstep was written for."""
    original = fetched(RELEASES[0]).sources
    changed = {path: text.replace(before, after) for path, text in original.items()}
    assert changed != original
    lines = [line for call in CALLS for line in disagreements(Sources(changed), call)]
    assert [line for line in lines if complaint in line], lines


# --- error texts ------------------------------------------------------------------------------------------------------


def literals(pattern: ExceptionPattern) -> tuple[str, ...]:
    if pattern.text is not None:
        return (pattern.text,)
    assert pattern.name in LITERALS, f"say what to look for: {pattern.name}"
    return LITERALS[pattern.name]


DEVICE_PATTERNS = [pattern for pattern in known_patterns() if pattern.library in {"torch_npu", "cann"}]


@pytest.mark.parametrize("version", RELEASES)
def test_every_error_text_is_in_the_library_or_known_to_be_only_documented(version: str) -> None:
    """And a text is not in a release for which its pattern is said not to hold."""
    library = fetched(version).library
    for pattern in DEVICE_PATTERNS:
        there = all(text.encode() in library for text in literals(pattern))
        expected = pattern.name not in ONLY_DOCUMENTED and pattern.holds_for({"torch_npu": version})
        if pattern.library == "cann" and pattern.name == "cann_suspect_remote" and version == RELEASES[0]:
            expected = False  # came with the text of torch-npu for it
        assert there is expected, f"{pattern.name} in torch-npu {version}"


@pytest.mark.parametrize("version", RELEASES[1:])
def test_cann_may_say_its_reasons_without_brackets(version: str) -> None:
    library = fetched(version).library
    for text in UNBRACKETED:
        assert text.encode() in library
        assert any(found.compiled and found.compiled.search(text) for found in DEVICE_PATTERNS), text


def test_the_library_is_really_searched() -> None:
    library = fetched(RELEASES[0]).library
    assert re.search(rb"FORCE STOP", library)
    assert b"HBM SINGLE BIT" not in library
