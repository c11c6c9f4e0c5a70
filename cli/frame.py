"""The frame that commands share: how one refuses, the options that several have, and orders to a job's controller."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..controller.endpoints.control_requests import Accepted, Refused, Request, StatusReply, StatusRequest
from ..controller.endpoints.local_sockets import NoController
from ..launch.reached_job import HereJob, ReachedJob, what_became_of_it
from ..protocol.discovery import endpoints
from ..protocol.errors import MidstepError
from ..protocol.token import CONTROLLER_VARIABLE, TOKEN_FILE_VARIABLE

METRICS_VARIABLE = "MIDSTEP_METRICS_LISTEN"
METRICS_TOKEN_VARIABLE = "MIDSTEP_METRICS_TOKEN_FILE"
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Command(click.Command):
    """A command that ends with one line on stderr, and status 1, when midstep refuses something."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except MidstepError as error:
            raise click.ClickException(str(error)) from error


def token_file_option(command: Any) -> Any:
    """Add --token-file to a command."""
    return click.option(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The file (mode 600) with the job's token, from `midstep token`.  [default: MIDSTEP_TOKEN]",
    )(command)


def proxy_option(command: Any) -> Any:
    """Add --proxy to a command that starts a node."""
    return click.option(
        "--proxy",
        "proxies",
        default="",
        metavar="HOST:PORT[,...]",
        callback=lambda context, option, given: endpoints(given) if given else (),
        help="Speak through a `midstep proxy`, through the next one where it does not answer, and without one at last.",
    )(command)


def metrics_options(command: _Command) -> _Command:
    """Add --metrics-listen and --metrics-token-file. What is wrong is said now, and not by each new controller."""
    token_file = click.option(
        "--metrics-token-file",
        envvar=METRICS_TOKEN_VARIABLE,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The file (mode 600) with what a scraper has to bring: Authorization: Bearer TOKEN.",
    )
    listen = click.option(
        "--metrics-listen",
        envvar=METRICS_VARIABLE,
        metavar="[HOST]:PORT",
        help="Serve the job's numbers to Prometheus (docs/metrics.md), from the controller's process. Without a HOST, "
        "or without a token, to this machine only.  [default: nowhere]",
    )
    return listen(token_file(command))


def hand_on_metrics(listen: str | None, token_file: Path | None) -> None:
    """Have the controllers that this process starts serve numbers. Raises ConfigurationError."""
    from ..controller.endpoints.metrics_server import metrics_place

    if listen:
        metrics_place(listen, token_file)
        os.environ[METRICS_VARIABLE] = listen
        if token_file is not None:
            os.environ[METRICS_TOKEN_VARIABLE] = str(token_file.absolute())


def store_option(*, required: bool = False) -> Callable[[Any], Any]:
    """Add --store to a command."""
    return click.option(
        "--store",
        envvar="MIDSTEP_STORE",
        required=required,
        metavar="URL",
        help="The etcd that keeps the job: etcd://HOST:PORT[,HOST:PORT...][/PREFIX], or etcds:// for TLS with the "
        "files that ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY name; user and password as in ETCDCTL_USER. Or a "
        "folder that all machines share, and the Lease of Kubernetes that elects their controllers: "
        "kubernetes://[NAMESPACE]/LEASE?journal=/FOLDER.  "
        "[env: MIDSTEP_STORE]",
    )


def operator_options(command: _Command) -> _Command:
    """Add what a command needs to reach a job from another machine."""
    token_file = click.option(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With --controller: the file (mode 600) with a token of a role, from `midstep token --role`.  "
        f"[default: {TOKEN_FILE_VARIABLE}, or the token itself in MIDSTEP_TOKEN]",
    )
    controller = click.option(
        "--controller",
        metavar="HOST:PORT[,...]",
        help=f"Ask over the network, where the job's controllers listen.  [default: {CONTROLLER_VARIABLE}]",
    )
    return controller(token_file(command))


def tell(job: ReachedJob, request: Request, timeout_s: float) -> str:
    """Send an order to the controller of a job and return what follows from it. Raises ClickException, MidstepError."""
    try:
        reply = job.ask(request, timeout_s)
    except NoController as error:
        why = what_became_of_it(job.directory) if isinstance(job, HereJob) else None
        if why:
            raise click.ClickException(f"{job.name}: {why}") from error
        raise
    if isinstance(reply, Accepted):
        return f"{job.name}: {reply.text}"
    if isinstance(reply, Refused):
        raise click.ClickException(f"{job.name}: {reply.reason}.")
    raise click.ClickException(
        f"{job.name}: the answer does not fit the request. Use the midstep version that runs the job."
    )


def ranks_on(job: ReachedJob, node: str, timeout_s: float) -> tuple[int, ...]:
    """Return the ranks that a node of a job has now. Raises ClickException if it has none, MidstepError."""
    reply = job.ask(StatusRequest(), timeout_s)
    ranks = reply.status.ranks if isinstance(reply, StatusReply) else ()
    there = tuple(rank.rank for rank in ranks if rank.node == node)
    if not there:
        raise click.ClickException(f"no rank is on node {node}. See `midstep status` for nodes and their ranks.")
    return there
