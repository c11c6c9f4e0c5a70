"""Whether `midstep run` is for several machines, where they meet, and whether this one runs the controller. Pure."""

from collections.abc import Mapping

import msgspec

from ...protocol.bounds import LATEST_S, MOST_NODES
from ...protocol.controller_addresses import DEFAULT_PORT, split
from ...protocol.errors import ConfigurationError
from .admission import JOIN_S
from .launch_environment import Launched

AUTO = "auto"
STATIC_PORT = 29_500  # torchrun's default for --master-port
_OWN = {"localhost", "127.0.0.1", "::1"}
_NO = {"0", "false", "f", "no", "n"}
_YES = {"1", "true", "t", "yes", "y"}


class Flags(msgspec.Struct, frozen=True):
    """What the user wrote, by torchrun's names."""

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


def meets_itself(flags: Flags, nodes: int) -> bool:
    """Whether a script's launcher flags describe one machine: one node, whose master has an address of this host."""
    return nodes == 1 and flags.node_rank == 0 and flags.rdzv_endpoint is None and flags.master_addr in _OWN


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
