"""Codes and levels: what a fault is taken for, by whose word, and what a table may say."""

import json
import os
from pathlib import Path

import msgspec
import pytest

import midstep
from midstep.detectors.mindcluster import device_readings
from midstep.policies.code_files import default_codes, fault_codes, load_codes
from midstep.policies.fault_codes import TREATMENTS, CodeRule, FaultCodes, LevelName, level_named
from midstep.policies.files import load_policy, parse_policy, render
from midstep.policies.schema import FaultPolicy, Policy
from midstep.protocol.errors import PolicyError
from midstep.protocol.types import FaultKind, FaultLevel, FaultReport

RULES = {
    "80E01801": CodeRule(LevelName.RESTART_BUSINESS, FaultKind.MEMORY, "memory is struck"),
    "8C1F*": CodeRule(LevelName.NOT_HANDLE_FAULT, FaultKind.LINK),
    "8C1F86*": CodeRule(LevelName.SUB_HEALTH_FAULT),
    "[0x08520003,na,L2,na]": CodeRule(LevelName.NOT_HANDLE, FaultKind.SWITCH),
}


def fault(code: str | None, level: FaultLevel = FaultLevel.SOFTWARE, **fields: object) -> FaultReport:
    """A report as a detector makes it."""
    report = FaultReport(FaultKind.DEVICE, 1.0, "detector/test", "", node="n", device=0, level=level, code=code)
    return msgspec.structs.replace(report, **fields)


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("80E01801", FaultLevel.RESTART_BUSINESS),
        ("80e01801", FaultLevel.RESTART_BUSINESS),
        ("8C1F0000", FaultLevel.NOT_HANDLE),
        ("8c1f860a", FaultLevel.SUB_HEALTH),
        ("[0x08520003,na,L2,na]", FaultLevel.NOT_HANDLE),
    ],
)
def test_a_code_has_the_level_of_its_rule_or_of_the_longest_pattern(code: str, level: FaultLevel) -> None:
    assert FaultCodes(RULES).completed(fault(code)).level is level


def test_brackets_of_a_switch_code_are_letters_and_no_pattern() -> None:
    assert FaultCodes(RULES).completed(fault("0")).meaning.startswith("unknown code")


def test_a_code_tells_what_it_is_about_and_what_it_means() -> None:
    completed = FaultCodes(RULES).completed(fault("80E01801"))
    assert (completed.kind, completed.meaning) == (FaultKind.MEMORY, "memory is struck")


def test_a_hang_that_the_device_plugin_publishes_is_one_of_the_process_on_that_device() -> None:
    """midstep's own clocks decide, unless the cluster or the policy says that such a process is to be replaced."""
    entry = {"npu_name": "Ascend910-3", "fault_code": "200001002", "fault_level": "NotHandleFault"}
    listed = {"huawei.com/Ascend910-Fault": json.dumps([entry])}
    (reading,) = device_readings(json.dumps({"DeviceInfo": {"DeviceList": listed}}), "n")
    assert (reading.device, reading.code, reading.level) == (3, "200001002", FaultLevel.NOT_HANDLE)

    report = fault(reading.code, FaultLevel.NOT_HANDLE, kind=reading.kind, device=reading.device)
    for own, level in ((None, FaultLevel.NOT_HANDLE), (LevelName.RESTART_BUSINESS, FaultLevel.RESTART_BUSINESS)):
        rules = None if own is None else {"200001002": CodeRule(own)}
        completed = FaultCodes(default_codes(), rules).completed(report)
        assert (completed.kind, completed.level) == (FaultKind.DEVICE, level)
        assert "stand still" in completed.meaning


def test_the_level_that_a_detector_names_comes_before_the_table_and_the_jobs_own_before_both() -> None:
    named = fault("80E01801", FaultLevel.SEPARATE_NPU)
    assert FaultCodes(RULES).completed(named).level is FaultLevel.SEPARATE_NPU
    own = {"80E0*": CodeRule(LevelName.RESTART_NPU)}
    completed = FaultCodes(RULES, own).completed(named)
    assert completed.level is FaultLevel.RESTART_NPU
    assert completed.meaning == "memory is struck"


def test_an_unknown_code_gets_the_policys_level_and_is_said_to_be_unknown() -> None:
    completed = FaultCodes(RULES, unknown=LevelName.PRE_SEPARATE_NPU).completed(fault("FFFF"))
    assert completed.level is FaultLevel.PRE_SEPARATE_NPU
    assert completed.meaning == "unknown code, taken as PreSeparateNPU by faults.unknown_code"
    told = FaultCodes(RULES).completed(fault("FFFF", FaultLevel.RESTART_NPU))
    assert told.level is FaultLevel.RESTART_NPU
    assert told.meaning == "unknown code, taken as RestartNPU as its detector says"


def test_what_a_process_can_mend_is_not_judged_again() -> None:
    report = fault("FFFF", FaultLevel.RESTART_BUSINESS, mendable=True)
    assert FaultCodes(RULES).completed(report) == report


def test_every_level_of_devices_nodes_and_switches_is_one_that_something_is_done_about() -> None:
    assert {level_named(name) for name in LevelName} == set(TREATMENTS) - {FaultLevel.SOFTWARE, FaultLevel.NODE}
    assert set(TREATMENTS) == set(FaultLevel)


def test_the_table_that_comes_along_has_a_meaning_for_every_code() -> None:
    assert default_codes()
    assert all(rule.meaning for rule in default_codes().values())


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("80E18008", FaultLevel.RESTART_NPU),
        ("80E18402", FaultLevel.SEPARATE_NPU),
        ("80C98008", FaultLevel.RESTART_REQUEST),
        ("8C204E00", FaultLevel.RESTART_BUSINESS),
        ("8C104E00", FaultLevel.FREE_RESTART_NPU),
        ("81B18605", FaultLevel.SUB_HEALTH),
        ("8F180E2F", FaultLevel.SEPARATE_NPU),
        ("8F19A04E", FaultLevel.PRE_SEPARATE_NPU),
        ("220001001", FaultLevel.SEPARATE_NPU),
    ],
)
def test_a_code_of_an_npu_without_a_level_has_that_of_mindclusters_device_plugin(code: str, level: FaultLevel) -> None:
    """As `npu-smi` and the kernel's log have them, where no device plugin runs, and PublicFault documents."""
    assert fault_codes(FaultPolicy()).completed(fault(code)).level is level


@pytest.mark.skipif("MIDSTEP_MINDCLUSTER" not in os.environ, reason="MIDSTEP_MINDCLUSTER names no checkout")
def test_every_code_of_mindclusters_own_files_has_its_level_here() -> None:
    """The device plugin takes a code that stands twice by the more serious list."""
    checkout = Path(os.environ["MIDSTEP_MINDCLUSTER"], "component")
    public = json.loads((checkout / "clusterd/build/publicFaultConfiguration.json").read_text())["publicFaultCode"]
    own = json.loads((checkout / "ascend-device-plugin/build/faultCode.json").read_text())
    lists: dict[str, list[str]] = {name: [*own.get(name, ()), *public.get(name, ())] for name in {**own, **public}}
    rank = list(FaultLevel)
    wanted: dict[str, FaultLevel] = {}
    for name, codes in lists.items():
        level = level_named(LevelName(name.removesuffix("Codes")))
        for code in codes:
            wanted[code] = max(level, wanted.get(code, level), key=rank.index)
    table = fault_codes(FaultPolicy())
    assert {code: table.completed(fault(code)).level for code in wanted} == wanted


@pytest.mark.skipif("MIDSTEP_MINDCLUSTER" not in os.environ, reason="MIDSTEP_MINDCLUSTER names no checkout")
def test_what_comes_too_often_on_an_npu_is_what_mindclusters_device_plugin_takes_for_it() -> None:
    build = Path(os.environ["MIDSTEP_MINDCLUSTER"], "component/ascend-device-plugin/build")
    rules = json.loads((build / "faultCustomization.json").read_text())["FaultFrequency"]
    policy = load_policy(Path(midstep.__file__).parent / "configs" / "npu.yaml")
    assert [(list(rule.codes), rule.times, rule.window_s) for rule in policy.faults.too_often] == [
        (rule["EventId"], rule["Times"], rule["TimeWindow"]) for rule in rules
    ]


def test_a_policy_overrides_codes_by_a_word_or_by_a_whole_rule() -> None:
    text = 'faults: {codes: {"80E01801": RestartNPU, "AB*": {level: Separate, kind: switch, meaning: gone}}}'
    policy = parse_policy(text, "job.yaml")
    codes = fault_codes(policy.faults)
    assert codes.completed(fault("80E01801")).level is FaultLevel.RESTART_NPU
    assert codes.completed(fault("AB12")).kind is FaultKind.SWITCH
    assert parse_policy(render(policy), "rendered") == policy


def test_a_policys_code_file_is_read_from_its_directory_and_what_the_policy_says_itself_comes_first(
    tmp_path: Path,
) -> None:
    (tmp_path / "codes.yaml").write_text('version: 1\ncodes: {"A1": RestartNPU, "A2": SubHealthFault}\n')
    (tmp_path / "job.yaml").write_text('faults: {codes_file: codes.yaml, codes: {"A2": SeparateNPU}}\n')
    policy = load_policy(tmp_path / "job.yaml")
    assert {code: rule.level for code, rule in policy.faults.codes.items()} == {
        "A1": LevelName.RESTART_NPU,
        "A2": LevelName.SEPARATE_NPU,
    }
    assert parse_policy(render(policy), "rendered") == policy


@pytest.mark.parametrize(
    "text",
    [
        '{"NotHandleFaultCodes": ["80E21007"], "RestartNPUCodes": ["8C03A000"], "PreSeparateNPUCodes": []}',
        '{"publicFaultCode": {"NotHandleFaultCodes": ["80E21007"], "RestartNPUCodes": ["8C03A000"]}}',
    ],
)
def test_a_clusters_own_file_of_codes_by_level_is_understood(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faultCode.json"
    path.write_text(text)
    assert {code: rule.level for code, rule in load_codes(path).items()} == {
        "80E21007": LevelName.NOT_HANDLE_FAULT,
        "8C03A000": LevelName.RESTART_NPU,
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "version: 1\ncodes: {A1: RestartNPUU}",
            "codes.A1.level: found the text 'RestartNPUU'; allowed: NotHandleFault",
        ),
        ("version: 1\ncodes: {A1: RestartNPUU}", "did you mean RestartNPU?"),
        ("version: 1\ncodes: {81078603: RestartNPU}", "codes.81078603: found 81078603 as a name; write it in quotes"),
        ("version: 1\ncodes: {A1: {level: Reset, kind: exit}}", "codes.A1.kind: found exit, which no code stands for"),
        ("version: 2\ncodes: {}", "version: found 2; allowed: 1"),
        (
            "codes: {A1: {levl: Reset}}",
            "codes.A1.levl: unknown key; allowed: level, kind, meaning; did you mean level?",
        ),
        ("codes: {}", "version: missing"),
        ("{RestartNPUUCodes: []}", "RestartNPUUCodes: names no level"),
        ("{RestartNPUCodes: [81078603]}", "RestartNPUCodes: allowed: a list of codes, each in quotes"),
        ("codes: [", "expected the node content"),
        ("- a", "found a list; allowed: a mapping with the keys version, codes"),
    ],
)
def test_a_wrong_table_is_refused_with_file_key_and_what_is_allowed(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "codes.yaml"
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        load_codes(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_a_code_file_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("faults: {codes_file: nowhere.yaml}\n")
    with pytest.raises(PolicyError, match=r"nowhere.yaml: cannot be read"):
        load_policy(tmp_path / "job.yaml")


def test_a_policy_without_a_word_about_faults_has_the_default() -> None:
    assert Policy().faults == FaultPolicy()
    assert fault_codes(FaultPolicy()).completed(fault("80E01801")).level is FaultLevel.RESTART_BUSINESS
