"""`midstep run`: a training script with process-level recovery, under torchrun's flags."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from ..agent.channel import ROLE_NAME
from ..launch import meeting as meetings
from ..launch.directories import checked_name
from ..launch.job import Start, create_job, new_name, required
from ..launch.joining import TokenWatch, prepare
from ..launch.kubernetes import PodFlags
from ..launch.rank_environment import load_schedule, named_variables, variables_of_files
from ..launch.roles import create_group, new_group
from ..protocol import environment as env
from ..protocol.compat import StrEnum
from ..protocol.errors import ConfigurationError
from ..protocol.token import TOKEN_VARIABLE, found_token_file, joinable, read_token
from .display.display import ShownRanks
from .display.plain import echo, hold_standard_descriptors, log_to_stderr
from .frame import Command, hand_on_metrics, metrics_options, proxy_option, token_file_option
from .job_options import (
    KUBERNETES,
    POLICY,
    PROGRAM,
    ROLES,
    SCRIPT_OR_ROLES,
    SHAPE,
    asked_for,
    options,
)
from .page.beside import page_beside, page_option, require_here
from .showing import join_job, run_job, run_on_ray, run_roles
from .torchrun_flags import OUTPUT, rendezvous_options, shown_local_ranks

GO_WITH_ROLES = frozenset(
    {"roles_file", "platform", "fixed_nodes", "job", "job_directory", "quiet", "environment", "environment_files"}
)
LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
IN_PODS = frozenset({*PodFlags.__struct_fields__, "token_file"})


class PlatformName(StrEnum):
    """The platform that provides the nodes of a job."""

    LOCAL = "local"
    KUBERNETES = "kubernetes"
    RAY = "ray"


@click.command(
    "run",
    cls=Command,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option(
    "--platform",
    type=click.Choice([name.value for name in PlatformName]),
    default=PlatformName.LOCAL.value,
    show_default=True,
    help="Where nodes come from: this machine, or those on which this command is typed; pods of Kubernetes "
    "(docs/kubernetes-managed.md); the Ray cluster that this machine is part of (docs/ray.md).",
)
@options(SHAPE)
@options(ROLES)
@click.option(
    "--fixed-nodes",
    is_flag=True,
    help="Start no node beyond those of --nnodes and --spares, as in a cluster that has no more.",
)
@rendezvous_options
@token_file_option
@click.option("--node", metavar="NAME", default="", help="This machine's name in the job.  [default: the host's]")
@click.option(
    "--failure-domain", metavar="NAME", default="", help="What fails together with this machine.  [default: the host]"
)
@proxy_option
@options(POLICY)
@click.option(
    "--fault-source",
    "fault_sources",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A file or directory in which the cluster's detectors leave their documents; see docs/faults.md. Repeatable.",
)
@click.option("--job", help="A name for the job.  [default: the time of day]")
@click.option(
    "--job-dir",
    "job_directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where journal, logs and checkpoints go.  [default: ~/.midstep/jobs/JOB]",
)
@click.option(
    "--faults",
    "faults_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Cause the faults of this file on purpose; see `midstep inject` for what there is.",
)
@options(KUBERNETES)
@metrics_options
@page_option()
@options(PROGRAM)
@click.option("--standalone", is_flag=True, envvar="PET_STANDALONE", help="All nodes are here, as by default.")
@click.option("-q", "--quiet", is_flag=True, help="Do not show what the ranks print; their logs are kept.")
@options(SCRIPT_OR_ROLES)
def command(
    *,
    roles_file: Path | None,
    platform: str,
    fixed_nodes: bool,
    fault_sources: tuple[Path, ...],
    job: str | None,
    job_directory: Path | None,
    faults_file: Path | None,
    quiet: bool,
    token_file: Path | None,
    node: str,
    failure_domain: str,
    proxies: tuple[str, ...],
    metrics_listen: str | None,
    metrics_token_file: Path | None,
    page: str | None,
    **chosen: Any,
) -> None:
    """Run SCRIPT on NNODES x NPROC-PER-NODE ranks and keep it running; with --roles, several scripts.

    All nodes are on this machine: each is an agent with its ranks, and a failure domain of its own. With
    --rdzv-endpoint (or --master-addr) each machine is a node: run the same command on all of them, with the job's token
    (`midstep token`); the one that has the address runs the controller.

    Ranks get the environment that torchrun sets. When a process fails, only what broke is replaced, if the script uses
    `@midstep.resilient`; a script that does not is restarted as a whole, --max-restarts times.

    The exit code is 0 when all ranks have finished, 130 after a stop by Ctrl-C or `midstep stop`, 1 otherwise. It is
    the job's also when the output has no reader any more (`| head`): the job continues, and its logs are kept.
    Afterwards `midstep report` tells what happened.
    """
    hold_standard_descriptors()
    log_to_stderr(logging.WARNING, "midstep: %(message)s")
    hand_on_metrics(metrics_listen, metrics_token_file)
    require_here(page)
    torchrun = {name: chosen.pop(name) for name in meetings.Flags.__struct_fields__}
    output = {name: chosen.pop(name) for name in OUTPUT}
    pods = PodFlags(**{name: chosen.pop(name) for name in PodFlags.__struct_fields__})
    if roles_file is not None:
        sys.exit(_run_roles(roles_file, click.get_current_context()))
    if chosen["script"] is None:
        raise click.UsageError("Missing argument 'SCRIPT', or --roles FILE.")
    asked = asked_for(**chosen)
    how = _manner(output, asked.ranks_per_node, quiet=quiet)
    start = msgspec.structs.replace(
        asked,
        last_call_s=meetings.last_call_s(torchrun["rdzv_conf"]),
        fixed_nodes=fixed_nodes,
        fault_sources=fault_sources,
        job_directory=job_directory or _under(output["log_dir"], job or torchrun["rdzv_id"]),
        job=job,
        environment={**_of_torchrun(output), **asked.environment, **_faults(faults_file, asked)},
    )
    if platform != PlatformName.LOCAL:
        _refuse_local(torchrun, output, platform, page)
    if pods != PodFlags() and platform != PlatformName.KUBERNETES:
        raise ConfigurationError("--image, --dry-run and the like are for --platform kubernetes.")
    if platform != PlatformName.LOCAL:
        _refuse_proxies(proxies)
        sys.exit(_run_elsewhere(start, platform, pods, token_file, quiet=how["quiet"]))
    flags = meetings.Flags(**{**torchrun, "rdzv_id": torchrun["rdzv_id"] or job})
    sys.exit(_run(start, flags, token_file, meetings.Wishes(node, failure_domain, proxies=proxies), how, page=page))


def _run(
    start: Start,
    flags: meetings.Flags,
    token_file: Path | None,
    wishes: meetings.Wishes,
    how: dict[str, Any],
    *,
    page: str | None,
) -> int:
    """Run the job on this machine, or this machine's part of one on several; return the exit code.

    `how`: further arguments of `run_job` and `join_job`.
    """
    token = read_token(token_file, os.environ)
    os.environ.pop(TOKEN_VARIABLE, None)  # not for the ranks
    alone = token is None and meetings.meets_itself(flags, start.nodes)
    where = None if alone else meetings.meeting(flags, meetings.launched(os.environ))
    if where is None:
        _refuse_proxies(wishes.proxies)
        job = create_job(start)
        with page_beside(job.job_directory, page):
            return run_job(job, **how)
    if page is not None:
        raise ConfigurationError("--page is for a job on this machine alone. Where several join: `midstep page`.")
    if token is None:
        token_file = found_token_file(os.environ)
        token = None if token_file is None else read_token(token_file, {})
    secret = joinable(required(token))
    machine = prepare(where, secret, start, wishes)
    keys = machine.held.path / meetings.KEYS_NAME
    with TokenWatch(None if machine.job is None else token_file, secret, keys, machine.name):
        return join_job(machine, **how)


def _run_elsewhere(start: Start, platform: str, pods: PodFlags, token_file: Path | None, *, quiet: bool) -> int:
    """Run the job on Kubernetes or Ray, and return its exit code. Raises MidstepError."""
    if platform == PlatformName.KUBERNETES:
        from ..launch.kubernetes.job import launch as launch_in_kubernetes

        return launch_in_kubernetes(start, pods, token_file, echo, quiet=quiet)
    if token_file is not None:
        raise ConfigurationError("--token-file: a job on Ray has keys of its own, and no token.")
    return run_on_ray(start, quiet=quiet)


def _refuse_proxies(proxies: tuple[str, ...]) -> None:
    """Refuse proxies where no machine joins by itself. Raises ConfigurationError."""
    if proxies:
        raise ConfigurationError("--proxy is for machines that join a job: it needs --rdzv-endpoint or --master-addr.")


def _refuse_local(torchrun: dict[str, Any], output: dict[str, Any], platform: str, page: str | None) -> None:
    """Refuse flags that are for machines on which this command is typed. Raises ConfigurationError."""
    if page is not None:
        raise ConfigurationError(
            f"--page is for a job on this machine. With --platform {platform}: `midstep page JOB`."
        )
    if output["local_ranks_filter"] is not None or output["signals_to_handle"]:
        raise ConfigurationError(
            "--local-ranks-filter and --signals-to-handle are for nodes on this machine, and for machines on which "
            f"this command is typed. With --platform {platform} write -q, and `midstep stop JOB` to end the job."
        )
    if torchrun["rdzv_endpoint"] or torchrun["master_addr"]:
        raise ConfigurationError(
            "--rdzv-endpoint and --master-addr are for machines on which this command is typed; --platform "
            f"{platform} brings its own."
        )


def _under(log_directory: Path | None, job: str | None) -> Path | None:
    """Return the job directory that --log-dir means; None if it is not given."""
    return None if log_directory is None else log_directory / checked_name(job or new_name())


def _manner(output: dict[str, Any], ranks_per_node: int, *, quiet: bool) -> dict[str, Any]:
    """Return further arguments of `run_job` and `join_job`, by torchrun's flags and variable."""
    chosen = output["local_ranks_filter"]
    local = shown_local_ranks(ranks_per_node, output["redirects"], output["tee"], chosen)
    shown = ShownRanks(ranks_per_node, local, os.environ.get(LINE_PREFIX, ""))
    return {"quiet": quiet or local == frozenset(), "shown": shown, "stop_signals": output["signals_to_handle"]}


def _of_torchrun(output: dict[str, Any]) -> dict[str, str]:
    """Return the variables of the ranks that torchrun's flags ask for."""
    role = {} if output["role"] is None else {ROLE_NAME: output["role"]}
    return {**role, **({env.VIRTUAL_LOCAL_RANK: "1"} if output["virtual_local_rank"] else {})}


def _faults(file: Path | None, start: Start) -> dict[str, str]:
    """Return the variable with the faults that are to be caused on purpose."""
    if file is None:
        return {}
    return {env.FAULTS: msgspec.json.encode(load_schedule(file, start.nodes, start.ranks_per_node)).decode()}


def _run_roles(file: Path, context: click.Context) -> int:
    """Run the job of a roles file to its end, and return its exit code. Raises MidstepError.

    `context`: of `midstep run`, whose options it goes by.
    """
    given = context.params
    platform, job_directory, fixed_nodes = given["platform"], given["job_directory"], given["fixed_nodes"]
    _refuse_what_is_of_one_script(context, IN_PODS if platform == "kubernetes" else frozenset())
    environment = {**variables_of_files(given["environment_files"]), **named_variables(given["environment"])}
    if platform == "kubernetes":
        from ..launch.kubernetes.job import launch_roles

        return launch_roles(
            file,
            PodFlags(**{name: given[name] for name in PodFlags.__struct_fields__}),
            echo,
            job=given["job"],
            job_directory=job_directory,
            environment=environment,
            fixed_nodes=fixed_nodes,
            token_file=given["token_file"],
            quiet=given["quiet"],
        )
    if platform == "ray" and (job_directory is None or fixed_nodes):
        raise ConfigurationError(
            "--roles with --platform ray: needs --job-dir, a directory that all machines of the cluster see, and takes "
            "no --fixed-nodes."
        )
    new = new_group(
        file,
        job=given["job"],
        job_directory=job_directory,
        environment=environment,
        platform=platform,
        fixed_nodes=fixed_nodes,
    )
    return run_roles(create_group(new), quiet=given["quiet"])


def _refuse_what_is_of_one_script(context: click.Context, further: frozenset[str]) -> None:
    """Refuse options that each role has in the file. `further`: others that go with it. Raises ConfigurationError."""
    for parameter in context.command.params:
        name = parameter.name or ""
        typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not typed or name in GO_WITH_ROLES | further or not context.params.get(name):
            continue
        what = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        raise ConfigurationError(
            f"{what} goes with one SCRIPT. With --roles the file says for each role what runs, on how many ranks and "
            "how it recovers: script, arguments, ranks, nnodes, spares, env, ladder, policy (docs/roles.md)."
        )
