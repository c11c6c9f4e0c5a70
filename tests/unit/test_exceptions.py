"""Patterns that are data give exceptions a meaning; one that no pattern knows is never swallowed."""

import contextlib
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstep.processor.exceptions import (
    Finding,
    Reaction,
    chain_of,
    classify,
    fault_in_recovery,
    known_patterns,
    parse_patterns,
    reaction,
)
from midstep.protocol.errors import (
    CallbackFailed,
    CommunicatorAborted,
    CommunicatorFailed,
    ConfigurationError,
    ProtocolViolation,
    UnsupportedCollective,
)
from midstep.protocol.faults import ExceptionPattern
from midstep.protocol.types import FaultKind, FaultLevel

PATTERNS = known_patterns()
ERROR_TAIL = "\n[ERROR] 2026-11-20-10:11:12 (PID:77, Device:0, RankID:3) ERR00100 PTA call acl api failed"
QUEUE_DEAD = (
    "The Inner error is reported as above. The process exits for this inner error, and the current working operator "
    "name is HcclAllreduce.\nSince the operator is called asynchronously, the stacktrace may be inaccurate."
)
HCCL_FAILED = "create_config: HCCL function error: HcclCommInitRootInfoConfig, error code is 15"


def found(error: BaseException) -> Finding:
    return classify(chain_of(error), PATTERNS)


# the exception, its kind (None: no fault), whether the living process may mend it
KNOWN = [
    (RuntimeError(f"FORCE STOP.{ERROR_TAIL}"), None, False),
    (RuntimeError(f"UCE ERROR.{ERROR_TAIL}"), FaultKind.MEMORY, True),
    (RuntimeError("HBM MULTI BIT ECC ERROR. time is 1732155"), FaultKind.MEMORY_MULTI_BIT, True),
    (RuntimeError("SUSPECT MEM ERROR"), FaultKind.MEMORY, True),
    (RuntimeError("HCCL OP RETRY FAILED"), FaultKind.LINK, True),
    (RuntimeError("HCCS LINK ERROR"), FaultKind.LINK, True),
    (RuntimeError("UB LINK ERROR"), FaultKind.LINK, True),
    (RuntimeError("SUSPECT REMOTE ERROR"), FaultKind.COMMUNICATION, False),
    (RuntimeError("There is unsafe data in the input tensor."), FaultKind.MEMORY, False),
    (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"), FaultKind.OUT_OF_MEMORY, False),
    (torch.OutOfMemoryError("CUDA out of memory."), FaultKind.OUT_OF_MEMORY, False),
    (MemoryError(), FaultKind.OUT_OF_MEMORY, False),
    (RuntimeError("EZ9999: inner error, reason=[hccl op retry failed]"), FaultKind.LINK, True),
    (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer"), FaultKind.COMMUNICATION, False),
    (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), FaultKind.COMMUNICATION, False),
    (RuntimeError("HCCL function error: HcclAllReduce, error code is 21"), FaultKind.COMMUNICATION, False),
    (RuntimeError("EE9999: inner error, reason=[device task abort]"), None, False),
    (RuntimeError("EE9999: reason=[hbm Multi-bit ECC error]"), FaultKind.MEMORY_MULTI_BIT, True),
    (RuntimeError("EE9999: reason=[device mem error]"), FaultKind.MEMORY, True),
    (RuntimeError("EE9999: reason=[suspect device mem error]"), FaultKind.MEMORY, True),
    (RuntimeError("EE9999: reason=[link error]"), FaultKind.LINK, True),
    (RuntimeError("EE9999: reason=device network link error"), FaultKind.LINK, True),
    (RuntimeError("EE9999: reason=link error"), FaultKind.LINK, True),
    (RuntimeError("EE9999: reason=device task abort"), None, False),
    (RuntimeError("EE9999: reason=hccl op retry failed"), FaultKind.LINK, True),
    (RuntimeError("EE9999: reason=suspect device mem error"), FaultKind.MEMORY, True),
    (RuntimeError(QUEUE_DEAD), FaultKind.DEVICE, False),
    (RuntimeError("EJ0001: Failed to initialize the HCCP process."), FaultKind.COMMUNICATION, False),
    (RuntimeError("EE9999: reason=[suspect remote error]"), FaultKind.COMMUNICATION, False),
    (RuntimeError("NPU function error: aclrtSynchronizeStream, error code is 107020"), FaultKind.COMMUNICATION, False),
    (RuntimeError("NPU function error: aclrtSynchronizeDevice, error code is 507010"), FaultKind.DEVICE, False),
    (RuntimeError("NPU function error: aclrtSynchronizeDevice, error code is 107022"), None, False),
    (RuntimeError("NPU function error: aclrtSynchronizeDevice, error code is 507053"), FaultKind.MEMORY, True),
    (RuntimeError("NPU function error: AclrtMemcpy, error code is 507054"), FaultKind.MEMORY_MULTI_BIT, True),
    (RuntimeError("NPU function error: AclrtMemcpy, error code is 507055"), FaultKind.MEMORY, True),
    (RuntimeError("OPS function error: aclnnMatmul, error code is 507056"), FaultKind.LINK, True),
    (RuntimeError("OPS function error: aclnnMatmul, error code is 507057"), FaultKind.COMMUNICATION, False),
    (RuntimeError("NPU error, error code is 507904\n[ERROR] 2026-11-20-10:11:12"), FaultKind.LINK, True),
    (RuntimeError("EE9999: reason=device local mem error"), FaultKind.MEMORY, True),
    (RuntimeError("EE9999: reason=[hccl ccu task error: device local mem error]"), FaultKind.MEMORY, True),
    (RuntimeError("EE9999: reason=device ub mem error"), FaultKind.LINK, True),
    (RuntimeError("EE9999: reason=device remote mem error"), FaultKind.COMMUNICATION, False),
    (RuntimeError("EE9999: reason=hccl ccu task error: device remote mem error"), FaultKind.COMMUNICATION, False),
    (RuntimeError(f"{HCCL_FAILED} EI0007: Failed to allocate resource[qp]"), FaultKind.OUT_OF_MEMORY, False),
    (RuntimeError(f"{HCCL_FAILED} EI0011: Failed to allocate 3 MB of NPU memory"), FaultKind.OUT_OF_MEMORY, False),
    (torch.OutOfMemoryError(f"{HCCL_FAILED} EL0004: Failed to allocate"), FaultKind.OUT_OF_MEMORY, False),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), FaultKind.DEVICE, False),
    (RuntimeError("CUDA error: device-side assert triggered"), FaultKind.DEVICE, False),
    (RuntimeError("CUDA error: unspecified launch failure"), FaultKind.DEVICE, False),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), FaultKind.DEVICE, False),
    (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), FaultKind.DEVICE, False),
    (RuntimeError("CUDA error: out of memory"), FaultKind.OUT_OF_MEMORY, False),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), FaultKind.DEVICE, False),
    (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0. "), None, False),
    (torch.distributed.DistBackendError("NCCL error: unhandled system error"), FaultKind.COMMUNICATION, False),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 4 TB"), FaultKind.OUT_OF_MEMORY, False),
    (torch.distributed.DistStoreError("wait timeout after 300000ms"), FaultKind.COMMUNICATION, False),
    (RuntimeError("Application timeout caused pair closure"), FaultKind.COMMUNICATION, False),
    (RuntimeError("[enforce fail at /x/gloo/transport/tcp/device.cc:84] rv != -1"), FaultKind.COMMUNICATION, False),
    (CommunicatorFailed("allreduce cannot be done"), FaultKind.COMMUNICATION, False),
    (CommunicatorAborted("allreduce cannot be done"), FaultKind.COMMUNICATION, False),
]


@pytest.mark.parametrize(("error", "kind", "mendable"), KNOWN, ids=lambda value: str(value)[:24])
def test_a_known_text_gets_its_kind(error: Exception, kind: FaultKind | None, mendable: bool) -> None:
    finding = found(error)
    assert (finding.kind, finding.mendable) == (kind, mendable)
    assert finding.known


def test_every_pattern_of_the_file_has_a_text_here() -> None:
    """A pattern that is added without one is found."""
    assert {found(error).pattern for error, _, _ in KNOWN} == {pattern.name for pattern in PATTERNS}


def test_the_time_stamp_of_a_multi_bit_error_is_read() -> None:
    text = f"HBM MULTI BIT ECC ERROR.hbm Multi-bit ECC error, time is 1732155001234{ERROR_TAIL}"
    assert found(RuntimeError(text)).time_us == 1732155001234
    assert found(RuntimeError("HBM MULTI BIT ECC ERROR.")).time_us is None


@pytest.mark.parametrize(
    "beginning",
    [
        "HBM MULTI BIT ECC ERROR, EZ9999: ",
        "EE9999: reason=hbm Multi-bit ECC error, ",
        "EE9999: HBM MULTI BIT ECC, Uncorrectable ECC, ",
    ],
)
def test_the_time_stamp_is_read_in_the_words_of_the_task_queue(beginning: str) -> None:
    """The queue, which is on by default, hands CANN's words on and does not put the time behind them.

    CANN's own text has no ERROR in it, and is enough for MindIO.
    """
    finding = found(RuntimeError(f"{beginning}device 3, time us= 1732155001234.{ERROR_TAIL}"))
    assert (finding.kind, finding.time_us) == (FaultKind.MEMORY_MULTI_BIT, 1732155001234)


def test_only_a_device_that_knows_where_its_memory_is_damaged_is_asked() -> None:
    """torch-npu takes no note of memory that is merely suspected."""
    codes = {507053: True, 507054: True, 507055: False, 507056: False, 507904: False}
    located = {code: found(RuntimeError(f"NPU function error: x, error code is {code}")).locate for code in codes}
    assert located == codes


def test_a_code_is_not_read_out_of_a_longer_number() -> None:
    assert not found(RuntimeError("NPU function error: x, error code is 5070530")).known


@pytest.mark.parametrize("words", ["error code is 107020", "HCCL function error: x, error code is 21", "UCE ERROR"])
def test_a_dead_task_queue_comes_before_whatever_else_its_text_says(words: str) -> None:
    """restart_device starts no other: a process that stayed would hang in the next link-up."""
    finding = found(RuntimeError(f"{QUEUE_DEAD}\n{words}{ERROR_TAIL}"))
    assert finding.pattern == "task_queue_dead"
    assert reaction(finding, collateral=True) is Reaction.LEAVE


def test_what_caused_an_exception_counts_if_the_exception_itself_says_nothing() -> None:
    """A framework that wraps the device's error in its own does not hide it."""
    error = ValueError("forward failed in layer 3")
    error.__cause__ = RuntimeError("UCE ERROR")
    assert found(error).kind is FaultKind.MEMORY


def test_the_outermost_text_goes_before_its_cause() -> None:
    error = RuntimeError("FORCE STOP")
    error.__cause__ = RuntimeError("HCCL OP RETRY FAILED")
    assert found(error).kind is None


def test_a_device_text_in_an_exception_that_is_no_runtime_error_means_nothing() -> None:
    """A user's ValueError that quotes a manual is not a fault of the device."""
    finding = found(ValueError("see the manual on UCE ERROR"))
    assert (finding.kind, finding.known) == (FaultKind.EXCEPTION, False)


@given(st.text(max_size=400))
def test_unknown_text_is_an_unknown_fault_that_shows_it(text: str) -> None:
    """Whatever a script raises: it is a fault of the kind exception, and its first line is kept."""
    finding = found(KeyError(text))
    assert finding.kind is FaultKind.EXCEPTION
    assert not finding.known
    assert "KeyError" in finding.meaning
    first = next((line.strip() for line in str(KeyError(text)).splitlines() if line.strip()), "")
    assert finding.text.startswith(first[:300])


@given(
    st.sampled_from([case for case in KNOWN if type(case[0]) is RuntimeError]),
    st.text(max_size=80),
    st.text(max_size=80),
)
def test_a_known_text_is_found_wherever_it_stands(
    case: tuple[Exception, FaultKind | None, bool], before: str, after: str
) -> None:
    error, kind, _ = case
    surrounded = RuntimeError(f"{before}\n{error}\n{after}")
    if all(pattern.text is None or pattern.text not in before + after for pattern in PATTERNS):
        assert found(surrounded).kind is kind


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert len(chain_of(one)) == 2


def test_an_exception_that_cannot_describe_itself_is_told_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert found(Mute()).kind is FaultKind.EXCEPTION


# --- what follows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "alone", "interrupted"),
    [
        (ValueError("a bug"), Reaction.LEAVE, Reaction.WAIT),
        (RuntimeError("FORCE STOP"), Reaction.REPORT, Reaction.WAIT),
        (RuntimeError("SUSPECT REMOTE ERROR"), Reaction.REPORT, Reaction.WAIT),
        (RuntimeError("HCCL OP RETRY FAILED"), Reaction.REPORT, Reaction.REPORT),
        (RuntimeError("UCE ERROR"), Reaction.REPORT, Reaction.REPORT),
        (torch.OutOfMemoryError("out"), Reaction.LEAVE, Reaction.LEAVE),
        (RuntimeError("There is unsafe data in the input tensor."), Reaction.LEAVE, Reaction.LEAVE),
        (RuntimeError(QUEUE_DEAD), Reaction.LEAVE, Reaction.LEAVE),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_follows_depends_on_whose_fault_it_is(error: Exception, alone: Reaction, interrupted: Reaction) -> None:
    """A process that can mend its fault stays, one with a bug leaves, one that was stopped waits."""
    assert reaction(found(error), collateral=False) is alone
    assert reaction(found(error), collateral=True) is interrupted


@pytest.mark.parametrize(
    ("error", "alone"),
    [
        (ValueError("a bug"), Reaction.REPORT),
        (ProtocolViolation("two updates in a step"), Reaction.LEAVE),
        (torch.OutOfMemoryError("out"), Reaction.LEAVE),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_unknown_exception_can_be_retried_but_for_midsteps_own(error: Exception, alone: Reaction) -> None:
    """What a pattern says of an exception holds all the same, and what follows from being stopped is no fault."""
    finding = classify(chain_of(error), PATTERNS, retry_unknown=True)
    assert reaction(finding, collateral=False) is alone
    unknown = classify(chain_of(ValueError("a consequence")), PATTERNS, retry_unknown=True)
    assert reaction(unknown, collateral=True) is Reaction.WAIT


def test_an_exception_that_midsteps_own_caused_is_not_retried() -> None:
    error = RuntimeError("the loop failed")
    error.__cause__ = ProtocolViolation("two updates in a step")
    assert not classify(chain_of(error), PATTERNS, retry_unknown=True).mendable


def test_settings_that_midstep_refuses_are_no_fault_of_a_process_which_waits_for_the_end_of_the_job() -> None:
    """Also where something of the script's wraps them; a class of another library with that name is any exception."""
    wrapped = RuntimeError("the loop failed")
    wrapped.__cause__ = UnsupportedCollective("gloo has no such reduction")
    refused = classify(chain_of(wrapped), PATTERNS, retry_unknown=True)
    assert (refused.kind, refused.text) == (FaultKind.REFUSED, "gloo has no such reduction")
    assert reaction(refused, collateral=False) is Reaction.REPORT
    assert reaction(refused, collateral=True) is Reaction.WAIT
    foreign = type("ConfigurationError", (ValueError,), {})("no such model")
    assert found(foreign).kind is FaultKind.EXCEPTION


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (RuntimeError(f"HCCL function error: HcclAllReduce, error code is 21{ERROR_TAIL}"), FaultKind.COMMUNICATION),
        (RuntimeError(f"FORCE STOP.{ERROR_TAIL}"), FaultKind.COMMUNICATION),
        (RuntimeError(f"UCE ERROR.{ERROR_TAIL}"), FaultKind.EXCEPTION),
        (RuntimeError(QUEUE_DEAD), FaultKind.EXCEPTION),
        (KeyError("optimizer"), FaultKind.EXCEPTION),
    ],
    ids=lambda value: str(value)[:16],
)
def test_a_callback_is_not_to_blame_for_its_own_collective_that_a_peer_has_failed(
    cause: Exception, kind: FaultKind
) -> None:
    """Handlers of MindIO have barriers of their own: with a second fault in a repair each rank would be replaced."""
    failed = CallbackFailed(f"the callback of repair raised {type(cause).__name__}: {cause}")
    failed.__cause__ = cause
    assert fault_in_recovery(failed, PATTERNS) is kind


# --- the file ---------------------------------------------------------------------------------------------------------


def test_patterns_of_versions_that_are_not_installed_are_left_out() -> None:
    link = next(pattern for pattern in PATTERNS if pattern.name == "ub_link")
    assert link.holds_for({"torch_npu": "2.13.0"})
    assert not link.holds_for({"torch_npu": "2.6.0"})
    assert link.holds_for({})
    assert link.holds_for({"torch_npu": "of my own making"})


def test_no_text_but_a_lost_device_asks_for_more_than_a_restart_in_place() -> None:
    """Texts condemn no device: that is for detectors to say."""
    levels = {
        pattern.fault.level
        for pattern in PATTERNS
        if pattern.fault is not None and pattern.name not in {"device_lost", "cuda_device_lost"}
    }
    assert levels <= {FaultLevel.SOFTWARE, FaultLevel.RESTART_REQUEST, FaultLevel.RESTART_BUSINESS}
    assert found(RuntimeError("NPU function error: x, error code is 507010")).level is FaultLevel.RESTART_NPU


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("{name: a, library: b, meaning: what, text: abc}", "either fault or stopped"),
        ("{name: a, library: b, meaning: what, stopped: true}", "one of text, regex and types"),
        ("{name: a, library: b, meaning: what, stopped: true, regex: '(abc'}", "regex"),
        ("{name: a, library: b, meaning: what, stopped: true, text: abc, versions: latest}", "versions"),
        ("{name: a, library: b, meaning: what, stopped: true, text: abc, colour: red}", "colour"),
        ("{name: a, library: b, meaning: what, text: abc, fault: {kind: meteor}}", "meteor"),
        ("{name: A B, library: b, meaning: what, text: abc, stopped: true}", "name"),
    ],
)
def test_a_mistake_in_the_file_is_named(entry: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        parse_patterns(f"version: 1\npatterns:\n  - {entry}\n", "mine.yaml")
    assert str(caught.value).startswith("mine.yaml")


def test_a_name_that_stands_twice_and_another_version_are_refused() -> None:
    entry = "  - {name: a, library: b, meaning: what, stopped: true, text: abc}\n"
    with pytest.raises(ConfigurationError, match=r"version: found 2.*(\n.*)*stands twice"):
        parse_patterns(f"version: 2\npatterns:\n{entry}{entry}", "mine.yaml")


@given(st.text(max_size=200))
def test_no_text_in_the_file_raises_anything_but_a_configuration_error(text: str) -> None:
    with contextlib.suppress(ConfigurationError):
        assert isinstance(parse_patterns(text, "mine.yaml"), tuple)


def test_patterns_survive_a_round_trip() -> None:
    """What the file says is what the structs hold."""
    assert msgspec.convert(msgspec.to_builtins(PATTERNS), tuple[ExceptionPattern, ...]) == PATTERNS


def test_the_page_on_npus_names_every_text_of_a_device() -> None:
    """And says where each was seen."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "npu.md").read_text()
    named = {pattern.name for pattern in PATTERNS if pattern.library in {"torch_npu", "cann"}}
    assert {name for name in named if f"`{name}`" not in page} == set()
