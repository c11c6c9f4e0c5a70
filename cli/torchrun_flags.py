"""torchrun's flags beside those of `midstep run` itself: each is taken, or refused with what to write instead.

A unit test compares the list with the parser of the torch that is installed.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
import msgspec

from ..protocol.bounds import MOST_NODES

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ENVIRONMENT = "PET_{}"
_BACKENDS = {"static", "c10d"}


class RefusedFlag(msgspec.Struct, frozen=True):
    """A flag that is refused unless its value is one of `allowed`. `is_flag`: it has no value."""

    instead: str
    allowed: tuple[str, ...] = ()
    is_flag: bool = False
    short: str = ""


# The end of a process is seen at once; how a script's process is started, standby.warm of the policy says.
WITHOUT_EFFECT = ("monitor_interval", "start_method")

REFUSED: Mapping[str, RefusedFlag] = {
    "event_log_handler": RefusedFlag("read the job's events with `midstep report --story`", ("null",)),
    "role": RefusedFlag("roles are named in the policy (docs/policies.md)", ("default",)),
    "run_path": RefusedFlag("leave it out: SCRIPT runs as __main__ anyway", is_flag=True),
    "log_dir": RefusedFlag("write --job-dir DIR: the ranks' logs are in its folder logs"),
    "redirects": RefusedFlag("output is always in the job's logs; write -q to not show it, too", ("0",), short="-r"),
    "tee": RefusedFlag("output is always in the job's logs and shown; leave --tee out", ("0", "3"), short="-t"),
    "local_ranks_filter": RefusedFlag("write -q, and read the logs of the ranks in the job directory"),
    "duplicate_stdout_filters": RefusedFlag("search the logs of the ranks in the job directory"),
    "duplicate_stderr_filters": RefusedFlag("search the logs of the ranks in the job directory"),
    "logs_specs": RefusedFlag("the ranks' logs are in the job directory; there is no other way to write them"),
    "numa_binding": RefusedFlag("bind the ranks in the script, or with --no-python and a program such as numactl"),
    "signals_to_handle": RefusedFlag(
        "SIGTERM, SIGINT and SIGHUP end the job in order; others keep their meaning", ("SIGTERM,SIGINT,SIGHUP,SIGQUIT",)
    ),
    "shutdown_timeout": RefusedFlag("write deadlines.stop_grace_s in the policy"),
    "virtual_local_rank": RefusedFlag("set the visible devices by the rank in the script", is_flag=True),
}


def spellings(name: str) -> tuple[str, ...]:
    """Return a torchrun flag in both of its spellings."""
    return tuple(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))


def environment_name(name: str) -> str:
    """Return the environment variable by which torchrun takes a flag, too."""
    return _ENVIRONMENT.format(name.upper())


def rendezvous_options(command: _Command) -> _Command:
    """Add the flags that say how several machines find each other, and those that are refused."""
    refused = (_refused(name, each) for name, each in REFUSED.items())
    ignored = (click.option(*spellings(name), hidden=True, expose_value=False) for name in WITHOUT_EFFECT)
    for option in reversed((*_TAKEN, *ignored, *refused)):
        command = option(command)
    return command


def _option(name: str, help_text: str, **settings: Any) -> Callable[[_Command], _Command]:
    return click.option(*spellings(name), envvar=environment_name(name), help=help_text, **settings)


def _refused(name: str, refused: RefusedFlag) -> Callable[[_Command], _Command]:
    def check(context: click.Context, option: click.Parameter, value: Any) -> None:
        if value and value not in refused.allowed:
            raise click.UsageError(f"--{name.replace('_', '-')} is not taken: {refused.instead}.")

    names = (*spellings(name), refused.short) if refused.short else spellings(name)
    settings: dict[str, Any] = {"is_flag": True} if refused.is_flag else {}
    return click.option(
        *names, callback=check, expose_value=False, hidden=True, envvar=environment_name(name), **settings
    )


def backend(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Take the rendezvous backends that mean what midstep does."""
    if value is not None and value not in _BACKENDS:
        raise click.BadParameter(f"{value!r}: the controller is where machines meet; write c10d, or leave it out")
    return value


def configuration(context: click.Context, option: click.Parameter, value: str | None) -> dict[str, str]:
    """Read `key=value,...`, and refuse keys that would have no effect."""
    pairs: dict[str, str] = {}
    for part in (value or "").split(",") if value and value.strip() else ():
        key, _, text = (each.strip() for each in part.partition("="))
        if not key or not text:
            raise click.BadParameter(f"{part!r}: write KEY=VALUE,...")
        if key not in CONFIGURATION:
            instead = CONFIGURATION_INSTEAD.get(key, f"midstep knows {', '.join(sorted(CONFIGURATION))}")
            raise click.BadParameter(f"{key!r} is not taken: {instead}")
        pairs[key] = text
    return pairs


CONFIGURATION = {"join_timeout", "timeout", "last_call_timeout", "is_host", "rank"}
CONFIGURATION_INSTEAD = {
    "close_timeout": "deadlines.stop_grace_s of the policy is how long an end may take",
    "read_timeout": "it has no meaning here",
    "keep_alive_interval": "write heartbeat.interval_s in the policy",
    "keep_alive_max_attempt": "write heartbeat.missed in the policy",
    "store_type": "the controller is where machines meet",
    "use_libuv": "it has no meaning here",
}

_TAKEN = (
    _option(
        "rdzv_endpoint",
        "Where the machines of the job meet, the same for all. `auto`: the first host of Slurm.",
        metavar="HOST[:PORT]",
    ),
    _option(
        "rdzv_id", "The job's name, the same on all machines.  [default: the one that the token names]", metavar="NAME"
    ),
    _option("rdzv_backend", "static or c10d: both mean the job's controller.", callback=backend, metavar="NAME"),
    _option(
        "rdzv_conf",
        "join_timeout=SECONDS, last_call_timeout=SECONDS, is_host=0|1.",
        callback=configuration,
        metavar="KEY=VALUE,...",
    ),
    _option(
        "node_rank", "This machine's number; 0 runs the controller.", type=click.IntRange(0, MOST_NODES), metavar="N"
    ),
    _option("master_addr", "As --rdzv-endpoint, its host alone.", metavar="HOST"),
    _option("master_port", "As --rdzv-endpoint, its port alone.", type=click.IntRange(1, 65_535), metavar="PORT"),
    _option(
        "local_addr", "Address under which other machines reach this one.  [default: found out]", metavar="ADDRESS"
    ),
)
