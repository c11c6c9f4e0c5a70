"""The options that say what a job is, for `midstep run` and `midstep submit`: its own, and Kubernetes'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..devices.kinds import device_names
from ..launch.job import Start
from ..launch.rank_environment import named_variables, variables_of_files
from ..protocol.bounds import MOST_OF_A_NODE
from ..protocol.errors import ConfigurationError
from .numbers import RESTARTS, SPARES, NodesAsked, RanksPerNode, node_count, seconds
from .torchrun_flags import spellings

Decorator = Callable[[Any], Any]
_FILE = click.Path(dir_okay=False, path_type=Path)
MOST_CONTROLLERS = 5
_TITAN = "midstep.adapters.torchtitan"  # the module that --titan runs


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
        *spellings("shutdown_timeout"),
        "stop_grace_s",
        envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
        type=seconds(),
        metavar="SECONDS",
        help="From SIGTERM to SIGKILL when the job ends, instead of the policy's deadlines.stop_grace_s.",
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
        "--titan",
        is_flag=True,
        help="Run torchtitan's own program, torchtitan.train, in the place of SCRIPT. Its arguments come after --, as "
        "in --titan -- --module llama3 --config llama3_debugmodel; see docs/torchtitan.md.",
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
    stop_grace_s: float | None,
    environment: tuple[str, ...],
    environment_files: tuple[Path, ...],
    mindio: bool,
    titan: bool,
    is_module: bool,
    no_python: bool,
    script: str,
    arguments: tuple[str, ...],
) -> Start:
    """Return what these options ask for.

    Raises ConfigurationError when a variable or its file cannot be taken, and for options that exclude each other.
    """
    if titan and (is_module or no_python or mindio):
        raise ConfigurationError(
            "--titan goes with none of --module, --no-python and --mindio. Arguments of torchtitan come after --, as "
            "in `midstep run --titan -- --module llama3 --config llama3_debugmodel`."
        )
    if no_python and is_module:
        raise click.UsageError("--no-python and -m exclude each other: SCRIPT is a program, or a module of Python.")
    return Start(
        command=(*([_TITAN] if titan else []), script, *arguments),
        is_module=is_module or titan,
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
        stop_grace_s=stop_grace_s,
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
        "--pod-group",
        type=_FILE,
        metavar="FILE",
        help="Kubernetes: have Volcano place as many agents as the job needs together, or none. FILE is a part of a "
        "PodGroup's manifest (queue, labels, annotations) that is laid over the one that is made.",
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
