"""Makes the objects of a job, shows what its ranks print, and ends with the job's exit code."""

import asyncio
import contextlib
import math
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from ...platforms.kubernetes import names
from ...platforms.kubernetes.api import Api, RequestRefused, Unavailable, pause_s, watch
from ...platforms.kubernetes.fleet import PodPhase, Trouble, read_pod, troubles
from ...protocol.errors import PlatformError
from . import Echo

INTERRUPTED = 130
FAILED = 1
LOOK_S = 1.0
PATIENCE_S = 30.0  # with an API that does not answer, for the objects
GONE_S = 120.0
LAST_LINES_S = 3.0
BEFORE = frozenset({names.CHECK, names.SUBMIT})  # containers that end before a job begins
_OF_A_RANK = re.compile(r"\[(\S+ )?rank \d+\] ")  # in a job of roles with the role's name
Say = Callable[[str], None]
Manifests = Sequence[dict[str, Any]]
MOST_SHOWN = 16  # pods at once
_MARGIN_S = 5  # what is asked for again: the host's clock and a slow line


class End(msgspec.Struct, frozen=True):
    """How a job has ended. `of_job`: it has said so itself; else it was taken away."""

    exit_code: int
    reason: str
    of_job: bool


async def run(
    api: Api,
    job: str,
    objects: Manifests,
    echo: Echo,
    *,
    follow: bool,
    shown: str = names.AGENT,
    quiet: bool = False,
) -> int:
    """Make the objects, follow the job to its end and remove them; return its exit code. Raises PlatformError.

    Ctrl-C ends the following, not the job, as it does with `kubectl logs -f`. `shown`: as of `Following`. `quiet`: what
    ranks print is not shown.
    """

    def say(text: str) -> None:
        echo(f"midstep: {text}", err=True)

    def show(line: str) -> None:
        if not (quiet and _OF_A_RANK.match(line)):
            echo(line)

    try:
        await make(api, job, objects, say)
        say(f"job {job} in the namespace {api.namespace}; `kubectl delete deployment {names.of_job(job)}` ends it")
        if not follow:
            return 0
        following = asyncio.create_task(Following(api, job, say, show, shown=shown).result())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, following.cancel)
        try:
            code = (await following).exit_code
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


async def make(api: Api, job: str, objects: Manifests, say: Say, *, owner: dict[str, Any] | None = None) -> None:
    """Make a job's objects: the Deployment, which owns all others. Raises PlatformError, and leaves none then.

    `owner`: of the Deployment, a reference. What such a job has already stays.
    """
    deployment, *others = objects
    again = owner is not None
    if owner is not None:
        deployment = {**deployment, "metadata": {**deployment["metadata"], "ownerReferences": [owner]}}
    made = await answered(partial(api.create, deployment))
    if made is None and again:
        made = await answered(partial(api.deployment, names.of_job(job)))
    if made is None:
        raise PlatformError(
            f"there is a job {job} in the namespace {api.namespace} already. Choose another --job, or end that one: "
            f"`kubectl delete deployment {names.of_job(job)}`."
        )
    itself = names.owner_reference("Deployment", "apps/v1", names.of_job(job), made["metadata"]["uid"])
    try:
        for each in others:
            owned = _can_be_owned(each, deployment)
            metadata = {**each["metadata"], "ownerReferences": [itself]} if owned else each["metadata"]
            if await answered(partial(api.create, {**each, "metadata": metadata})) is None and owned and not again:
                raise PlatformError(f"{each['kind']} {metadata['name']} is there already: what was it left by?")
    except PlatformError:
        if not again:
            await remove(api, job, objects, say)
        raise


async def remove(api: Api, job: str, objects: Manifests, say: Say) -> None:
    """Remove all objects of a job, and wait until they are gone, the agents' pods too. Raises PlatformError.

    A pod whose machine is off stays until its machine is back: that is said, and is no error.
    """
    name, agents = names.of_job(job), names.selected(job, names.AGENT)
    left: list[str] | None = None
    for each in objects:
        if not _can_be_owned(each, objects[0]):
            await answered(partial(api.delete_unowned, each))
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
    """Return whether an object is in the namespace of the Deployment, which alone can own it there."""
    return bool(manifest["metadata"].get("namespace") == deployment["metadata"]["namespace"])


class Following:
    """Shows a job, and finds out how it ends.

    `shown`: AGENT or LAUNCHER: the pods whose output is shown with `show`, and their container.
    """

    def __init__(self, api: Api, job: str, say: Say, show: Say, *, shown: str = names.AGENT) -> None:
        self._api = api
        self._job = job
        self._say = say
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._shown = shown
        self._output = Output(api, shown, show)
        self._phases: dict[str, PodPhase] = {}
        self._told: set[Trouble] = set()
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def result(self) -> End:
        """Return how the job has ended, once it has. Raises PlatformError when it cannot begin."""
        try:
            for role in (self._shown, *((names.CONTROLLER,) if self._shown == names.AGENT else ())):
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

    async def _ended(self) -> End:
        while True:
            if self._failed.done():
                raise PlatformError(self._failed.result())
            try:
                deployment = await self._api.deployment(names.of_job(self._job))
            except Unavailable:
                deployment = {}
            if deployment is None:
                self._say("its Deployment was deleted, and so the job was ended")
                return End(FAILED, "its Deployment was deleted", of_job=False)
            annotations = deployment.get("metadata", {}).get("annotations") or {}
            if names.EXIT_CODE in annotations:
                await self._output.last_lines(LAST_LINES_S)
                end = End(int(annotations[names.EXIT_CODE]), annotations.get(names.REASON, ""), of_job=True)
                self._say(f"{end.reason} (exit code {end.exit_code})")
                return end
            await asyncio.sleep(LOOK_S)

    def _take_all(self, role: str, pods: list[dict[str, Any]]) -> None:
        if role == self._shown:
            self._output.keep({pod["metadata"]["name"] for pod in pods})
        for pod in pods:
            self._take_one(role, "ADDED", pod)

    def _take_one(self, role: str, operation: str, pod: dict[str, Any]) -> None:
        if operation == "DELETED":
            self._output.drop(pod["metadata"]["name"])
            return
        if role == self._shown:
            self._take_shown(pod)
        self._tell(pod)

    def _take_shown(self, pod: dict[str, Any]) -> None:
        reading = read_pod(pod)
        name = reading.node or reading.name
        if self._phases.get(name) is not reading.phase:
            self._phases[name] = reading.phase
            where = f" on {reading.host}" if reading.host else ""
            self._say(f"{name}: {reading.phase.lower()}{where}{': ' + reading.end if reading.end else ''}")
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


async def answered(request: Callable[[], Any]) -> Any:
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


class Output:
    """Shows the output of one container in each of some pods. `show` takes a line."""

    def __init__(self, api: Api, container: str, show: Callable[[str], None]) -> None:
        self._api = api
        self._container = container
        self._show = show
        self._running: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, pod: str) -> None:
        """Show what a pod prints from now on, and has printed, unless many are shown. Idempotent."""
        self._running.add(pod)
        if pod not in self._tasks and len(self._tasks) < MOST_SHOWN:
            self._tasks[pod] = asyncio.create_task(self._follow(pod))

    def finish(self, pod: str) -> None:
        """Note that a pod has ended: what it has printed is shown to its end. Idempotent."""
        self._running.discard(pod)

    def drop(self, pod: str) -> None:
        """Forget a pod that is gone, and its output with it. Idempotent."""
        self.finish(pod)
        if pod in self._tasks:
            self._tasks.pop(pod).cancel()

    def keep(self, pods: set[str]) -> None:
        """Forget all pods but these: the others are gone."""
        for pod in self._tasks.keys() - pods:
            self.drop(pod)

    async def last_lines(self, limit_s: float) -> None:
        """Wait until the output of all pods has ended, for a while."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=limit_s)

    async def close(self) -> None:
        """Show no more. Idempotent."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, pod: str) -> None:
        clock = asyncio.get_running_loop().time
        last, shown_at, failures = "", 0.0, 0
        while True:
            ends = pod not in self._running
            since_s = math.ceil(clock() - shown_at) + _MARGIN_S if last else None
            try:
                async with aclosing(self._api.log(pod, self._container, since_s)) as lines:
                    async for written, text in lines:
                        if written > last:
                            last, shown_at, failures = written, clock(), 0
                            self._show(text)
                if ends:
                    return
            except RequestRefused:
                return
            except Unavailable:
                pass
            await asyncio.sleep(pause_s(failures))
            failures += 1
