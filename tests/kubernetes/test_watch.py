"""The watch of a real API server that has forgotten what a client has seen last: 410 Gone, and all is listed again."""

import json
import sys

import pytest

from .cluster.cluster import Cluster

pytestmark = pytest.mark.timeout(600)

_LIST = """
import asyncio, json
from midstep.platforms.kubernetes.api import Api

async def main():
    api = Api()
    print(json.dumps((await api.pods({}))[1]))
    await api.close()

asyncio.run(main())
"""
_FOLLOW = """
import asyncio, json, sys
from midstep.platforms.kubernetes.api import Api, Expired
from midstep.platforms.kubernetes.api import watch

async def main(old):
    api, listed, versions = Api(), [], []

    async def listing():
        found, version = await api.pods({})
        versions.append(version)
        return found, version if len(versions) > 1 else old

    async def events(version):
        try:
            async for each in api.watch_pods({}, version):
                yield each
        except Expired:
            versions.append("expired")
            raise

    def on_all(pods):
        listed.append([pod["metadata"]["name"] for pod in pods])

    following = asyncio.create_task(watch("pods", listing, events, on_all=on_all, on_event=lambda *_: None))
    while len(listed) < 2:
        await asyncio.sleep(0.1)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await api.close()
    print(json.dumps({"expired": versions.count("expired"), "listed": listed}))

asyncio.run(asyncio.wait_for(main(sys.argv[1]), 60))
"""


def test_what_an_api_server_does_not_remember_is_listed_again(cluster: Cluster) -> None:
    """It is started again after changes that a watch has not seen, and keeps no history from before."""
    old = json.loads(ask(cluster, _LIST))
    pod = {"metadata": {"name": "seen-late"}, "spec": {"containers": [{"name": "it", "image": "midstep.test/host:1"}]}}
    try:
        cluster.apply({"apiVersion": "v1", "kind": "Pod", **pod})
        cluster.until(lambda: cluster.get("pod", "seen-late")["status"]["phase"] == "Running", "the pod to run")
        cluster.stop_api()
        cluster.start_api()
        found = json.loads(ask(cluster, _FOLLOW, old))
    finally:
        cluster.kubectl("delete", "pod", "seen-late", "--grace-period=0", "--force", "--ignore-not-found")

    assert found["expired"] == 1
    assert all("seen-late" in names for names in found["listed"])


def ask(cluster: Cluster, code: str, *words: str) -> str:
    """Run a few lines of Python on the machine of the control plane, and return what they print."""
    environment = (f"{name}={value}" for name, value in cluster.environment().items())
    return cluster.machines[0].run("env", *environment, sys.executable, "-c", code, *words)
