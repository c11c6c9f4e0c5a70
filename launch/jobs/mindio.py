"""`--mindio`: what a job is like whose scripts bring MindIO's handlers."""

from pathlib import Path

import msgspec

from ...adapters.mindio.package import refuse_beside, refuse_installed
from ...devices.kinds import EXTERNAL
from ...policies.schema import Policy
from ...protocol import environment as env
from ...protocol.types import RestoreSource


def with_mindio(policy: Policy, folder: Path) -> Policy:
    """Return the policy of such a job, whose script is in `folder`. Its groups and checkpoints are the framework's own.

    Raises ConfigurationError if another mindio_ttp is installed here, or lies beside the script.
    """
    refuse_installed()
    refuse_beside(folder)
    return msgspec.structs.replace(
        policy,
        communicator=msgspec.structs.replace(policy.communicator, name=EXTERNAL),
        checkpoint=msgspec.structs.replace(policy.checkpoint, every_steps=0),
        restore=(RestoreSource.REPLICA,),
    )


def mindio_environment(wanted: bool) -> dict[str, str]:
    """Return the variables by which the ranks find the package."""
    return {env.MINDIO: "1"} if wanted else {}
