"""`midstep detect`: report faults of hardware to a running job: from documents, lines, drivers, or the kernel's log."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path

import click
import msgspec

from ..launch.directories import find_job, run_directory_of
from ..launch.job import POLICY_NAME
from ..launch.reached_job import JobElsewhere, reached_from_elsewhere
from ..policies.files import load_policy
from ..protocol.errors import ConfigurationError
from ..protocol.identities import Role
from ..protocol.keys import ClientKeys
from ..protocol.types import FaultReport, detector_address
from .display.plain import echo, log_to_stderr
from .frame import Command, operator_options
from .standing_by import LEAVE_S, LEFT, unless_told_to_leave, until_one_leads

KEYS_NAME = "keys"
KMSG, STDIN = "/dev/kmsg", "-"  # where the lines of the kernel's log are read
EXIT_SKIPPED = 3  # everything else was reported
LOOK_S = 1.0
TURN_S = 5.0  # at one endpoint
ASK_S = 10.0


@click.command("detect", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--source",
    "sources",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A file or directory with documents of detectors, to be watched. Repeatable.",
)
@click.option(
    "--config-maps",
    "namespaces",
    multiple=True,
    metavar="NAMESPACE",
    help="A namespace of Kubernetes whose ConfigMaps are to be watched, by its API. Repeatable.",
)
@click.option(
    "--serial",
    "serials",
    multiple=True,
    metavar="SN=NODE",
    help="The node of the machine with this serial number, for PublicFault documents that have no name. Repeatable.",
)
@click.option(
    "--node-name",
    "node_names",
    multiple=True,
    metavar="NAME=NODE",
    help="The job's name of a node that documents name as the cluster does. Repeatable.",
)
@click.option(
    "--kernel-log",
    type=click.Choice([KMSG, STDIN]),
    metavar=f"{KMSG}|-",
    help="Report what the drivers of GPUs and NPUs write to this machine's kernel log: read from there, or, with -, "
    "from lines on standard input, to their end. --node-name names the node, if it is not the host's name.",
)
@click.option(
    "--npu-smi",
    is_flag=True,
    help="Report what `npu-smi` says of the NPUs of this machine, which is asked every 5 s. --node-name as above.",
)
@click.option("--lines", is_flag=True, help="Read reports from standard input, one JSON object a line, to its end.")
@click.option("--name", metavar="NAME", help="The detector's name.  [default: the source's, such as npu-smi]")
@operator_options
@click.option(
    "--keys",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --controller, instead of a token: the directory that the detector's key folder was copied to.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="With --controller: wait for as long as no controller that listens there leads, and end "
    "with status 75, to be started again, when the one that was served has been away for 10 s.",
)
@click.option("--signs", is_flag=True, hidden=True)  # of life, to standard output: for `midstep run`, which starts this
@click.option("--make-keys", is_flag=True, help="Only make the detector's keys, and print where they are.")
def command(
    *,
    job: str | None,
    sources: tuple[Path, ...],
    namespaces: tuple[str, ...],
    serials: tuple[str, ...],
    node_names: tuple[str, ...],
    kernel_log: str | None,
    npu_smi: bool,
    lines: bool,
    name: str | None,
    controller: str | None,
    token_file: Path | None,
    keys: Path | None,
    standby: bool,
    signs: bool,
    make_keys: bool,
) -> None:
    """Report faults of devices and nodes to a running job until it ends, or until the lines do.

    Documents are what MindCluster's detectors leave (mindx-dl-deviceinfo-*, mindx-dl-nodeinfo-*, switches,
    PublicFault) and ClusterD (cluster-info-*, reset-config-*), as JSON, as ConfigMaps, or mounted. docs/faults.md
    describes them, the lines, and what follows from each level.

    With --npu-smi the faults are those of the NPUs of this machine, as the driver's own program names them; with
    --kernel-log those that NVIDIA's driver writes of its GPUs (Xid events), and Ascend's of its NPUs.

    With --config-maps they are read from the API of Kubernetes (KUBECONFIG, or the account of a pod), which takes the
    rights to list and to watch ConfigMaps there.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. With
    --controller it is the job's whole name, and nothing of the job has to be on this machine: a token of the role
    operator or admin will do, or the detector's keys.

    \b
    Examples:
      midstep detect --source /etc/cluster-faults
      echo '{"code": "80E01801", "node": "node1", "device": 0}' | midstep detect --lines
      midstep detect --npu-smi --node-name $HOSTNAME=node1
      my-bmc-watcher | midstep detect demo --lines --name bmc
      journalctl --dmesg --follow --lines 0 | midstep detect --kernel-log -

    Exit status: 0 when all was reported, 3 when lines were skipped, 1 when the controller did not take reports in, 75
    with --standby when the controller has gone.
    """
    log_to_stderr(logging.INFO, "%(asctime)s detect %(levelname)s %(message)s")
    logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it counts changes
    local = {"kernel-log": kernel_log, "npu-smi": npu_smi, "lines": lines}
    kinds: dict[str, object] = {"files": sources, "config-maps": namespaces, **local}
    chosen = name or ("files" if make_keys and not any(kinds.values()) else _kind_of_detector(kinds))
    if standby and (keys is not None or make_keys):
        raise click.UsageError("--standby goes with --controller and a token, and not with keys.")
    _check_keys(job, controller, token_file, keys, make_keys=make_keys)
    nodes = dict(_named_node("--serial", each, "a serial number", "2102312=node1") for each in serials)
    nodes |= dict(_named_node("--node-name", each, "a name", "worker-7=node1") for each in node_names)
    try:
        watched = Watched(sources, nodes, signs, namespaces, kernel_log or "", npu_smi)
        if controller is not None and keys is not None:
            sys.exit(asyncio.run(report_faults(Way(job or "", controller, keys), chosen, watched)))
        target = None if signs or make_keys else reached_from_elsewhere(job, controller, token_file)
        if target is not None:
            named = name or f"{chosen}@{socket.gethostname()}"  # that of each machine is another detector
            sys.exit(_detect_elsewhere(target, watched, named, standby=standby))
        if standby:
            raise click.UsageError("--standby goes with --controller HOST:PORT and a token.")
        sys.exit(_detect(job, watched, chosen, only_keys=make_keys))
    except KeyboardInterrupt:
        sys.exit(0)


def _kind_of_detector(given: Mapping[str, object]) -> str:
    """Return which one of these was given: a detector without a name is called so. Raises click.UsageError."""
    kinds = [kind for kind, value in given.items() if value]
    if not kinds:
        raise click.UsageError(
            "nothing to do: name a --source PATH, --config-maps NAMESPACE, --npu-smi, --kernel-log, or --lines to read "
            "from standard input."
        )
    if len(kinds) > 1:
        raise click.UsageError(
            "--source, --config-maps, --npu-smi, --kernel-log and --lines are detectors: start one for each, with a "
            "--name of its own."
        )
    return kinds[0]


def _check_keys(
    job: str | None, controller: str | None, token_file: Path | None, keys: Path | None, *, make_keys: bool
) -> None:
    if keys is not None and (controller is None or token_file is not None):
        raise click.UsageError("--keys goes with --controller, and is given instead of a token.")
    if keys is not None and job is None:
        raise click.UsageError("with --keys, name the job: nothing of it is on this machine.")
    if make_keys and controller is not None:
        raise click.UsageError("--make-keys is for the machine that runs the controller: leave --controller out.")


def _named_node(option: str, text: str, what: str, example: str) -> tuple[str, str]:
    name, _, node = text.partition("=")
    if not name or not node:
        raise click.UsageError(f"{option} {text}: {what} and the name of its node, e.g. {example}.")
    return name, node


class Watched(msgspec.Struct, frozen=True):
    """The sources that a detector watches, and the nodes that documents name by a serial number or another name.

    `signs`: it gives signs of life on standard output. `namespaces`: those whose ConfigMaps are watched. `kernel_log`:
    where the lines of the kernel's log are read. `npu_smi`: the NPUs of this machine are.
    """

    sources: tuple[Path, ...]
    serials: dict[str, str]
    signs: bool = False
    namespaces: tuple[str, ...] = ()
    kernel_log: str = ""
    npu_smi: bool = False


def _detect_elsewhere(job: JobElsewhere, watched: Watched, name: str, *, standby: bool) -> int:
    async def stand_by_and_report() -> int:
        await until_one_leads(job.endpoints, job.token)
        return await report_faults(way_with_token(job, name, standby=True), name, watched)

    if standby:
        return asyncio.run(unless_told_to_leave(stand_by_and_report()))
    return asyncio.run(report_faults(way_with_token(job, name, standby=False), name, watched))


def _detect(job: str | None, watched: Watched, name: str, *, only_keys: bool) -> int:
    from ..protocol.keys import JobKeys

    job_directory = find_job(job)
    run_directory = run_directory_of(job_directory)
    if run_directory is None or not run_directory.is_dir():
        raise ConfigurationError(f"{job_directory}: the job is not running. Start it, or name one that is.")
    JobKeys.add(run_directory / KEYS_NAME, detector_address(name))
    if only_keys:
        echo(str(JobKeys.folder(run_directory / KEYS_NAME, detector_address(name))))
        return 0
    from ..protocol.discovery import read_endpoint

    endpoint = read_endpoint(run_directory)
    if endpoint is None:
        raise ConfigurationError(f"{run_directory}: no controller has come up yet. Try again in some seconds.")
    if not watched.signs and (job_directory / POLICY_NAME).is_file():  # `midstep run` gives the names itself
        named = load_policy(job_directory / POLICY_NAME).faults.named_nodes
        watched = msgspec.structs.replace(watched, serials={**named, **watched.serials})
    # The run directory has the job's name, whatever its job directory is called.
    way = Way(run_directory.name, endpoint, run_directory / KEYS_NAME, run_directory)
    return asyncio.run(report_faults(way, name, watched))


class Way(msgspec.Struct, frozen=True):
    """The way to the controller of a job. `run_directory`: of a job on this machine.

    `others`: where other controllers of the job may listen. `standby`: leave, to be started again, when the controller
    has been away for a while.
    """

    job: str
    controller: str
    keys: Path | ClientKeys
    run_directory: Path | None = None
    others: tuple[str, ...] = ()
    standby: bool = False


def way_with_token(job: JobElsewhere, name: str, *, standby: bool) -> Way:
    """Return the way to a job on another machine, after a question that shows whether there is one.

    Raises MidstepError.
    """
    from ..controller.endpoints.control_requests import StatusRequest

    token = job.token
    if token.detector is None:
        raise ConfigurationError(
            f"the role {token.role} may not report faults: that takes the role {Role.OPERATOR}. Whoever has the job's "
            f"token makes a token of that role: `midstep token --role {Role.OPERATOR}`."
        )
    job.ask(StatusRequest(), ASK_S)  # reports wait for a day, without a word of what is wrong
    keys = ClientKeys(detector_address(name), token.detector.public, token.detector.secret, token.server_public)
    return Way(job.name, job.endpoints[0], keys, others=job.endpoints[1:], standby=standby)


async def report_faults(way: Way, name: str, watched: Watched) -> int:
    """Report what a detector sees until it or the job ends, or its controller has gone; return the exit code.

    Raises MidstepError.
    """
    from ..detectors.files import FileDetector
    from ..detectors.kernel_log import KernelLogDetector
    from ..detectors.lines import MAX_LINE_BYTES, LineDetector
    from ..detectors.npu_smi import NpuSmiDetector
    from ..detectors.reporter import FaultReporter
    from ..protocol.discovery import Lookup, read_endpoint

    here = way.run_directory
    turns = _Turns((way.controller, *way.others))
    lookup: Lookup = turns if here is None else partial(read_endpoint, here)
    async with FaultReporter(way.job, way.controller, name, way.keys, lookup=lookup) as reporter:
        turns.connected = lambda: reporter.connected
        lasts = _Presence(turns.connected).recent if way.standby else _lasts(way)
        state = None if here is None else here / f"detect-{name}.state"
        if watched.sources:
            if watched.signs:
                os.set_blocking(sys.stdout.fileno(), False)
            alive = _give_sign if watched.signs else _give_none
            detector = FileDetector(name, watched.sources, state, watched.serials, alive)
            watching = asyncio.create_task(detector.watch(reporter.tell))
            return await _while_it_lasts(watching, lasts, LEFT if way.standby else 0)
        if watched.namespaces:
            watching = asyncio.create_task(_watch_config_maps(name, watched, reporter.tell))
            return await _while_it_lasts(watching, lasts, LEFT if way.standby else 0)
        host = socket.gethostname()
        node = watched.serials.get(host, host)
        kernel_log = KernelLogDetector(name, node)
        if watched.npu_smi or watched.kernel_log == KMSG:
            local = NpuSmiDetector(name, node, state) if watched.npu_smi else kernel_log
            watching = asyncio.create_task(local.watch(reporter.tell))
            return await _while_it_lasts(watching, lasts, LEFT if way.standby else 0)
        stream = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
        lines = LineDetector(name, stream)
        reading = kernel_log.watch_lines(stream, reporter.tell) if watched.kernel_log else lines.watch(reporter.tell)
        await _while_it_lasts(asyncio.create_task(reading), lasts)
        await reporter.flush()
        return EXIT_SKIPPED if lines.refused else 0


async def _watch_config_maps(name: str, watched: Watched, report: Callable[[FaultReport], None]) -> None:
    from ..launch.kubernetes.config_maps import ConfigMapDetector
    from ..platforms.kubernetes.api import Api

    api = Api()
    try:
        await ConfigMapDetector(api, name, watched.namespaces, watched.serials).watch(report)
    finally:
        await api.close()


class _Turns:
    """Names another endpoint whenever there has been no connection for a while."""

    def __init__(self, endpoints: tuple[str, ...]) -> None:
        self._endpoints = cycle(endpoints)
        self._present = next(self._endpoints)
        self._since_s = time.monotonic()
        self.connected: Callable[[], bool] = lambda: False

    def __call__(self) -> str:
        """Return where to connect to."""
        now = time.monotonic()
        if self.connected():
            self._since_s = now
        elif now - self._since_s >= TURN_S:
            self._since_s, self._present = now, next(self._endpoints)
        return self._present


def _give_sign(sign: str) -> None:
    with contextlib.suppress(BlockingIOError):  # the launcher is busy, and has signs enough
        os.write(sys.stdout.fileno(), sign.encode())


def _give_none(sign: str) -> None:
    """Say nothing: a person has started the command."""


def _lasts(way: Way) -> Callable[[], bool]:
    """Return whether the job runs: its run directory goes away with it. Of one elsewhere that is not known."""
    return (lambda: True) if way.run_directory is None else way.run_directory.is_dir


class _Presence:
    """Knows whether there was a connection lately."""

    def __init__(self, connected: Callable[[], bool]) -> None:
        self._connected = connected
        self._since_s = time.monotonic()

    def recent(self) -> bool:
        """True if there was one within the time after which another controller is taken to lead."""
        now = time.monotonic()
        if self._connected():
            self._since_s = now
        return now - self._since_s < LEAVE_S


async def _while_it_lasts(watching: "asyncio.Task[None]", lasts: Callable[[], bool], code: int = 0) -> int:
    """Wait for the end of a detector, or of what it is for; return `code`."""
    try:
        while not watching.done() and lasts():
            await asyncio.wait([watching], timeout=LOOK_S)
        if watching.done():
            await watching
        return code
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
