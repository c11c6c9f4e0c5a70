"""`midstep run --platform kubernetes` against an API: what it makes, how long it follows, and what it leaves."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from midstep.launch.kubernetes import Echo, following
from midstep.platforms.kubernetes.api import Api
from midstep.platforms.kubernetes.names import owner_reference
from midstep.platforms.kubernetes.objects import Submission, manifests
from midstep.platforms.kubernetes.settings import Settings
from midstep.protocol.compat import within
from midstep.protocol.errors import PlatformError
from midstep.protocol.token import new_token

from .api_server import ApiServer, served

NAME = "midstep-demo"
KEY = ("deployments", NAME)
OWNER = owner_reference("Deployment", "apps/v1", NAME, f"uid-{NAME}")
LIMIT_S = 60.0
T = TypeVar("T")


def objects() -> list[dict[str, Any]]:
    """Return the objects of the job `demo`."""
    submission = Submission(("train.py",), 1, 0, "/c/midstep-demo")
    settings = Settings("demo", "image", watch_nodes=True, config_maps=("kube-system",))
    return manifests(settings, submission, new_token(job="demo"), "default")


def running_pod() -> dict[str, Any]:
    """Return the pod of an agent of that job."""
    labels = {"midstep.io/job": "demo", "midstep.io/role": "agent", "midstep.io/node": "node0"}
    metadata = {"name": "a-0", "labels": labels, "ownerReferences": [OWNER]}
    return {"metadata": metadata, "status": {"phase": "Running"}}


def heard_by(told: list[str]) -> Echo:
    """Return what prints the ranks' lines, and notes those of the command without its name."""

    def echo(text: str, *, err: bool = False) -> None:
        if err:
            told.append(text.removeprefix("midstep: "))
        else:
            print(text)

    return echo


def with_api(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scenario: Callable[[ApiServer, Api, list[str]], Awaitable[T]]
) -> T:
    """Run a scenario with an API, a client of it, and what the user is told."""
    monkeypatch.setattr(following, "LOOK_S", 0.02)

    async def run() -> T:
        async with served(folder) as (server, config):
            monkeypatch.setenv("KUBECONFIG", str(config))
            return await within(LIMIT_S, scenario(server, Api(), []))

    return asyncio.run(run())


def test_a_job_is_followed_to_its_end_and_its_exit_code_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ApiServer, api: Api, told: list[str]) -> tuple[int, list[str]]:
        running = asyncio.create_task(following.run(api, "demo", objects(), heard_by(told), follow=True))
        while len(server.objects) < len(objects()):
            await asyncio.sleep(0.01)
        owned = [each for (kind, _), each in server.objects.items() if kind != "deployments"]
        owners = [each["metadata"].get("ownerReferences", [{}])[0].get("name") for each in owned]
        assert owners.count(NAME) == len(owned) - 4  # what is in no namespace cannot be owned, nor what is in another
        server.failures = [503, 503]
        annotations = {"midstep.io/exit-code": "3", "midstep.io/reason": "it was enough"}
        found = server.objects[KEY]
        server.put("deployments", {**found, "metadata": {**found["metadata"], "annotations": annotations}})
        code = await running
        assert KEY not in server.objects
        assert server.objects == {}
        return code, told

    code, told = with_api(tmp_path, monkeypatch, scenario)
    assert code == 3
    assert told[-1] == "it was enough (exit code 3)"


@pytest.mark.parametrize("comes_back", [True, False])
def test_the_command_waits_for_pods_that_outlive_the_job_and_names_those_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """Their machine is off: it comes back, or it does not, which changes no exit code."""
    monkeypatch.setattr(following, "GONE_S", LIMIT_S / 2 if comes_back else 0.1)

    async def scenario(server: ApiServer, api: Api, told: list[str]) -> tuple[int, list[str]]:
        server.put("pods", running_pod())
        server.on_lost_machines.add("a-0")
        running = asyncio.create_task(following.run(api, "demo", objects(), heard_by(told), follow=True))
        while len(server.objects) <= len(objects()):
            await asyncio.sleep(0.01)
        annotations = {"midstep.io/exit-code": "0", "midstep.io/reason": "done"}
        found = server.objects[KEY]
        server.put("deployments", {**found, "metadata": {**found["metadata"], "annotations": annotations}})
        while KEY in server.objects:
            await asyncio.sleep(0.01)
        if comes_back:
            await asyncio.sleep(0.1)
            assert not running.done()
            server.remove("pods", "a-0")
        return await running, told

    code, told = with_api(tmp_path, monkeypatch, scenario)
    assert code == 0
    assert ("a-0" in told[-1]) is not comes_back


def test_a_job_that_somebody_deletes_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: ApiServer, api: Api, told: list[str]) -> int:
        running = asyncio.create_task(following.run(api, "demo", objects(), heard_by(told), follow=True))
        while len(server.objects) < len(objects()):
            await asyncio.sleep(0.01)
        server.remove(*KEY)
        return await running

    assert with_api(tmp_path, monkeypatch, scenario) == 1


def test_a_name_that_is_in_use_is_refused_and_that_job_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ApiServer, api: Api, told: list[str]) -> None:
        server.put("deployments", objects()[0])
        with pytest.raises(PlatformError, match="already"):
            await following.run(api, "demo", objects(), heard_by(told), follow=False)
        assert list(server.objects) == [KEY]

    with_api(tmp_path, monkeypatch, scenario)


def test_what_cannot_be_made_whole_is_not_left_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: ApiServer, api: Api, told: list[str]) -> None:
        (secret,) = (each for each in objects() if each["kind"] == "Secret")
        server.put("secrets", secret)  # of somebody else
        with pytest.raises(PlatformError, match="Secret"):
            await following.run(api, "demo", objects(), heard_by(told), follow=False)
        assert KEY not in server.objects

    with_api(tmp_path, monkeypatch, scenario)


def test_the_job_of_a_role_is_found_again_as_far_as_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher that made it was lost in the middle; the Deployment of the whole job owns that of the role."""

    async def scenario(server: ApiServer, api: Api, told: list[str]) -> None:
        for made in (objects()[:3], objects()):
            await following.make(api, "demo", made, told.append, owner=OWNER)
        assert server.objects[KEY]["metadata"]["ownerReferences"] == [OWNER]
        (secret,) = (each for each in server.objects.values() if each["kind"] == "Secret")
        assert secret["metadata"]["ownerReferences"][0]["name"] == "midstep-demo"
        await api.close()

    with_api(tmp_path, monkeypatch, scenario)


@pytest.mark.parametrize("container", ["check", "submit"])
def test_a_job_that_cannot_begin_ends_the_command_with_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    async def scenario(server: ApiServer, api: Api, told: list[str]) -> None:
        labels = {"midstep.io/job": "demo", "midstep.io/role": "controller"}
        ended = {"terminated": {"exitCode": 1}}
        statuses = [{"name": container, "image": "", "imageID": "", "ready": False, "restartCount": 0, "state": ended}]
        metadata = {"name": "c-1", "labels": labels, "ownerReferences": [OWNER]}
        pod = {"metadata": metadata, "status": {"initContainerStatuses": statuses}}
        server.put("pods", pod)
        with pytest.raises(PlatformError, match="cannot begin"):
            await following.run(api, "demo", objects(), heard_by(told), follow=True)
        assert told[-1] == f"c-1: {container}: ended with exit code 1"

    with_api(tmp_path, monkeypatch, scenario)


def test_each_line_of_a_pod_is_shown_once_however_often_the_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(server: ApiServer, api: Api, told: list[str]) -> None:
        pod = running_pod()
        server.put("pods", pod)
        running = asyncio.create_task(following.run(api, "demo", objects(), heard_by(told), follow=True))
        shown = ""
        for line in ("first", "second", "third"):
            server.print("a-0", line)
            while line not in shown:
                await asyncio.sleep(0.01)
                shown += capsys.readouterr().out
            server.failures = [503, 500]
            server.end_watches()
        server.put("pods", {**pod, "status": {"phase": "Succeeded"}})
        server.remove(*KEY)
        assert await running == 1
        assert (shown + capsys.readouterr().out).split() == ["first", "second", "third"]

    with_api(tmp_path, monkeypatch, scenario)


def test_a_quiet_command_shows_what_midstep_says_and_nothing_that_ranks_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(server: ApiServer, api: Api, told: list[str]) -> None:
        server.put("pods", running_pod())
        running = asyncio.create_task(following.run(api, "demo", objects(), heard_by(told), follow=True, quiet=True))
        for line in ("[rank 0] a loss", "[actor rank 11] another", "midstep: node0 joins"):
            server.print("a-0", line)
        shown = ""
        while "joins" not in shown:
            await asyncio.sleep(0.01)
            shown += capsys.readouterr().out
        server.remove(*KEY)
        await running
        assert shown == "midstep: node0 joins\n"

    with_api(tmp_path, monkeypatch, scenario)
