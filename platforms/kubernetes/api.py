"""The API of Kubernetes as the platform uses it: objects as plain data, failures sorted by what can be done about them.

lightkube comes with the extra `midstep[kubernetes]`; this module and `leases.py` import it, and nothing else does.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

import msgspec

from ...protocol.compat import within
from ...protocol.errors import ConfigurationError, PlatformError

try:
    import httpx2
    from lightkube import AsyncClient, codecs
    from lightkube.core.exceptions import ApiError, ConfigError, LoadResourceError
    from lightkube.generic_resource import create_namespaced_resource
    from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
    from lightkube.resources.apps_v1 import Deployment
    from lightkube.resources.authorization_v1 import SelfSubjectAccessReview
    from lightkube.resources.core_v1 import ConfigMap, Node, Pod
    from lightkube.types import CascadeType, PatchType
except ImportError as _error:
    raise ConfigurationError(
        f"the platform kubernetes needs lightkube ({_error}): pip install 'midstep[kubernetes]'."
    ) from _error

REQUEST_S = 10.0
WATCH_S = 60  # then the server ends a watch, and everything is listed again
_GONE, _NOT_FOUND, _CONFLICT, _BUSY, _TIMED_OUT, _SERVER = 410, 404, 409, 429, 408, 500
_ASCEND_JOB = create_namespaced_resource("mindxdl.gitee.com", "v1", "AscendJob", "ascendjobs")  # of MindCluster
create_namespaced_resource("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups")  # makes the kind known here
_OLD_BUDGET = "policy/v1beta1"  # of PodDisruptionBudget, before Kubernetes 1.21
Manifest = Mapping[str, Any]
Event = tuple[str, dict[str, Any]]
# A connection that ends in the middle of an object shows as an error of the decoder.
_FAILURES = (
    *(httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError),
    *(msgspec.MsgspecError, ConfigError, StopAsyncIteration),
)
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
Listing = Callable[[], Awaitable[tuple[list[dict[str, Any]], str]]]
Watch = Callable[[str], AsyncGenerator[Event, None]]

_log = logging.getLogger(__name__)
logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of each request


class RequestRefused(PlatformError):
    """The API refuses a request, and would do so again: no right to it, a quota, a wrong manifest."""


class Unavailable(PlatformError):
    """The API cannot be reached, or not now. The same request may succeed later."""


class Expired(Unavailable):
    """The version that was watched is not kept any longer (410 Gone): list again."""


class Api:
    """Objects of one namespace. `config`: the path of a kubeconfig; None: that of the pod, or the user's own.

    Methods raise RequestRefused or Unavailable.
    """

    def __init__(self, namespace: str | None = None) -> None:
        """Read the configuration. Raises ConfigurationError."""
        try:
            self._client = AsyncClient(namespace=namespace, timeout=httpx2.Timeout(REQUEST_S), field_manager="midstep")
        except (ConfigError, OSError, KeyError, AttributeError, msgspec.MsgspecError) as error:
            raise ConfigurationError(
                f"there is no cluster to ask ({error}): set KUBECONFIG, or give the pod a service account."
            ) from error

    @property
    def namespace(self) -> str:
        """The namespace that is used where none is given."""
        return str(self._client.namespace)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    # --- objects ----------------------------------------------------------------------------------------------------

    async def create(self, manifest: Manifest) -> dict[str, Any] | None:
        """Create an object and return it; None if there is one of its name."""
        try:
            made = await self._client.create(codecs.from_dict(dict(manifest)))
        except LoadResourceError as error:
            raise RequestRefused(f"{manifest.get('kind')}: {error}") from error
        except _FAILURES as error:
            if _status(error) == _CONFLICT:
                return None
            if _status(error) == _NOT_FOUND and manifest["kind"] == "PodDisruptionBudget":
                return await self._create_old_budget(manifest)
            raise _sorted(error, f"{manifest['kind']} {manifest['metadata']['name']}") from error
        return _plain(made)

    async def delete_pod(self, name: str, grace_s: int) -> bool:
        """Ask for a pod to be deleted; False if there is none."""
        try:
            await self._client.delete(Pod, name, grace_period=grace_s)
        except _FAILURES as error:
            if _status(error) == _NOT_FOUND:
                return False
            raise _sorted(error, f"pod {name}") from error
        return True

    async def delete_deployment(self, name: str) -> bool:
        """Delete a Deployment with all that belongs to it; False: there is none. Pods may outlive it for a moment."""
        try:
            await self._client.delete(Deployment, name, cascade=CascadeType.FOREGROUND)
        except _FAILURES as error:
            if _status(error) == _NOT_FOUND:
                return False
            raise _sorted(error, f"deployment {name}") from error
        return True

    async def delete_unowned(self, manifest: Manifest) -> None:
        """Delete an object that is in another namespace or in none, if it is there."""
        kind: Any = type(codecs.from_dict(dict(manifest)))
        where = {"namespace": manifest["metadata"]["namespace"]} if "namespace" in manifest["metadata"] else {}
        try:
            await self._client.delete(kind, manifest["metadata"]["name"], **where)
        except _FAILURES as error:
            if _status(error) != _NOT_FOUND:
                raise _sorted(error, f"{manifest['kind']} {manifest['metadata']['name']}") from error

    async def deployment(self, name: str) -> dict[str, Any] | None:
        """Return a Deployment; None if there is none."""
        return await self._get(Deployment, name)

    async def ascend_job(self, name: str) -> dict[str, Any] | None:
        """Return an AscendJob of MindCluster; None if there is none, or if the cluster does not know the kind."""
        return await self._get(_ASCEND_JOB, name)

    async def patch_deployment(self, name: str, patch: Manifest) -> None:
        """Change a Deployment by a merge patch."""
        try:
            await self._client.patch(Deployment, name, dict(patch), patch_type=PatchType.MERGE)
        except _FAILURES as error:
            raise _sorted(error, f"deployment {name}") from error

    async def may(self, verb: str, group: str, resource: str, name: str = "", namespace: str = "") -> bool:
        """Return whether this account may do something, in a namespace ("": this one) where the resource is in one."""
        where = namespace or self.namespace
        asked = ResourceAttributes(verb=verb, group=group, resource=resource, name=name or None, namespace=where)
        try:
            review = SelfSubjectAccessReview(spec=SelfSubjectAccessReviewSpec(resourceAttributes=asked))
            answer = await self._client.create(review)
        except _FAILURES as error:
            raise _sorted(error, "own rights") from error
        return bool(answer.status and answer.status.allowed)

    # --- watching ---------------------------------------------------------------------------------------------------

    async def pods(self, labels: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        """Return all pods with these labels, and the version of that list."""
        return await self._list(Pod, labels)

    async def hosts(self) -> tuple[list[dict[str, Any]], str]:
        """Return all nodes of the cluster, and the version of that list."""
        return await self._list(Node, {})

    def watch_pods(self, labels: Mapping[str, str], version: str) -> AsyncGenerator[Event, None]:
        """Yield what happens to pods after a version: ADDED, MODIFIED or DELETED, and the pod.

        Raises Expired. Raises Unavailable also when nothing was heard for longer than the server keeps a watch open.
        """
        return self._watch(Pod, labels, version)

    def watch_hosts(self, version: str) -> AsyncGenerator[Event, None]:
        """Yield what happens to nodes of the cluster after a version, as watch_pods does."""
        return self._watch(Node, {}, version)

    async def config_maps(self, namespace: str) -> tuple[list[dict[str, Any]], str]:
        """Return all ConfigMaps of a namespace, and the version of that list."""
        return await self._list(ConfigMap, {}, namespace)

    def watch_config_maps(self, namespace: str, version: str) -> AsyncGenerator[Event, None]:
        """Yield what happens to ConfigMaps of a namespace after a version, as watch_pods does."""
        return self._watch(ConfigMap, {}, version, namespace)

    async def log(self, pod: str, container: str, since_s: int | None = None) -> AsyncGenerator[tuple[str, str], None]:
        """Yield when each line of a container's output was written, and the line, as they come, until it ends.

        The times are texts that sort. `since_s`: only what was written in so many seconds before now.
        """
        lines = self._client.log(pod, container=container, follow=True, newlines=False, timestamps=True, since=since_s)
        try:
            async for line in lines:
                written, _, text = line.partition(" ")
                yield written, text
        except (*_FAILURES, RuntimeError) as error:  # lightkube 1.0.1 raises that one in place of a refusal
            raise _sorted(error, f"log of {pod}") from error

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _get(self, kind: Any, name: str) -> dict[str, Any] | None:
        try:
            return _plain(await self._client.get(kind, name))
        except _FAILURES as error:
            if _status(error) == _NOT_FOUND:
                return None
            raise _sorted(error, f"{kind.__name__} {name}") from error

    async def _list(
        self, kind: Any, labels: Mapping[str, str], namespace: str | None = None
    ) -> tuple[list[dict[str, Any]], str]:
        try:
            listing = self._client.list(kind, namespace=namespace, labels=dict(labels))
            found = [_plain(each) async for each in listing]
            return found, listing.resourceVersion
        except _FAILURES as error:
            raise _sorted(error, f"list of {kind.__name__}s") from error

    async def _watch(
        self, kind: Any, labels: Mapping[str, str], version: str, namespace: str | None = None
    ) -> AsyncGenerator[Event, None]:
        watching = self._client.watch(
            kind, namespace=namespace, labels=dict(labels), server_timeout=WATCH_S, resource_version=version
        )
        async with aclosing(cast(AsyncGenerator[tuple[str, Any], None], watching)) as events:
            while True:
                try:
                    operation, found = await within(WATCH_S + REQUEST_S, events.__anext__())
                except TimeoutError as error:
                    raise Expired("nothing was heard for long: the connection may be dead") from error
                except _FAILURES as error:
                    raise _sorted(error, f"watch of {kind.__name__}s") from error
                yield operation, _plain(found)

    async def _create_old_budget(self, manifest: Manifest) -> dict[str, Any] | None:
        group, _, version = _OLD_BUDGET.partition("/")
        kind = create_namespaced_resource(group, version, manifest["kind"], "poddisruptionbudgets")
        try:
            return _plain(await self._client.create(kind.from_dict({**manifest, "apiVersion": _OLD_BUDGET})))
        except _FAILURES as error:
            if _status(error) == _CONFLICT:
                return None
            raise _sorted(error, f"{manifest['kind']} {manifest['metadata']['name']}") from error


def _status(error: BaseException) -> int | None:
    """Return the status with which the API has answered; None if it has not."""
    if isinstance(error, ApiError):
        return error.status.code
    return error.response.status_code if isinstance(error, httpx2.HTTPStatusError) else None


def _sorted(error: BaseException, what: str) -> PlatformError:
    code = _status(error)
    text = f"{what}: {error or type(error).__name__}"
    if code == _GONE:
        return Expired(text)
    if code is None or code >= _SERVER or code in {_BUSY, _TIMED_OUT}:
        return Unavailable(text)
    return RequestRefused(text)


def _plain(found: Any) -> dict[str, Any]:
    plain: dict[str, Any] = found.to_dict()
    return plain


def pause_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, 16)))


async def watch(
    what: str,
    listing: Listing,
    events: Watch,
    *,
    on_all: Callable[[list[dict[str, Any]]], None],
    on_event: Callable[[str, dict[str, Any]], None],
) -> None:
    """Hand on all objects, then each change of one, until it is cancelled. `what` is for the log.

    After each interruption all are handed on again: what went away meanwhile is not among them. A refusal is asked
    again, too: the right may be given later.
    """
    failures = 0
    while True:
        try:
            found, version = await listing()
            if failures:
                _log.info("%s are watched again", what)
            failures = 0
            on_all(found)
            async with aclosing(events(version)) as following:
                async for operation, each in following:
                    on_event(operation, each)
        except Expired as error:
            _log.debug("%s are listed again: %s", what, error)
        except (RequestRefused, Unavailable) as error:
            failures += 1
            if failures == 1:
                _log.warning("%s are not watched for now: %s", what, error)
        await asyncio.sleep(pause_s(failures))
