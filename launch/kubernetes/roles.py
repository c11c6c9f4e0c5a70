"""`midstep run --roles FILE --platform kubernetes`: the objects of a job whose launcher is in a pod."""

import asyncio
import sys
from pathlib import Path

import msgspec
import yaml

from ...platforms.kubernetes import names
from ...platforms.kubernetes.objects import default_directory, role_manifests
from ...platforms.kubernetes.settings import Settings, checked_job
from ...policies.scripted_roles import JobOfRoles, parse_roles
from ...policies.yaml_text import read_text
from ...protocol.errors import ConfigurationError
from ..jobs.start import Start
from ..roles.group_files import HIGHEST_ATTEMPT, role_job
from .launch import DEFAULT_NAMESPACE, say, settings_of, token_of
from .options import PodFlags


def launch(
    file: Path,
    flags: PodFlags,
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
    _check(file, plan, settings, flags)
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
    following = run(api, settings.job, objects, follow=not flags.detach, say=say, shown=names.LAUNCHER, quiet=quiet)
    return asyncio.run(following)


def _check(file: Path, plan: JobOfRoles, settings: Settings, flags: PodFlags) -> None:
    """Refuse what could not run. Raises ConfigurationError."""
    if flags.store is not None or flags.acjob is not None:
        raise ConfigurationError(
            "--store and --acjob are for one SCRIPT: with --roles the first --volume has the journals, and FILE the "
            "policies."
        )
    if not settings.volumes:
        raise ConfigurationError(
            "--roles on Kubernetes needs --volume CLAIM:/PATH, a claim that pods on all hosts can write "
            "(ReadWriteMany): it has the job's directory, which launcher, controllers and ranks share."
        )
    jobs: dict[str, str] = {}
    for role in plan.roles:
        name = checked_job(role_job("kubernetes", settings.job, role.name, HIGHEST_ATTEMPT))
        if name in jobs:
            raise ConfigurationError(f"{file}: roles {jobs[name]} and {role.name} cannot both name objects: {name}.")
        jobs[name] = role.name
        by_path = not role.given.module and not role.given.no_python
        if by_path and not Path(role.given.script).is_absolute():
            raise ConfigurationError(
                f"{file}: roles.{role.name}.script: found {role.given.script!r}; allowed on Kubernetes: an absolute "
                "path in the image or on a volume"
            )
