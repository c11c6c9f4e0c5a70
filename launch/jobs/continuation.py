"""A job whose launcher or whole machine was lost, ready to be started again from its journal."""

import re
from pathlib import Path

from ...controller.journal.reading import read_founding, read_status
from ...controller.journal.records import Founding
from ...controller.volume.place import folder_in, holds_journal
from ...protocol.errors import ConfigurationError
from ...protocol.incidents import JobStatus
from ...protocol.keys import JobKeys
from ...protocol.run_directories import RunDirectoryTaken
from ...protocol.types import CONTROLLER, PLATFORM, JobSpec, node_address
from .job_file import JobFile, read_job_file, write_job_file
from .run_directory import claim_run_directory
from .start import Before, PreparedJob

_USED = {"active", "spare", "unfit"}
_OF_THIS_PLATFORM = re.compile(r"node\d+")
_NS = 1_000_000_000


def continued(directory: Path) -> PreparedJob:
    """Return a job that is ready to go on: with the nodes that it had, and new keys. Raises MidstepError.

    Its directory may have been copied from another machine, as a whole.
    """
    known = read_job_file(directory)
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
        held = claim_run_directory(spec.job)
    except RunDirectoryTaken as error:
        raise ConfigurationError(
            f"{spec.job} is running on this machine, or is just ending: see `midstep status {spec.job}`."
        ) from error
    try:
        JobKeys.create(held.path / "keys", _keys(spec, before))
        write_job_file(directory, JobFile(str(held.path)))
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
