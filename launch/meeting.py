"""Where the machines of a job meet, which one runs the controller, and how a node is admitted there.

A Slurm step or an MPI launcher, where it has started this process, says on which machine of how many it runs.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ..agent.main import AgentOptions
from ..protocol.bounds import LATEST_S, MOST_NODES
from ..protocol.discovery import DEFAULT_PORT, endpoint, resolved, split
from ..protocol.errors import ConfigurationError
from ..protocol.exits import hear_for_all
from ..protocol.joining import ask_for_admission
from ..protocol.keys import JobKeys
from ..protocol.messages import LONGEST_NODE_NAME, EnrolmentRequested
from ..protocol.private_files import make_private_directory
from ..protocol.token import Invitation, random_pair
from ..protocol.types import node_address

KEYS_NAME = "keys"
JOIN_S = 600.0  # torchrun's join_timeout
AUTO = "auto"
STATIC_PORT = 29_500  # torchrun's default for --master-port
_OWN = {"localhost", "127.0.0.1", "::1"}
_NO = {"0", "false", "f", "no", "n"}
_YES = {"1", "true", "t", "yes", "y"}
_SLURM_RANGE = re.compile(r"([^,\[]+)(?:\[([^\]]*)\])?")
_EVERYWHERE = "0.0.0.0"


class Flags(msgspec.Struct, frozen=True):
    """The user's settings, by torchrun's names."""

    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_backend: str | None = None
    rdzv_conf: Mapping[str, str] = {}
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    standalone: bool = False


class RendezvousPoint(msgspec.Struct, frozen=True):
    """Where the machines of a job meet. `hosts`: this one runs the controller; None: if the address is its own.

    `signals_all`: as in Launched.
    """

    host: str
    port: int
    job: str | None
    hosts: bool | None
    join_s: float
    local_addr: str
    signals_all: bool = False


class Launched(msgspec.Struct, frozen=True):
    """The launcher's settings. None: it does not say. Ranks and sizes count processes, of which each machine has one.

    `signals_all`: what it sends to end them it sends to all machines, and there to all processes below them, too.
    """

    node_rank: int | None = None
    nodes: int | None = None
    first_host: str | None = None
    job: str | None = None
    signals_all: bool = False


def meets_itself(flags: Flags, nodes: int) -> bool:
    """Return whether a script's launcher flags describe one machine: one node, whose master is this host.

    A node rank that is not given is 0, as torchrun has it.
    """
    return nodes == 1 and not flags.node_rank and flags.rdzv_endpoint is None and flags.master_addr in _OWN


def meeting(flags: Flags, launched: Launched) -> RendezvousPoint | None:
    """Return where to meet; None: all nodes are on this machine. Raises ConfigurationError."""
    if flags.standalone or (flags.rdzv_endpoint is None and flags.master_addr is None):
        return None
    if flags.rdzv_endpoint is not None:
        host, port = _endpoint(flags.rdzv_endpoint, launched)
    else:
        host, port = split(f"{_bracketed(flags.master_addr or '')}:{flags.master_port or STATIC_PORT}")
    conf = flags.rdzv_conf
    node_rank = flags.node_rank if flags.node_rank is not None else _node_rank(conf, launched)
    hosts = _answer("is_host", conf["is_host"]) if "is_host" in conf else None
    if hosts is None and node_rank is not None:
        hosts = node_rank == 0
    join_s = _seconds(conf, "join_timeout") or _seconds(conf, "timeout") or JOIN_S
    job = flags.rdzv_id if flags.rdzv_id not in {None, "none"} else launched.job
    return RendezvousPoint(host, port, job, hosts, join_s, flags.local_addr or "", launched.signals_all)


def _endpoint(text: str, launched: Launched) -> tuple[str, int]:
    name, _, port = text.partition(":")
    if name != AUTO:
        return split(text)
    if launched.first_host is None:
        raise ConfigurationError(
            "--rdzv-endpoint auto: nothing says which host is the first, as Slurm's variables would: write HOST:PORT."
        )
    return split(f"{_bracketed(launched.first_host)}:{port or DEFAULT_PORT}")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _node_rank(conf: Mapping[str, str], launched: Launched) -> int | None:
    if "rank" not in conf:
        return launched.node_rank
    if not conf["rank"].isdecimal() or len(conf["rank"]) > len(str(MOST_NODES)):
        raise ConfigurationError(f"--rdzv-conf rank={conf['rank']}: write a number.")
    return int(conf["rank"])


def _answer(key: str, text: str) -> bool:
    if text.lower() not in _YES | _NO:
        raise ConfigurationError(f"--rdzv-conf {key}={text}: write 1 or 0.")
    return text.lower() in _YES


def last_call_s(conf: Mapping[str, str]) -> float | None:
    """Return for how long a job that could start waits for more nodes; None: as the policy says."""
    return _seconds(conf, "last_call_timeout")


def _seconds(conf: Mapping[str, str], key: str) -> float | None:
    if key not in conf:
        return None
    try:
        seconds = float(conf[key])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LATEST_S:
        raise ConfigurationError(f"--rdzv-conf {key}={conf[key]}: write a number of seconds above 0.")
    return seconds


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


class Wishes(msgspec.Struct, frozen=True):
    """A node's wishes for itself. Empty: found out by itself. `proxies`: endpoints that it goes through, if it can."""

    node: str = ""
    failure_domain: str = ""
    host: str = ""
    proxies: tuple[str, ...] = ()


def admitted(
    endpoints: tuple[str, ...],
    invitation: Invitation,
    wishes: Wishes,
    run_directory: Path,
    *,
    limit_s: float = JOIN_S,
    life_fd: int | None = None,
) -> AgentOptions:
    """Ask for admission until there is an answer, and return what the agent is started with. Blocks.

    Raises NotAdmitted or ConfigurationError.
    """
    pair = random_pair()
    domain = wishes.failure_domain or host_name()
    request = EnrolmentRequested(wishes.node or host_name(), bool(wishes.node), pair.public, domain)
    launcher = os.getppid()
    admission = ask_for_admission(
        (*wishes.proxies, *endpoints),
        invitation,
        request,
        limit_s=limit_s,
        wanted=lambda: life_fd is None or os.getppid() == launcher,
    )
    name = admission.enrolled.node
    make_private_directory(run_directory / KEYS_NAME)
    JobKeys.save_client(run_directory / KEYS_NAME, node_address(name), pair, invitation.server_public)
    return AgentOptions(
        job=invitation.job,
        node=name,
        controller=admission.endpoint,
        keys=str(run_directory / KEYS_NAME),
        run_directory=str(run_directory),
        failure_domain=admission.enrolled.failure_domain,
        host=wishes.host or address_towards(*split(admission.endpoint)),
        life_fd=life_fd,
        session=admission.enrolled.session,
        endpoints=endpoints,
        proxies=wishes.proxies,
    )


def host_name() -> str:
    """Return this machine's name, as it can be that of a node."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0]).strip("-_")
    return name[:LONGEST_NODE_NAME] or "node"


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach what listens at a host: a name counts by what it means here."""
    addresses = resolved(host)
    return bool(addresses) and all(ipaddress.ip_address(each).is_loopback for each in addresses)


def own_addresses() -> tuple[str, ...]:
    """Return the addresses of this machine."""
    return tuple(
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in {socket.AF_INET, socket.AF_INET6}
    )


def is_own(host: str, own: tuple[str, ...]) -> bool:
    """Say whether a host is this machine, whose addresses are `own`. All of 127.0.0.0/8 is."""
    addresses = [ipaddress.ip_address(each) for each in resolved(host)]
    mine = {ipaddress.ip_address(each) for each in own}
    return any(address in mine or address.is_loopback for address in addresses)


def listening_at(host: str, port: int) -> str:
    """Return where the controller listens so that all can reach it at `host`.

    That is the address itself; all addresses where a name means only this machine here (as Debian's /etc/hosts has it
    for a machine's own name), or is no address of this machine (that of a load balancer).
    """
    if not is_own(host, own_addresses()):
        return endpoint(_EVERYWHERE, port)
    if is_loopback(host) and not _is_address(host) and host != "localhost":
        return endpoint(_EVERYWHERE, port)
    return endpoint(host, port)


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine under which those at `host` reach it. Raises ConfigurationError."""
    for family, kind, _, _, address in _datagram(host, port):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing: it chooses a route
            except OSError:
                continue
            own = str(probe.getsockname()[0]).partition("%")[0]
        if not ipaddress.ip_address(own).is_loopback or _is_address(host) or host == "localhost":
            return own
        return address_outside() or own
    raise ConfigurationError(f"{host} is not known to this machine, or there is no way to it: check its name.")


def _datagram(host: str, port: int) -> list[tuple[Any, ...]]:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))
    except OSError:
        return []


def address_outside() -> str | None:
    """Return an address of this machine that others can reach."""
    usable = (ipaddress.ip_address(each) for each in own_addresses())
    return next((str(each) for each in usable if not each.is_loopback and not each.is_link_local), None)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
