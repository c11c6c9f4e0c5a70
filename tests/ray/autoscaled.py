"""Ray's own autoscaler, with its provider that stands for a cloud: a machine is one more raylet beside the head.

All of it is on one machine of namespaces. The autoscaler itself is the one of every cluster: it sees what actors and
placement groups wait for, orders machines, takes away those that are idle, and replaces those whose raylet has ended.
"""

import json
import time
from pathlib import Path
from typing import Any

from ..machines.machines import Machines
from .cluster import CONTROLLER, CPUS, MEMORY_BYTES, PORT, RayCluster

MOST_MACHINES = 4
IDLE_S = 12.0  # after which a machine is taken away
LOOKS_S = 1  # between two looks of the autoscaler
HEAD, WORKER = "ray.head.default", "worker"
HEAD_ID = "f" * 51 + "0" * 5  # the provider counts on from here
_COMMANDS = (  # of a cloud's machines; these need none
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
_PATIENCE_S = 120.0
_POLL_S = 0.2
_SETTINGS = {
    "AUTOSCALER_UPDATE_INTERVAL_S": str(LOOKS_S),
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
}


class AutoscaledRay(RayCluster):
    """A head alone. Its machines come as they are needed."""

    def __init__(self, machines: Machines, root: Path) -> None:
        """`root`: a folder that the machine sees."""
        self.machines = machines
        self.address = f"{machines[0].address}:{PORT}"
        file = root / "autoscaling.json"
        file.write_text(json.dumps(_configuration(self.address)))
        self.start_head(
            f"--autoscaling-config={file}", f"--resources={json.dumps({CONTROLLER: 1})}", environment=_SETTINGS
        )

    def workers(self) -> set[str]:
        """Return the machines that are there now, without the head."""
        said = self.ask("print(*(each['NodeID'] for each in ray.nodes() if each['Alive']))")
        return set(said.split()) - {HEAD_ID}

    def until_workers(self, count: int) -> set[str]:
        """Wait until so many machines are there, and return them."""
        deadline = time.monotonic() + _PATIENCE_S
        while len(found := self.workers()) != count:
            assert time.monotonic() < deadline, f"still waiting for {count} machines: {found}\n{self.said()}"
            time.sleep(_POLL_S)
        return found

    def said(self) -> str:
        """Return what the autoscaler has logged."""
        log = Path(f"/proc/{self.machines[0].space.pid}/root/tmp/ray/session_latest/logs/monitor.log")
        return log.read_text(errors="replace")[-6000:] if log.exists() else "the autoscaler has no log"


def _configuration(address: str) -> dict[str, Any]:
    """Return what `ray start` has to know of the autoscaler. All machines have one address, so an id stands for it."""
    size = {"CPU": CPUS, "object_store_memory": MEMORY_BYTES}
    provider = {
        # Under its own name, fake_multinode, it needs a file that is in no release of Ray.
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "gcs_address": address,
        "head_node_id": HEAD_ID,
        "launch_multiple": True,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    types = {
        HEAD: {"resources": {"CPU": 0, CONTROLLER: 1}, "node_config": {}, "max_workers": 0},
        WORKER: {"resources": size, "node_config": {}, "min_workers": 0, "max_workers": MOST_MACHINES},
    }
    return {
        "cluster_name": "of-tests",
        "max_workers": MOST_MACHINES,
        "provider": provider,
        "available_node_types": types,
        "head_node_type": HEAD,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60.0,
        **{name: [] for name in _COMMANDS},
        "file_mounts": {},
        "cluster_synced_files": [],
    }
