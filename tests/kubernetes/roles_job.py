"""A job of several roles that `midstep run --platform kubernetes --roles` starts, with a view of each role."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from midstep.launch.directories import role_directory, role_job

from .cluster.cluster import NPUS, RESOURCE, Cluster
from .cluster.image import IMAGE
from .managed import FIRST, KINDS, MIDSTEP, NEEDED, ManagedJob, template


class RoleInPods(ManagedJob):
    """One role in one attempt: what can be seen of it, and done to it, is that of any managed job."""

    def __init__(self, whole: "RolesInPods", role: str, attempt: int) -> None:
        self.cluster, self.root = whole.cluster, whole.root
        self.name = role_job("kubernetes", whole.name, role, attempt)
        self.ranks = whole.ranks[role]
        self.directory = role_directory(whole.directory, role, attempt)
        self.output, self.process = whole.output, whole.process
        self._runtime, self.records = None, whole.records(role)

    def until_steps(self, count: int) -> None:
        """Wait until every rank has come to a step."""

        def there(status: dict[str, Any]) -> bool:
            return len(status["ranks"]) == self.ranks and min(each["step"] for each in status["ranks"]) >= count

        self.until(there, f"step {count} of {self.name}")

    def until_incidents(self, count: int) -> None:
        """Wait until so many incidents are over."""
        self.until(
            lambda status: status["phase"] == "running" and len(status["incidents"]) >= count,
            f"{count} incidents of {self.name}",
        )


class RolesInPods:
    """The job. Its command is typed on the machine of the control plane."""

    def __init__(
        self,
        cluster: Cluster,
        root: Path,
        name: str,
        roles: Mapping[str, Mapping[str, Any]],
        *,
        gates: Mapping[str, Sequence[int]] = {},
        options: Sequence[str] = (),
        npus: int = NPUS,
        **more: Any,
    ) -> None:
        """`gates`: steps in front of which the ranks of a role are held. `more`: keys of the file beside the roles.

        `options`: more of `midstep run`. `npus`: of each pod; with all of a machine it shares that with no other.
        """
        self.cluster, self.root, self.name = cluster, root, name
        self.ranks = {role: int(says["ranks"]) for role, says in roles.items()}
        for role in roles:
            self.records(role).mkdir(parents=True)
            for step in gates.get(role, ()):
                (self.records(role) / f"gate.{step}").touch()
        self.directory = root / f"midstep-{name}"
        file, self.output = root / "roles.yaml", root / "output.txt"
        whole = {**NEEDED, **more, "roles": {role: dict(says) for role, says in roles.items()}}
        file.write_text(yaml.safe_dump(json.loads(json.dumps(whole))))  # without aliases
        words = ["--platform", "kubernetes", "--roles", str(file), "--image", IMAGE, "--job", name]
        words += [
            "--resource",
            f"{RESOURCE}={npus}",
            "--volume",
            f"{root}:{root}",
            "--pod-template",
            template(root, "agent"),
        ]
        detector = ("detector",) if "--config-maps" in options else ()
        words += ["--controller-template", template(root, "controller", "platform", *detector, first=FIRST)]
        words += ["--launcher-template", template(root, "launcher", first=FIRST), *options]
        self.process = cluster.machines[0].start(
            (*MIDSTEP, "run", *words), environment={**cluster.environment(), "HOME": "/tmp"}, output=self.output
        )

    def records(self, role: str) -> Path:
        """Return where the ranks of a role write down what they compute."""
        return self.root / f"records-{role}"

    def role(self, name: str, attempt: int = 1) -> RoleInPods:
        """Return a view of one role."""
        return RoleInPods(self, name, attempt)

    def launcher_pod(self) -> str:
        """Return the name of the pod of the launcher, once it runs."""
        chosen = f"midstep.io/job={self.name},midstep.io/role=launcher"
        found: list[str] = []

        def runs() -> bool:
            pods = self.cluster.get("pods", "-l", chosen)["items"]
            found[:] = [
                pod["metadata"]["name"]
                for pod in pods
                if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
            ]
            return len(found) == 1

        self.cluster.until(runs, "the pod of the launcher")
        return found[0]

    def exit_code(self) -> int:
        """Wait until `midstep run` has ended."""
        self.cluster.until(lambda: self.process.poll() is not None, "midstep run to end")
        return int(self.process.returncode)

    def left(self) -> list[str]:
        """Return the names of all objects of the job and of its roles that are there."""
        found = self.cluster.kubectl("get", KINDS, "-l", "app.kubernetes.io/name=midstep", "-o", "name").split()
        return [each for each in found if each.split("/")[1].startswith(f"midstep-{self.name}")]

    def delete(self) -> None:
        """Delete what owns all that it is made of."""
        self.cluster.kubectl("delete", "deployment", f"midstep-{self.name}", "--ignore-not-found", "--wait=false")
