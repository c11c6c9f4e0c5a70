"""A job of several roles on a Ray cluster of namespaced machines, with a view of each role."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from midstep.launch.directories import role_directory, role_job

from ..machines.engine_job import ROOMY
from ..machines.job import PATIENCE_S
from .cluster import RayCluster
from .job import RayJob

FIRST_ATTEMPT = 1


class RoleOnRay(RayJob):
    """One role: what can be seen of it, and done to it, is that of any job on Ray."""

    def __init__(self, group: "RolesOnRay", role: str, attempt: int) -> None:
        self.cluster, self.machines, self.root = group.cluster, group.cluster.machines, group.root
        self.name, self.ranks = role_job("ray", group.name, role, attempt), group.ranks[role]
        self.controller = group.launcher
        self.records = group.root / f"records-{role}"
        self._directory = role_directory(group.directory, role, attempt)

    @property
    def directory(self) -> Path:
        """The job directory of its attempt."""
        return self._directory

    def report(self) -> dict[str, Any]:
        """Return what `midstep report --json` says."""
        command = [sys.executable, "-m", "midstep.cli.main", "report", "--json", str(self._directory)]
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
        report: dict[str, Any] = json.loads(done.stdout)
        return report


class RolesOnRay:
    """The job. Its command is typed on machine 0."""

    def __init__(self, cluster: RayCluster, root: Path, roles: Mapping[str, Mapping[str, Any]], **more: Any) -> None:
        """`root`: a directory that all machines see. `more`: keys of the file beside the roles."""
        self.cluster, self.root = cluster, root
        self.name = f"roles-{secrets.token_hex(4)}"
        self.directory = root / self.name
        self.ranks = {name: int(role["ranks"]) for name, role in roles.items()}
        for role in roles:
            (root / f"records-{role}").mkdir()
        file = root / "roles.yaml"
        whole = {**ROOMY, **more, "roles": {name: dict(role) for name, role in roles.items()}}
        file.write_text(yaml.safe_dump(json.loads(json.dumps(whole))))  # without aliases
        where = ("--roles", str(file), "--job", self.name, "--job-dir", str(self.directory))
        self.launcher = self._start("run", "--platform", "ray", *where)

    def resume(self) -> None:
        """Continue it with `midstep resume`, typed on machine 0."""
        self.launcher = self._start("resume", str(self.directory))

    def kill_launchers(self) -> None:
        """Kill the launcher of all roles, with which those of the roles end."""
        machine = self.cluster.machines[0]
        command = machine.run("pgrep", "-f", f"midstep.cli.main run.*{self.name}")
        machine.run("kill", "-9", *command.split())
        self.launcher.wait(PATIENCE_S)

    def role(self, name: str, attempt: int = FIRST_ATTEMPT) -> RoleOnRay:
        """Return a view of one role."""
        return RoleOnRay(self, name, attempt)

    def _start(self, *words: str) -> "subprocess.Popen[bytes]":
        return self.cluster.machines[0].start(
            (sys.executable, "-m", "midstep.cli.main", *words),
            environment=self.cluster.environment(),
            output=self.root / "driver.log",
        )

    def close(self) -> None:
        """End a job whose test failed: its launcher, and what is in Ray."""
        if self.launcher.poll() is None:
            os.killpg(self.launcher.pid, signal.SIGKILL)
            self.cluster.clear()
