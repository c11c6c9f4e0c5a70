"""The policy that an AscendJob of MindCluster has in the cluster: of its labels and annotations as they are now."""

import asyncio
from typing import Any

import yaml

from ...platforms.kubernetes.api import Api
from ...policies.acjob.translation import Translation, translate
from ...protocol.errors import ConfigurationError


def read_from_cluster(name: str, namespace: str | None) -> Translation:
    """Return the policy of an AscendJob, with notes on what could not be said in it.

    Raises ConfigurationError: there is none, or it is wrong; PlatformError: the API cannot say.
    """
    api = Api(namespace)
    found = asyncio.run(_found(api, name))
    if found is None:
        raise ConfigurationError(
            f"--acjob {name}: the namespace {api.namespace} has no AscendJob of that name, or the cluster does not "
            "know the kind: `kubectl get ascendjobs` lists what is there."
        )
    return translate(yaml.safe_dump(found, sort_keys=False), f"{api.namespace}/{name}")


async def _found(api: Api, name: str) -> dict[str, Any] | None:
    try:
        return await api.ascend_job(name)
    finally:
        await api.close()
