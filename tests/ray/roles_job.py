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

from midstep.cli.roles.group_files import role_directory

from .cluster import RayCluster
from .job import ROOMY, RayJob

FIRST_ATTEMPT = 1


class RoleOnRay(RayJob):
    """One role: what can be seen of it, and done to it, is that of any job on Ray."""

    def __init__(self, group: "RolesOnRay", role: str) -> None:
        self.cluster, self.machines, self.root = group.cluster, group.cluster.machines, group.root
        self.name, self.ranks = f"{group.name}/{role}", group.ranks[role]
        self.controller = group.launcher
        self.records = group.root / f"records-{role}"
        self._directory = role_directory(group.directory, role, FIRST_ATTEMPT)

    @property
    def directory(self) -> Path:
        """The job directory of its first attempt."""
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
        self.launcher = cluster.machines[0].start(
            (sys.executable, "-m", "midstep.cli.main", "run", "--platform", "ray", *where),
            environment=cluster.environment(),
            output=root / "driver.log",
        )

    def role(self, name: str) -> RoleOnRay:
        """Return a view of one role."""
        return RoleOnRay(self, name)

    def close(self) -> None:
        """End a job whose test failed: its launcher, and what is in Ray."""
        if self.launcher.poll() is None:
            os.killpg(self.launcher.pid, signal.SIGKILL)
            self.cluster.clear()
