"""From the flags of `midstep run` to a job: its directories, its keys, its journal."""

import logging
import os
import re
import secrets
import stat
import time
from importlib import resources
from pathlib import Path

import msgspec

from ..adapters.mindio.package import refuse_beside, refuse_installed
from ..adapters.mindio.script_checkpoints import folder_of, variables_of
from ..controller.journal.reading import read_founding, read_status
from ..controller.journal.records import Founding
from ..controller.journal.sqlite_file import HEAD_NAME, journal_path
from ..controller.journal.sqlite_store import found_journal
from ..controller.journal.volume_place import folder_in, holds_journal
from ..devices.kinds import EXTERNAL, NPU, communicator_kind, device_kind
from ..platforms.local import MOST_NODES_HERE
from ..policies.budgets import beyond
from ..policies.files import load_policy, parse_policy, render
from ..policies.rules import broken_rules, job_settings
from ..policies.schema import Policy, default_policy
from ..policies.yaml_text import refuse
from ..protocol import environment as env
from ..protocol.bounds import LARGEST_RANK, MOST_NODES
from ..protocol.errors import ConfigurationError
from ..protocol.identities import PROXY_FAMILY, Role, family_of
from ..protocol.incidents import JobStatus
from ..protocol.keys import JobKeys, JoiningTerms
from ..protocol.private_files import WRITABLE_BY_OTHERS, make_private_directory, replace_file
from ..protocol.run_directories import RunDirectory, RunDirectoryTaken
from ..protocol.token import FullToken, Token, expiry_text
from ..protocol.types import (
    CONTROLLER,
    DETECTOR_PREFIX,
    PLATFORM,
    JobSettings,
    JobSpec,
    RestoreSource,
    StandbyDepth,
    node_address,
)
from . import directories
from .meeting import is_loopback
from .script_imports import refuse_another_size

_log = logging.getLogger(__name__)
POLICY_NAME = "policy.yaml"  # the policy as it was read, in the directory of its job
_TCP = "tcp://"
_ANY = "*"
_USED = {"active", "spare", "unfit"}
_OF_THIS_PLATFORM = re.compile(r"node\d+")
_NS = 1_000_000_000


class Start(msgspec.Struct, frozen=True):
    """A user's request for a job. Paths are absolute."""

    command: tuple[str, ...]
    is_module: bool = False
    no_python: bool = False
    nodes: int = 1
    least_nodes: int | None = None  # instead of the policy's scale.min_nodes
    last_call_s: float | None = None  # instead of the policy's scale.last_call_s
    ranks_per_node: int = 1
    spare_nodes: int = 0
    fixed_nodes: bool = False
    max_restarts: int = 0
    policy_file: Path | None = None
    policy: Policy | None = None  # instead of a file's
    fault_sources: tuple[Path, ...] = ()
    job_directory: Path | None = None
    job: str | None = None
    environment: dict[str, str] = {}
    working_directory: Path | None = None  # None: this process's
    device: str | None = None  # instead of the policy's, with the communicator that goes with it
    communicator: str | None = None  # instead of that one
    listen: str | None = None  # where the controller of a job on several machines listens
    token: FullToken | None = None  # of such a job
    node_check: bool = False  # or as the policy has it
    stop_grace_s: float | None = None  # instead of the policy's deadlines.stop_grace_s
    mindio: bool = False  # the ranks find a package mindio_ttp, which is midstep's


class Before(msgspec.Struct, frozen=True):
    """The past of a job that continues: nodes that it lost, those to start, and a session above all earlier ones."""

    lost: tuple[str, ...]
    nodes: tuple[str, ...]
    session: int


class PreparedJob(msgspec.Struct, frozen=True):
    """A job that is ready to be started. `held`: its run directory, which the launcher removes at the end."""

    spec: JobSpec
    policy: Policy
    job_directory: Path
    held: RunDirectory
    fault_sources: tuple[Path, ...] = ()
    listen: str | None = None  # None: on this machine, at any port
    before: Before | None = None  # of a job that continues
    can_create_nodes: bool = True  # beyond those that the job starts with

    @property
    def name(self) -> str:
        """The job's name."""
        return self.spec.job

    @property
    def run_directory(self) -> Path:
        """Where sockets and keys lie while the job runs."""
        return self.held.path


def create_job(start: Start) -> PreparedJob:
    """Make the directories, the keys and the journal of a new job. Raises ConfigurationError; nothing has run then."""
    name = directories.checked_name(start.job) if start.job is not None else new_name()
    require_script(start)
    policy = policy_of(start)
    if start.token is None and start.nodes + start.spare_nodes > 1 and _would_collide(start, policy):
        raise ConfigurationError(
            f"--nnodes {start.nodes} --spares {start.spare_nodes} with the device {policy.device}: all nodes of the "
            "local platform are on this machine, and their ranks would take the same devices. Use --nnodes 1, without "
            "spares."
        )
    if start.token is None and start.nodes + start.spare_nodes > MOST_NODES_HERE:
        raise ConfigurationError(
            f"--nnodes {start.nodes} --spares {start.spare_nodes}: all nodes of the local platform are on one machine, "
            f"for at most {MOST_NODES_HERE}. With --rdzv-endpoint each machine is a node."
        )
    directory = (start.job_directory or directories.base_directory() / name).absolute()
    make_job_directory(directory, policy)
    spec = spec_of(start, name, policy, directory)
    can_create_nodes = not start.fixed_nodes and start.token is None
    held = directories.claim_run_directory(name)
    try:
        _make_keys(start, name, held.path / "keys")
        found_journal(
            journal_path(directory), spec, policy, can_create_nodes=can_create_nodes, head=held.path / HEAD_NAME
        )
        directories.write_job_file(directory, directories.JobFile(str(held.path)))
    except OSError as error:
        held.remove()
        raise unwritable(directory, error) from error
    except BaseException:
        held.remove()  # keys of a job that never was
        raise
    _warn_of_writers(directory)
    sources = [*map(Path, policy.faults.sources), *(source.absolute() for source in start.fault_sources)]
    return PreparedJob(
        spec,
        policy,
        directory,
        held,
        tuple(dict.fromkeys(sources)),
        start.listen,
        can_create_nodes=can_create_nodes,
    )


def new_name() -> str:
    """Return the name of a job that was given none."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def policy_of(start: Start, given: Policy | None = None) -> Policy:
    """Return the policy of a new job. `given` stands in for the file that was asked for.

    Raises ConfigurationError when it does not go with what was asked for.
    """
    given = start.policy if given is None else given
    if given is None:
        given = load_policy(start.policy_file) if start.policy_file else default_policy()
    policy = _with_few_nodes(given, start)
    policy = _on_device(policy, start)
    policy = with_mindio(policy, _folder_of(start), loads=_loads_from(start) is not None) if start.mindio else policy
    if start.stop_grace_s is not None:
        deadlines = msgspec.structs.replace(policy.deadlines, stop_grace_s=start.stop_grace_s)
        policy = msgspec.structs.replace(policy, deadlines=deadlines)
    if start.environment.get(env.VIRTUAL_LOCAL_RANK) == "1" and (policy.device == NPU or start.mindio):
        raise ConfigurationError(
            "--virtual-local-rank is for GPUs: a rank on NPUs takes the one of its LOCAL_RANK. Leave it out."
        )
    if start.node_check:
        node_check = msgspec.structs.replace(policy.node_check, enabled=True)
        policy = msgspec.structs.replace(policy, node_check=node_check)
    out_of_range = beyond(policy, start.nodes * start.ranks_per_node)
    if out_of_range is not None:
        raise ConfigurationError(f"{start.policy_file or 'the default policy'}: {out_of_range}")
    _refuse_sizes(start)
    if policy.scale.in_place and not communicator_kind(policy.communicator.name).grows:
        raise ConfigurationError(
            f"scale.in_place in the policy: groups of the communicator {policy.communicator.name} have one size. Leave "
            "it out: all processes restart to grow."
        )
    if policy.scale.min_nodes is not None:
        refuse_another_size(start.command, _folder_of(start), is_module=start.is_module, mindio=start.mindio)
    return policy


def spec_of(start: Start, name: str, policy: Policy, directory: Path) -> JobSpec:
    """Return what is to run, as agents get it."""
    # A script with MindIO's handlers takes its device itself, whatever the policy says.
    kinds = [policy.device, *([NPU] if start.mindio else [])]
    wanted = {name: value for kind in kinds for name, value in device_kind(kind).environment.items()}
    needed = {name: value for name, value in wanted.items() if name not in os.environ}
    reported = {env.TRAINJOB_REPORTED: "1"} if policy.trainjob.report else {}
    return JobSpec(
        job=name,
        command=start.command,
        is_module=start.is_module,
        no_python=start.no_python,
        environment={**needed, **start.environment, **_of_mindio(start), **reported},
        working_directory=str(start.working_directory or Path.cwd()),
        job_directory=str(directory),
        world_size=start.nodes * start.ranks_per_node,
        ranks_per_node=start.ranks_per_node,
        nodes=start.nodes,
        spare_nodes=start.spare_nodes,
        max_restarts=start.max_restarts,
        settings=_settings(start, policy, directory),
    )


def _settings(start: Start, policy: Policy, directory: Path) -> JobSettings:
    """Return the policy's. A program that is not Python is never run ahead: it would not stop before it trains."""
    settings = job_settings(policy, directory, spares=start.spare_nodes)
    return msgspec.structs.replace(settings, standby_depth=StandbyDepth.IMPORTED) if start.no_python else settings


def require_script(start: Start) -> None:
    """Refuse a script that is not there. Raises ConfigurationError."""
    if not start.no_python and not start.is_module and not Path(start.command[0]).is_file():
        raise ConfigurationError(
            f"there is no script {start.command[0]}. Use -m for a module, --no-python for a program."
        )


def _refuse_sizes(start: Start) -> None:
    """Refuse a world that no controller could lead. Raises ConfigurationError."""
    if start.nodes * start.ranks_per_node > LARGEST_RANK or start.nodes + start.spare_nodes > MOST_NODES:
        raise ConfigurationError(
            f"{start.nodes} nodes of {start.ranks_per_node} ranks, and {start.spare_nodes} spare nodes: at most "
            f"{LARGEST_RANK} ranks on {MOST_NODES} nodes."
        )


def _folder_of(start: Start) -> Path:
    """Return the folder from which the ranks' program imports first."""
    working = start.working_directory or Path.cwd()
    return working if start.is_module or start.no_python else (working / start.command[0]).resolve().parent


def _make_keys(start: Start, job: str, keys: Path) -> None:
    """Make the keys of all that the launcher starts; machines that join make their own."""
    if start.token is not None:
        let_nodes_join(keys, start.token, job)
        JobKeys.add(keys, CONTROLLER)
        return
    names = [f"node{number}" for number in range(start.nodes + start.spare_nodes)]
    JobKeys.create(keys, [CONTROLLER, PLATFORM, *map(node_address, names)])


def _warn_of_writers(directory: Path) -> None:
    """Say so when others can replace what the job writes: a directory that was there keeps the mode that it had."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & WRITABLE_BY_OTHERS:
        _log.warning(
            "%s can be written by others (mode %o): they can change the job's results; chmod 700 it", directory, mode
        )


def _with_few_nodes(policy: Policy, start: Start) -> Policy:
    """Return a policy by which the job trains with as few nodes as was asked for. Raises ConfigurationError."""
    if start.least_nodes is None:
        return policy
    last_call_s = policy.scale.last_call_s if start.last_call_s is None else start.last_call_s
    scale = msgspec.structs.replace(policy.scale, min_nodes=start.least_nodes, last_call_s=last_call_s)
    policy = msgspec.structs.replace(policy, scale=scale)
    source = start.policy_file or "the default policy"
    refuse(broken_rules(policy), f"{source} with --nnodes {start.least_nodes}:{start.nodes}")
    return policy


def _on_device(policy: Policy, start: Start) -> Policy:
    """Return the policy for the device that was asked for, whose links take their own time to come up.

    The communicator is that of the policy which is written for the device; so are the deadlines, if they are not set.
    """
    if start.device is not None and start.device != policy.device:
        kind = device_kind(start.device)
        communicator = msgspec.structs.replace(policy.communicator, name=kind.communicators[0].name)
        deadlines = policy.deadlines
        if kind.configuration is not None:
            text = resources.files("midstep.configs").joinpath(kind.configuration).read_text()
            own = parse_policy(text, kind.configuration)
            communicator = own.communicator
            deadlines = own.deadlines if deadlines == default_policy().deadlines else deadlines
        policy = msgspec.structs.replace(policy, device=kind.name, communicator=communicator, deadlines=deadlines)
    if start.communicator is not None:
        communicator = msgspec.structs.replace(policy.communicator, name=start.communicator)
        policy = msgspec.structs.replace(policy, communicator=communicator)
    return policy


def _would_collide(start: Start, policy: Policy) -> bool:
    """Return whether nodes of one machine would take the same devices, and may not."""
    kind = device_kind(policy.device)
    is_shared = kind.shared_with is not None and {**os.environ, **start.environment}.get(kind.shared_with) == "1"
    return kind.local and not is_shared


def make_job_directory(directory: Path, policy: Policy) -> None:
    """Make the directory of a new job, with its policy as it was read. Raises ConfigurationError."""
    if directories.is_job(directory):
        raise ConfigurationError(f"{directory} holds a job already. Choose another --job or --job-dir, or remove it.")
    directories.require_local(directory)
    for link in (directory / "logs", directory / "checkpoints"):
        if link.is_symlink() and link.lstat().st_uid != os.getuid():
            raise ConfigurationError(
                f"{link} is a link that another user has made: remove it, or choose another --job-dir."
            )
    try:
        make_private_directory(directory / "logs")
        replace_file(directory / POLICY_NAME, render(policy).encode())
    except OSError as error:
        raise unwritable(directory, error) from error


def found_in_directory(directory: Path, spec: JobSpec, policy: Policy, *, platform: str = "") -> None:
    """Make a job that waits for its controller, one at a time; `platform`: what makes its nodes, see Founding.

    Raises ConfigurationError, JournalError.
    """
    make_job_directory(directory, policy)
    create_journal(directory, spec, policy, platform=platform)


def create_journal(directory: Path, spec: JobSpec, policy: Policy, *, platform: str = "") -> None:
    """Make the journal of a new job, with which it begins to exist. Raises ConfigurationError, JournalError."""
    try:
        found_journal(journal_path(directory), spec, policy, platform=platform)
    except OSError as error:
        raise unwritable(directory, error) from error


def unwritable(directory: Path, error: OSError) -> ConfigurationError:
    """Return the error of a job directory that cannot be written."""
    return ConfigurationError(f"{directory} cannot be written: {error}. Choose another --job-dir.")


def with_mindio(policy: Policy, folder: Path, *, loads: bool = False) -> Policy:
    """Return the policy of such a job, whose script is in `folder`. Its groups and checkpoints are the framework's own.

    `loads`: it is known where its checkpoints lie, so that all ranks can be told to load one.
    Raises ConfigurationError if another mindio_ttp is installed here, or lies beside the script.
    """
    refuse_installed()
    refuse_beside(folder)
    usable = {RestoreSource.REPLICA, *([RestoreSource.CHECKPOINT] if loads else [])}
    return msgspec.structs.replace(
        policy,
        communicator=msgspec.structs.replace(policy.communicator, name=EXTERNAL),
        checkpoint=msgspec.structs.replace(policy.checkpoint, every_steps=0),
        restore=tuple(each for each in policy.restore if each in usable) or (RestoreSource.REPLICA,),
    )


def _of_mindio(start: Start) -> dict[str, str]:
    """Return the variables by which the ranks find the package, and the script's checkpoints."""
    return {env.MINDIO: "1", **variables_of(_loads_from(start))} if start.mindio else {}


def _loads_from(start: Start) -> Path | None:
    return folder_of(start.command, start.environment, (start.working_directory or Path.cwd()).absolute())


def let_nodes_join(keys: Path, token: FullToken, job: str) -> None:
    """Give the controller the keys that follow from the token, and admit those who ask with it, operators too.

    A job continues when its token has expired; no more nodes join, and no operators connect. A renewed token may be
    given at any time, to a controller that runs, too. Raises ConfigurationError when the job has been run with other
    keys.
    """
    pair = token.controller_keys(job)
    JobKeys.create(keys, [], server=pair)
    if JobKeys.load_server(keys).public != pair.public:
        raise ConfigurationError(
            f"{keys} holds keys of another token: give this controller the token that it had, or one that "
            "`midstep token --renew` has made of that."
        )
    families = {family_of(role): token.operator_keys(job, role).public for role in Role}
    families[DETECTOR_PREFIX] = token.detector_keys(job).public
    JobKeys.admit(keys, PLATFORM, token.platform_keys(job).public)
    JobKeys.admit(keys, PROXY_FAMILY, token.proxy_keys(job).public)
    JobKeys.open_for_joining(keys, JoiningTerms(token.invitation(job).join.public, token.expires_s, families))


def required(token: Token | None) -> Token:
    """Refuse to work with other machines without a token. Raises ConfigurationError."""
    if token is None:
        raise ConfigurationError(
            "several machines need the job's token: `(umask 077; midstep token > job.token)` on one of them, and "
            "--token-file job.token, or its text in MIDSTEP_TOKEN, on all; or as ~/.midstep/token in the home of all."
        )
    return token


def require_unexpired(token: FullToken) -> None:
    """Refuse to begin a job that no node could join. Raises ConfigurationError."""
    if token.expires_s and time.time() >= token.expires_s:
        raise ConfigurationError(
            f"the token expired at {expiry_text(token.expires_s)}: `midstep token` makes a new one."
        )


def require_loopback(listen: str) -> None:
    """Refuse to listen where other machines get to, without a token. Raises ConfigurationError."""
    host = listen.removeprefix(_TCP).rpartition(":")[0].removeprefix("[").removesuffix("]")
    if listen.startswith(_TCP) and (host == _ANY or not is_loopback(host)):
        raise ConfigurationError(
            f"--listen {listen}: other machines could connect. Give the job's token (--token-file, MIDSTEP_TOKEN), or "
            "listen at 127.0.0.1."
        )


def continued(directory: Path) -> PreparedJob:
    """Return a job that is ready to go on: with the nodes that it had, and new keys. Raises MidstepError.

    Its directory may have been copied from another machine, as a whole.
    """
    known = directories.read_job_file(directory)
    if known is not None and known.store:
        raise ConfigurationError(
            f"{directory.name} is kept in {known.store}: start its controllers and agents again, as before."
        )
    if holds_journal(folder_in(directory)):
        raise ConfigurationError(
            f"{directory.name} is kept on a volume of several machines: start its controllers and agents "
            "again, as before."
        )
    founding, status = read_founding(directory), read_status(directory)
    refuse_if_ended(directory, status)
    lost = tuple(node.node for node in status.nodes if node.state in _USED)
    if any(_OF_THIS_PLATFORM.fullmatch(node) is None for node in lost):
        raise ConfigurationError(
            f"{directory.name} ran on several machines ({', '.join(lost)}), which joined it by themselves: that a "
            "whole job of that kind continues, its journal has to be in etcd. See docs/controllers.md."
        )
    spec, policy = founding.job, founding.policy
    before = Before(lost, _fresh(founding, status), int(status.at_s * _NS) + 1) if lost else None
    try:
        held = directories.claim_run_directory(spec.job)
    except RunDirectoryTaken as error:
        raise ConfigurationError(
            f"{spec.job} is running on this machine, or is just ending: see `midstep status {spec.job}`."
        ) from error
    try:
        JobKeys.create(held.path / "keys", _keys(spec, before))
        directories.write_job_file(directory, directories.JobFile(str(held.path)))
    except OSError as error:
        held.remove()
        raise ConfigurationError(f"{held.path} cannot be written: {error.strerror}.") from error
    except BaseException:
        held.remove()
        raise
    sources = tuple(dict.fromkeys(map(Path, policy.faults.sources)))
    return PreparedJob(
        spec, policy, directory, held, sources, before=before, can_create_nodes=founding.can_create_nodes
    )


def refuse_if_ended(directory: Path, status: JobStatus) -> None:
    """Refuse to continue a job that is over. Raises ConfigurationError."""
    if status.exit_code is not None:
        raise ConfigurationError(f"{directory.name} has ended: {status.reason}. Start a new job with `midstep run`.")


def _fresh(founding: Founding, status: JobStatus) -> tuple[str, ...]:
    """Return the nodes to start; none where the controller asks for those that it needs."""
    if founding.can_create_nodes:
        return ()
    first = 1 + max(int(node.node.removeprefix("node")) for node in status.nodes)
    return tuple(f"node{first + number}" for number in range(founding.job.nodes + founding.job.spare_nodes))


def _keys(spec: JobSpec, before: Before | None) -> list[str]:
    """Return whose keys are made at once: those of other nodes are made with them."""
    nodes = [f"node{number}" for number in range(spec.nodes + spec.spare_nodes)] if before is None else before.nodes
    return [CONTROLLER, PLATFORM, *map(node_address, nodes)]
