"""From the flags of `midstep run` to a job in Kubernetes."""

import asyncio
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ...platforms.kubernetes import names
from ...platforms.kubernetes import settings as kubernetes
from ...platforms.kubernetes.objects import Submission, default_directory, lease_store, manifests, role_manifests
from ...policies.acjob.translation import Translation, translate
from ...policies.files import render
from ...policies.scripted_roles import JobOfRoles, parse_roles
from ...policies.yaml_text import read_text
from ...protocol.errors import ConfigurationError
from ...protocol.token import FullToken, full, new_token, read_token
from ..directories import HIGHEST_ATTEMPT, checked_name, role_job
from ..job import Start, new_name, policy_of
from . import Echo, PodFlags

_log = logging.getLogger(__name__)
DEFAULT_NAMESPACE = "default"
_RUN_BYTES = 4


def launch(start: Start, flags: PodFlags, token_file: Path | None, echo: Echo, *, quiet: bool) -> int:
    """Make a job's objects and follow it to its end, or print them; return the exit code. Raises MidstepError.

    `echo` prints lines for the user.
    """
    settings = settings_of(start, flags)
    submission = submission_of(start, settings, _translated(start, flags, echo))
    token = token_of(token_file, settings.job)
    if flags.dry_run:
        objects = manifests(settings, submission, token, flags.namespace or DEFAULT_NAMESPACE)
        yaml.safe_dump_all(objects, sys.stdout, sort_keys=False)
        return 0

    from ...platforms.kubernetes.api import Api
    from .following import run

    api = Api(flags.namespace)
    objects = manifests(settings, submission, token, api.namespace)
    return asyncio.run(run(api, settings.job, objects, echo, follow=not flags.detach, quiet=quiet))


def settings_of(start: Start, flags: PodFlags, *, has_roles: bool = False) -> kubernetes.Settings:
    """Return what the job's pods are like. Raises ConfigurationError."""
    if flags.image is None:
        raise ConfigurationError("--platform kubernetes needs --image: one with midstep and the script in it.")
    if flags.launcher_template is not None and not has_roles:
        raise ConfigurationError("--launcher-template goes with --roles: other jobs have no launcher in a pod.")
    if start.fault_sources or start.fixed_nodes:
        raise ConfigurationError(
            "--fault-source and --fixed-nodes are for nodes on this machine; see --config-maps for faults of hardware."
        )
    store, shared = _store(flags.store), tuple(map(kubernetes.parse_volume, flags.volumes))
    settings = kubernetes.Settings(
        job=kubernetes.checked_job(checked_name(start.job or new_name())),
        image=flags.image,
        resources=dict(map(kubernetes.parse_resource, flags.resources)),
        volumes=shared,
        environment=start.environment,
        agent=_template(flags.pod_template),
        controller=_template(flags.controller_template),
        launcher=_template(flags.launcher_template),
        pod_group=None if flags.pod_group is None else _template(flags.pod_group, "PodGroup"),
        watch_nodes=flags.watch_nodes or bool(flags.node_conditions),
        node_conditions=tuple(map(kubernetes.checked_condition, dict.fromkeys(flags.node_conditions))),
        controllers=kubernetes.checked_controllers(flags.controllers, store, shared),
        store=store,
        config_maps=tuple(dict.fromkeys(flags.config_maps)),
        has_roles=has_roles,
    )
    if not settings.volumes and start.job_directory is None:
        lost = "checkpoints are" if settings.store else "journal and its checkpoints are"
        _log.warning("without --volume the job's %s lost with its pods: name a claim for them", lost)
    if settings.controllers > 1 and not store:
        directory = default_directory(settings) if start.job_directory is None else str(start.job_directory)
        return msgspec.structs.replace(settings, store=lease_store(settings, directory))
    return settings


def submission_of(start: Start, settings: kubernetes.Settings, translated: Translation | None = None) -> Submission:
    """Return what is submitted in the controller's pod. `translated`: the policy in the place of a file's.

    Raises ConfigurationError for a policy that does not fit.
    """
    policy = policy_of(start, None if translated is None else translated.policy)
    nodes = str(start.nodes) if start.least_nodes is None else f"{start.least_nodes}:{start.nodes}"
    words = ["--nnodes", nodes, "--nproc-per-node", str(start.ranks_per_node), "--spares", str(start.spare_nodes)]
    words += ["--max-restarts", str(start.max_restarts)] if start.max_restarts else []
    words += ["--device", start.device] if start.device is not None else []
    flags = {"--mindio": start.mindio, "--module": start.is_module, "--no-python": start.no_python}
    words += [flag for flag, given in flags.items() if given]
    return Submission(
        words=(*words, *start.command),
        nodes=start.nodes if start.least_nodes is None else start.least_nodes,
        spares=start.spare_nodes,
        directory=default_directory(settings) if start.job_directory is None else str(start.job_directory),
        policy=translated.text if translated is not None else _policy_text(start),
        named_nodes=policy.faults.named_nodes,
    )


def _translated(start: Start, flags: PodFlags, echo: Echo) -> Translation | None:
    """Return the policy of the AscendJob that is named, if one is. Raises MidstepError."""
    if flags.acjob is None:
        return None
    if start.policy_file is not None:
        raise ConfigurationError("--acjob and --policy both give the job's policy: choose one of them.")
    pass

    translated = read_from_cluster(flags.acjob, flags.namespace)
    for note in translated.notes:
        echo(str(note), err=True)
    return translated


def _policy_text(start: Start) -> str | None:
    if start.policy_file is not None:
        return start.policy_file.read_text()
    return None if start.policy is None else render(start.policy)


def _store(given: str | None) -> str:
    """Return where in an etcd this run of the job is kept, or "" without one. Raises ConfigurationError.

    Each run has a place of its own: a job of the same name in another namespace, or one that has ended, is not met.
    """
    if given is None:
        return ""
    if given.startswith(kubernetes.LEASE_SCHEME):
        raise ConfigurationError(f"--store {given}: that is what --controllers chooses for a job without --store.")
    from ...controller.etcd.place import parse_place

    return str(parse_place(given, secrets.token_hex(_RUN_BYTES)))


def token_of(file: Path | None, job: str) -> FullToken:
    """Return the token of a file or of the environment, or a new one. Raises ConfigurationError."""
    token = read_token(file, os.environ)
    return new_token(job=job) if token is None else full(token)


def _template(file: Path | None, kind: str = "Pod") -> dict[str, Any]:
    """Return the part of a manifest that a file has. Raises ConfigurationError."""
    if file is None:
        return {}
    try:
        found = yaml.safe_load(file.read_text())
        template = msgspec.convert(found, dict[str, Any])
    except (OSError, yaml.YAMLError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{file} is no part of a {kind}'s manifest: {error}.") from error
    unknown = set(template) - {"apiVersion", "kind", "metadata", "spec"}
    if unknown:
        raise ConfigurationError(f"{file}: a {kind} has metadata and spec, and no {', '.join(sorted(unknown))}.")
    return template


def launch_roles(
    file: Path,
    flags: PodFlags,
    echo: Echo,
    *,
    job: str | None,
    job_directory: Path | None,
    environment: dict[str, str],
    fixed_nodes: bool,
    token_file: Path | None,
    quiet: bool,
) -> int:
    """Make the objects of a job of roles and follow it to its end, or print them; return the exit code.

    Raises MidstepError.
    """
    text = read_text(file)
    plan = parse_roles(text, str(file))
    start = Start(command=(), job=job, job_directory=job_directory, environment=environment, fixed_nodes=fixed_nodes)
    # The roles' jobs have stores of their own; that of the launcher is files on the volume.
    settings = msgspec.structs.replace(settings_of(start, flags, has_roles=True), store="")
    _check_roles(file, plan, settings, flags)
    directory = default_directory(settings) if job_directory is None else str(job_directory)
    token = token_of(token_file, settings.job)
    if flags.dry_run:
        objects = role_manifests(settings, text, directory, token, flags.namespace or DEFAULT_NAMESPACE)
        yaml.safe_dump_all(objects, sys.stdout, sort_keys=False)
        return 0

    from ...platforms.kubernetes.api import Api
    from .following import run

    api = Api(flags.namespace)
    objects = role_manifests(settings, text, directory, token, api.namespace)
    following = run(api, settings.job, objects, echo, follow=not flags.detach, shown=names.LAUNCHER, quiet=quiet)
    return asyncio.run(following)


def _check_roles(file: Path, plan: JobOfRoles, settings: kubernetes.Settings, flags: PodFlags) -> None:
    """Refuse what could not run. Raises ConfigurationError."""
    if flags.store is not None or flags.acjob is not None:
        raise ConfigurationError(
            "--store and --acjob are for one SCRIPT: with --roles the first --volume has the journals, and FILE the "
            "policies."
        )
    if flags.pod_group is not None:
        raise ConfigurationError("--pod-group is for one SCRIPT: make a PodGroup, and name it in --pod-template.")
    if not settings.volumes:
        raise ConfigurationError(
            "--roles on Kubernetes needs --volume CLAIM:/PATH, a claim that pods on all hosts can write "
            "(ReadWriteMany): it has the job's directory, which launcher, controllers and ranks share."
        )
    jobs: dict[str, str] = {}
    for role in plan.roles:
        name = kubernetes.checked_job(role_job("kubernetes", settings.job, role.name, HIGHEST_ATTEMPT))
        if name in jobs:
            raise ConfigurationError(f"{file}: roles {jobs[name]} and {role.name} cannot both name objects: {name}.")
        jobs[name] = role.name
        by_path = not role.given.module and not role.given.no_python
        if by_path and not Path(role.given.script).is_absolute():
            raise ConfigurationError(
                f"{file}: roles.{role.name}.script: found {role.given.script!r}; allowed on Kubernetes: an absolute "
                "path in the image or on a volume"
            )


def read_from_cluster(name: str, namespace: str | None) -> Translation:
    """Return the policy of an AscendJob, with notes on what could not be said in it.

    Raises ConfigurationError: there is none, or it is wrong; PlatformError: the API cannot say.
    """
    from ...platforms.kubernetes.api import Api

    async def find() -> dict[str, Any] | None:
        try:
            return await api.ascend_job(name)
        finally:
            await api.close()

    api = Api(namespace)
    found = asyncio.run(find())
    if found is None:
        raise ConfigurationError(
            f"--acjob {name}: the namespace {api.namespace} has no AscendJob of that name, or the cluster does not "
            "know the kind: `kubectl get ascendjobs` lists what is there."
        )
    return translate(yaml.safe_dump(found, sort_keys=False), f"{api.namespace}/{name}")
