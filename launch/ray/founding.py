"""A job for a Ray cluster, made new or found again: what it takes of Ray is kept beside its journal."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...controller.journal.reading import read_founding, read_status
from ...devices.kinds import device_kind
from ...policies.schema import Policy
from ...protocol.errors import ConfigurationError
from ...protocol.private_files import replace_file
from ...protocol.types import JobSpec
from ..jobs.continuation import refuse_if_ended
from ..jobs.founding import create_journal, make_job_directory, unwritable
from ..jobs.start import Start, policy_of, require_script, spec_of
from .controller_actor import RayJob

PLATFORM_NAME = "ray"
RESERVED_NAME = "ray.json"  # in the job directory
GRACE_MARGIN_S = 10.0


class Reserved(msgspec.Struct, frozen=True):
    """What Ray is to reserve: for each node, by default a CPU for each rank (and an NPU); and for the controller."""

    node: Mapping[str, float] = {}
    controller: Mapping[str, float] = {}


def found(start: Start, reserved: Reserved) -> RayJob:
    """Make the directory and the journal of a new job. Raises ConfigurationError; nothing has run then."""
    assert start.job is not None
    assert start.job_directory is not None
    require_script(start)
    directory, policy = start.job_directory, policy_of(start)
    spec = spec_of(start, start.job, policy, directory)
    make_job_directory(directory, policy)
    try:
        replace_file(directory / RESERVED_NAME, msgspec.json.encode(reserved))
    except OSError as error:
        raise unwritable(directory, error) from error
    create_journal(directory, spec, policy, platform=PLATFORM_NAME)
    return _job(directory, spec, policy, reserved)


def found_again(directory: Path) -> RayJob:
    """Return a job that was founded before, on this cluster or on one that is gone. Raises MidstepError."""
    founding = read_founding(directory)
    refuse_if_ended(directory, read_status(directory))
    return _job(directory, founding.job, founding.policy, _read_reserved(directory))


def is_on_ray(directory: Path) -> bool:
    """Tell whether a job's nodes are actors of Ray."""
    return (directory / RESERVED_NAME).is_file()


def _job(directory: Path, spec: JobSpec, policy: Policy, reserved: Reserved) -> RayJob:
    resources = dict(reserved.node or {"CPU": float(spec.ranks_per_node)})
    resource = device_kind(policy.device).ray_resource
    if not reserved.node and resource is not None:
        resources[resource] = float(spec.ranks_per_node)
    return RayJob(
        job=spec.job,
        job_directory=str(directory),
        nodes=spec.nodes + spec.spare_nodes,
        resources=resources,
        controller_resources=dict(reserved.controller),
        environment=spec.environment,
        grace_s=spec.settings.stop_grace_s + GRACE_MARGIN_S,
    )


def _read_reserved(directory: Path) -> Reserved:
    path = directory / RESERVED_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Reserved)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{path} does not say what the job takes of Ray ({error}). Bring it back, or write it again: "
            '{"node": {"CPU": 8}, "controller": {}}.'
        ) from error
