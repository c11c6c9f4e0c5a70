"""A cluster of one computer for the contract of platforms: an API server, and what starts pods as a kubelet does."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midstep.platforms.kubernetes import names
from midstep.platforms.kubernetes.settings import Settings, encode
from midstep.protocol.compat import within
from midstep.protocol.token import TOKEN_VARIABLE, FullToken, full, parse_token, token_text

from .api_server import served

TURN_S = 0.02
LONG_S = 60.0
OWN_ADDRESS = "127.0.0.1"
_SIGNALS = 128
_MIDSTEP = (sys.executable, "-m", "midstep.cli.main")


class InKubernetes:
    """The platform in a process of its own, hosted by `midstep platform`, with a cluster that allows `most` pods."""

    def __init__(self, root: Path, *, job: str, most: int, environment: Mapping[str, str]) -> None:
        self._root, self._job, self._most = root, job, most
        self._environment = {**os.environ, **environment}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}  # by their pods

    def start(self, endpoint: str) -> None:
        """Bring it up, for the controller at an endpoint."""
        self._serving = asyncio.get_running_loop().create_task(self._serve(endpoint))

    def agent_of(self, node: str) -> int | None:
        """Return the process id of a node's agent; None: there is none."""
        process = self._agents.get(names.pod_name(self._job, node))
        return process.pid if process is not None and process.poll() is None else None

    async def ended(self) -> None:
        """Wait until its process is gone, and see what it has left."""
        await within(LONG_S, self._serving)
        assert self._api.pods() == {}
        assert self._api.objects["deployments", names.of_job(self._job)]["spec"]["replicas"] == 0

    async def _serve(self, endpoint: str) -> None:
        async with served(self._root) as (self._api, config):
            self._api.most_pods = self._most
            spec = {"selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {}}}
            metadata = {"name": names.of_job(self._job), "uid": "owner"}
            self._api.put(
                "deployments", {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
            )
            platform = self._start_platform(endpoint, config)
            try:
                while platform.poll() is None:
                    self._turn()
                    await asyncio.sleep(TURN_S)
                assert platform.returncode == 0
            finally:
                platform.kill()
                for agent in self._agents.values():
                    agent.kill()
                    agent.wait()

    def _start_platform(self, endpoint: str, config: Path) -> subprocess.Popen[bytes]:
        token: FullToken = full(parse_token((self._root / "token").read_text(), "the token"))
        (self._root / "join").touch(mode=0o600)
        (self._root / "join").write_text(token_text(token.for_joining(self._job)))
        settings = self._root / "settings.json"
        settings.write_text(encode(Settings(self._job, "image", port=int(endpoint.rpartition(":")[2]))))
        words = ["platform", "kubernetes", "--job", self._job, "--controller", endpoint, "-o", f"settings={settings}"]
        environment = {**self._environment, "KUBECONFIG": str(config), TOKEN_VARIABLE: token_text(token)}
        with (self._root / "platform.log").open("wb") as log:
            return subprocess.Popen(
                [*_MIDSTEP, *words, "-o", f"address={OWN_ADDRESS}"], stdout=log, stderr=log, env=environment
            )

    def _turn(self) -> None:
        """Start what is to run, end what is not, and say what has ended."""
        pods = self._api.pods()
        for name, pod in pods.items():
            if name not in self._agents:
                self._agents[name] = self._start_agent(name, pod)
                self._say(pod, {"phase": "Running", "podIP": OWN_ADDRESS})
            elif pod["status"]["phase"] == "Running" and self._agents[name].poll() is not None:
                status = self._agents[name].returncode
                ended = {"exitCode": _SIGNALS - status if status < 0 else status, "reason": "Error"}
                statuses = [_container_status(ended)]
                self._say(pod, {"phase": "Failed" if status else "Succeeded", "containerStatuses": statuses})
        for name in self._agents.keys() - pods:
            self._agents[name].kill()
            self._agents[name].poll()

    def _say(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        self._api.put("pods", {**pod, "spec": {**pod["spec"], "nodeName": OWN_ADDRESS}, "status": status})

    def _start_agent(self, name: str, pod: dict[str, Any]) -> subprocess.Popen[bytes]:
        _, *words = pod["spec"]["containers"][0]["command"]
        fields = {"$(POD_IP)": OWN_ADDRESS, "$(HOST_NAME)": "host"}
        fields[words[words.index("--token-file") + 1]] = str(self._root / "join")
        fields[words[words.index("--log-dir") + 1]] = str(self._root / name)
        with (self._root / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*_MIDSTEP, *(fields.get(word, word) for word in words)], stdout=log, stderr=log, env=self._environment
            )


def _container_status(ended: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": names.AGENT,
        "image": "",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
