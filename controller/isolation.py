"""Isolate across jobs: what came too often on a device is kept in a folder, which the next jobs read at their start.

The folder is in the home of the jobs: those of one user on one machine, or on all machines that share it. Each device
has a document there, with the job that raised its fault (`faults.too_often`), and until when it holds
(`faults.isolate_s`). A job that has no world yet takes what holds for reports of a detector, so the nodes are unfit
before any rank is placed. Ranks that train are left alone, and spare nodes are not; each job hears what is released, or
over.

A release rewrites the document, as the controller that wrote it may be followed by one that knows the fault as well.
Files are read and written by a thread: the folder may be on a file server that hangs, and no recovery waits for it.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import quote

import msgspec

from ..policies.fault_codes import LevelName, level_named
from ..protocol.bounds import Device, Name, Seconds, Text
from ..protocol.errors import ForeignFile
from ..protocol.private_files import make_private_directory, read_own_file, replace_file
from ..protocol.types import Assertion, FaultKind, FaultReport, JobSpec, detector_address
from .metrics import Observation, publish_every_s
from .recovery.fitness import came_too_often
from .recovery.state import JobState, Phase
from .recovery.world import REACHABLE, World

SEEN_BY = detector_address("isolated")
ENDING = ".json"
MOST = 1000  # documents; of more, those that hold no longer go, and then the oldest
MOST_BYTES = 64 * 1024  # of one
MOST_LISTED = 10 * MOST  # names in the folder that are looked at
MOST_WAITING = 1000  # documents that cannot be written now
MOST_SAID = 1000  # lines in the log that are not repeated
READ_S = 2.0
BEGINNING_S = 0.25  # between two looks before ranks are placed: nodes come
FIRST_READ_S = 0.5  # so long a controller waits for the folder before it begins
LAST_WRITE_S = 2.0  # so long it waits for its last document
AGAIN_S = 30.0  # what was told and is not known yet is told again
_ID = "isolated/"  # begins the id of each fault that is told here: people may call a detector of theirs so
_LONGEST_NODE = 253
_LONGEST_STEM = 200  # bytes of a file's name
_LONGEST_WHY = 500

_log = logging.getLogger(__name__)
Answer = Callable[[object], None]


class Isolated(msgspec.Struct, frozen=True):
    """One document: a device of a node, or with `device` None the whole node. Times are wall-clock seconds.

    `node`: the machine, where the node is known by that; else MACHINE/NODE, of a job with all nodes on one machine.
    """

    node: Annotated[str, msgspec.Meta(min_length=1, max_length=_LONGEST_NODE)]
    device: Device | None
    code: Name
    job: Name
    at_s: Seconds
    until_s: Seconds
    detail: Text = ""

    @property
    def place(self) -> str:
        """Name node and device."""
        return self.node if self.device is None else f"{self.node}, device {self.device}"

    @property
    def file_name(self) -> str:
        """The name of its file, which people can read as long as it is not too long."""
        name = f"{self.node} {'node' if self.device is None else self.device}"
        stem = quote(name, safe=" ").replace(" ", "+").lstrip(".")
        is_long = len(stem) > _LONGEST_STEM
        return (hashlib.blake2b(name.encode(), digest_size=16).hexdigest() if is_long else stem) + ENDING


_decode = msgspec.json.Decoder(Isolated).decode


class IsolationStore:
    """The documents of a folder. One that cannot be read stays as it is, and is named in `problems` by its path."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        """Touch nothing yet."""
        self.folder, self._now = folder, now
        self.problems: dict[Path, str] = {}  # of the last `read`

    def read(self) -> list[Isolated]:
        """Return what holds now, by node and device. Raises OSError where the folder cannot be listed."""
        documents = self._documents()
        return sorted(
            (each for each in documents.values() if self._now() < each.until_s),
            key=lambda each: (each.node, -1 if each.device is None else each.device),
        )

    def add(self, document: Isolated) -> None:
        """Keep a document, unless one about the same device is as new, or it holds no longer. Raises OSError."""
        path = self.folder / document.file_name
        documents = self._documents()
        known = documents.get(path)
        if document.until_s <= self._now() or (known is not None and known.at_s >= document.at_s):
            return
        make_private_directory(self.folder)
        replace_file(path, msgspec.json.encode(document) + b"\n")
        documents[path] = document
        over = sorted(documents, key=lambda each: (self._now() < documents[each].until_s, documents[each].at_s))
        for each in over[: len(documents) - MOST]:
            each.unlink(missing_ok=True)

    def release(self, node: str, device: int | None, machine: str) -> list[Isolated]:
        """End the isolation of a node, or of one of its devices; return what was ended. Raises OSError.

        `machine`: this one; a node of a job that has all of its nodes on one machine may be called without it.
        """
        named, now = {node, f"{machine}/{node}"}, self._now()
        ended = []
        for path, each in self._documents().items():
            if each.node in named and device in {None, each.device} and now < each.until_s:
                replace_file(path, msgspec.json.encode(msgspec.structs.replace(each, until_s=now)) + b"\n")
                ended.append(each)
        return ended

    def _documents(self) -> dict[Path, Isolated]:
        self.problems = {}
        try:
            paths = sorted(each for each in islice(self.folder.iterdir(), MOST_LISTED) if each.name.endswith(ENDING))
        except FileNotFoundError:
            return {}
        found: dict[Path, Isolated] = {}
        for path in paths:
            try:
                if path.stat().st_size > MOST_BYTES:
                    raise ValueError(f"it is larger than {MOST_BYTES} bytes")
                found[path] = _decode(read_own_file(path))
            except FileNotFoundError:  # just removed
                continue
            except (OSError, ValueError, msgspec.MsgspecError, ForeignFile) as error:
                self.problems[path] = " ".join(str(error).split())
        return found


# --- between the folder and a job -------------------------------------------------------------------------------------


class Names(NamedTuple):
    """How the nodes of a job are called in the folder. `machine`: all of them are on it; empty: each is on its own.

    `alone`: the job has one node, so that is the machine. `placed`: a platform names nodes, in each job as it likes.
    """

    machine: str = ""
    alone: bool = False
    placed: bool = False

    def given(self, world: World) -> dict[str, str]:
        """Return what other jobs know each node by."""
        if self.machine:
            return {name: self.machine if self.alone else f"{self.machine}/{name}" for name in world.nodes}
        if self.placed:
            return {name: node.failure_domain for name, node in world.nodes.items()}
        # Somebody may have named a domain of several machines.
        living = Counter(node.failure_domain for node in world.nodes.values() if node.state in REACHABLE)
        return {
            name: name if living[node.failure_domain] > (node.state in REACHABLE) else node.failure_domain
            for name, node in world.nodes.items()
        }

    def to_come(self, known_by: str) -> list[str]:
        """Return the node that a document means and that has not come yet, by the name that it will have."""
        if not self.machine:
            return [] if self.placed or "/" in known_by else [known_by]
        machine, _, node = known_by.partition("/")
        return [node or "node0"] if machine == self.machine and bool(node) != self.alone else []


def names_of(job: JobSpec, machine: str, platform: str = "") -> Names:
    """Return how the nodes of a job are called. `machine`: the one that all of them are on, if they do not join."""
    return Names(machine, alone=job.nodes + job.spare_nodes == 1, placed=bool(platform))


def raised(state: JobState, names: Names, isolate_s: float) -> Iterator[Isolated]:
    """Yield what the job has raised because it came too often, and what its last incident was about."""
    standing = [(fault.report, fault.since_s) for fault in state.book.standing()]
    last = [state.history.open] if state.history.open else state.history.incidents[-1:]
    past = [(report, report.at_s) for incident in last for report in incident.reports]
    found = [(report, at_s) for report, at_s in (*standing, *past) if came_too_often(report)]
    given = names.given(state.world) if found else {}
    seen: set[tuple[str, int | None]] = set()
    for report, at_s in found:
        node = given.get(report.node or "", "")[:_LONGEST_NODE]
        if node and (node, report.device) not in seen:
            seen.add((node, report.device))
            why = report.meaning[:_LONGEST_WHY]
            yield Isolated(node, report.device, report.code or "", state.job.job, at_s, at_s + isolate_s, why)


def reports(documents: Sequence[Isolated], names: Names, world: World, now: float) -> dict[str, FaultReport]:
    """Return the faults of a job's nodes that follow from documents, by their ids."""
    found: dict[str, FaultReport] = {}
    known: dict[str, list[str]] = {}
    for node, known_by in names.given(world).items() if documents else ():
        known.setdefault(known_by[:_LONGEST_NODE], []).append(node)
    for each in documents:
        for node in known.get(each.node) or names.to_come(each.node):
            fault_id = f"{_ID}{node}/{'node' if each.device is None else each.device}"
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(each.at_s))
            # Without its code: that would be one more time, and the job's own word on the code may be milder.
            found[fault_id] = FaultReport(
                FaultKind.DEVICE,
                now,
                SEEN_BY,
                f"isolated by job {each.job} at {since}: {each.code} {each.detail[:_LONGEST_WHY]} (`midstep isolated`)",
                node=node,
                device=each.device,
                level=level_named(LevelName.MANUALLY_SEPARATE_NPU),
                fault_id=fault_id,
                assertion=Assertion.OCCUR,
                age_s=max(0.0, now - each.at_s),
            )
    return found


class IsolationFolder:
    """Reads and writes the folder in a thread, while it is open. `latest`: what held when it was read last.

    None: it has not been read. `whole`: all of it could be read.
    """

    def __init__(self, store: IsolationStore) -> None:
        """Touch nothing before `start`."""
        self._store = store
        self._waiting: deque[Isolated] = deque(maxlen=MOST_WAITING)
        self._wake, self._closed, self._read_once = threading.Event(), threading.Event(), threading.Event()
        self._said: set[str] = set()
        self.latest: list[Isolated] | None = None  # assignments are all that is shared
        self.whole = False
        self._thread = threading.Thread(target=self._run, name="isolated devices", daemon=True)

    def start(self, *, wait: bool) -> None:
        """Begin. `wait`: for the first reading, but not for long."""
        self._thread.start()
        if wait and not self._read_once.wait(FIRST_READ_S):
            _log.warning("%s: not read within %g s; isolated devices are known later", self._store.folder, FIRST_READ_S)

    def write(self, document: Isolated) -> None:
        """Have a document written; what cannot be is tried again."""
        self._waiting.append(document)
        self._wake.set()

    def close(self) -> None:
        """Write what waits, and end. What hangs is not waited for."""
        self._closed.set()
        self._wake.set()
        self._thread.join(LAST_WRITE_S)

    def _run(self) -> None:
        while True:
            self._wake.clear()
            closing = self._closed.is_set()
            self._write()
            if closing:
                return
            self._read()
            self._read_once.set()
            self._wake.wait(READ_S)

    def _write(self) -> None:
        while self._waiting:
            document = self._waiting[0]
            try:
                self._store.add(document)
            except OSError as error:
                self._say(f"{self._store.folder}: {error}; the next jobs do not learn of {document.place}")
                return
            self._waiting.popleft()

    def _read(self) -> None:
        try:
            self.latest = self._store.read()
            self.whole = not self._store.problems
        except OSError as error:
            self.whole = False
            self._say(f"{self._store.folder}: which devices are isolated cannot be read: {error}")
        for path, why in self._store.problems.items():
            self._say(f"{path}: is skipped: {why}. Repair or remove it; `midstep isolated` shows the others")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said = {text} if len(self._said) >= MOST_SAID else {text, *self._said}
            _log.error("%s", text)


def _is_idle(state: JobState, node: str) -> bool:
    """Say whether a node has no rank, and is not about to get one: that it is unfit harms nothing then."""
    return state.generation == 0 or (state.phase is Phase.RUNNING and not state.world.on(node))


class IsolationAcrossJobs:
    """Looks at one job and at the folder while `run` runs. `report`: takes in what a detector says."""

    def __init__(
        self,
        folder: IsolationFolder,
        names: Names,
        isolate_s: float,
        observe: Callable[[], Observation],
        report: Callable[[FaultReport, Answer], None],
    ) -> None:
        """`isolate_s`: how long what this job raises holds."""
        self._folder, self._names, self._isolate_s = folder, names, isolate_s
        self._observe, self._report = observe, report
        self._written: list[Isolated] = []
        self._told_s: dict[tuple[str, Assertion], float] = {}

    async def run(self) -> None:
        """Look until cancelled, and once more then."""
        self._folder.start(wait=self._observe().state.generation == 0)  # no rank has been placed
        try:
            while True:
                state = self.look().state
                await asyncio.sleep(publish_every_s(state.job.world_size) if state.generation else BEGINNING_S)
        finally:
            self.look()
            self._folder.close()

    def look(self) -> Observation:
        """Hand what was raised to the folder, and tell the job what the folder says. Returns how the job stands."""
        seen = self._observe()
        documents = list(raised(seen.state, self._names, self._isolate_s))
        for document in documents:
            if document not in self._written:
                self._folder.write(document)
        self._written = documents
        if self._folder.latest is not None:
            self._tell(seen, self._folder.latest)
        return seen

    def _tell(self, seen: Observation, documents: list[Isolated]) -> None:
        state = seen.state

        def following(*, own: bool) -> dict[str, FaultReport]:
            chosen = [each for each in documents if (each.job == state.job.job) is own]
            return reports(chosen, self._names, state.world, seen.at_s)

        own, others = following(own=True), following(own=False)
        holding = {**own, **others}
        known = [each.report for each in state.book.standing() if each.report.seen_by == SEEN_BY]
        standing = {report.fault_id: report for report in known if report.fault_id.startswith(_ID)}
        tellable = others if state.generation else holding  # on its own, once it runs, its detector has the last word
        fresh = [
            each for fault_id, each in tellable.items() if fault_id not in standing and _is_idle(state, each.node or "")
        ]
        over = [
            msgspec.structs.replace(report, assertion=Assertion.RECOVER, at_s=seen.at_s)
            for fault_id, report in standing.items()
            if fault_id not in holding and self._folder.whole
        ]
        self._told_s = {key: at_s for key, at_s in self._told_s.items() if seen.at_s - at_s < AGAIN_S}
        for report in (*fresh, *over):
            key = (report.fault_id, report.assertion)
            if key not in self._told_s:
                self._told_s[key] = seen.at_s
                _log.warning("%s: %s", report.assertion, report.detail)
                self._report(report, lambda reply: None)
