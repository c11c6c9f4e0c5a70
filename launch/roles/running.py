"""`midstep run --roles FILE`: which other options go with it, and the run itself."""

import asyncio
import os
from pathlib import Path

import click
from click.core import ParameterSource

from ...cli.display.display import Display
from ...protocol.errors import ConfigurationError
from ..jobs.rank_variables import named_variables, variables_of_files
from ..joining.launch_environment import hear_if_all_are_signalled
from ..kubernetes.options import PodFlags
from .launcher import RolesLauncher
from .opening import OpenedGroup, create_group, new_group

GO_WITH_ROLES = frozenset(
    {"roles_file", "platform", "fixed_nodes", "job", "job_directory", "quiet", "environment", "environment_files"}
)
IN_PODS = frozenset({*PodFlags.__struct_fields__, "token_file"})


def run_roles(file: Path, context: click.Context) -> int:
    """Run the job of a roles file to its end, and return its exit code. Raises MidstepError.

    `context`: of `midstep run`, whose options it goes by.
    """
    given = context.params
    platform, job_directory, fixed_nodes = given["platform"], given["job_directory"], given["fixed_nodes"]
    _refuse_what_is_of_one_script(context, IN_PODS if platform == "kubernetes" else frozenset())
    environment = {**variables_of_files(given["environment_files"]), **named_variables(given["environment"])}
    if platform == "kubernetes":
        from ..kubernetes.roles import launch

        return launch(
            file,
            PodFlags(**{name: given[name] for name in PodFlags.__struct_fields__}),
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
    return launch_roles(create_group(new), quiet=given["quiet"])


def launch_roles(opened: OpenedGroup, *, quiet: bool) -> int:
    """Run a job of roles to its end, and return its exit code; says on stderr what happens to it."""
    hear_if_all_are_signalled(os.environ)
    try:
        with Display(opened.directory, opened.held.path, quiet=True) as display:
            names = ", ".join(opened.founding.plan.names)
            display.say(f"job {opened.founding.job} of roles {names} in {opened.directory}", "dim")
            result = asyncio.run(RolesLauncher(opened, quiet=quiet).run())
            display.say(f"{result.reason} (exit code {result.exit_code})", "green" if result.exit_code == 0 else "red")
            if result.exit_code != 0:
                display.say(f"see `midstep report {opened.directory}`", "dim")
    finally:
        opened.held.remove()  # if it was interrupted before the launcher ran
    return result.exit_code


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
