"""ConfigMaps of MindCluster, watched by the API: faults are reported when they come, and when they have gone."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from midstep.launch.kubernetes.config_maps import ConfigMapDetector
from midstep.platforms.kubernetes.api import Api
from midstep.protocol.compat import within
from midstep.protocol.types import Assertion, FaultKind, FaultLevel, FaultReport

from .api_server import ApiServer, served

LIMIT_S = 20.0
NAME = "mindx-dl-deviceinfo-m1"
Until = Callable[[int], Awaitable[None]]


def config_map(*codes: str, name: str = NAME) -> dict[str, Any]:
    """Return the ConfigMap of host m1, with a fault of its first device for each code."""
    faults = [{"npu_name": "npu-0", "fault_code": code, "fault_level": "SeparateNPU"} for code in codes]
    document = {"DeviceInfo": {"DeviceList": {"huawei.com/npu-Fault": json.dumps(faults)}, "UpdateTime": 0}}
    return {"kind": "ConfigMap", "metadata": {"name": name}, "data": {"DeviceInfoCfg": json.dumps(document)}}


def watched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[ApiServer, list[FaultReport], Until], Awaitable[None]],
) -> None:
    """Run a scenario with an API, what was reported of its namespace, and a way to wait for so many reports."""

    async def run() -> None:
        async with served(folder) as (server, config):
            monkeypatch.setenv("KUBECONFIG", str(config))
            api, reports = Api(), list[FaultReport]()
            watching = asyncio.create_task(ConfigMapDetector(api, "config-maps", ["default"]).watch(reports.append))

            async def until(count: int) -> None:
                while len(reports) < count:
                    assert not watching.done(), watching.exception()
                    await asyncio.sleep(0.01)

            try:
                await within(LIMIT_S, scenario(server, reports, until))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await api.close()

    asyncio.run(run())


def test_a_fault_that_stands_is_reported_and_one_that_comes_and_one_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ApiServer, reports: list[FaultReport], until: Until) -> None:
        server.put("configmaps", {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": "x"}}, "ADDED")
        server.put("configmaps", config_map("A1"), "ADDED")
        await until(1)
        server.put("configmaps", config_map("A1", "B2"))
        await until(2)
        server.put("configmaps", config_map("B2"))
        await until(3)
        found = [(each.node, each.device, each.code, each.level, each.assertion) for each in reports]
        separate = FaultLevel.SEPARATE_NPU
        assert found == [
            ("m1", 0, "A1", separate, Assertion.OCCUR),
            ("m1", 0, "B2", separate, Assertion.OCCUR),
            ("m1", 0, "A1", separate, Assertion.RECOVER),
        ]

    watched(tmp_path, monkeypatch, scenario)


@pytest.mark.parametrize("status", [410, None])
def test_what_changed_while_the_watch_was_interrupted_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    async def scenario(server: ApiServer, reports: list[FaultReport], until: Until) -> None:
        server.put("configmaps", config_map("A1"), "ADDED")
        await until(1)
        server.objects["configmaps", NAME] = config_map("A1", "B2")  # told of in the next listing only
        server.failures = [503]
        server.end_watches(status)
        await until(2)
        server.put("configmaps", config_map())
        await until(4)
        assert [(each.code, each.assertion.value) for each in reports[:2]] == [("A1", "occur"), ("B2", "occur")]
        assert {each.assertion for each in reports[2:]} == {Assertion.RECOVER}

    watched(tmp_path, monkeypatch, scenario)


def test_faults_of_a_config_map_that_is_deleted_stay_in_force_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ApiServer, reports: list[FaultReport], until: Until) -> None:
        server.put("configmaps", config_map("A1"), "ADDED")
        await until(1)
        server.remove("configmaps", NAME)
        await until(2)
        assert reports[1].kind is FaultKind.DETECTOR
        assert reports[1].detail == f"default/{NAME}: is gone; the faults that it last had stay in force"
        server.put("configmaps", config_map("A1"), "ADDED")
        await until(3)
        assert (reports[2].kind, reports[2].assertion) == (FaultKind.DETECTOR, Assertion.RECOVER)

    watched(tmp_path, monkeypatch, scenario)


def test_what_cannot_be_read_is_reported_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: ApiServer, reports: list[FaultReport], until: Until) -> None:
        broken = {"metadata": {"name": NAME}, "data": {"DeviceInfoCfg": "{"}}
        server.put("configmaps", broken, "ADDED")
        await until(1)
        assert reports[0].detail.startswith(f"default/{NAME}:{NAME}:DeviceInfoCfg: ")

    watched(tmp_path, monkeypatch, scenario)
