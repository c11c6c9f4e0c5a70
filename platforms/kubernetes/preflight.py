"""Before a job begins: whether its account has every right that it will need, also the one that only its end takes."""

import asyncio
import logging
import time

from ...protocol.errors import ConfigurationError
from ..base import PlatformContext
from . import names
from .api import Api, RequestRefused, Unavailable
from .rules import CLUSTER_RIGHTS, CONFIG_MAP_RIGHTS, ApiRight, own_rights
from .settings import Settings
from .watching import pause_s

PATIENCE_S = 60.0  # with an API that does not answer

_log = logging.getLogger(__name__)


async def check_rights(context: PlatformContext, settings: Settings) -> None:
    """Ask the API whether this account has the rights of its job. Runs in the controller's pod, before all else.

    Raises:
        ConfigurationError: Rights are missing; the text names each verb and what it is for.
        Unavailable: The API has not answered for a minute.
    """
    api = Api()
    try:
        own = (*own_rights(settings), *(CLUSTER_RIGHTS if settings.watch_nodes else ()))
        wanted = [(api.namespace, own), *((namespace, CONFIG_MAP_RIGHTS) for namespace in settings.config_maps)]
        missing = [
            (namespace, right)
            for namespace, rights in wanted
            for right in rights
            if not await _has(api, right, names.of_job(context.job), namespace)
        ]
    except RequestRefused as error:
        _log.warning("which rights this account has cannot be asked, so they are not checked: %s", error)
        return
    finally:
        await api.close()
    if missing:
        where = ", ".join(dict.fromkeys(namespace for namespace, _ in missing))
        lacking = "\n".join(f"  {right.verb} {right.resource}: {right.why}" for _, right in missing)
        account = names.of_job(settings.group or context.job)
        raise ConfigurationError(
            f"the service account {account} lacks rights in the namespace {where}:\n{lacking}\n"
            "Its Role has them as `midstep run --platform kubernetes --dry-run` prints it: apply that one."
        )


async def _has(api: Api, right: ApiRight, job: str, namespace: str) -> bool:
    deadline, failures = time.monotonic() + PATIENCE_S, 0
    while True:
        try:
            return await api.may(right.verb, right.group, right.resource, job if right.named else "", namespace)
        except Unavailable:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(pause_s(failures))
        failures += 1
