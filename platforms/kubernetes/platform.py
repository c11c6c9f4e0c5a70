"""The `kubernetes` platform: makes and deletes pods as the controller asks, and tells it what happens to them.

Runs beside the controller, in its pod. While the API does not answer, nothing is lost but time: requests are repeated,
training continues, and faults of processes are recovered from without it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigurationError
from ...protocol.messages import CreateNode, DeleteNode, EndJob, KillNode, NodeRefused, PlatformJoined
from ..base import PlatformContext
from . import names
from .api import Api, RequestRefused, Unavailable, pause_s, watch
from .deployment import IncidentEvents, OwnDeployment
from .fleet import PodFleet, Word, read_host, read_pod
from .pods import agent_pod
from .rules import CLUSTER_RIGHTS, CONFIG_MAP_RIGHTS, ApiRight, own_rights
from .settings import Settings, read_settings

SETTINGS_OPTION = "settings"
ADDRESS_OPTION = "address"
GOODBYE_S = 2  # for a pod that is deleted on purpose: nothing on it is needed any more
FORCED_AFTER_S = 6.0  # the host has not confirmed it until then, so it does not answer
ENDING_S = 20.0  # for agents to end by themselves
GONE_S = 30.0
_LOOK_S = 0.1
PATIENCE_S = 60.0  # with an API that does not answer

_log = logging.getLogger(__name__)


class KubernetesPlatform:
    """Nodes as pods. Construct it in the running loop; `close` it when the job has ended."""

    def __init__(self, context: PlatformContext, settings: Settings, api: Api, address: str) -> None:
        """`address`: of this pod, where agents that start now find the controller sooner than by its name."""
        self._context = context
        self._settings = settings
        self._api = api
        name = f"{names.of_job(settings.job)}.{api.namespace}.svc"
        self._controllers = [f"{host}:{settings.port}" for host in (address, name) if host]
        self._fleet = PodFleet()
        self._read_host = partial(read_host, conditions=settings.node_conditions)
        self._own = OwnDeployment(api, names.of_job(settings.job))
        self._events = IncidentEvents(api, self._own, context.incidents, self._fleet.pod)
        self._end: EndJob | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        labels = names.selected(settings.job, names.AGENT)
        self._start(
            watch(
                "pods",
                partial(api.pods, labels),
                partial(api.watch_pods, labels),
                on_all=self._take_pods,
                on_event=self._take_pod,
            )
        )
        self._start(self._events.follow())
        if settings.watch_nodes:
            self._start(watch("nodes", api.hosts, api.watch_hosts, on_all=self._take_hosts, on_event=self._take_host))

    # --- commands of the controller ---------------------------------------------------------------------------------

    def describe(self) -> PlatformJoined:
        """Return what can be done in this cluster, and which nodes there are."""
        return PlatformJoined(can_create=True, can_kill=True, nodes=tuple(self._fleet.nodes()))

    def create_node(self, command: CreateNode) -> None:
        """Make a pod."""
        if self._end is None and not self._fleet.is_known(command.node):
            self._fleet.expect(command.node)
            self._start(self._create(command.node))

    def delete_node(self, command: DeleteNode) -> None:
        """Delete a pod; by force where its host does not confirm it."""
        host = self._fleet.isolates(command.node)
        if host:
            self._own.avoid(host)
            self._start(self._own.write())
        pod = self._fleet.delete(command.node)
        name = names.pod_name(self._settings.job, command.node) if pod is None else pod.name
        self._start(self._delete(name))

    def kill_node(self, command: KillNode) -> None:
        """Delete a pod by force."""
        name = names.pod_name(self._settings.job, command.node)
        self._start(self._insist(f"killing {name}", partial(self._api.delete_pod, name, 0)))

    def end_job(self, command: EndJob) -> None:
        """Take note of the end."""
        self._end, self._fleet.ended = command, True
        self._start(self._events.look())  # while the controller can still be asked

    async def close(self) -> None:
        """Delete all pods, write down how the job has ended, and have no controller any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._until(lambda: not self._fleet.has_running(), ENDING_S)
        for name in self._fleet.pods():
            self._start(self._delete(name))
        if not await self._until(lambda: not self._fleet.pods(), GONE_S):
            _log.error("pods that are not gone: %s", ", ".join(self._fleet.pods()))
        if self._end is not None:
            await self._own.end(self._end)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._api.close()

    def is_running(self, node: str) -> bool:
        """Say whether the pod of a node runs, as far as is known here."""
        return self._fleet.is_running(node)

    # --- what is seen -----------------------------------------------------------------------------------------------

    def _take_pods(self, pods: list[dict[str, Any]]) -> None:
        self._tell(self._fleet.take_all(map(read_pod, pods), time.time()))

    def _take_pod(self, operation: str, pod: dict[str, Any]) -> None:
        reading = read_pod(pod)
        take = self._fleet.take_removed if operation == "DELETED" else self._fleet.take_pod
        self._tell(take(reading, time.time()))

    def _take_hosts(self, hosts: list[dict[str, Any]]) -> None:
        self._tell(self._fleet.take_hosts(map(self._read_host, hosts)))

    def _take_host(self, operation: str, host: dict[str, Any]) -> None:
        if operation != "DELETED":  # whether its pods live, their agents say
            self._tell(self._fleet.take_host(self._read_host(host)))

    def _tell(self, words: list[Word]) -> None:
        for word in words:
            _log.info("%s", word)
            self._context.post(word)

    # --- what is done -----------------------------------------------------------------------------------------------

    async def _create(self, node: str) -> None:
        """Make a pod, and tell the controller if the API would never do it."""
        try:
            owner = await self._until_answered(f"the owner of {node}", self._own.reference)
            pod = agent_pod(self._settings, node, self._controllers, avoid=self._own.avoided, owner=owner)
            name = pod["metadata"]["name"]
            await self._until_answered(f"making {name}", partial(self._api.create, pod))
        except RequestRefused as error:
            self._fleet.forget(node)
            self._context.post(NodeRefused(node=node, reason=str(error)))
            return
        _log.info("made %s", name)
        if node not in self._fleet.nodes():
            await self._delete(name)  # ordered meanwhile

    async def _delete(self, name: str) -> None:
        """Delete a pod, and then by force."""
        if not await self._insist(f"deleting {name}", partial(self._api.delete_pod, name, GOODBYE_S)):
            return
        if not await self._until(lambda: name not in self._fleet.pods(), FORCED_AFTER_S):
            _log.warning("%s is deleted by force: its host does not answer", name)
            await self._insist(f"forcing {name}", partial(self._api.delete_pod, name, 0))

    async def _insist(self, what: str, request: Callable[[], Awaitable[bool]]) -> bool:
        """Ask until there is an answer; False also for a refusal, which is logged."""
        try:
            answered: bool = await self._until_answered(what, request)
            return answered
        except RequestRefused as error:
            _log.error("%s: %s", what, error)
            return False

    async def _until_answered(self, what: str, request: Callable[[], Awaitable[Any]]) -> Any:
        """Ask until the API answers. Raises RequestRefused."""
        failures = 0
        while True:
            try:
                return await request()
            except Unavailable as error:
                if not failures:
                    _log.warning("%s is tried again: %s", what, error)
                await asyncio.sleep(pause_s(failures))
                failures += 1

    async def _until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                _log.error("part of the platform has failed", exc_info=error)


def kubernetes_platform(context: PlatformContext) -> KubernetesPlatform:
    """Make the platform of a pod. Raises ConfigurationError."""
    return KubernetesPlatform(context, _settings(context), Api(), context.options.get(ADDRESS_OPTION, ""))


async def check_kubernetes(context: PlatformContext) -> None:
    """Check that the platform of this pod can do its work. Raises ConfigurationError, Unavailable."""
    await check_rights(context, _settings(context))


def _settings(context: PlatformContext) -> Settings:
    unknown = set(context.options) - {SETTINGS_OPTION, ADDRESS_OPTION}
    if unknown or SETTINGS_OPTION not in context.options:
        raise ConfigurationError(
            f"the platform kubernetes takes --option {SETTINGS_OPTION}=FILE and {ADDRESS_OPTION}=IP, and no "
            f"{', '.join(sorted(unknown)) or 'less'}. `midstep run --platform kubernetes` starts it."
        )
    settings = read_settings(Path(context.options[SETTINGS_OPTION]))
    if settings.job != context.job:
        raise ConfigurationError(
            f"{context.options[SETTINGS_OPTION]} is for the job {settings.job}, not {context.job}."
        )
    return settings


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
