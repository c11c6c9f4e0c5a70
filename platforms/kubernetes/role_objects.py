"""All objects of a job of roles but those of its roles, whose jobs its launcher makes.

The Deployment of the launcher owns the Deployments of the roles' jobs, and they own what is theirs.
"""

from typing import Any

from ...protocol.token import FullToken
from . import names
from .objects import (
    FILES,
    KILLED_BY_TERM,
    account,
    check,
    config_map,
    container_of,
    in_namespace,
    kept_running,
    movable_pod,
    secret,
)
from .overlay import laid_over
from .pods import from_field
from .settings import Settings

ROLES_FILE = "roles.yaml"


def role_manifests(
    settings: Settings, roles: str, directory: str, token: FullToken, namespace: str
) -> list[dict[str, Any]]:
    """Return the objects of a job of roles, the Deployment first.

    `roles`: the text of its file. `directory`: of the job, on a volume that all its pods see.
    """
    objects = [
        _deployment(settings, directory),
        *account(settings, namespace),
        secret(settings, token),
        config_map(settings, {ROLES_FILE: roles}),
    ]
    return [in_namespace(each, namespace) for each in objects]


def _deployment(settings: Settings, directory: str) -> dict[str, Any]:
    """Return what keeps the launcher of all roles running. Another one finds the roles' jobs again."""
    first = [check(settings), _submit(settings, directory)]
    pod = movable_pod(settings, names.LAUNCHER, first, [_launcher(settings, directory)])
    return kept_running(settings, names.LAUNCHER, laid_over(pod, settings.launcher), 1, overlap=False)


def _submit(settings: Settings, directory: str) -> dict[str, Any]:
    """Check the file and the scripts where they will run, and found the job, unless a pod before has done so."""
    words = ["midstep", "submit", "--roles", f"{FILES}/{ROLES_FILE}", "--job", settings.job, "--job-dir", directory]
    return container_of(settings, names.SUBMIT, [*words, "--platform", "kubernetes", "--if-absent"])


def _launcher(settings: Settings, directory: str) -> dict[str, Any]:
    # SIGTERM would stop all roles, and the pod may only be on its way to another host.
    words = ["sh", "-c", KILLED_BY_TERM, "sh", "midstep", "resume", directory]
    container = container_of(settings, names.LAUNCHER, words)
    return {**container, "env": [*container["env"], from_field(names.POD_IP, "status.podIP")]}
