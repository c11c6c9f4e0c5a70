"""From the flags of `midstep run` to a job: its directories, its keys, its journal."""

import ast
import logging
import os
import secrets
import stat
import time
from pathlib import Path

import msgspec

from ...controller.journal.head import HEAD_NAME
from ...controller.journal.journal import Journal
from ...controller.journal.paths import journal_path
from ...devices.kinds import device_kind
from ...platforms.local import MOST_NODES_HERE
from ...policies.budgets import beyond
from ...policies.files import load_policy
from ...policies.rules import broken_rules
from ...policies.schema import Policy, default_policy, job_settings
from ...policies.yaml_text import refuse
from ...protocol.bounds import LARGEST_RANK, MOST_NODES
from ...protocol.errors import ConfigurationError
from ...protocol.keys import JobKeys
from ...protocol.private_files import WRITABLE_BY_OTHERS
from ...protocol.run_directories import RunDirectory
from ...protocol.token import FullToken
from ...protocol.types import CONTROLLER, PLATFORM, JobSpec, node_address
from ..joining.opening import let_nodes_join
from .directories import base_directory, checked_name
from .founding import make_job_directory, unwritable
from .job_file import JobFile, write_job_file
from .mindio import mindio_environment, with_mindio
from .run_directory import claim_run_directory

_log = logging.getLogger(__name__)
_OF_MEGATRON = ("megatron.", "mindspeed.", "mindspeed_llm.", "midstep.adapters.megatron.")  # what its scripts import


class Start(msgspec.Struct, frozen=True):
    """What a user asked for. Paths are absolute."""

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
    listen: str | None = None  # where the controller of a job on several machines listens
    token: FullToken | None = None  # of such a job
    node_check: bool = False  # or as the policy has it
    mindio: bool = False  # the ranks find a package mindio_ttp, which is midstep's


class Before(msgspec.Struct, frozen=True):
    """Of a job that continues: the nodes that it lost, those to start, and a session above all earlier ones."""

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
    def run_directory(self) -> Path:
        """Where sockets and keys lie while the job runs."""
        return self.held.path


def create_job(start: Start) -> PreparedJob:
    """Make the directories, the keys and the journal of a new job. Raises ConfigurationError; nothing has run then."""
    name = checked_name(start.job) if start.job is not None else new_name()
    require_script(start)
    policy = policy_of(start)
    if start.token is None and device_kind(policy.device).local and start.nodes + start.spare_nodes > 1:
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
    directory = (start.job_directory or base_directory() / name).absolute()
    make_job_directory(directory, policy)
    spec = spec_of(start, name, policy, directory)
    can_create_nodes = not start.fixed_nodes and start.token is None
    held = claim_run_directory(name)
    try:
        _make_keys(start, name, held.path / "keys")
        Journal.create(
            journal_path(directory), spec, policy, can_create_nodes=can_create_nodes, head=held.path / HEAD_NAME
        )
        write_job_file(directory, JobFile(str(held.path)))
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
    policy = _on_device(policy, start.device)
    policy = with_mindio(policy, _folder_of(start)) if start.mindio else policy
    if start.node_check:
        node_check = msgspec.structs.replace(policy.node_check, enabled=True)
        policy = msgspec.structs.replace(policy, node_check=node_check)
    out_of_range = beyond(policy, start.nodes * start.ranks_per_node)
    if out_of_range is not None:
        raise ConfigurationError(f"{start.policy_file or 'the default policy'}: {out_of_range}")
    _refuse_sizes(start)
    if policy.scale.min_nodes is not None:
        _refuse_another_size(start)
    return policy


def spec_of(start: Start, name: str, policy: Policy, directory: Path) -> JobSpec:
    """Return what is to run, as agents get it."""
    needed = {name: value for name, value in device_kind(policy.device).environment.items() if name not in os.environ}
    return JobSpec(
        job=name,
        command=start.command,
        is_module=start.is_module,
        no_python=start.no_python,
        environment={**needed, **start.environment, **mindio_environment(start.mindio)},
        working_directory=str(start.working_directory or Path.cwd()),
        job_directory=str(directory),
        world_size=start.nodes * start.ranks_per_node,
        ranks_per_node=start.ranks_per_node,
        nodes=start.nodes,
        spare_nodes=start.spare_nodes,
        max_restarts=start.max_restarts,
        settings=job_settings(policy, directory),
    )


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


def _refuse_another_size(start: Start) -> None:
    """Refuse scale.min_nodes for a script that trains with Megatron, as its ranks would. Raises ConfigurationError."""
    by = "--mindio" if start.mindio else _megatron_import(start)
    if by:
        raise ConfigurationError(
            f"{by}: a world of another size is not possible with Megatron, where what a rank holds follows from the "
            "number of ranks. Leave scale.min_nodes out of the policy; have spare nodes instead (--spares)."
        )


def _megatron_import(start: Start) -> str:
    """Return where the script itself imports Megatron; empty when it does not, or is no Python that can be read."""
    try:
        tree = ast.parse(Path(start.command[0]).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(f"{name}.".startswith(_OF_MEGATRON) for name in names):
            return f"{start.command[0]}, line {node.lineno}"  # type: ignore[attr-defined]
    return ""


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


def _on_device(policy: Policy, device: str | None) -> Policy:
    if device is None:
        return policy
    fitting = [each.name for each in device_kind(device).communicators]
    if policy.communicator.name in fitting:
        return msgspec.structs.replace(policy, device=device)
    communicator = msgspec.structs.replace(policy.communicator, name=fitting[0])
    return msgspec.structs.replace(policy, device=device, communicator=communicator)
