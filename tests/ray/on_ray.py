"""The `ray` platform for the contract of platforms: on this computer, on a Ray with a raylet for each of its nodes.

Without machines of namespaces: what orders, the platform and the raylets have to see each other's addresses.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from midstep.platforms.ray.platform import BookKeeper, RayOptions
from midstep.protocol.discovery import ENDPOINT_NAME
from midstep.protocol.private_files import replace_file

from ..contract.platforms.ordering import CHEAP, JOB, MOST, eventually
from .cluster import MEMORY_BYTES, SETTINGS

PROGRAM = "midstep.cli.agent"
GRACE_S = 10.0
LOGS = ("gcs_server.out", "raylet*.out", "raylet*.err", "worker-*.err")
SAID = 3000  # characters of each
_HOST = Path(__file__).with_name("platform_host.py")


class RayHere:
    """A Ray whose raylets are all on this computer, each with room for two nodes. This process is connected to it."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        """`folder`: in which Ray has its files."""
        self._cluster, self._folder = cluster, folder
        self.address: str = cluster.address

    def add_machine(self) -> Any:
        """Start one more raylet, and return it."""
        return self._cluster.add_node(num_cpus=2, object_store_memory=MEMORY_BYTES)

    def remove_machine(self, raylet: Any) -> None:
        """Kill a raylet with everything that it has started."""
        self._cluster.remove_node(raylet, allow_graceful=False)

    def said(self) -> str:
        """Return the last lines of what Ray's own programs have written, for messages of failed tests."""
        logs = [log for name in LOGS for log in sorted(self._folder.glob(f"**/session_2*/logs/{name}"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-SAID:]}" for log in logs)

    def assert_nothing_left(self) -> None:
        """No actor and no placement group is left."""
        ray = _ray()
        groups = ray.util.placement_group_table().values()
        assert ray.util.list_named_actors(all_namespaces=True) == []
        assert [group["name"] for group in groups if group["state"] != "REMOVED"] == []

    def clear(self) -> None:
        """End what a scenario that failed has left."""
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        ray = _ray()
        for each in ray.util.list_named_actors(all_namespaces=True):
            ray.kill(ray.get_actor(each["name"], each["namespace"]))
        for identity, group in ray.util.placement_group_table().items():
            if group["state"] != "REMOVED":
                ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(identity))))


@contextmanager
def ray_here() -> Iterator[RayHere]:
    """Start a Ray with MOST raylets beside its head, and connect this process to it."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        ray = _ray()
        head = {"num_cpus": 0, "object_store_memory": MEMORY_BYTES, "include_dashboard": False}
        cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        here = RayHere(cluster, Path(folder))
        try:
            for _ in range(MOST):
                here.add_machine()
            ray.init(address=here.address, log_to_driver=False)
            yield here
        finally:
            ray.shutdown()
            cluster.shutdown()


def _ray() -> Any:
    """Return Ray, with the parts that are used here: only these tests have it."""
    import ray
    import ray.cluster_utils

    return ray


class OnRay:
    """The platform in a process of its own, which can be killed and started again as Ray does with its actor."""

    def __init__(self, root: Path, here: RayHere, places: int = MOST) -> None:
        """`places`: those that it reserves for nodes. It begins without nodes, as the scenarios have it."""
        self._root, self._here, self._places = root, here, places
        self._process: subprocess.Popen[bytes] | None = None
        BookKeeper(root).found(())

    @property
    def nodes_asked_for(self) -> tuple[str, ...]:
        """The nodes that it has, or waits for machines for."""
        return BookKeeper(self._root).books.nodes

    @property
    def places(self) -> dict[str, int]:
        """The reserved places that it has given to nodes."""
        return BookKeeper(self._root).books.bundles

    def start(self, endpoint: str) -> None:
        """Bring it up, for the controller at an endpoint."""
        self._endpoint = endpoint
        replace_file(self._root / ENDPOINT_NAME, f"{endpoint}\n".encode())
        self._begin()

    def restart(self) -> None:
        """Kill its process, and start it again."""
        self._end()
        self._begin()

    def _begin(self) -> None:
        root = str(self._root)
        options = RayOptions(JOB, f"{root}/keys", root, root, self._places, {"CPU": 1.0}, CHEAP, GRACE_S)
        environment = {**os.environ, "RAY_ADDRESS": self._here.address}
        with (self._root / "platform.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_HOST), msgspec.json.encode(options).decode()],
                stdout=log,
                stderr=log,
                env=environment,
            )

    def agent_of(self, node: str) -> int | None:
        """Return the process id of a node's agent; None: there is none."""
        wanted = {PROGRAM, self._endpoint, node}
        agents = {
            each.pid: each.info["ppid"]
            for each in psutil.process_iter(["cmdline", "ppid"])
            if wanted <= set(each.info["cmdline"] or ())
        }
        return next((pid for pid, parent in agents.items() if parent not in agents), None)  # its forks look the same

    def raylet_of(self, node: str) -> int | None:
        """Return the process id of the raylet that has started a node's actor; None: the node has no agent."""
        agent = self.agent_of(node)
        return None if agent is None else psutil.Process(agent).parents()[1].pid

    async def ended(self) -> None:
        """Wait until it is gone, once the job is over, and see what it has left."""
        process = self._process
        assert process is not None
        await eventually(lambda: process.poll() is not None, "the end of the platform's process")
        assert process.returncode == 0
        self._here.assert_nothing_left()

    def close(self) -> None:
        """End it, and what a scenario that failed has left."""
        self._end()
        self._here.clear()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
