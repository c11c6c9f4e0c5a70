"""The names and labels of a job's objects, by which they are found again."""

from typing import Any

PREFIX = "midstep.io"
JOB = f"{PREFIX}/job"
NODE = f"{PREFIX}/node"
ROLE = f"{PREFIX}/role"  # of a pod: AGENT, CONTROLLER or LAUNCHER
AGENT = "agent"
CONTROLLER = "controller"
PLATFORM = "platform"
DETECTOR = "detector"
LAUNCHER = "launcher"  # of a job of roles
CHECK = "check"
SUBMIT = "submit"

EXIT_CODE = f"{PREFIX}/exit-code"  # annotations of the Deployment of a job that has ended
REASON = f"{PREFIX}/reason"
AVOIDED = f"{PREFIX}/avoided-hosts"
INCIDENTS = f"{PREFIX}/incidents"  # how many there have been, and the last one in a line
LAST_INCIDENT = f"{PREFIX}/last-incident"

POD_IP = "POD_IP"  # the variable that has the address of the own pod

HOST_LABEL = "kubernetes.io/hostname"
VOLCANO = "volcano"  # the scheduler
GROUP = "scheduling.k8s.io/group-name"  # the annotation that puts a pod into a PodGroup of Volcano


def of_job(job: str) -> str:
    """Return the name of all objects of which a job has one: Deployment, Service, Secret, ConfigMap, accounts."""
    return f"midstep-{job}"


def pod_name(job: str, node: str) -> str:
    """Return the name of a node's pod. Nodes' names are never used again, so these are not either."""
    return f"{of_job(job)}-{node.replace('_', '-').lower()}"


def labels(job: str, **more: str) -> dict[str, str]:
    """Return the labels of an object of a job, with those of `more` by their names here."""
    known = {"role": ROLE, "node": NODE}
    standard = {"app.kubernetes.io/name": "midstep", "app.kubernetes.io/instance": job}
    return {**standard, JOB: job, **{known[name]: value for name, value in more.items()}}


def selector(job: str, role: str) -> str:
    """Return the label selector of the pods of a role."""
    return ",".join(f"{key}={value}" for key, value in selected(job, role).items())


def selected(job: str, role: str) -> dict[str, str]:
    """Return the labels by which the pods of a role are selected."""
    return {JOB: job, ROLE: role}


def owner_reference(kind: str, api: str, name: str, uid: str) -> dict[str, Any]:
    """Return what makes an object be deleted with its owner."""
    return {
        "apiVersion": api,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": False,
        "blockOwnerDeletion": False,
    }
