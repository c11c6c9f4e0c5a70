"""Makes the objects of a job, shows what its ranks print, and ends with the job's exit code."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...platforms.kubernetes import names
from ...platforms.kubernetes.api import Api, Unavailable
from ...platforms.kubernetes.readings import PodPhase, read_pod
from ...platforms.kubernetes.trouble import Trouble, troubles
from ...platforms.kubernetes.watching import pause_s, watch
from ...protocol.errors import PlatformError
from ..display.plain import echo
from .output import Output

INTERRUPTED = 130
FAILED = 1
LOOK_S = 1.0
PATIENCE_S = 30.0  # with an API that does not answer, for the objects
GONE_S = 120.0
LAST_LINES_S = 3.0
BEFORE = frozenset({names.CHECK, names.SUBMIT})  # containers that end before a job begins

Say = Callable[[str], None]


async def run(api: Api, job: str, objects: Sequence[dict[str, Any]], *, follow: bool, say: Say) -> int:
    """Make the objects, follow the job to its end and remove them; return its exit code. Raises PlatformError.

    Ctrl-C ends the following, not the job, as it does with `kubectl logs -f`.
    """
    try:
        await make(api, job, objects, say)
        say(f"job {job} in the namespace {api.namespace}; `kubectl delete deployment {names.of_job(job)}` ends it")
        if not follow:
            return 0
        following = asyncio.create_task(Following(api, job, say).result())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, following.cancel)
        try:
            code = await following
        except asyncio.CancelledError:
            say("the job continues without being followed")
            return INTERRUPTED
        except PlatformError:  # it cannot begin
            await remove(api, job, objects, say)
            raise
        await remove(api, job, objects, say)
        return code
    finally:
        await api.close()


async def make(api: Api, job: str, objects: Sequence[dict[str, Any]], say: Say) -> None:
    """Make a job's objects: the Deployment, which owns all others. Raises PlatformError, and leaves none then."""
    deployment, *others = objects
    made = await _answered(partial(api.create, deployment))
    if made is None:
        raise PlatformError(
            f"there is a job {job} in the namespace {api.namespace} already. Choose another --job, or end that one: "
            f"`kubectl delete deployment {names.of_job(job)}`."
        )
    owner = names.owner_reference("Deployment", "apps/v1", names.of_job(job), made["metadata"]["uid"])
    try:
        for each in others:
            owned = _can_be_owned(each, deployment)
            metadata = {**each["metadata"], "ownerReferences": [owner]} if owned else each["metadata"]
            if await _answered(partial(api.create, {**each, "metadata": metadata})) is None and owned:
                raise PlatformError(f"{each['kind']} {metadata['name']} is there already: what was it left by?")
    except PlatformError:
        await remove(api, job, objects, say)
        raise


async def remove(api: Api, job: str, objects: Sequence[dict[str, Any]], say: Say) -> None:
    """Remove all objects of a job, and wait until they are gone, the agents' pods too. Raises PlatformError.

    A pod whose machine is off stays until its machine is back: that is said, and is no error.
    """
    name, agents = names.of_job(job), names.selected(job, names.AGENT)
    left: list[str] | None = None
    for each in objects:
        if not _can_be_owned(each, objects[0]):
            await _answered(partial(api.delete_unowned, each))
    for _ in range(int(GONE_S / LOOK_S)):
        with contextlib.suppress(Unavailable):
            if not await api.delete_deployment(name):
                left = [pod["metadata"]["name"] for pod in (await api.pods(agents))[0]]
                if not left:
                    return
        await asyncio.sleep(LOOK_S)
    if left is None:
        raise PlatformError(f"the Deployment {name} is not gone after {GONE_S:g} s: look what holds it.")
    say(f"not gone after {GONE_S:g} s: {', '.join(left)}; where the machine is lost: `kubectl delete pod NAME --force`")


def _can_be_owned(manifest: dict[str, Any], deployment: dict[str, Any]) -> bool:
    """Whether an object is in the namespace of the Deployment, which alone can own it there."""
    return bool(manifest["metadata"].get("namespace") == deployment["metadata"]["namespace"])


class Following:
    """Shows a job, and finds out how it ends."""

    def __init__(self, api: Api, job: str, say: Say) -> None:
        self._api = api
        self._job = job
        self._say = say
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._output = Output(api, names.AGENT, echo)
        self._phases: dict[str, PodPhase] = {}
        self._told: set[Trouble] = set()
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def result(self) -> int:
        """Return the job's exit code when it has ended. Raises PlatformError when it cannot begin."""
        try:
            for role in (names.AGENT, names.CONTROLLER):
                labels = names.selected(self._job, role)
                listing, events = partial(self._api.pods, labels), partial(self._api.watch_pods, labels)
                on_all, on_event = partial(self._take_all, role), partial(self._take_one, role)
                self._start(role, watch(f"{role}s", listing, events, on_all=on_all, on_event=on_event))
            return await self._ended()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self._output.close()

    async def _ended(self) -> int:
        while True:
            if self._failed.done():
                raise PlatformError(self._failed.result())
            try:
                deployment = await self._api.deployment(names.of_job(self._job))
            except Unavailable:
                deployment = {}
            if deployment is None:
                self._say("its Deployment was deleted, and so the job was ended")
                return FAILED
            annotations = deployment.get("metadata", {}).get("annotations") or {}
            if names.EXIT_CODE in annotations:
                await self._output.last_lines(LAST_LINES_S)
                code = int(annotations[names.EXIT_CODE])
                self._say(f"{annotations.get(names.REASON, '')} (exit code {code})")
                return code
            await asyncio.sleep(LOOK_S)

    def _take_all(self, role: str, pods: list[dict[str, Any]]) -> None:
        if role == names.AGENT:
            self._output.keep({pod["metadata"]["name"] for pod in pods})
        for pod in pods:
            self._take_one(role, "ADDED", pod)

    def _take_one(self, role: str, operation: str, pod: dict[str, Any]) -> None:
        if operation == "DELETED":
            self._output.drop(pod["metadata"]["name"])
            return
        if role == names.AGENT:
            self._take_agent(pod)
        self._tell(pod)

    def _take_agent(self, pod: dict[str, Any]) -> None:
        reading = read_pod(pod)
        if self._phases.get(reading.node) is not reading.phase:
            self._phases[reading.node] = reading.phase
            where = f" on {reading.host}" if reading.host else ""
            self._say(f"{reading.node}: {reading.phase.lower()}{where}{': ' + reading.end if reading.end else ''}")
        if reading.phase is PodPhase.RUNNING:
            self._output.begin(reading.name)
        else:
            self._output.finish(reading.name)

    def _tell(self, pod: dict[str, Any]) -> None:
        for trouble in troubles(pod):
            if trouble in self._told:
                continue
            self._told.add(trouble)
            self._say(f"{pod['metadata']['name']}: {trouble.container}: {trouble.text}")
            if trouble.container in BEFORE and trouble.ended and not self._failed.done():
                self._start(names.SUBMIT, self._fail(pod["metadata"]["name"], trouble.container))

    async def _fail(self, pod: str, container: str) -> None:
        """End the following with what has been printed before the job could begin: it would fail again."""
        lines = []
        with contextlib.suppress(PlatformError):
            async for _, text in self._api.log(pod, container):
                lines.append(text)
        self._failed.set_result("the job cannot begin: " + "\n".join(lines[-20:]))

    def _start(self, name: str, work: Any) -> None:
        self._tasks[name] = asyncio.create_task(work)


async def _answered(request: Callable[[], Any]) -> Any:
    """Ask until the API answers, for a while. Raises PlatformError."""
    loop = asyncio.get_running_loop()
    deadline, failures = loop.time() + PATIENCE_S, 0
    while True:
        try:
            return await request()
        except Unavailable:
            if loop.time() > deadline:
                raise
            await asyncio.sleep(pause_s(failures))
            failures += 1
