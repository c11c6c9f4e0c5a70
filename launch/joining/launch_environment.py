"""What Slurm or an MPI launcher says of the machine on which it has started this process, among how many."""

import re
from collections.abc import Mapping, MutableMapping

import msgspec

from ...protocol.shared_signals import hear_for_all

_SLURM_RANGE = re.compile(r"([^,\[]+)(?:\[([^\]]*)\])?")


class Launched(msgspec.Struct, frozen=True):
    """What the launcher says. None: it does not say. Ranks and sizes count processes, of which each machine has one.

    `signals_all`: what it sends to end them it sends to all machines, and there to all processes below them, too.
    """

    node_rank: int | None = None
    nodes: int | None = None
    first_host: str | None = None
    job: str | None = None
    signals_all: bool = False


def launched(environment: Mapping[str, str]) -> Launched:
    """Read the variables of a step of Slurm, else of Open MPI, else of PMI. Several on a machine: no node rank."""
    if "SLURM_STEP_ID" in environment:  # a batch script has the other ones of its first task, too
        nodes = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        rank = _number(environment, "SLURM_NODEID") if tasks in {None, nodes} else None
        return Launched(rank, nodes, first_host(hosts), _slurm_job(environment), signals_all=True)
    if "OMPI_COMM_WORLD_RANK" in environment:
        alone = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") in {None, 1}
        rank, size = _number(environment, "OMPI_COMM_WORLD_RANK"), _number(environment, "OMPI_COMM_WORLD_SIZE")
        return Launched(rank, size) if alone else Launched()
    if "PMI_RANK" in environment:
        alone = _number(environment, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE") in {None, 1}
        return Launched(_number(environment, "PMI_RANK"), _number(environment, "PMI_SIZE")) if alone else Launched()
    return Launched()


def hear_if_all_are_signalled(environment: MutableMapping[str, str]) -> None:
    """Have only this process act on SIGTERM, where each process that it starts is sent it as well."""
    if launched(environment).signals_all:
        hear_for_all(environment)


def first_host(hosts: str) -> str | None:
    """Return the first name of a list as Slurm writes it: `n[003-008,12],m1`."""
    match = _SLURM_RANGE.match(hosts.strip())
    if match is None:
        return None
    first = re.split(r"[-,]", match[2])[0] if match[2] else ""
    return match[1] + first


def _slurm_job(environment: Mapping[str, str]) -> str | None:
    """Return Slurm's number of the job; with how often it was put back into the queue, as it is another job then."""
    number, restarts = environment.get("SLURM_JOB_ID"), _number(environment, "SLURM_RESTART_COUNT")
    return f"{number}-{restarts}" if number and restarts else number


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environment.get(name, "")
        if text.isascii() and text.isdecimal():
            return int(text)
    return None
