"""ClusterD's documents: the faults of all nodes in one, and the ranks that it has found at fault."""

import json
from pathlib import PurePath
from typing import Any

import pytest
import yaml

from midstep.detectors.documents import Document, documents_in, is_document
from midstep.detectors.files import Snapshots
from midstep.protocol.types import Assertion, FaultKind, FaultLevel

UCE = {
    "fault_type": "CardUnhealthy",
    "npu_name": "Ascend910-3",
    "fault_level": "RestartBusiness",
    "fault_code": "80E01801",
}
DEVICES = {
    "mindx-dl-deviceinfo-worker-1": {
        "DeviceList": {"huawei.com/Ascend910": "Ascend910-0", "huawei.com/Ascend910-Fault": json.dumps([UCE])},
        "UpdateTime": 1763700000,
        "CmName": "mindx-dl-deviceinfo-worker-1",
        "SuperPodID": -2,
        "ServerIndex": -2,
    },
    "mindx-dl-deviceinfo-worker-2": {"DeviceList": {"huawei.com/Ascend910-Fault": "[]"}, "UpdateTime": 1763700000},
}
NODES = {
    "mindx-dl-nodeinfo-worker-2": {
        "FaultDevList": [
            {"DeviceType": "PSU", "DeviceId": 1, "FaultCode": ["0300000D"], "FaultLevel": "SeparateFault"}
        ],
        "NodeStatus": "UnHealthy",
        "CmName": "mindx-dl-nodeinfo-worker-2",
    }
}
SWITCHES = {
    "mindx-dl-switchinfo-worker-1": {
        "FaultCode": [json.dumps({"AssembledFaultCode": "[0x00f1ff06,155911,na,na]", "SwitchChipId": 1})],
        "FaultLevel": "SubHealth",
        "CmName": "mindx-dl-switchinfo-worker-1",
    }
}
RESET = {
    "RankList": [
        {"RankId": 5, "LogicId": 1, "Status": "unrecovered", "Policy": "restart", "ErrorCodeHex": "80e01801"},
        {"RankId": 6, "LogicId": 2, "Status": "recovered", "Policy": "free_reset", "ErrorCode": None},
    ],
    "UpdateTime": 1763700000,
    "RetryTime": 0,
    "GracefulExit": 0,
}


def config_map(name: str, key: str, content: Any) -> bytes:
    """As `kubectl get cm -o yaml` prints it."""
    text = content if isinstance(content, str) else json.dumps(content)
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {key: text}}
    ).encode()


def only(found: tuple[Document, ...]) -> Document:
    (document,) = found
    return document


def one(content: Any, name: str, names: dict[str, str] | None = None) -> Document:
    """The document of a ConfigMap of ClusterD, whose key is its name."""
    return only(documents_in(PurePath(f"{name}.yaml"), config_map(name, name, content), names or {}))


def test_the_devices_of_all_nodes_are_read_from_one_document() -> None:
    (reading,) = one(DEVICES, "cluster-info-device-0").readings
    assert (reading.node, reading.device, reading.code) == ("worker-1", 3, "80E01801")
    assert (reading.kind, reading.level) == (FaultKind.DEVICE, FaultLevel.RESTART_BUSINESS)


def test_parts_of_nodes_and_switches_are_read_likewise() -> None:
    (part,) = one(NODES, "cluster-info-node-cm").readings
    assert (part.node, part.kind, part.code) == ("worker-2", FaultKind.NODE, "0300000D")
    (switch,) = one(SWITCHES, "cluster-info-switch-0").readings
    assert (switch.node, switch.kind, switch.level) == ("worker-1", FaultKind.SWITCH, FaultLevel.SUB_HEALTH)


@pytest.mark.parametrize("path", ["cluster-info-device-0", "cluster-info-device-0.json", "mount/cluster-info-device-0"])
def test_it_may_be_raw_or_mounted(path: str) -> None:
    assert is_document(PurePath(path))
    assert len(only(documents_in(PurePath(path), json.dumps(DEVICES).encode())).readings) == 1


def test_nodes_are_called_as_the_job_calls_them() -> None:
    """A map says so, for all documents alike."""
    names = {"worker-1": "node0"}
    assert one(DEVICES, "cluster-info-device-0", names).readings[0].node == "node0"
    own = {"DeviceInfo": DEVICES["mindx-dl-deviceinfo-worker-1"]}
    raw = json.dumps({"DeviceInfoCfg": json.dumps(own)}).encode()
    (document,) = documents_in(PurePath("mindx-dl-deviceinfo-worker-1.json"), raw, names)
    assert document.readings[0].node == "node0"


def test_an_empty_one_says_that_nothing_is_wrong_and_what_is_gone_has_recovered() -> None:
    snapshots = Snapshots("detector/files")
    (occurred,) = snapshots.take([one(DEVICES, "cluster-info-device-0")], 1763700009.0)
    assert (occurred.assertion, occurred.node) == (Assertion.OCCUR, "worker-1")
    (recovered,) = snapshots.take([one("", "cluster-info-device-0")], 1763700010.0)
    assert (recovered.assertion, recovered.fault_id) == (Assertion.RECOVER, occurred.fault_id)


def test_an_npu_that_clusterd_has_isolated_is_left_until_clusterd_releases_it() -> None:
    """Across jobs, for what came too often: ClusterD lists it without a code, until its time or a person's edit."""
    isolated = {
        "fault_type": "CardUnhealthy",
        "npu_name": "Ascend910-0",
        "fault_code": "",
        "large_model_fault_level": "ManuallySeparateNPU",
        "fault_level": "ManuallySeparateNPU",
        "fault_handling": "ManuallySeparateNPU",
        "fault_time_and_level_map": {},
    }
    listed = {"DeviceList": {"huawei.com/Ascend910-Fault": json.dumps([isolated, UCE])}}
    snapshots = Snapshots("detector/files")
    both = snapshots.take([one({"mindx-dl-deviceinfo-worker-1": listed}, "cluster-info-device-0")], 1763700009.0)
    assert {(report.device, report.level) for report in both} == {
        (0, FaultLevel.MANUALLY_SEPARATE_NPU),
        (3, FaultLevel.RESTART_BUSINESS),
    }
    (released,) = snapshots.take([one(DEVICES, "cluster-info-device-0")], 1763700010.0)
    assert (released.device, released.assertion) == (0, Assertion.RECOVER)


def test_a_mistake_in_one_nodes_part_is_named_and_the_document_not_taken() -> None:
    wrong = {**DEVICES, "mindx-dl-deviceinfo-worker-9": {"DeviceList": {"x-Fault": "[{"}}}
    document = one(wrong, "cluster-info-device-0")
    assert document.readings == ()
    assert "worker-9" in document.error
    assert "is no name of a node's ConfigMap" in one({"worker-1": {}}, "cluster-info-device-0").error


def test_the_ranks_that_clusterd_has_found_at_fault_are_faults_wherever_they_run() -> None:
    found = only(documents_in(PurePath("reset.yaml"), config_map("reset-config-gpt", "reset.json", RESET)))
    struck, well = found.readings
    assert (struck.rank, struck.code, struck.level) == (5, "80E01801", FaultLevel.RESTART_BUSINESS)
    assert (well.rank, well.level, well.assertion) == (6, FaultLevel.FREE_RESTART_NPU, Assertion.RECOVER)
    report = struck.report("detector/files", 1763700009.0)
    assert (report.rank, report.node) == (5, None)


def test_a_mounted_reset_json_is_read() -> None:
    assert is_document(PurePath("mount/reset.json"))
    assert len(only(documents_in(PurePath("mount/reset.json"), json.dumps(RESET).encode())).readings) == 2


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"RankId": -1, "Policy": "restart"}, "RankId"),
        ({"RankId": 1, "Policy": "explode"}, "Policy"),
        ({"RankId": 1, "Policy": "restart", "Status": "perhaps"}, "Status"),
    ],
)
def test_a_rank_that_makes_no_sense_is_refused(entry: dict[str, Any], complaint: str) -> None:
    document = only(documents_in(PurePath("reset.json"), json.dumps({"RankList": [entry]}).encode()))
    assert f"reset.json.RankList[0].{complaint}" in document.error
