"""The platform against an API that answers slowly, refuses, forgets, and goes away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from midstep.platforms.base import EndedIncident, EndedIncidents, PlatformContext, no_incidents
from midstep.platforms.kubernetes import api as api_module
from midstep.platforms.kubernetes import deployment
from midstep.platforms.kubernetes.platform import KubernetesPlatform, kubernetes_platform
from midstep.platforms.kubernetes.settings import Settings, encode
from midstep.protocol.compat import within
from midstep.protocol.errors import ConfigurationError, MidstepError
from midstep.protocol.messages import (
    CreateNode,
    DeleteNode,
    EndJob,
    KillNode,
    NodeGoing,
    NodeLost,
    NodeRefused,
    Report,
)
from midstep.protocol.token import new_token

from .api_server import ApiServer, served

LIMIT_S = 8.0
POD = "midstep-demo-node0"
OWNER = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "midstep-demo", "uid": "owner"},
    "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {}}},
}


class Bench:
    """A platform, the API that it asks, and what it has told the controller."""

    def __init__(self, api: ApiServer, platform: KubernetesPlatform, told: list[Report]) -> None:
        self.api = api
        self.platform = platform
        self.told = told

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for something that has to happen."""

        async def held() -> None:
            while not holds():
                await asyncio.sleep(0.01)

        await within(LIMIT_S, held())

    async def running(self, node: str = "node0", host: str = "m1") -> None:
        """Make a node, and have its pod run."""
        self.platform.create_node(CreateNode(node))
        name = f"midstep-demo-{node}"
        await self.until(lambda: name in self.api.pods())
        found = self.api.pods()[name]
        self.api.put("pods", {**found, "spec": {**found["spec"], "nodeName": host}, "status": {"phase": "Running"}})
        await self.until(lambda: self.platform.is_running(node))


@asynccontextmanager
async def bench(
    folder: Path, monkeypatch: pytest.MonkeyPatch, incidents: EndedIncidents = no_incidents
) -> AsyncIterator[Bench]:
    """Run a platform of the job `demo`."""
    monkeypatch.setattr(api_module, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(deployment, "LOOK_S", LIMIT_S if incidents is no_incidents else 0.05)
    async with served(folder) as (api, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        api.put("deployments", dict(OWNER))
        file = folder / "settings.json"
        file.write_text(encode(Settings("demo", "image")))
        told: list[Report] = []
        context = PlatformContext("demo", (), new_token(job="demo"), {"settings": str(file)}, told.append, incidents)
        platform = kubernetes_platform(context)
        await asyncio.sleep(0)
        try:
            yield Bench(api, platform, told)
        finally:
            for pod in api.pods():
                api.remove("pods", pod)
            await platform.close()


def test_a_node_is_a_pod_that_its_deployment_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> dict[str, Any]:
        async with bench(tmp_path, monkeypatch) as it:
            it.platform.create_node(CreateNode("node0"))
            it.platform.create_node(CreateNode("node0"))  # it may come twice
            await it.until(it.api.pods)
            assert it.platform.describe().nodes == ("node0",)
            await asyncio.sleep(0.05)
            assert it.api.asked.count("POST /api/v1/namespaces/default/pods") == 1
            assert it.told == []
            return it.api.pods()[POD]

    (owner,) = asyncio.run(scenario())["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Deployment", "midstep-demo", "owner")


@pytest.mark.parametrize("failures", [[500, 429, 503], [500] * 8])
def test_what_the_api_cannot_do_now_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: list[int]
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            it.api.failures = failures
            it.platform.create_node(CreateNode("node0"))
            await it.until(it.api.pods)
            assert it.told == []

    asyncio.run(scenario())


def test_what_the_api_would_never_do_is_refused_to_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.until(lambda: any("GET /api/v1/namespaces/default/pods" in each for each in it.api.asked))
            await asyncio.sleep(0.1)
            it.api.failures = [403]
            it.platform.create_node(CreateNode("node0"))
            await it.until(lambda: it.told)
            (said,) = it.told
            assert isinstance(said, NodeRefused)
            assert "status 403" in said.reason
            assert it.platform.describe().nodes == ()

    asyncio.run(scenario())


def test_a_pod_that_an_earlier_platform_has_made_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            labels = {"midstep.io/job": "demo", "midstep.io/role": "agent", "midstep.io/node": "node0"}
            it.api.put("pods", {"metadata": {"name": POD, "labels": labels}, "status": {"phase": "Running"}}, "ADDED")
            it.platform.create_node(CreateNode("node0"))
            await it.until(lambda: it.platform.is_running("node0"))
            assert it.told == []

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [None, 410, 500])
def test_a_watch_that_breaks_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.running()
            it.api.failures = [500, 500] if status is None else []
            it.api.end_watches(status)
            it.api.objects.pop(("pods", POD))  # while nobody is told
            await it.until(lambda: it.told)
            (said,) = it.told
            assert isinstance(said, NodeLost)
            assert said.node == "node0"

    asyncio.run(scenario())


def test_a_pod_that_is_being_deleted_is_told_before_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.running()
            pod = it.api.pods()[POD]
            going = {"deletionTimestamp": "2026-11-23T08:00:00Z", "deletionGracePeriodSeconds": 60}
            it.api.put("pods", {**pod, "metadata": {**pod["metadata"], **going}})
            await it.until(lambda: it.told)
            assert it.told == [NodeGoing("node0", "its pod is being deleted", 60.0)]

    asyncio.run(scenario())


@pytest.mark.parametrize(("order", "told"), [(DeleteNode("node0"), 0), (KillNode("node0"), 1)])
def test_a_node_is_deleted_in_silence_and_killed_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: DeleteNode | KillNode, told: int
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.running()
            act: Callable[[Any], None] = (
                it.platform.delete_node if isinstance(order, DeleteNode) else it.platform.kill_node
            )
            act(order)
            await it.until(lambda: not it.api.pods() and not it.platform.is_running("node0"))
            assert [type(each) for each in it.told] == [NodeLost] * told

    asyncio.run(scenario())


def test_a_host_that_was_left_is_avoided_also_by_the_next_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch) as it:
            await it.running(host="m7")
            it.platform.delete_node(DeleteNode("node0"))
            it.platform.create_node(CreateNode("node1"))
            await it.until(lambda: "midstep-demo-node1" in it.api.pods())
            assert "nodeAffinity" in it.api.pods()["midstep-demo-node1"]["spec"]["affinity"]
            await it.until(lambda: it.api.objects["deployments", "midstep-demo"]["metadata"].get("annotations"))

    asyncio.run(scenario())


def test_the_end_of_a_job_leaves_no_pod_and_writes_down_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> dict[str, Any]:
        async with bench(tmp_path, monkeypatch) as it:
            await it.running()
            pod = it.api.pods()[POD]
            it.platform.end_job(EndJob(exit_code=3, reason="it was enough"))
            it.api.put("pods", {**pod, "status": {"phase": "Failed"}})
            await it.platform.close()
            assert it.api.pods() == {}
            assert it.told == []
            return it.api.objects["deployments", "midstep-demo"]

    deployment = asyncio.run(scenario())
    assert deployment["spec"]["replicas"] == 0
    assert deployment["metadata"]["annotations"] == {
        "midstep.io/exit-code": "3",
        "midstep.io/reason": "it was enough",
    }


def test_options_that_are_not_known_are_refused() -> None:
    context = PlatformContext("demo", (), new_token(job="demo"), {"image": "x"}, lambda report: None)

    with pytest.raises(ConfigurationError, match="image"):
        kubernetes_platform(context)


MARKED = {"midstep.io/incidents": "2"}
HAD = (
    EndedIncident(1, "recover_in_place", "Incident 1: RESUMED; exit: rank 0 on node0", ("node0",)),
    EndedIncident(2, "", "Incident 2: DISMISSED; stall", ("node7",)),
    EndedIncident(3, "stop", "Incident 3: STOPPED; exit: rank 1 on node0", ("node0",), stopped=True),
)


def teller(had: list[EndedIncident], asked: list[int]) -> EndedIncidents:
    """Return what tells of the incidents of a list, and does not answer at first."""

    async def after(number: int) -> tuple[EndedIncident, ...]:
        asked.append(number)
        if len(asked) == 1:
            raise MidstepError("no controller leads")
        return tuple(each for each in had if each.number > number)

    return after


def shown(api: ApiServer) -> list[tuple[str, str, str, str]]:
    """Return kind and name of what Events are about, their type and reason."""
    events = [found for (plural, _), found in api.objects.items() if plural == "events"]
    return [
        (each["involvedObject"]["kind"], each["involvedObject"]["name"], each["type"], each["reason"])
        for each in events
    ]


def test_each_incident_that_is_over_is_an_event_of_the_job_and_of_the_pods_with_its_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had: list[EndedIncident] = []
    asked: list[int] = []
    job = "Deployment", "midstep-demo"

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, teller(had, asked)) as it:
            await it.running()
            had.append(HAD[0])
            expected = [(*job, "Normal", "RecoverInPlace"), ("Pod", POD, "Normal", "RecoverInPlace")]
            await it.until(lambda: shown(it.api) == expected)
            had.extend(HAD[1:])
            expected += [(*job, "Normal", "Dismissed"), (*job, "Warning", "Stop"), ("Pod", POD, "Warning", "Stop")]
            await it.until(lambda: shown(it.api) == expected)
            await it.until(lambda: asked[-1] == 3)
            written = it.api.objects["deployments", "midstep-demo"]["metadata"]["annotations"]
            assert (written["midstep.io/incidents"], written["midstep.io/last-incident"]) == ("3", HAD[2].text)

    asyncio.run(scenario())


def test_the_next_platform_process_shows_no_incident_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, teller(list(HAD), asked)) as it:
            found = it.api.objects["deployments", "midstep-demo"]
            it.api.put("deployments", {**found, "metadata": {**found["metadata"], "annotations": MARKED}})
            await it.until(lambda: len(asked) > 2)
            assert asked[0] == 2
            assert [name for _, name, _, _ in shown(it.api)] == ["midstep-demo"]

    asyncio.run(scenario())


def test_an_account_that_may_not_write_events_costs_the_job_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    async def scenario() -> None:
        async with bench(tmp_path, monkeypatch, teller(list(HAD), asked)) as it:
            it.api.forbidden.add(("create", "events", ""))
            await it.running()
            await it.until(lambda: asked[-1:] == [3])
            assert shown(it.api) == []

    asyncio.run(scenario())
    assert [each.message for each in caplog.records if "not shown as Events" in each.message] != []
    assert len([each for each in caplog.records if "not shown as Events" in each.message]) == 1
