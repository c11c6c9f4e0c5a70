"""The options that say what a job is, the same for `midstep run` and `midstep submit`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..devices.kinds import device_names
from ..launch.job import Start
from ..launch.rank_environment import named_variables, variables_of_files
from ..protocol.bounds import MOST_OF_A_NODE
from .numbers import RESTARTS, SPARES, NodesAsked, Whole, node_count
from .torchrun_flags import spellings

Decorator = Callable[[Any], Any]

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
        type=Whole(MOST_OF_A_NODE),
        default=1,
        show_default=True,
        help="Ranks on each node.",
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
