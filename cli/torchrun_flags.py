"""torchrun's flags of `midstep run`: how machines find each other, what is shown, and what is refused.

Each flag of torchrun is taken, or refused with what to write instead; a unit test compares the list with the parser of
the torch that is installed.
"""

import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ..protocol.bounds import MOST_NODES

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ENVIRONMENT = "PET_{}"
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_BACKENDS = {"static", "c10d"}
_LOCAL_RANKS = re.compile(r"\d{1,6}(,\d{1,6})*")
_ENDING_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")


def spellings(name: str) -> tuple[str, ...]:
    """Return a torchrun flag in both of its spellings."""
    return tuple(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))


class RefusedFlag(msgspec.Struct, frozen=True):
    """A flag that is refused unless its value is one of `allowed`."""

    instead: str
    allowed: tuple[str, ...] = ()


# The end of a process is seen at once; how a script's process is started, standby.warm of the policy says.
WITHOUT_EFFECT = ("monitor_interval", "start_method")
# A script runs as `__main__` by its path with or without it.
FLAGS_WITHOUT_EFFECT = ("run_path",)

REFUSED: Mapping[str, RefusedFlag] = {
    "event_log_handler": RefusedFlag("read the job's events with `midstep report --story`", ("null",)),
    "duplicate_stdout_filters": RefusedFlag("write `grep -h -e WORD JOB_DIRECTORY/logs/rank-*.log`"),
    "duplicate_stderr_filters": RefusedFlag("write `grep -h -e WORD JOB_DIRECTORY/logs/rank-*.log`"),
    "logs_specs": RefusedFlag("the ranks' logs are in the job directory; --log-dir says where that is"),
    "numa_binding": RefusedFlag(
        "write os.sched_setaffinity(0, CPUS) by LOCAL_RANK at the top of the script, or --no-python and a program that "
        "runs numactl"
    ),
}

CONFIGURATION = {"join_timeout", "timeout", "last_call_timeout", "is_host", "rank"}

CONFIGURATION_INSTEAD = {
    "close_timeout": "deadlines.stop_grace_s of the policy is how long an end may take",
    "read_timeout": "it has no meaning here",
    "keep_alive_interval": "write heartbeat.interval_s in the policy",
    "keep_alive_max_attempt": "write heartbeat.missed in the policy",
    "store_type": "the controller is where machines meet",
    "use_libuv": "it has no meaning here",
}


def environment_name(name: str) -> str:
    """Return the environment variable by which torchrun takes a flag, too."""
    return _ENVIRONMENT.format(name.upper())


def _option(name: str, help_text: str, *others: str, **settings: Any) -> Callable[[_Command], _Command]:
    """Make an option of a torchrun flag. `others`: further spellings of it."""
    return click.option(*spellings(name), *others, name, envvar=environment_name(name), help=help_text, **settings)


def streams(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Take which streams of which ranks are meant: one number for all, or RANK:NUMBER,..."""
    if value is not None and _STREAMS.fullmatch(value) is None:
        raise click.BadParameter(f"{value!r}: write 0, 1 (stdout), 2 (stderr) or 3 (both), or RANK:NUMBER,...")
    return value


def local_ranks(context: click.Context, option: click.Parameter, value: str | None) -> frozenset[int] | None:
    """Read numbers of ranks on their nodes: 0,1,2."""
    if value is None:
        return None
    if _LOCAL_RANKS.fullmatch(value) is None:
        raise click.BadParameter(f"{value!r}: write numbers of ranks on their nodes, as in 0,1,2")
    return frozenset(map(int, value.split(",")))


def shown_local_ranks(
    ranks_per_node: int, redirects: str | None, tee: str | None, chosen: frozenset[int] | None
) -> frozenset[int] | None:
    """Return the local ranks whose output is shown; None: those of all. The logs have all of it in any case."""
    redirected, teed = _streams_of(redirects), _streams_of(tee)
    shown = frozenset(
        rank
        for rank in range(ranks_per_node)
        if (chosen is None or rank in chosen) and not (redirected(rank) == "3" and teed(rank) == "0")
    )
    return None if len(shown) == ranks_per_node else shown


def _streams_of(value: str | None) -> Callable[[int], str]:
    """Return which streams are meant, by local rank: of what `streams` has taken."""
    if value is None or ":" not in value:
        return lambda rank: value or "0"
    each = dict(part.split(":") for part in value.split(","))
    return lambda rank: each.get(str(rank), "0")


def ending_signals(context: click.Context, option: click.Parameter, value: str | None) -> frozenset[signal.Signals]:
    """Read names of signals that end a job in order, beside those that do in any case."""
    names = [each.strip() for each in (value or "").split(",") if each.strip()]
    for name in names:
        if name not in _ENDING_SIGNALS:
            raise click.BadParameter(f"{name!r}: signals that may end a job are {', '.join(_ENDING_SIGNALS)}")
    return frozenset(signal.Signals[name] for name in names)


def backend(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Take the rendezvous backends that mean what midstep does."""
    if value is not None and value not in _BACKENDS:
        raise click.BadParameter(f"{value!r}: the controller is where machines meet; write c10d, or leave it out")
    return value


def configuration(context: click.Context, option: click.Parameter, value: str | None) -> dict[str, str]:
    """Read `key=value,...`, and refuse keys that would have no effect."""
    pairs: dict[str, str] = {}
    text = (value or "").strip().strip("'\"")  # quotes for a shell that did not read the line
    for part in text.split(",") if text else ():
        key, _, meant = (each.strip() for each in part.partition("="))
        if not key or not meant:
            raise click.BadParameter(f"{part!r}: write KEY=VALUE,...")
        if key not in CONFIGURATION:
            instead = CONFIGURATION_INSTEAD.get(key, f"midstep knows {', '.join(sorted(CONFIGURATION))}")
            raise click.BadParameter(f"{key!r} is not taken: {instead}")
        pairs[key] = meant
    return pairs


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


def rendezvous_options(command: _Command) -> _Command:
    """Add the flags that say how several machines find each other, and those that are refused."""
    refused = (_refused(name, each) for name, each in REFUSED.items())
    ignored = (click.option(*spellings(name), hidden=True, expose_value=False) for name in WITHOUT_EFFECT)
    without = (
        click.option(*spellings(name), is_flag=True, hidden=True, expose_value=False) for name in FLAGS_WITHOUT_EFFECT
    )
    for option in reversed((*_TAKEN, *_OUTPUT, *ignored, *without, *refused)):
        command = option(command)
    return command


def _refused(name: str, refused: RefusedFlag) -> Callable[[_Command], _Command]:
    def check(context: click.Context, option: click.Parameter, value: Any) -> None:
        if value and value not in refused.allowed:
            raise click.UsageError(f"--{name.replace('_', '-')} is not taken: {refused.instead}.")

    return click.option(
        *spellings(name), callback=check, expose_value=False, hidden=True, envvar=environment_name(name)
    )


OUTPUT = ("log_dir", "redirects", "tee", "role", "local_ranks_filter", "signals_to_handle", "virtual_local_rank")
_OUTPUT = (
    _option(
        "log_dir",
        "The job's directory is DIR/JOB, unless --job-dir says otherwise; the ranks' logs are in its folder logs.",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
    ),
    _option(
        "redirects",
        "3: what the ranks print is in their logs only, as with -q. They have it in any case.",
        "-r",
        "--redirect",
        callback=streams,
        metavar="0|1|2|3|RANK:N,...",
    ),
    _option(
        "tee",
        "What the ranks print is in their logs and is shown, as without it.",
        "-t",
        callback=streams,
        metavar="0|1|2|3|RANK:N,...",
    ),
    _option(
        "local_ranks_filter",
        "Show what these ranks of each node print, and not what others do.",
        callback=local_ranks,
        metavar="0,1,...",
    ),
    _option("role", "The ranks find NAME in ROLE_NAME.", metavar="NAME"),
    _option(
        "signals_to_handle",
        "Signals that end the job in order, beside SIGTERM, SIGINT and SIGHUP: SIGQUIT, SIGUSR1, SIGUSR2, SIGXCPU.",
        callback=ending_signals,
        metavar="NAME,...",
    ),
    _option(
        "virtual_local_rank",
        "Each rank finds LOCAL_RANK 0, and only its own GPU, in CUDA_VISIBLE_DEVICES.",
        is_flag=True,
    ),
)
