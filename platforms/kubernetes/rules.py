"""The rights of a job's platform in the API: a Role of exact verbs, and a reason for each of them."""

from typing import Any

import msgspec

from . import names
from .settings import Settings


class ApiRight(msgspec.Struct, frozen=True):
    """One verb on one kind of object. `named`: on the job's own object of that kind only."""

    group: str
    resource: str
    verb: str
    why: str
    named: bool = False


RIGHTS = (
    ApiRight("", "pods", "create", "nodes are made"),
    ApiRight("", "pods", "delete", "nodes that the controller leaves are ended, and all when the job ends"),
    ApiRight("", "pods", "list", "which nodes there are, at the start and after a watch was interrupted"),
    ApiRight("", "pods", "watch", "nodes that end, vanish or are about to be evicted"),
    ApiRight("apps", "deployments", "get", "the owner of the pods, and which hosts are to be avoided", named=True),
    ApiRight(
        "apps",
        "deployments",
        "patch",
        "how the job ended, which hosts are to be avoided, and no controller after the end",
        named=True,
    ),
    ApiRight("", "events", "create", "incidents are shown by `kubectl describe`"),
)

# Of a job whose controllers are elected by its Lease.
LEASE_RIGHTS = (
    ApiRight("coordination.k8s.io", "leases", "get", "which of several controllers leads", named=True),
    ApiRight("coordination.k8s.io", "leases", "update", "the controller that leads shows that it lives", named=True),
)

# A Role cannot give these; `--watch-nodes` has them in a ClusterRole.
CLUSTER_RIGHTS = (
    ApiRight("", "nodes", "list", "hosts that are cordoned or tainted, or have a condition, at the start"),
    ApiRight("", "nodes", "watch", "hosts that are cordoned or tainted, or have a condition, from then on"),
)

# Of a job of roles, whose launcher makes a job of each. Their names are not known before, as attempts are numbered.
ROLES_RIGHTS = (
    *(ApiRight("", kind, "create", "the jobs of the roles are made") for kind in ("services", "secrets", "configmaps")),
    ApiRight("policy", "poddisruptionbudgets", "create", "the jobs of the roles are made"),
    ApiRight("apps", "deployments", "create", "the jobs of the roles are made"),
    ApiRight("apps", "deployments", "get", "how the jobs of the roles end, and this one; owners of pods"),
    ApiRight("apps", "deployments", "patch", "how the jobs of the roles have ended, and this one"),
    ApiRight("apps", "deployments", "delete", "jobs of roles that have ended are taken away"),
    ApiRight("", "pods/log", "get", "what the ranks print is shown"),
    ApiRight("coordination.k8s.io", "leases", "create", "the jobs of the roles are made"),
    ApiRight("coordination.k8s.io", "leases", "get", "which of the controllers of a role leads"),
    ApiRight("coordination.k8s.io", "leases", "update", "the controller that leads shows that it lives"),
)

# In each namespace that `--config-maps` names.
CONFIG_MAP_RIGHTS = (
    ApiRight("", "configmaps", "list", "faults of hardware that stand, at the start and after a watch was interrupted"),
    ApiRight("", "configmaps", "watch", "faults of hardware that come and go"),
)


def role(settings: Settings) -> dict[str, Any]:
    """Return the Role of a job."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": _metadata(settings),
        "rules": _rules(own_rights(settings), settings.job),
    }


def own_rights(settings: Settings) -> tuple[ApiRight, ...]:
    """Return the rights of a job's account in its own namespace."""
    if settings.has_roles or settings.group:
        return (*(right for right in RIGHTS if not right.named), *ROLES_RIGHTS)
    return (*RIGHTS, *(LEASE_RIGHTS if settings.has_lease else ()))


def config_map_roles(settings: Settings, namespace: str) -> list[dict[str, Any]]:
    """Return Role and RoleBinding in each namespace of `config_maps`, for the account in `namespace`."""
    objects = []
    for each in settings.config_maps:
        metadata = {**_metadata(settings), "name": cluster_name(settings.job, namespace), "namespace": each}
        objects.append({**role(settings), "metadata": metadata, "rules": _rules(CONFIG_MAP_RIGHTS, settings.job)})
        reference = {**binding(settings)["roleRef"], "name": metadata["name"]}
        subjects = cluster_binding(settings, namespace)["subjects"]
        objects.append({**binding(settings), "metadata": metadata, "roleRef": reference, "subjects": subjects})
    return objects


def cluster_role(settings: Settings, namespace: str) -> dict[str, Any]:
    """Return the ClusterRole of a job that looks at its hosts."""
    metadata = {**_metadata(settings), "name": cluster_name(settings.job, namespace)}
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": metadata,
        "rules": _rules(CLUSTER_RIGHTS, settings.job),
    }


def binding(settings: Settings) -> dict[str, Any]:
    """Return what gives the job's account its Role."""
    name = names.of_job(settings.job)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(settings),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name}],
    }


def cluster_binding(settings: Settings, namespace: str) -> dict[str, Any]:
    """Return what gives the job's account its ClusterRole."""
    name = cluster_name(settings.job, namespace)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {**_metadata(settings), "name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": names.of_job(settings.job), "namespace": namespace}],
    }


def cluster_name(job: str, namespace: str) -> str:
    """Return the name of a job's objects that are in no namespace, or in another one."""
    return f"{names.of_job(job)}.{namespace}"


def _metadata(settings: Settings) -> dict[str, Any]:
    return {"name": names.of_job(settings.job), "labels": names.labels(settings.job)}


def _rules(rights: tuple[ApiRight, ...], job: str) -> list[dict[str, Any]]:
    kinds = dict.fromkeys((right.group, right.resource, right.named) for right in rights)
    rules = []
    for group, resource, named in kinds:
        verbs = [right.verb for right in rights if (right.group, right.resource) == (group, resource)]
        rule: dict[str, Any] = {"apiGroups": [group], "resources": [resource], "verbs": verbs}
        rules.append({**rule, "resourceNames": [names.of_job(job)]} if named else rule)
    return rules
