"""The options that say what a job is, for `midstep run` and `midstep submit`: its own, Kubernetes', and torchrun's.

Each flag of torchrun is taken, or refused with what to write instead; a unit test compares the list with the parser of
the torch that is installed.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from ..devices.kinds import device_names
from ..launch.job import Start
from ..launch.rank_environment import named_variables, variables_of_files
from ..protocol.bounds import MOST_NODES, MOST_OF_A_NODE
from .numbers import RESTARTS, SPARES, NodesAsked, RanksPerNode, node_count

Decorator = Callable[[Any], Any]
_Command = TypeVar("_Command", bound=Callable[..., Any])
_ENVIRONMENT = "PET_{}"
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_BACKENDS = {"static", "c10d"}
_FILE = click.Path(dir_okay=False, path_type=Path)
MOST_CONTROLLERS = 5


def spellings(name: str) -> tuple[str, ...]:
    """Return a torchrun flag in both of its spellings."""
    return tuple(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))


SHAPE: tuple[Decorator, ...] = (
    click.option(
        *spellings("nnodes"),
        "nodes",
        callback=node_count,
        metavar="N|MIN:MAX",
        default="1",
        show_default=True,
        envvar="PET_NNODES",
        help="Nodes. Machines that come beyond them are spares. MIN:MAX: the job starts with MIN when no more come "
        "within the last call, and gets smaller and larger as nodes go and come; see scale in docs/policies.md.",
    ),
    click.option(
        *spellings("nproc_per_node"),
        "ranks_per_node",
        envvar="PET_NPROC_PER_NODE",
        type=RanksPerNode(MOST_OF_A_NODE),
        default=1,
        show_default=True,
        help="Ranks on each node: a number; cpu: its processors; gpu: its GPUs; auto: accelerators, else processors.",
    ),
    click.option(
        "--spares",
        "spare_nodes",
        type=SPARES,
        default=0,
        show_default=True,
        help="Spare nodes, warm and without ranks, that take the place of a lost one.",
    ),
)

POLICY: tuple[Decorator, ...] = (
    click.option(
        *spellings("max_restarts"),
        envvar="PET_MAX_RESTARTS",
        type=RESTARTS,
        default=0,
        show_default=True,
        help="Restarts of the whole job, for scripts that are not resilient; others go by the policy.",
    ),
    click.option(
        "--policy",
        "policy_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The job's policy file; see `midstep policy check`.  [default: the built-in policy]",
    ),
    click.option(
        "--device",
        type=click.Choice(device_names()),
        help="What the ranks compute on, instead of the policy's: cpu, cuda (NVIDIA GPUs), npu (torch-npu), or fake, a "
        "CPU that behaves like an NPU and in which device faults can be caused.",
    ),
    click.option(
        "--network-check",
        "node_check",
        is_flag=True,
        help="Check each node before it gets ranks: a matrix product, and an exchange with another node.",
    ),
)

PROGRAM: tuple[Decorator, ...] = (
    click.option(
        "--env",
        "environment",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Set a variable for the ranks. NAME alone takes its value from here, and `ps` does not show it. "
        "Repeatable.",
    ),
    click.option(
        "--env-file",
        "environment_files",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Set the variables of FILE for the ranks: NAME=VALUE lines, taken as they are, and # comments. "
        "Repeatable; --env goes before it.",
    ),
    click.option(
        "--mindio",
        is_flag=True,
        help="Give the ranks a package mindio_ttp that is midstep, for scripts that call MindIO; see docs/mindio.md.",
    ),
    click.option(
        "-m",
        "--module",
        "is_module",
        is_flag=True,
        envvar="PET_MODULE",
        help="SCRIPT is a module name, as with `python -m`.",
    ),
    click.option(
        *spellings("no_python"),
        "no_python",
        is_flag=True,
        envvar="PET_NO_PYTHON",
        help="SCRIPT is a program, not Python.",
    ),
)

SCRIPT: tuple[Decorator, ...] = (
    click.argument("script"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
)

SCRIPT_OR_ROLES: tuple[Decorator, ...] = (
    click.argument("script", required=False),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
)

ROLES: tuple[Decorator, ...] = (
    click.option(
        "--roles",
        "roles_file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Run a job of several roles, each with its own script, ranks and ladder, instead of one SCRIPT; see "
        "docs/roles.md, and `midstep policy check FILE`.",
    ),
)


def options(*groups: tuple[Decorator, ...]) -> Decorator:
    """Add groups of options to a command, in this order."""

    def add(command: Any) -> Any:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return add


def asked_for(
    *,
    nodes: NodesAsked,
    ranks_per_node: int,
    spare_nodes: int,
    max_restarts: int,
    policy_file: Path | None,
    device: str | None,
    node_check: bool,
    environment: tuple[str, ...],
    environment_files: tuple[Path, ...],
    mindio: bool,
    is_module: bool,
    no_python: bool,
    script: str,
    arguments: tuple[str, ...],
) -> Start:
    """Return what these options ask for. Raises ConfigurationError when a variable or its file cannot be taken."""
    return Start(
        command=(script, *arguments),
        is_module=is_module,
        no_python=no_python,
        nodes=nodes.most,
        least_nodes=nodes.least,
        ranks_per_node=ranks_per_node,
        spare_nodes=spare_nodes,
        max_restarts=max_restarts,
        policy_file=policy_file,
        environment={**variables_of_files(environment_files), **named_variables(environment)},
        device=device,
        node_check=node_check,
        mindio=mindio,
    )


# --- Kubernetes -------------------------------------------------------------------------------------------------------


KUBERNETES: tuple[Decorator, ...] = (
    click.option("--image", metavar="IMAGE", help="Kubernetes: the image of all pods, with midstep and SCRIPT in it."),
    click.option(
        "--namespace", metavar="NAME", help="Kubernetes: where the objects are made.  [default: that of the context]"
    ),
    click.option("--dry-run", is_flag=True, help="Kubernetes: print the objects for `kubectl apply -f -`, make none."),
    click.option("--detach", is_flag=True, help="Kubernetes: do not follow the job once its objects are made."),
    click.option(
        "--resource",
        "resources",
        multiple=True,
        metavar="NAME=QUANTITY",
        help="Kubernetes: what each agent's pod gets, as huawei.com/Ascend910=8. Repeatable.",
    ),
    click.option(
        "--volume",
        "volumes",
        multiple=True,
        metavar="CLAIM:PATH",
        help="Kubernetes: a PersistentVolumeClaim, or a /FOLDER of the hosts, and where pods see it. The first one has "
        "journal and checkpoints. Repeatable.",
    ),
    click.option(
        "--pod-template",
        type=_FILE,
        metavar="FILE",
        help="Kubernetes: a part of a Pod's manifest that is laid over that of the agents: labels, annotations, "
        "schedulerName, tolerations; see docs/kubernetes-managed.md.",
    ),
    click.option(
        "--controller-template", type=_FILE, metavar="FILE", help="Kubernetes: the same for the controller's pod."
    ),
    click.option(
        "--launcher-template",
        type=_FILE,
        metavar="FILE",
        help="Kubernetes: with --roles, the same for the pod of the launcher of all roles.",
    ),
    click.option(
        "--controllers",
        type=click.IntRange(1, MOST_CONTROLLERS),
        default=1,
        show_default=True,
        metavar="N",
        help="Kubernetes: how many controllers the job has, each on a host of its own where that is possible. One "
        "leads, and another takes over when it is lost. More than one takes a --volume that pods on all hosts can "
        "write (ReadWriteMany), and a Lease elects them; or --store.",
    ),
    click.option(
        "--store",
        metavar="URL",
        help="Kubernetes: the etcd that keeps the job in the place of a volume, as its controllers reach it: "
        "etcd://HOST:PORT[,HOST:PORT...][/PREFIX]; see docs/controllers.md.",
    ),
    click.option(
        "--acjob",
        metavar="NAME",
        help="Kubernetes: take the policy from the labels and annotations that an AscendJob of MindCluster has in the "
        "cluster, as `midstep policy from-acjob` does from a file.",
    ),
    click.option(
        "--config-maps",
        multiple=True,
        metavar="NAMESPACE",
        help="Kubernetes: a namespace in whose ConfigMaps MindCluster's detectors leave faults of hardware, to be "
        "watched beside the controller, as by `midstep detect --config-maps`. Takes a Role there. Repeatable.",
    ),
    click.option(
        "--watch-nodes",
        is_flag=True,
        help="Kubernetes: leave hosts that are cordoned or tainted before their pods are evicted. Takes a ClusterRole.",
    ),
    click.option(
        "--node-condition",
        "node_conditions",
        multiple=True,
        metavar="TYPE",
        help="Kubernetes: a condition of hosts, as node-problem-detector's KernelDeadlock, that while it is True is a "
        "reason to leave them, as a taint is. Implies --watch-nodes. Repeatable.",
    ),
)

# --- torchrun's flags, and how machines find each other ---------------------------------------------------------------


class RefusedFlag(msgspec.Struct, frozen=True):
    """A flag that is refused unless its value is one of `allowed`. `is_flag`: it has no value."""

    instead: str
    allowed: tuple[str, ...] = ()
    is_flag: bool = False
    short: str = ""


# The end of a process is seen at once; how a script's process is started, standby.warm of the policy says.
WITHOUT_EFFECT = ("monitor_interval", "start_method")
# A script runs as `__main__` by its path with or without it.
FLAGS_WITHOUT_EFFECT = ("run_path",)

REFUSED: Mapping[str, RefusedFlag] = {
    "event_log_handler": RefusedFlag("read the job's events with `midstep report --story`", ("null",)),
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


def _option(name: str, help_text: str, *, short: str = "", **settings: Any) -> Callable[[_Command], _Command]:
    names = (*spellings(name), short) if short else spellings(name)
    return click.option(*names, envvar=environment_name(name), help=help_text, **settings)


def streams(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Take which streams of which ranks are meant: one number for all, or RANK:NUMBER,..."""
    if value is not None and _STREAMS.fullmatch(value) is None:
        raise click.BadParameter(f"{value!r}: write 0, 1 (stdout), 2 (stderr) or 3 (both), or RANK:NUMBER,...")
    return value


def shows_nothing(redirects: str | None, tee: str | None) -> bool:
    """Tell whether what the ranks print is to be in their logs only. The logs have all of it in any case."""
    return redirects == "3" and tee in {None, "0"}


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

    names = (*spellings(name), refused.short) if refused.short else spellings(name)
    settings: dict[str, Any] = {"is_flag": True} if refused.is_flag else {}
    return click.option(
        *names, callback=check, expose_value=False, hidden=True, envvar=environment_name(name), **settings
    )


OUTPUT = ("log_dir", "redirects", "tee", "role")
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
        short="-r",
        callback=streams,
        metavar="0|1|2|3|RANK:N,...",
    ),
    _option(
        "tee",
        "What the ranks print is in their logs and is shown, as without it.",
        short="-t",
        callback=streams,
        metavar="0|1|2|3|RANK:N,...",
    ),
    _option("role", "The ranks find NAME in ROLE_NAME.", metavar="NAME"),
)
