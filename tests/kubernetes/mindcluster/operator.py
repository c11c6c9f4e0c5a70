"""The ascend-operator, played: from an AscendJob of PyTorch to its PodGroup, its Service and its pods, and its end."""

import copy

from .api import GROUPS, JOBS, PODS, SERVICES, Api, Thing, annotations, asked_npus, is_going, labels

CONTAINER = "ascend"  # the others get no variables
_PORT_NAME, _PORT = "ascendjob-port", 2222
_MASTER, _WORKER = "Master", "Worker"
_NAMES = "training.kubeflow.org/"
_RETRIES = "fault-retry-times"
_RECOVER = "recover-strategy"
_SERVER = "clusterd-grpc-svc.mindx-dl.svc.cluster.local"
_DONE = frozenset({"Succeeded", "Failed"})


def job_labels(job: Thing, kind: str, index: int) -> dict[str, str]:
    """Return the labels by which a pod of a job is found, or the Service of one."""
    name = job["metadata"]["name"]
    own = {"job-name": name, "replica-type": kind.lower(), "replica-index": str(index)}
    both = {**{f"{_NAMES}{key}": value for key, value in own.items()}, **own}
    return {**both, f"{_NAMES}operator-name": "ascendjob-controller", "group-name": "mindxdl.gitee.com"}


def group_name(job: Thing) -> str:
    """Return the name of a job's PodGroup."""
    return f"{job['metadata']['name']}-{job['metadata']['uid']}"


def pod_group(job: Thing) -> Thing:
    """Return the PodGroup of a job, which has its labels and annotations."""
    replicas = job["spec"]["replicaSpecs"]
    total = sum(each.get("replicas", 1) for each in replicas.values())
    policy = job["spec"].get("runPolicy", {}).get("schedulingPolicy", {})
    least = policy.get("minAvailable", total)
    name, amount = asked_npus(replicas[_WORKER]["template"])
    marked = {"process-recover-enable": "on"} if _RECOVER in annotations(job) else {}
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {
            "name": group_name(job),
            "labels": {**labels(job), **marked},
            "annotations": annotations(job),
            "ownerReferences": [_owner(job)],
        },
        "spec": {"minMember": least, "queue": policy.get("queue", ""), "minResources": {name: str(least * amount)}},
    }


def service(job: Thing) -> Thing:
    """Return the Service of the master, which has an address of its own."""
    ports = [
        {"name": each["name"], "port": each["containerPort"]}
        for each in _container(job["spec"]["replicaSpecs"][_MASTER]["template"]).get("ports", ())
    ]
    if all(each["name"] != _PORT_NAME for each in ports):
        ports.append({"name": _PORT_NAME, "port": _PORT})
    selected = job_labels(job, _MASTER, 0)
    metadata = {
        "name": f"{job['metadata']['name']}-master-0",
        "labels": selected,
        "ownerReferences": [_owner(job)],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"selector": selected, "ports": ports}}


def pod(job: Thing, kind: str, index: int, master: Thing, version: int) -> Thing:
    """Return a pod of a job. `master`: the Service. `version`: how often pods had to be made again."""
    replicas = job["spec"]["replicaSpecs"]
    template = copy.deepcopy(replicas[kind]["template"])
    rank = index + (kind == _WORKER)
    metadata = {**template.get("metadata", {}), "name": f"{job['metadata']['name']}-{kind.lower()}-{index}"}
    metadata["labels"] = {**metadata.get("labels", {}), **job_labels(job, kind, index), "version": str(version)}
    if kind == _MASTER:
        metadata["labels"][f"{_NAMES}job-role"] = "master"
    metadata["annotations"] = {
        **metadata.get("annotations", {}),
        "hccl/rankIndex": str(rank),
        "scheduling.k8s.io/group-name": group_name(job),
        "volcano.sh/task-spec": kind.lower(),
    }
    metadata["ownerReferences"] = [_owner(job)]
    container = _container(template)
    container["env"] = [*container.get("env", ()), *_variables(job, template, kind, rank, master)]
    spec = {**template["spec"], "restartPolicy": replicas[kind].get("restartPolicy", "Never")}
    spec.setdefault("schedulerName", "volcano")
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _variables(job: Thing, template: Thing, kind: str, rank: int, master: Thing) -> list[Thing]:
    name, npus = asked_npus(template)
    total = sum(each.get("replicas", 1) for each in job["spec"]["replicaSpecs"].values())
    (port,) = (each["port"] for each in master["spec"]["ports"] if each["name"] == _PORT_NAME)
    plain = {
        "MINDX_TASK_ID": job["metadata"]["uid"],
        "MINDX_SERVER_IP": _SERVER,
        "MINDX_SERVER_DOMAIN": _SERVER,
        "HostNetwork": "false",
        "HCCL_LOGIC_SUPERPOD_ID": "0",
        "REPLICA_TYPE": kind,
        "LOCAL_WORLD_SIZE": str(npus),
        "WORLD_SIZE": str(npus * total),
        "LOCAL_RANK": ",".join(map(str, range(npus))),
        "MASTER_ADDR": master["spec"]["clusterIP"],
        "MASTER_PORT": str(port),
        "RANK": str(rank),
    }
    strategies = annotations(job).get(_RECOVER, "")
    if strategies:
        named = sorted({"recover" if each in {"recover-in-place", "exit"} else each for each in strategies.split(",")})
        plain |= {"PROCESS_RECOVER": "on", "ELASTIC_PROCESS_RECOVER_ENABLE": "1", "HCCL_ASYNC_ERROR_HANDLING": "0"}
        plain["HIGH_AVAILABILITY"] = ",".join(named)
    devices = {"fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}}
    return [
        {"name": "ASCEND_VISIBLE_DEVICES", "valueFrom": devices},
        *({"name": key, "value": value} for key, value in plain.items()),
    ]


def end_of(pods: list[Thing], remaining: int) -> str:
    """Return the state of a job by its pods. `remaining`: how many more failures Volcano answers by deleting a pod."""
    phases = [each["status"]["phase"] for each in pods if not (each["status"]["phase"] == "Failed" and is_going(each))]
    if "Failed" in phases:
        return "Restarting" if remaining else "Failed"
    if "Running" in phases:
        return "Running"
    return "Succeeded" if "Succeeded" in phases else "Created"


class Operator:
    """Reconciles AscendJobs, again and again. `remaining`: retries that Volcano has left, by PodGroup."""

    def __init__(self, api: Api, remaining: dict[str, int]) -> None:
        self._api = api
        self._remaining = remaining
        self._versions: dict[str, int] = {}
        self._seen: dict[str, dict[str, int]] = {}  # job -> pods by uid, with their versions

    def reconcile(self) -> None:
        """Bring what there is closer to what the jobs ask for."""
        pods = self._api.items(PODS)
        for job in self._api.items(JOBS):
            name = job["metadata"]["name"]
            self._reconcile(job, [each for each in pods if labels(each).get(f"{_NAMES}job-name") == name])

    def _reconcile(self, job: Thing, pods: list[Thing]) -> None:
        group = f"{GROUPS}/{group_name(job)}"
        if _state(job) in _DONE:
            self._api.delete(group)
            return
        version = self._version(job, pods)
        if 0 < _backoff_limit(job) < version:
            self._say(job, "Failed")
            return
        found = self._api.send("GET", group)
        if found is None:
            self._api.send("POST", GROUPS, pod_group(job))
            return
        if found.get("status", {}).get("phase", "Pending") == "Pending":
            return
        self._make_missing(job, pods, version)
        state = end_of(pods, self._remaining.get(group_name(job), 0))
        if state != _state(job):
            self._say(job, state)

    def _version(self, job: Thing, pods: list[Thing]) -> int:
        """Count the times that a pod of the newest version has gone."""
        uid = job["metadata"]["uid"]
        now = {each["metadata"]["uid"]: int(labels(each)["version"]) for each in pods}
        version = self._versions.setdefault(uid, 0)
        before = self._seen.get(uid, {})
        if any(of_pod == version for pod_uid, of_pod in before.items() if pod_uid not in now):
            self._versions[uid] = version = version + 1
        self._seen[uid] = now
        return version

    def _make_missing(self, job: Thing, pods: list[Thing], version: int) -> None:
        there = {each["metadata"]["name"] for each in pods}
        master = service(job)
        path = f"{SERVICES}/{master['metadata']['name']}"
        made = self._api.send("GET", path) or self._api.send("POST", SERVICES, master)
        if made is None:
            return
        for kind, replicas in job["spec"]["replicaSpecs"].items():
            for index in range(replicas.get("replicas", 1)):
                wanted = pod(job, kind, index, made, version)
                if wanted["metadata"]["name"] not in there:
                    self._api.send("POST", PODS, wanted)

    def _say(self, job: Thing, state: str) -> None:
        print(f"{job['metadata']['name']}: {state}", flush=True)
        conditions = [{"type": state, "status": "True"}]
        self._api.change(f"{JOBS}/{job['metadata']['name']}/status", {"status": {"conditions": conditions}})


def _backoff_limit(job: Thing) -> int:
    """Return how often pods may have gone; 0 and less: without a limit."""
    return int(job["spec"].get("runPolicy", {}).get("backoffLimit", labels(job).get(_RETRIES, 0)))


def _state(job: Thing) -> str:
    conditions = job.get("status", {}).get("conditions", ())
    return conditions[-1]["type"] if conditions else ""


def _container(template: Thing) -> Thing:
    (found,) = (each for each in template["spec"]["containers"] if each["name"] == CONTAINER)
    assert isinstance(found, dict)
    return found


def _owner(job: Thing) -> Thing:
    return {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
