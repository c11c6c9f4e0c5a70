"""`midstep submit`: a job in etcd, which controllers and agents on several machines work on."""

import os
from pathlib import Path

import click

from ..policies.schema import DeviceName
from ..protocol.errors import MidstepError
from .display.plain import echo
from .job_options import POLICY, PROGRAM, SCRIPT, SHAPE, options
from .jobs.directories import base_directory, checked_name
from .jobs.rank_variables import named_variables, variables_of_files
from .jobs.start import Start, new_name, policy_of, spec_of
from .numbers import NodesAsked
from .store import store_option


@click.command("submit", context_settings={"allow_interspersed_args": False})
@store_option(required=True)
@click.option("--job", help="A name for the job.  [default: the time of day]")
@click.option(
    "--job-dir",
    "job_directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where logs and checkpoints go, on each machine.  [default: ~/.midstep/jobs/JOB]",
)
@options(SHAPE, POLICY, PROGRAM, SCRIPT)
def command(
    *,
    store: str,
    job: str | None,
    job_directory: Path | None,
    nodes: NodesAsked,
    ranks_per_node: int,
    spare_nodes: int,
    max_restarts: int,
    policy_file: Path | None,
    device: str | None,
    environment: tuple[str, ...],
    environment_files: tuple[Path, ...],
    is_module: bool,
    no_python: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Put a job into etcd: SCRIPT on NNODES x NPROC-PER-NODE ranks. Nothing runs yet.

    Then start `midstep controller --store ... --standby` on some machines, any number, and `midstep agent` on each
    node. SCRIPT and the present directory have to be there on the nodes, under the same names.
    """
    from ..controller.etcd.journal import submit
    from ..controller.etcd.place import certificates_of, parse_place

    try:
        name = checked_name(job) if job is not None else new_name()
        start = Start(
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
            device=None if device is None else DeviceName(device),
        )
        policy = policy_of(start)
        directory = (job_directory or base_directory() / name).absolute()
        place = parse_place(store, name, certificates_of(os.environ))
        submit(place, spec_of(start, name, policy, directory), policy)
    except MidstepError as error:
        raise click.ClickException(str(error)) from error
    echo(f"{name}: submitted to {place}")
