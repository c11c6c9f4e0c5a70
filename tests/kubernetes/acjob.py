"""A job in the pods of an AscendJob: that of examples/kubernetes/acjob.yaml, with what this cluster has put in.

Those are image, script, volumes and the number of ranks; and there are no labels of nodes.
"""

from pathlib import Path
from typing import Any

import yaml

from .cluster.image import IMAGE
from .joined import HOME, MIDSTEP, JoinedJob

EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes" / "acjob.yaml"
POLICY = "/etc/midstep/policy.yaml"  # in the example


def policy_of_example() -> dict[str, Any]:
    """Return what the policy of the example says of pods that come again."""
    (found,) = (each for each in yaml.safe_load_all(EXAMPLE.read_text()) if each["kind"] == "ConfigMap")
    policy: dict[str, Any] = yaml.safe_load(found["data"]["policy.yaml"])
    return {key: policy[key] for key in ("node", "on_node_relaunch")}


class AscendJobOfMidstep(JoinedJob):
    """A job of a master and a worker. Operator and Volcano have to be played meanwhile."""

    def documents(self, others: int) -> list[dict[str, Any]]:
        """Return the Secret, and the AscendJob of the example."""
        (job,) = (each for each in yaml.safe_load_all(EXAMPLE.read_text()) if each["kind"] == "AscendJob")
        job["metadata"] |= {"name": self.name, "labels": {**job["metadata"]["labels"], "job": self.name}}
        replicas = job["spec"]["replicaSpecs"]
        replicas["Worker"]["replicas"] = others
        for kind, each in replicas.items():
            each["template"] = self._template(each["template"], is_master=kind == "Master")
        return [self.secret(), job]

    def _template(self, given: dict[str, Any], *, is_master: bool) -> dict[str, Any]:
        ours = self.pod("of-the-example")
        (own,), (container,) = ours["spec"]["containers"], given["spec"]["containers"]
        memory = {"name": "memory", "mountPath": "/dev/shm"}
        home = str(self.root / "home") if is_master and self._directory else HOME
        changed = {
            "image": IMAGE,
            "command": [self._words(word) for word in container["command"]],
            "env": [{**each, "value": home} if each["value"] == HOME else each for each in own["env"]],
            "volumeMounts": [*own["volumeMounts"], memory],
        }
        volumes = [*ours["spec"]["volumes"], {"name": "memory", "emptyDir": {"medium": "Memory"}}]
        spec = {**given["spec"], "containers": [{**container, **changed}], "volumes": volumes, "nodeSelector": {}}
        labels = {**given["metadata"]["labels"], **ours["metadata"]["labels"]}
        return {"metadata": {**given["metadata"], "labels": labels}, "spec": spec}

    def _words(self, text: str) -> str:
        """Return a word of the example's command, for this job."""
        nodes, number, per_node, ranks = self._shape
        for old, new in (
            ("exec midstep", f"exec {' '.join(MIDSTEP)}"),
            ("--nproc-per-node 8", f"{per_node} {ranks}"),
            ("--rdzv-id gpt", f"--rdzv-id {self.name}"),
            (POLICY, str(self.root / "policy.yaml")),
            ("train.py", " ".join(self._training)),
        ):
            assert old in text or not text.startswith("exec"), f"{EXAMPLE} has no {old}"
            text = text.replace(old, new)
        assert f"{nodes} {number}" in text or not text.startswith("exec")
        return text

    # --- watching -------------------------------------------------------------------------------------------------

    def is_first(self, pod: dict[str, Any]) -> bool:
        """Say whether a pod is the master."""
        return bool(pod["metadata"]["name"] == f"{self.name}-master-0")

    def pod_of(self, node: str) -> str:
        """Return the name of a node's pod: that of its host, with a number where it was in use."""
        (name,) = (each["metadata"]["name"] for each in self.pods() if node.startswith(each["metadata"]["name"]))
        return str(name)

    def victim(self, status: dict[str, Any]) -> tuple[str, set[int]]:
        """Return the pod of the worker, and its ranks."""
        node = next(each["node"] for each in status["ranks"] if "-worker-" in each["node"])
        return self.pod_of(node), {each["rank"] for each in status["ranks"] if each["node"] == node}

    def until_again(self, pod: str, uid: str) -> dict[str, Any]:
        """Wait until a pod that was lost runs again, and return it."""
        found: list[dict[str, Any]] = []

        def again() -> bool:
            found[:] = [each for each in self.pods() if each["metadata"]["name"] == pod]
            return bool(found) and found[0]["metadata"]["uid"] != uid and found[0]["status"]["phase"] == "Running"

        self.cluster.until(again, f"{pod} to run again")
        return found[0]

    def uid(self, pod: str) -> str:
        """Return what tells a pod from the next one of its name."""
        return str(self.cluster.get("pod", pod)["metadata"]["uid"])

    def state(self) -> str:
        """Return the state of the AscendJob, as the operator has it."""
        conditions = self.cluster.get("ascendjob", self.name).get("status", {}).get("conditions", ())
        return str(conditions[-1]["type"]) if conditions else ""

    # --- its end --------------------------------------------------------------------------------------------------

    def until_complete(self) -> None:
        """Wait until the operator calls the job a success."""
        try:
            self.cluster.until(lambda: self.state() == "Succeeded", "the AscendJob to succeed")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def job_directory(self) -> Path:
        """Return where its controller keeps it."""
        return self.root / "home" / self.name

    def delete(self) -> None:
        """Delete all that it is made of, at once."""
        self.cluster.kubectl("delete", "ascendjob", self.name, "--wait=false", check=False)
        super().delete()
