"""The documents of a cluster's detectors: what is read out of each form, and what is said of those that are wrong."""

import json
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml

from midstep.detectors.documents import Document, documents_in, is_document
from midstep.detectors.reading import Reading
from midstep.protocol.types import Assertion, FaultKind, FaultLevel

DOCUMENTS = Path(__file__).parent / "documents"

DEVICE_FAULTS = [
    ("80E01801", 3, FaultKind.DEVICE, FaultLevel.RESTART_BUSINESS, 1763700000.123),
    ("80C98009", 3, FaultKind.DEVICE, FaultLevel.RESTART_REQUEST, 1763700000.456),
    ("81078603", 5, FaultKind.NETWORK, FaultLevel.PRE_SEPARATE_NPU, 1763700001.0),
]
SWITCH_FAULTS = [
    ("[0x00f1ff06,155911,na,na]", FaultLevel.SUB_HEALTH, Assertion.OCCUR, "switch chip 1, port 14"),
    ("[0x08520003,na,L2,na]", FaultLevel.NOT_HANDLE, Assertion.ONCE, "switch chip 0, port 3"),
]


def read(name: str) -> tuple[Document, ...]:
    """The documents of a file that lies beside this test."""
    path = DOCUMENTS / name
    return documents_in(PurePath(path), path.read_bytes())


def by_key(name: str) -> dict[str, tuple[Reading, ...]]:
    """The readings of a file without mistakes, by key."""
    documents = read(name)
    assert [document.error for document in documents] == [""] * len(documents)
    return {document.key: document.readings for document in documents}


def in_short(readings: tuple[Reading, ...]) -> list[tuple[object, ...]]:
    """What device faults are compared by."""
    return [(each.code, each.device, each.kind, each.level, each.at_s) for each in readings]


def test_a_device_plugins_configmap_is_read_with_its_devices_switches_and_separated_devices() -> None:
    found = by_key("deviceinfo.yaml")
    assert in_short(found["DeviceInfoCfg"]) == DEVICE_FAULTS
    assert {reading.node for readings in found.values() for reading in readings} == {"worker-0"}
    switches = found["SwitchInfoCfg"]
    assert [(each.code, each.level, each.assertion, each.detail) for each in switches] == SWITCH_FAULTS
    assert {each.kind for each in switches} == {FaultKind.SWITCH}
    assert [(each.device, each.level) for each in found["ManuallySeparateNPU"]] == [
        (6, FaultLevel.MANUALLY_SEPARATE_NPU),
        (7, FaultLevel.MANUALLY_SEPARATE_NPU),
    ]


def test_a_nodes_configmap_is_read_with_a_fault_for_each_code_of_each_part() -> None:
    (readings,) = by_key("nodeinfo.json").values()
    assert [(each.code, each.level, each.detail) for each in readings] == [
        ("00000005", FaultLevel.PRE_SEPARATE_NPU, "Memory 2"),
        ("0000000D", FaultLevel.PRE_SEPARATE_NPU, "Memory 2"),
        ("0000001B", FaultLevel.SEPARATE_NPU, "CPU 0"),
        ("28000001", FaultLevel.NOT_HANDLE, "Fan 4"),
    ]
    assert {(each.node, each.device, each.kind) for each in readings} == {("worker-1", None, FaultKind.NODE)}


@pytest.mark.parametrize("name", ["publicfault.yaml", "publicfault_raw.json"])
def test_a_public_fault_is_one_at_each_device_that_it_has_influence_on(name: str) -> None:
    (readings,) = by_key(name).values()
    assert [(each.kind, each.node, each.device, each.code, each.assertion) for each in readings] == [
        (FaultKind.NETWORK, "worker-2", 0, "220001001", Assertion.OCCUR),
        (FaultKind.NETWORK, "worker-2", 1, "220001001", Assertion.OCCUR),
        (FaultKind.NETWORK, "worker-3", 4, "220001001", Assertion.OCCUR),
        (FaultKind.STORAGE, "worker-2", None, "230001002", Assertion.ONCE),
        (FaultKind.NODE, "worker-4", None, "200001002", Assertion.RECOVER),
    ]
    assert readings[0].at_s == 1763700009.0
    assert readings[0].detail == "pingmesh: packets are lost on the way to a rack"
    assert {each.level for each in readings} == {None}  # for the code to say
    assert not read(name)[0].snapshot


def test_raw_json_is_read_and_its_file_is_named_for_the_node() -> None:
    assert in_short(by_key("mindx-dl-deviceinfo-worker-5.json")["DeviceInfoCfg"]) == DEVICE_FAULTS
    assert by_key("mindx-dl-deviceinfo-worker-5.json")["DeviceInfoCfg"][0].node == "worker-5"
    assert len(by_key("mindx-dl-nodeinfo-worker-6.json")["NodeInfo"]) == 4
    switches = by_key("mindx-dl-switchinfo-worker-7.json")["SwitchInfoCfg"]
    assert [(each.code, each.level, each.assertion, each.detail) for each in switches] == SWITCH_FAULTS


def test_a_list_of_configmaps_is_read_and_a_healthy_node_has_no_fault() -> None:
    documents = read("list.yaml")
    assert [(document.key, document.readings, document.error) for document in documents] == [
        ("DeviceInfoCfg", (), ""),
        ("NodeInfo", (), ""),
    ]


def test_a_mounted_configmap_is_a_file_for_each_key_in_a_directory_named_for_the_node() -> None:
    place = "mindx-dl-deviceinfo-worker-9"
    assert in_short(by_key(f"{place}/DeviceInfoCfg")["DeviceInfoCfg"]) == DEVICE_FAULTS
    assert by_key(f"{place}/DeviceInfoCfg")["DeviceInfoCfg"][0].node == "worker-9"
    assert by_key(f"{place}/SwitchInfoCfg") == {"SwitchInfoCfg": ()}
    assert by_key(f"{place}/ManuallySeparateNPU") == {"ManuallySeparateNPU": ()}


def test_every_fault_of_a_document_has_its_own_name() -> None:
    for path in DOCUMENTS.rglob("*"):
        if path.is_file():
            for document in documents_in(PurePath(path), path.read_bytes()):
                assert len({each.fault_id for each in document.readings}) == len(document.readings)


def device_info(*faults: dict[str, Any], unhealthy: str = "") -> bytes:
    """A raw device document with these faults."""
    listed = {"huawei.com/npu-Fault": json.dumps(faults), "huawei.com/npu-Unhealthy": unhealthy}
    return json.dumps({"DeviceInfo": {"DeviceList": listed, "UpdateTime": 0}}).encode()


def test_a_device_that_is_unhealthy_for_no_known_reason_gets_nothing_new() -> None:
    found = documents_in(PurePath("mindx-dl-deviceinfo-n.json"), device_info(unhealthy="npu-2,npu-4"))
    assert [(each.device, each.level) for each in found[0].readings] == [
        (2, FaultLevel.PRE_SEPARATE_NPU),
        (4, FaultLevel.PRE_SEPARATE_NPU),
    ]


def test_the_level_of_an_entry_holds_for_codes_without_their_own_and_none_is_left_to_the_code() -> None:
    entry = {
        "npu_name": "npu-1",
        "fault_code": " A1 , B2",
        "fault_handling": "RestartNPU",
        "fault_level": "SeparateNPU",
    }
    (document,) = documents_in(PurePath("mindx-dl-deviceinfo-n.json"), device_info(entry))
    assert [(each.code, each.level) for each in document.readings] == [
        ("A1", FaultLevel.RESTART_NPU),
        ("B2", FaultLevel.RESTART_NPU),
    ]
    node_fault = {"fault_type": "NodeUnhealthy", "npu_name": "", "fault_code": "C3"}
    (document,) = documents_in(PurePath("mindx-dl-deviceinfo-n.json"), device_info(node_fault))
    assert [(each.kind, each.device, each.level) for each in document.readings] == [(FaultKind.NODE, None, None)]


NAMED = "mindx-dl-deviceinfo-n.json"


@pytest.mark.parametrize(
    ("name", "data", "complaint"),
    [
        (NAMED, b"", "found nothing; known: a ConfigMap or a JSON document"),
        (NAMED, b"[]", "found a list; known: a ConfigMap or a JSON document"),
        (NAMED, b"{", "not JSON: Input data was truncated"),
        (NAMED, b"a: [", "not YAML:"),
        (NAMED, b"- " * 100, "is nested deeper than 64 levels"),
        (NAMED, b"a: &b c\nd: *b\n", "has YAML aliases"),
        (NAMED, b"\xff\xfe{}", "byte 0 is not UTF-8"),
        (NAMED, b"{}", "not a known document; known: DeviceInfoCfg, SwitchInfoCfg"),
        (NAMED, b"x" * (4 * 1024 * 1024 + 1), "larger than 4194304 bytes"),
        (NAMED, b'{"DeviceInfo": 3}', "DeviceInfoCfg: Expected `object`, got `int` - at `$.DeviceInfo`"),
        (NAMED, b'{"DeviceInfo": {"UpdateTime": 3}}', "DeviceInfoCfg: Object missing required field `DeviceList`"),
        (NAMED, b'{"kind": "ConfigMap", "data": {"a": "b"}}', "data: has none of DeviceInfoCfg"),
        (NAMED, b'{"kind": "ConfigMap"}', "data: found nothing; known: a mapping with DeviceInfoCfg"),
        (NAMED, b'{"kind": "List", "items": [3]}', "items[0]: found 3; known: a ConfigMap"),
        (NAMED, b'{"kind": "List", "items": []}', "items: found nothing; known: ConfigMaps"),
        ("other.json", device_info(), 'metadata.name: "other" names no node; known: mindx-dl-deviceinfo-NODE'),
        ("mindx-dl-deviceinfo-.json", device_info(), 'metadata.name: "" is not a valid name of a node'),
        (NAMED, device_info({"fault_code": "A"}, unhealthy="npu"), '"npu" is not a valid name of a device'),
        (NAMED, device_info({"npu_name": "npu-9999", "fault_code": "A"}), '[0].npu_name: "npu-9999" is not a valid'),
        (NAMED, device_info({"fault_type": "Card", "fault_code": "A"}), '[0].fault_type: found "Card"; known: Card'),
        (NAMED, device_info({"npu_name": "npu-1"}), "[0]: neither a fault_code nor a level"),
        (
            NAMED,
            device_info({"npu_name": "npu-1", "fault_code": "A", "fault_level": "RestartNpu"}),
            '[0].fault_level: "RestartNpu" is not a level; known: NotHandleFault',
        ),
        (
            "mindx-dl-switchinfo-n.json",
            b'{"FaultCode": [{"AssembledFaultCode": "A", "Assertion": 7}]}',
            "SwitchInfoCfg.FaultCode[0].Assertion: found 7; known: 0 recover, 1 occur, 2 once",
        ),
        ("mindx-dl-switchinfo-n.json", b'{"FaultCode": ["{"]}', "SwitchInfoCfg.FaultCode[0]: Input data was truncated"),
        (
            "mindx-dl-nodeinfo-n.json",
            b'{"NodeInfo": {"FaultDevList": 1}}',
            "NodeInfo: Expected `array | null`, got `int`",
        ),
        ("p.json", b'{"faults": []}', "PublicFault: Object missing required field `id`"),
    ],
)
def test_a_document_that_is_wrong_is_refused_with_key_and_what_is_known(name: str, data: bytes, complaint: str) -> None:
    (document,) = documents_in(PurePath("/etc/faults") / name, data)
    assert complaint in document.error
    assert document.readings == ()


def public(**changes: Any) -> bytes:
    """A public fault with something changed."""
    message = json.loads((DOCUMENTS / "publicfault_raw.json").read_text())
    message["faults"] = [{**message["faults"][0], **changes}]
    return json.dumps(message).encode()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"assertion": "maybe"}, "Invalid enum value 'maybe' - at `$.faults[0].assertion`"),
        ({"faultType": "npu"}, "Invalid enum value 'npu' - at `$.faults[0].faultType`"),
        ({"faultCode": ""}, "PublicFault.faults[0].faultCode: is empty"),
        (
            {"influence": [{"nodeSN": "123"}]},
            'influence[0].nodeSN: no node is known by the serial number "123"; name its node in faults.node_serials',
        ),
        ({"influence": [{"deviceIds": [1]}]}, "influence[0].nodeName: is missing, and so is nodeSN"),
        ({"influence": [{"nodeName": "a b"}]}, 'influence[0].nodeName: "a b" is not a valid name of a node'),
        ({"influence": [{"nodeName": "a", "deviceIds": [-1]}]}, "deviceIds: found a number out of range"),
        ({"faultId": "x" * 1000}, "is longer than a code can be"),
    ],
)
def test_a_public_fault_that_is_wrong_is_refused_with_the_place(changes: dict[str, Any], complaint: str) -> None:
    (document,) = documents_in(PurePath("p.json"), public(**changes))
    assert complaint in document.error


def test_a_machine_that_a_public_fault_names_by_its_serial_number_is_the_node_that_is_known_for_it() -> None:
    """The name comes first where both are there."""
    data = public(influence=[{"nodeSN": "123", "deviceIds": [1]}, {"nodeSN": "123", "nodeName": "worker-9"}])
    (document,) = documents_in(PurePath("p.json"), data, {"123": "worker-7"})
    assert document.error == ""
    assert [(reading.node, reading.device) for reading in document.readings] == [("worker-7", 1), ("worker-9", None)]


def test_a_serial_number_that_leads_to_no_name_of_a_node_is_told() -> None:
    (document,) = documents_in(PurePath("p.json"), public(influence=[{"nodeSN": "123"}]), {"123": "a b"})
    assert 'influence[0].nodeSN: "a b" is not a valid name of a node' in document.error


def test_one_wrong_configmap_of_a_list_is_refused_and_the_others_are_read() -> None:
    text = (DOCUMENTS / "list.yaml").read_text().replace("mindx-dl-nodeinfo-worker-8", "whose-is-this")
    good, wrong = documents_in(PurePath("list.yaml"), text.encode())
    assert good.error == ""
    assert '"whose-is-this" names no node' in wrong.error


@pytest.mark.parametrize(
    ("name", "looked_at"),
    [
        ("a.json", True),
        ("a.yaml", True),
        ("a.yml", True),
        ("DeviceInfoCfg", True),
        ("PublicFault", True),
        ("mindx-dl-nodeinfo-x", True),
        ("UpgradeFaultReason", False),
        (".a.json", False),
        ("..data", False),
        ("readme.txt", False),
    ],
)
def test_files_of_a_directory_are_chosen_by_name(name: str, looked_at: bool) -> None:
    assert is_document(PurePath("/x") / name) is looked_at


@pytest.mark.parametrize(
    ("name", "mounted", "key"),
    [
        ("deviceinfo.yaml", "mindx-dl-deviceinfo-worker-0", "DeviceInfoCfg"),
        ("deviceinfo.yaml", "mindx-dl-deviceinfo-worker-0", "SwitchInfoCfg"),
        ("deviceinfo.yaml", "mindx-dl-deviceinfo-worker-0", "ManuallySeparateNPU"),
        ("nodeinfo.json", "mindx-dl-nodeinfo-worker-1", "NodeInfo"),
        ("publicfault.yaml", "mindx-dl-publicinfo", "PublicFault"),
    ],
)
def test_each_document_says_the_same_in_a_mount_as_in_its_configmap(name: str, mounted: str, key: str) -> None:
    configmap = yaml.safe_load((DOCUMENTS / name).read_text())
    (document,) = documents_in(PurePath(mounted) / key, configmap["data"][key].encode())
    assert document.error == ""
    assert document.readings
    assert document.readings == by_key(name)[key]
