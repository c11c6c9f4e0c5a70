"""Check what a script passes to `init_process_group` against the job that runs it. Pure.

Scripts bring the arguments of `torch.distributed.init_process_group` with them. Under `midstep run` the job has decided
most of them already: which ranks take part, where the ranks meet, and what their collectives run on. An argument that
says the same is accepted, one that says something else is refused in words: to ignore it would train in another world
than the script's author thinks.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from ..devices.kinds import CPU, communicator_kind, device_kind
from ..protocol.errors import ConfigurationError

UNSET = -1  # torch's default of rank and world_size
_NUMBERS = frozenset({"rank", "world_size"})  # what an `env://` or `tcp://` URL may say besides


class GroupArguments(msgspec.Struct, frozen=True):
    """The arguments of one call, with torch's names and defaults."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None
    world_size: int = UNSET
    rank: int = UNSET
    store: Any = None
    pg_options: Any = None
    device_id: Any = None  # torch.device | int | None

    @property
    def naming_peers(self) -> "GroupArguments":
        """Only those that say which ranks take part and where they meet."""
        return GroupArguments(
            init_method=self.init_method, world_size=self.world_size, rank=self.rank, store=self.store
        )


class GroupOfJob(msgspec.Struct, frozen=True):
    """The job's decisions about the default process group of this process."""

    rank: int
    world_size: int
    local_rank: int
    communicator: str
    device: str
    master: str  # MASTER_ADDR:MASTER_PORT
    stall_grace_s: float


def check_arguments(given: GroupArguments, job: GroupOfJob) -> None:
    """Raise ConfigurationError if an argument contradicts the job; the text names each of them."""
    wrong = list(_contradictions(given, job))
    if wrong:
        lines = "\n".join(f"  - {line}" for line in wrong)
        raise ConfigurationError(f"rank {job.rank}: init_process_group() contradicts the job that runs it:\n{lines}")


def _contradictions(given: GroupArguments, job: GroupOfJob) -> Iterator[str]:
    yield from _wrong_backend(given.backend, job)
    yield from _wrong_init_method(given.init_method, job)
    yield from _wrong_timeout(given.timeout, job)
    yield from _wrong_number("world_size", given.world_size, job.world_size)
    yield from _wrong_number("rank", given.rank, job.rank)
    if given.store is not None:
        yield (
            f"store: found a {type(given.store).__name__}, expected none, as the ranks of the job meet in a store "
            "of the job, which outlives each of them. Leave store out."
        )
    if given.pg_options is not None:
        yield (
            f"pg_options: found a {type(given.pg_options).__name__}, expected none, as midstep makes the groups and "
            "could not apply them. Leave pg_options out; what the library takes from variables is set with "
            "`midstep run --env`."
        )
    yield from _wrong_device(given.device_id, job)


def _wrong_backend(backend: str | None, job: GroupOfJob) -> Iterator[str]:
    if backend is None:
        return
    kind = communicator_kind(job.communicator)
    names = kind.script_names
    for part in str(backend).lower().split(","):
        device, _, name = part.strip().rpartition(":")
        if name not in names:
            yield (
                f"backend: found {backend!r}, expected {_either(names)}, as the job's communicator is "
                f"{job.communicator} (communicator.name in the policy). Leave backend out, or choose what the ranks "
                "compute on with `midstep run --device`."
            )
            return
        if device and device not in kind.tensors:
            yield (
                f"backend: found {backend!r}, expected none for {device} tensors, as the job's collectives are those "
                f"of {job.communicator} alone. Leave backend out, and keep collectives to the job's device "
                f"({job.device})."
            )
            return


def _wrong_init_method(init_method: str | None, job: GroupOfJob) -> Iterator[str]:
    if init_method is None:
        return
    try:
        url = urlsplit(init_method)
        place = f"{url.hostname}:{url.port}"
        asked = {name: int(values[-1]) for name, values in parse_qs(url.query).items() if name in _NUMBERS}
    except ValueError:
        yield f"init_method: found {init_method!r}, which is not a URL, expected 'env://'. Leave init_method out."
        return
    if url.scheme != "env" and (url.scheme != "tcp" or place != job.master.lower()):
        yield (
            f"init_method: found {init_method!r}, expected 'env://', as the ranks of the job meet where its agents say "
            f"(now {job.master}). Leave init_method out."
        )
    yield from _wrong_number("rank in init_method", asked.get("rank", UNSET), job.rank)
    yield from _wrong_number("world_size in init_method", asked.get("world_size", UNSET), job.world_size)


def _wrong_timeout(timeout: timedelta | None, job: GroupOfJob) -> Iterator[str]:
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        yield f"timeout: found {timeout!r}, expected a datetime.timedelta."
    elif timeout.total_seconds() <= job.stall_grace_s:
        yield (
            f"timeout: found {timeout.total_seconds():g} s, expected more than {job.stall_grace_s:g} s "
            "(stall.grace_s in the policy), as a collective must not fail before its stall can be seen. Raise it, or "
            "leave it out: communicator.collective_s in the policy holds then."
        )


def _wrong_number(name: str, found: int, expected: int) -> Iterator[str]:
    if found not in {UNSET, expected}:
        variable = "RANK" if name.startswith("rank") else "WORLD_SIZE"
        yield (
            f"{name}: found {found}, expected {expected}. Leave it out, or pass the value of the variable {variable}."
        )


def _wrong_device(device_id: Any, job: GroupOfJob) -> Iterator[str]:
    if device_id is None:
        return
    names = device_kind(job.device).torch_names
    allowed: set[object] = {*names, *(f"{name}:{0 if name == CPU else job.local_rank}" for name in names)}
    if names[0] != CPU:
        allowed.add(job.local_rank)
    if (device_id if isinstance(device_id, int) else str(device_id)) not in allowed:
        here = CPU if names[0] == CPU else f"{names[0]}:{job.local_rank}"
        yield (
            f"device_id: found {str(device_id)!r}, expected {here!r}, as this rank "
            f"computes on {job.device} and takes the device of its local rank, {job.local_rank}. Leave device_id "
            "out, or choose what the ranks compute on with `midstep run --device`."
        )


def _either(names: frozenset[str]) -> str:
    return " or ".join(repr(name) for name in sorted(names))
