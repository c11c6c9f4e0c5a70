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

from ...cli.display.plain import echo
from ...platforms.kubernetes.objects import Submission, default_directory, lease_store, manifests
from ...platforms.kubernetes.settings import (
    LEASE_SCHEME,
    Settings,
    checked_condition,
    checked_controllers,
    checked_job,
    parse_resource,
    parse_volume,
)
from ...policies.acjob.translation import Translation
from ...policies.files import render
from ...protocol.errors import ConfigurationError
from ...protocol.secret_files import read_token
from ...protocol.token import FullToken, full, new_token
from ..jobs.directories import checked_name
from ..jobs.start import Start, new_name, policy_of
from .options import PodFlags

_log = logging.getLogger(__name__)
DEFAULT_NAMESPACE = "default"
_RUN_BYTES = 4


def launch(start: Start, flags: PodFlags, token_file: Path | None, *, quiet: bool) -> int:
    """Make a job's objects and follow it to its end, or print them; return the exit code. Raises MidstepError."""
    settings = settings_of(start, flags)
    submission = submission_of(start, settings, _translated(start, flags))
    token = token_of(token_file, settings.job)
    if flags.dry_run:
        objects = manifests(settings, submission, token, flags.namespace or DEFAULT_NAMESPACE)
        yaml.safe_dump_all(objects, sys.stdout, sort_keys=False)
        return 0
    from ...platforms.kubernetes.api import Api
    from .following import run

    api = Api(flags.namespace)
    objects = manifests(settings, submission, token, api.namespace)
    return asyncio.run(run(api, settings.job, objects, follow=not flags.detach, say=say, quiet=quiet))


def settings_of(start: Start, flags: PodFlags, *, has_roles: bool = False) -> Settings:
    """Return what the job's pods are like. Raises ConfigurationError."""
    if flags.image is None:
        raise ConfigurationError("--platform kubernetes needs --image: one with midstep and the script in it.")
    if flags.launcher_template is not None and not has_roles:
        raise ConfigurationError("--launcher-template goes with --roles: other jobs have no launcher in a pod.")
    if start.fault_sources or start.fixed_nodes:
        raise ConfigurationError(
            "--fault-source and --fixed-nodes are for nodes on this machine; see --config-maps for faults of hardware."
        )
    store, shared = _store(flags.store), tuple(map(parse_volume, flags.volumes))
    settings = Settings(
        job=checked_job(checked_name(start.job or new_name())),
        image=flags.image,
        resources=dict(map(parse_resource, flags.resources)),
        volumes=shared,
        environment=start.environment,
        agent=_template(flags.pod_template),
        controller=_template(flags.controller_template),
        launcher=_template(flags.launcher_template),
        watch_nodes=flags.watch_nodes or bool(flags.node_conditions),
        node_conditions=tuple(map(checked_condition, dict.fromkeys(flags.node_conditions))),
        controllers=checked_controllers(flags.controllers, store, shared),
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


def submission_of(start: Start, settings: Settings, translated: Translation | None = None) -> Submission:
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


def _translated(start: Start, flags: PodFlags) -> Translation | None:
    """Return the policy of the AscendJob that is named, if one is. Raises MidstepError."""
    if flags.acjob is None:
        return None
    if start.policy_file is not None:
        raise ConfigurationError("--acjob and --policy both give the job's policy: choose one of them.")
    from .acjob import read_from_cluster

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
    if given.startswith(LEASE_SCHEME):
        raise ConfigurationError(f"--store {given}: that is what --controllers chooses for a job without --store.")
    from ...controller.etcd.place import parse_place

    return str(parse_place(given, secrets.token_hex(_RUN_BYTES)))


def token_of(file: Path | None, job: str) -> FullToken:
    """Return the token of a file or of the environment, or a new one. Raises ConfigurationError."""
    token = read_token(file, os.environ)
    return new_token(job=job) if token is None else full(token)


def _template(file: Path | None) -> dict[str, Any]:
    """Return what a template says. Raises ConfigurationError."""
    if file is None:
        return {}
    try:
        found = yaml.safe_load(file.read_text())
        template = msgspec.convert(found, dict[str, Any])
    except (OSError, yaml.YAMLError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{file} is no part of a Pod's manifest: {error}.") from error
    unknown = set(template) - {"apiVersion", "kind", "metadata", "spec"}
    if unknown:
        raise ConfigurationError(f"{file}: a Pod has metadata and spec, and no {', '.join(sorted(unknown))}.")
    return template


def say(text: str) -> None:
    echo(f"midstep: {text}", err=True)
