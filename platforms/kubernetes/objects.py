"""All objects of a job, or of a job of roles, but its agents' pods, as manifests that `kubectl apply` takes.

The Deployment of the controller owns the pods of the agents: they go with it. The Deployment of the launcher of a job
of roles owns the Deployments of the roles' jobs, which that launcher makes.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import msgspec

from ...protocol.token import FullToken, token_text
from . import names, rules
from .pods import TOKEN_FOLDER, from_field, laid_over, mounts, secret_volume, volumes
from .settings import LEASE_SCHEME, Settings, encode

FULL_KEY = "token"
SETTINGS_FILE = "platform.json"
POLICY_FILE = "policy.yaml"
FILES = "/etc/midstep"
OWN_FOLDER = "/var/lib/midstep"  # of the controller's pod, where the job has no volume
_MOVES_AFTER_S = 5  # that the controller's machine does not answer
_APART = 100  # the most that the scheduler can weigh
# SIGTERM would stop the job, and the pod may only be on its way to another host. The journal takes a kill.
KILLED_BY_TERM = 'trap "kill -9 \\$!" TERM; "$@" & wait $!'
_SETTINGS = ("--option", f"settings={FILES}/{SETTINGS_FILE}")
ROLES_FILE = "roles.yaml"
_AMOUNT = re.compile(r"\d+(\.\d+)?")  # of a quantity, before its unit


class Submission(msgspec.Struct, frozen=True):
    """A job as it is submitted in the controller's pod. `words`: options of `midstep submit`, script and arguments."""

    words: tuple[str, ...]
    nodes: int  # without which the job does not train
    spares: int
    directory: str  # of the job, in the controller's pod and in those of the agents
    policy: str | None = None  # the text of the file
    named_nodes: dict[str, str] = {}  # by which names and serial numbers documents of detectors mean a node


def default_directory(settings: Settings) -> str:
    """Return where a job keeps its journal and its checkpoints: on its first volume, if it has one."""
    base = settings.volumes[0].path.rstrip("/") if settings.volumes else OWN_FOLDER
    return f"{base}/midstep-{settings.job}"


def lease_store(settings: Settings, directory: str) -> str:
    """Return the address of a journal in a job's directory on a volume, with the Lease that is the job's own."""
    return f"{LEASE_SCHEME}/{names.of_job(settings.job)}?journal={quote(directory)}/journal"


def manifests(settings: Settings, submission: Submission, token: FullToken, namespace: str) -> list[dict[str, Any]]:
    """Return the objects of a job, the Deployment first: it owns the others when `midstep run` makes them."""
    objects = [
        deployment(settings, submission),
        *([] if settings.group else account(settings, namespace)),
        secret(settings, token),
        config_map(settings, {POLICY_FILE: submission.policy}),
        service(settings),
        disruption_budget(settings, submission),
    ]
    if settings.controllers > 1:
        objects.append(controllers_budget(settings))
    if settings.pod_group is not None:
        objects.append(pod_group(settings, settings.pod_group, submission))
    if settings.has_lease:
        objects.append({**named_object(settings, "Lease", "coordination.k8s.io/v1"), "spec": {}})
    return [in_namespace(each, namespace) for each in objects]


def account(settings: Settings, namespace: str) -> list[dict[str, Any]]:
    """Return the account of a job, and what it may do in each namespace and in the cluster."""
    objects = [named_object(settings, "ServiceAccount"), rules.role(settings), rules.binding(settings)]
    if settings.watch_nodes:
        objects += [rules.cluster_role(settings, namespace), rules.cluster_binding(settings, namespace)]
    return objects + rules.config_map_roles(settings, namespace)


def secret(settings: Settings, token: FullToken) -> dict[str, Any]:
    """Return the job's token, and the one with which agents can join and do nothing else."""
    texts = {FULL_KEY: token_text(token), "join": token_text(token.for_joining(settings.job))}
    return {**named_object(settings, "Secret"), "type": "Opaque", "stringData": texts}


def config_map(settings: Settings, texts: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the files that the pod of the Deployment reads: the settings, and those of `texts` that there are."""
    files = {SETTINGS_FILE: encode(settings), **{name: text for name, text in texts.items() if text is not None}}
    return {**named_object(settings, "ConfigMap"), "data": files}


def service(settings: Settings) -> dict[str, Any]:
    """Return the name under which agents find the controller, wherever its pod is. It is without an own address."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # agents try until it listens
        "selector": names.selected(settings.job, names.CONTROLLER),
        "ports": [{"name": "midstep", "port": settings.port}],
    }
    return {**named_object(settings, "Service"), "spec": spec}


def disruption_budget(settings: Settings, submission: Submission) -> dict[str, Any]:
    """Return what keeps evictions from taking several nodes at once.

    Without spares one may go: only its eviction tells that a node has to be made elsewhere, unless hosts are watched.
    """
    one = not submission.spares and not settings.watch_nodes
    least = submission.nodes - 1 if one else submission.nodes
    spec = {"minAvailable": least, "selector": {"matchLabels": names.selected(settings.job, names.AGENT)}}
    return {**named_object(settings, "PodDisruptionBudget", "policy/v1"), "spec": spec}


def pod_group(settings: Settings, over: dict[str, Any], submission: Submission) -> dict[str, Any]:
    """Return what has Volcano place as many agents as the job needs together, or none; spares come when they can.

    `over`: a part of a manifest that is laid over it.
    """
    least = {name: times(amount, submission.nodes) for name, amount in settings.resources.items()}
    spec = {"minMember": submission.nodes, "minResources": least}
    own = {**named_object(settings, "PodGroup", "scheduling.volcano.sh/v1beta1"), "spec": spec}
    made: dict[str, Any] = laid_over(own, over)
    return made


def times(quantity: str, number: int) -> str:
    """Return so many times a quantity: twice 8 is 16, twice 1.5Gi is 3.0Gi."""
    amount = _AMOUNT.match(quantity)
    return quantity if amount is None else f"{Decimal(amount[0]) * number}{quantity[amount.end() :]}"


def controllers_budget(settings: Settings) -> dict[str, Any]:
    """Return what keeps evictions from taking all controllers at once."""
    budget = named_object(settings, "PodDisruptionBudget", "policy/v1")
    metadata = {**budget["metadata"], "name": f"{names.of_job(settings.job)}-controllers"}
    selected = {"matchLabels": names.selected(settings.job, names.CONTROLLER)}
    return {**budget, "metadata": metadata, "spec": {"maxUnavailable": 1, "selector": selected}}


def deployment(settings: Settings, submission: Submission) -> dict[str, Any]:
    """Return what keeps the controllers running, and a platform beside each, which serves while that one leads."""
    first = [check(settings), _submit(settings, submission)]
    pod = movable_pod(
        settings, names.CONTROLLER, first, [_controller(settings, submission), *_beside(settings, submission)]
    )
    if settings.controllers > 1:
        same = {"labelSelector": {"matchLabels": names.selected(settings.job, names.CONTROLLER)}}
        apart = {"weight": _APART, "podAffinityTerm": {**same, "topologyKey": names.HOST_LABEL}}
        pod["spec"]["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}}
    template = laid_over(pod, settings.controller)
    # Of one journal on a volume, two at once would only wait for each other.
    return kept_running(settings, names.CONTROLLER, template, settings.controllers, overlap=bool(settings.store))


def movable_pod(
    settings: Settings, role: str, first: list[dict[str, Any]], containers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the template of a pod that asks the API, has the job's token, and leaves a host that does not answer."""
    return {
        "metadata": {"labels": names.labels(settings.job, role=role)},
        "spec": {
            "serviceAccountName": names.of_job(settings.group or settings.job),
            "terminationGracePeriodSeconds": 5,
            "tolerations": [
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _MOVES_AFTER_S}
                for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
            ],
            "initContainers": first,
            "containers": containers,
            "volumes": [
                secret_volume(settings.job, FULL_KEY),
                {"name": "midstep-files", "configMap": {"name": names.of_job(settings.job)}},
                {"name": "midstep-own", "emptyDir": {}},
                *volumes(settings),
            ],
        },
    }


def kept_running(
    settings: Settings, role: str, template: dict[str, Any], replicas: int, *, overlap: bool
) -> dict[str, Any]:
    """Return the Deployment that keeps pods of a template running. `overlap`: of an old one and a new one."""
    spec = {
        "replicas": replicas,
        "strategy": {"type": "RollingUpdate" if overlap else "Recreate"},
        "selector": {"matchLabels": names.selected(settings.job, role)},
        "template": template,
    }
    return {**named_object(settings, "Deployment", "apps/v1"), "spec": spec}


# --- the containers of the controller's pod -------------------------------------------------------------------------


def check(settings: Settings) -> dict[str, Any]:
    """Say what the account lacks, before anything is founded."""
    words = ["midstep", "platform", "kubernetes", "--check", "--token-file", f"{TOKEN_FOLDER}/token"]
    return container_of(settings, names.CHECK, [*words, *_SETTINGS])


def _submit(settings: Settings, submission: Submission) -> dict[str, Any]:
    """Found the job, unless a pod before this one has done so."""
    policy = [] if submission.policy is None else ["--policy", f"{FILES}/{POLICY_FILE}"]
    where = ["--job", settings.job, "--job-dir", submission.directory, "--platform", "kubernetes", "--if-absent"]
    store = ["--store", settings.store] if settings.store else []
    return container_of(settings, names.SUBMIT, ["midstep", "submit", *store, *where, *policy, *submission.words])


def _controller(settings: Settings, submission: Submission) -> dict[str, Any]:
    words = ["midstep", "controller", "--listen", f"tcp://0.0.0.0:{settings.port}"]
    words += ["--token-file", f"{TOKEN_FOLDER}/token"]
    if settings.store:
        own = f"{OWN_FOLDER}/{names.of_job(settings.job)}"  # that of the job is not this controller's alone
        words += ["--store", settings.store, "--job", settings.job, "--job-dir", own]
        words += ["--standby", "--name", "$(POD_NAME)"]
        named, leader = [from_field("POD_NAME", "metadata.name")], names.of_job(settings.job)
    else:
        # The last one's lock is free when its host is known to be gone, which a lease of the file system may delay.
        words += ["--job-dir", submission.directory, "--wait", "60"]
        named, leader = [], "127.0.0.1"  # no name server is needed
    container = container_of(settings, names.CONTROLLER, ["sh", "-c", KILLED_BY_TERM, "sh", *words])
    container["env"] += [
        *named,
        # So that operators' commands that are typed here reach the controller that leads.
        {"name": "MIDSTEP_CONTROLLER", "value": f"{leader}:{settings.port}"},
        {"name": "MIDSTEP_TOKEN_FILE", "value": f"{TOKEN_FOLDER}/token"},
    ]
    return {**container, "ports": [{"name": "midstep", "containerPort": settings.port}]}


def _beside(settings: Settings, submission: Submission) -> list[dict[str, Any]]:
    """Return the containers that serve the controller of their pod, while it leads."""
    return [_platform(settings), *([_detector(settings, submission)] if settings.config_maps else [])]


def _detector(settings: Settings, submission: Submission) -> dict[str, Any]:
    words = ["midstep", "detect", settings.job, "--standby", *_own_controller(settings)]
    # One name, whichever pod it runs in: the next one takes back what the last one has reported.
    words += ["--name", names.DETECTOR]
    for namespace in settings.config_maps:
        words += ["--config-maps", namespace]
    for name, node in submission.named_nodes.items():
        words += ["--node-name", f"{name}={node}"]
    return container_of(settings, names.DETECTOR, words)


def _own_controller(settings: Settings) -> tuple[str, ...]:
    return ("--controller", f"127.0.0.1:{settings.port}", "--token-file", f"{TOKEN_FOLDER}/token")


def _platform(settings: Settings) -> dict[str, Any]:
    words = ["midstep", "platform", "kubernetes", "--job", settings.job, *_own_controller(settings)]
    words += [*_SETTINGS, "--option", f"address=$({names.POD_IP})", *(["--standby"] if settings.store else [])]
    container = container_of(settings, names.PLATFORM, words)
    return {**container, "env": [*container["env"], from_field(names.POD_IP, "status.podIP")]}


def container_of(settings: Settings, name: str, command: Sequence[str]) -> dict[str, Any]:
    own = [
        {"name": "midstep-files", "mountPath": FILES, "readOnly": True},
        {"name": "midstep-own", "mountPath": OWN_FOLDER},
    ]
    return {
        "name": name,
        "image": settings.image,
        "command": list(command),
        "env": [],
        "volumeMounts": [*mounts(settings), *own],
    }


def named_object(settings: Settings, kind: str, api: str = "v1") -> dict[str, Any]:
    metadata = {"name": names.of_job(settings.job), "labels": names.labels(settings.job)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def in_namespace(manifest: dict[str, Any], namespace: str) -> dict[str, Any]:
    if manifest["kind"].startswith("Cluster"):
        return manifest
    where = manifest["metadata"].get("namespace", namespace)
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": where}}


# --- a job of roles ---------------------------------------------------------------------------------------------------


def role_manifests(
    settings: Settings, roles: str, directory: str, token: FullToken, namespace: str
) -> list[dict[str, Any]]:
    """Return the objects of a job of roles, the Deployment first.

    `roles`: the text of its file. `directory`: of the job, on a volume that all its pods see.
    """
    objects = [
        _launcher_deployment(settings, directory),
        *account(settings, namespace),
        secret(settings, token),
        config_map(settings, {ROLES_FILE: roles}),
    ]
    return [in_namespace(each, namespace) for each in objects]


def _launcher_deployment(settings: Settings, directory: str) -> dict[str, Any]:
    """Return what keeps the launcher of all roles running. Another one finds the roles' jobs again."""
    first = [check(settings), _submit_roles(settings, directory)]
    pod = movable_pod(settings, names.LAUNCHER, first, [_launcher(settings, directory)])
    return kept_running(settings, names.LAUNCHER, laid_over(pod, settings.launcher), 1, overlap=False)


def _submit_roles(settings: Settings, directory: str) -> dict[str, Any]:
    """Check the file and the scripts where they will run, and found the job, unless a pod before has done so."""
    words = ["midstep", "submit", "--roles", f"{FILES}/{ROLES_FILE}", "--job", settings.job, "--job-dir", directory]
    return container_of(settings, names.SUBMIT, [*words, "--platform", "kubernetes", "--if-absent"])


def _launcher(settings: Settings, directory: str) -> dict[str, Any]:
    # SIGTERM would stop all roles, and the pod may only be on its way to another host.
    words = ["sh", "-c", KILLED_BY_TERM, "sh", "midstep", "resume", directory]
    container = container_of(settings, names.LAUNCHER, words)
    return {**container, "env": [*container["env"], from_field(names.POD_IP, "status.podIP")]}
