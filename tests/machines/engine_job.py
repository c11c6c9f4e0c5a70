"""A job that an engine has brought to machines: what is seen of it is that of any job, once it is found there."""

import json
from pathlib import Path
from typing import Any

from midstep.controller.endpoints.local_sockets import SOCKET_NAME

from .job import PATIENCE_S, Job

# A gate is no stall, and a busy computer takes its time to start processes.
ROOMY: dict[str, Any] = {
    "checkpoint": {"every_steps": 10},
    "stall": {"grace_s": PATIENCE_S},
    "deadlines": {"quiesce_s": 60.0, "start_s": 300.0, "rejoin_s": 300.0, "nodes_s": 300.0, "orders_s": 1200.0},
}


class EngineJob(Job):
    """A job whose controller may be on any of the machines, and move. Its `directory` is on all of them."""

    @property
    def directory(self) -> Path:
        """The job directory."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """Return what `midstep report --json` says."""
        linked = self.root / "job"
        if not linked.is_symlink():
            linked.symlink_to(self.directory)
        return super().report()

    def _sockets(self) -> list[Path]:
        """Return where the controller may be asked: a machine that it has left may have an old socket."""
        try:
            place = json.loads((self.directory / "job.json").read_text())["run_dir"]
        except FileNotFoundError:
            return []
        on = [machine for machine in self.machines if machine.is_on]
        paths = [Path(f"/proc/{machine.space.pid}/root{place}/{SOCKET_NAME}") for machine in on]
        return sorted((path for path in paths if path.exists()), key=lambda path: -path.stat().st_mtime)
